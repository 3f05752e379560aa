"""Tensors whose memory can be given back while they keep their addresses, so that graphs that read them stay good.

Owns that memory, on GPUs (`driver.py`) and on the CPU, where the system can take pages back.
"""

from __future__ import annotations

import gc
import logging
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphmod.decode.cache.driver import Addresses, load
from graphmod.decode.errors import DecodeError
from graphmod.wrap.extension import between_captures, do_what_waits

log = logging.getLogger("graphmod")


class _Bytes:
    """Bytes that a GPU can reach, as libraries tell each other of them. The tensor over them holds this, and this their
    owner. (numba's documentation, "CUDA Array Interface", version 2.)"""

    def __init__(self, address: int, size: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def bytes_at(address: int, size: int, owner: Any, device: torch.device) -> Tensor:
    """(size,) uint8 on a GPU, over memory at an address that it can reach.

    Args:
        owner: of the memory; lives as long as the tensor.

    Raises:
        DecodeError: this PyTorch copies it.
    """
    found = torch.as_tensor(_Bytes(address, size, owner), device=device)
    if found.data_ptr() != address:
        raise DecodeError("this PyTorch copies memory that is not its own")
    return found


def shaped(raw: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes as a tensor that is no view of another, for a view shares the version of its base."""
    found: Any = torch.empty(0, dtype=dtype, device=raw.device)
    return found.set_(raw.untyped_storage(), 0, shape)


_APART = 512  # bytes between the beginnings of tensors, as in PyTorch's own allocator

Shapes = Sequence[tuple[int, ...]]


class HostSpace:
    """As `Addresses`, on the CPU: pages that were given back are zeros again when they are touched."""

    def __init__(self, nbytes: int) -> None:
        # Private: shared memory would keep what it holds.
        self.nbytes = max(nbytes, 1)
        self.buffer = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.mapped = False

    def map(self) -> None:
        self.mapped = True

    def unmap(self) -> None:
        if self.mapped:
            self.buffer.madvise(mmap.MADV_DONTNEED)
            self.mapped = False

    def free(self) -> None:
        """Nothing: the tensors hold the buffer, and it goes with the last of them."""


Space = Addresses | HostSpace


class Pages:
    """The memory of some tensors, which lie one after the other in a range of addresses.

    The tensors keep it, so that it lives as long as the last of them; what is left at the end of the process is left to
    the system. Neither can be copied or pickled.

    Args:
        space: without memory yet.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        finalizer: Any = weakref.finalize(self, _free, space, os.getpid())
        finalizer.atexit = False  # the end of the process frees everything, and something may still run
        self._finalizer = finalizer

    @property
    def mapped(self) -> bool:
        """Whether there is memory now. Without it no tensor may be touched."""
        return self._space.mapped

    def map(self) -> None:
        """Takes memory again, all zeros.

        Raises:
            torch.OutOfMemoryError: there is not enough, not even without garbage and what PyTorch keeps for later.
            DecodeError: the driver refuses for another reason.
        """
        do_what_waits()  # which may free memory
        try:
            self._space.map()
        except torch.OutOfMemoryError:
            gc.collect()  # an engine that nobody has any more keeps its memory until then
            do_what_waits()
            torch.cuda.empty_cache()
            try:
                self._space.map()
            except torch.OutOfMemoryError as error:
                words = f"the KV cache needs {self._space.nbytes / 2**20:,.0f} MiB, which are not free: {error}"
                raise torch.OutOfMemoryError(words) from None

    def unmap(self) -> None:
        """Waits until nothing uses the memory, and gives it back."""
        self._space.unmap()

    def __reduce__(self) -> NoReturn:
        raise TypeError("the memory of a KV cache can neither be copied nor pickled; make another engine")


class Ordinary:
    """Stands for pages where the tensors are PyTorch's own.

    Args:
        reason: why there are none.
    """

    mapped = True

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def map(self) -> None:
        """Nothing to do."""

    def unmap(self) -> NoReturn:
        raise DecodeError(
            f"the memory of the KV cache cannot be given back at addresses that stay: {self.reason}. "
            "Use suspend() without keep, which gives the graphs back as well"
        )


def zeros(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Pages | Ordinary]:
    """Tensors of zeros, and the pages they lie on.

    Raises:
        torch.OutOfMemoryError: there is not enough memory.
    """
    try:
        return _on_pages(shapes, dtype, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a driver, or of a PyTorch that does not know such memory
        reason = str(error)
    log.debug("decode: the KV cache is ordinary memory, because %s", reason)
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes], Ordinary(reason)


def _on_pages(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Pages]:
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    starts = [*accumulate((-(-size // _APART) * _APART for size in sizes), initial=0)]
    space = _space(device, starts[-1])
    pages = Pages(space)
    pages.map()
    memory = [_over(space, pages, start, size, device) for start, size in zip(starts, sizes, strict=False)]
    return [shaped(raw, shape, dtype) for raw, shape in zip(memory, shapes, strict=True)], pages


def _space(device: torch.device, nbytes: int) -> Space:
    """A range of addresses on a device.

    Raises:
        DecodeError: there is no such thing here.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return Addresses(load(), index, nbytes)
    if device.type == "cpu" and sys.platform == "linux":
        return HostSpace(nbytes)
    raise DecodeError(f"graphmod has no such memory for the device {device.type} on {sys.platform}")


def _over(space: Space, pages: Pages, start: int, size: int, device: torch.device) -> Tensor:
    """Bytes of a range as a tensor that keeps the memory alive."""
    if isinstance(space, HostSpace):
        return torch.frombuffer(space.buffer, dtype=torch.uint8, count=size, offset=start)
    return bytes_at(space.start + start, size, pages, device)


def _free(space: Space, process: int) -> None:
    """Frees what nobody holds any more. Garbage is collected anywhere: also in a child, which has no right to its
    parent's GPU, and during a capture."""
    if process == os.getpid():
        between_captures(partial(_free_now, space))


def _free_now(space: Space) -> None:
    try:
        space.free()
    except Exception as error:
        log.warning("decode: the memory of a KV cache could not be given back: %s", error)
