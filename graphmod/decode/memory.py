"""Memory of the KV cache: tensors whose memory can be given back while they keep their addresses, so that graphs that
read them stay good; and memory of the host that a GPU reaches.

Owns that memory, on GPUs by the driver's virtual memory (CUDA Driver API, "Virtual Memory Management") and on the CPU,
where the system can take pages back.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphmod.cuda_driver import bindings, call
from graphmod.decode.types import DecodeError
from graphmod.errors import ConfigError
from graphmod.wrap.extension import between_captures, do_what_waits

log = logging.getLogger("graphmod")


# -- the driver's virtual memory ---------------------------------------------------------------------------------------

_WORD = 4  # bytes that memory is zeroed by


def _driver(name: str, *arguments: Any) -> Any:
    """See `cuda_driver.call`.

    Raises:
        torch.OutOfMemoryError: there is not enough memory.
        DecodeError: anything else.
    """
    try:
        return call(name, *arguments)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, RuntimeError) as error:
        raise DecodeError(str(error)) from error


class Addresses:
    """A range of addresses on a GPU, at first with no memory behind it.

    Memory is one allocation, whose handle is released as soon as it is mapped: the mapping alone keeps it, so that
    there are two states, and nothing that could be forgotten in between. Whatever raises leaves the state it found.

    Args:
        device: number of the GPU.
        nbytes: rounded up to whole pages.

    Attributes:
        start, nbytes: of the range.
        mapped: whether there is memory.

    Raises:
        DecodeError: this GPU or driver cannot do it.
    """

    def __init__(self, device: int, nbytes: int) -> None:
        if torch.version.hip is not None:
            raise DecodeError("AMD GPUs have other calls for it")
        self.mapped = False
        _driver("cuInit", 0)
        kinds, self._device = bindings(), _driver("cuDeviceGet", device)
        able = kinds.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not _driver("cuDeviceGetAttribute", able, self._device):
            raise DecodeError("this GPU cannot map memory at addresses that stay")
        self._properties, self._access = kinds.CUmemAllocationProp(), kinds.CUmemAccessDesc()
        self._properties.type = kinds.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for location in (self._properties.location, self._access.location):
            location.type, location.id = kinds.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device
        self._access.flags = kinds.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        whole = kinds.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._context = _driver("cuDevicePrimaryCtxRetain", self._device)
        with contextlib.ExitStack() as undo:
            undo.callback(_driver, "cuDevicePrimaryCtxRelease", self._device)
            with self._current():
                page = _driver("cuMemGetAllocationGranularity", self._properties, whole)
                self.nbytes = -(-max(nbytes, 1) // page) * page
                self.start = int(_driver("cuMemAddressReserve", self.nbytes, 0, 0, 0))
                undo.callback(_driver, "cuMemAddressFree", self.start, self.nbytes)
            undo.pop_all()

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """The context of PyTorch is that of this thread, which may have had none yet."""
        _driver("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            _driver("cuCtxPopCurrent")

    def map(self) -> None:
        """Takes memory, all zeros.

        Raises:
            torch.OutOfMemoryError: there is not enough.
            DecodeError: the driver refuses for another reason.
        """
        if self.mapped:
            return
        with self._current(), contextlib.ExitStack() as undo:
            handle = _driver("cuMemCreate", self.nbytes, self._properties, 0)
            with contextlib.ExitStack() as held:
                held.callback(_driver, "cuMemRelease", handle)
                _driver("cuMemMap", self.start, self.nbytes, 0, handle, 0)
                undo.callback(_driver, "cuMemUnmap", self.start, self.nbytes)
            _driver("cuMemSetAccess", self.start, self.nbytes, [self._access], 1)
            _driver("cuMemsetD32", self.start, 0, self.nbytes // _WORD)  # new memory holds anything
            _driver("cuCtxSynchronize")  # streams of PyTorch do not wait for it by themselves
            undo.pop_all()
            self.mapped = True

    def unmap(self) -> None:
        """Gives the memory back, as soon as nothing that was launched can use it.

        Raises:
            DecodeError: the driver refuses, as it does everything after an error of a kernel.
        """
        if not self.mapped:
            return
        with self._current():
            _driver("cuCtxSynchronize")
            _driver("cuMemUnmap", self.start, self.nbytes)
            self.mapped = False

    def free(self) -> None:
        """Gives everything back, the addresses too.

        Raises:
            DecodeError: the driver refuses.
        """
        with contextlib.ExitStack() as last:
            last.callback(_driver, "cuDevicePrimaryCtxRelease", self._device)
            self.unmap()
            _driver("cuMemAddressFree", self.start, self.nbytes)


# -- tensors over memory that comes and goes ---------------------------------------------------------------------------


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
    """A range of addresses on the CPU, where pages that were given back are zeros again when they are touched."""

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
        return Addresses(index, nbytes)
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


# -- memory of the host, for a GPU ------------------------------------------------------------------------------------

_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class _Pinned:
    """Keeps memory pinned. Once nothing refers to it any more, it is unpinned, as soon as no capture is under way."""

    def __init__(self, memory: Tensor) -> None:
        cudart: Any = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_AND_MAPPED))
        if code:
            raise torch.cuda.CudaError(code)
        finalizer: Any = weakref.finalize(self, between_captures, partial(_unpin, memory, cudart))
        finalizer.atexit = False  # what ends gives everything back


def _unpin(memory: Tensor, cudart: Any) -> None:
    torch.cuda.synchronize()  # what was launched may still work on it
    cudart.cudaHostUnregister(memory.data_ptr())


def host_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in memory of the host, as a tensor of `device`.

    For a GPU the memory is pinned, and kernels reach it over the bus (unified virtual addressing: CUDA Programming
    Guide, "Page-Locked Host Memory"). For a CPU it is an ordinary tensor.

    Raises:
        ConfigError: the system does not let so much be pinned.
    """
    if device.type != "cuda":
        return torch.zeros(size, dtype=dtype, device=device)
    with torch.cuda.device(device):
        memory = torch.zeros(size, dtype=dtype)
        try:
            pinned = _Pinned(memory)
        except RuntimeError as error:
            raise ConfigError(
                f"{memory.nbytes / 2**30:.2f} GiB more of the host's memory cannot be pinned for the KV cache "
                f"({error}); lower cache_tokens, max_batch_size or max_seq_len, raise offload_resident, or use "
                "offload=none"
            ) from error
        return shaped(bytes_at(memory.data_ptr(), memory.nbytes, pinned, device), size, dtype)
