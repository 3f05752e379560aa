"""Memory of the KV cache: tensors whose memory can be given back while they keep their addresses, so that graphs that
read them stay good; and memory of the host that a GPU reaches.

Owns that memory, on GPUs by the driver's calls for virtual memory (by ctypes; structures, symbols and values are those
of CUDA 11.2 and later) and on the CPU, where the system can take pages back.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor

from graphmod.decode.types import DecodeError
from graphmod.errors import ConfigError
from graphmod.wrap.extension import between_captures, do_what_waits

log = logging.getLogger("graphmod")


# -- the driver's calls for virtual memory -----------------------------------------------------------------------------

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_VIRTUAL_MEMORY_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_WORD = 4  # bytes that memory is zeroed by


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", _AllocationFlags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


_ADDRESS, _HANDLE = c_ulonglong, c_ulonglong
PROTOTYPES = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemAddressReserve": (POINTER(_ADDRESS), c_size_t, c_size_t, _ADDRESS, c_ulonglong),
    "cuMemAddressFree": (_ADDRESS, c_size_t),
    "cuMemCreate": (POINTER(_HANDLE), c_size_t, POINTER(AllocationProperties), c_ulonglong),
    "cuMemRelease": (_HANDLE,),
    "cuMemMap": (_ADDRESS, c_size_t, c_size_t, _HANDLE, c_ulonglong),
    "cuMemUnmap": (_ADDRESS, c_size_t),
    "cuMemSetAccess": (_ADDRESS, c_size_t, POINTER(Access), c_size_t),
    "cuMemsetD32_v2": (_ADDRESS, c_uint, c_size_t),
}
"""Name -> types of the arguments. All return a CUresult, 0 for success."""


class Driver:
    """The library, whose calls raise where they fail.

    Args:
        library: what has functions of the names in `PROTOTYPES`.

    Raises:
        DecodeError: it lacks one of them.
    """

    def __init__(self, library: Any) -> None:
        self._functions = {}
        for name, arguments in PROTOTYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise DecodeError(f"this CUDA driver has no {name}") from None
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function.

        Raises:
            torch.OutOfMemoryError: there is not enough memory.
            DecodeError: anything else; the message has the driver's words.
        """
        status = self._functions[name](*arguments)
        if status:
            words = f"{name}: {self._words(status)} (CUDA error {status})"
            raise (torch.OutOfMemoryError if status == _OUT_OF_MEMORY else DecodeError)(words)

    def _words(self, status: int) -> str:
        found = c_char_p()
        if self._functions["cuGetErrorString"](status, byref(found)) or not found.value:
            return "unknown error"
        return found.value.decode(errors="replace")


def load() -> Driver:
    """The driver of this machine.

    Raises:
        DecodeError: there is none that can be used.
    """
    if torch.version.hip is not None:
        raise DecodeError("AMD GPUs have other calls for it")
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DecodeError(f"the CUDA driver cannot be loaded here ({error})") from None
    driver = Driver(library)
    driver("cuInit", 0)
    return driver


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

    def __init__(self, driver: Driver, device: int, nbytes: int) -> None:
        self._driver, self.mapped = driver, False
        number = c_int()
        driver("cuDeviceGet", byref(number), device)
        self._device = number.value
        able = c_int()
        driver("cuDeviceGetAttribute", byref(able), _VIRTUAL_MEMORY_SUPPORTED, self._device)
        if not able.value:
            raise DecodeError("this GPU cannot map memory at addresses that stay")
        self._properties = AllocationProperties(type=_PINNED, location=Location(_DEVICE, self._device))
        self._context = c_void_p()
        driver("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        with contextlib.ExitStack() as undo:
            undo.callback(self._driver, "cuDevicePrimaryCtxRelease_v2", self._device)
            with self._current():
                page = c_size_t()
                driver("cuMemGetAllocationGranularity", byref(page), byref(self._properties), _RECOMMENDED)
                self.nbytes = -(-max(nbytes, 1) // page.value) * page.value
                start = c_ulonglong()
                driver("cuMemAddressReserve", byref(start), self.nbytes, 0, 0, 0)
                self.start = start.value
                undo.callback(driver, "cuMemAddressFree", self.start, self.nbytes)
            undo.pop_all()

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """The context of PyTorch is that of this thread, which may have had none yet."""
        self._driver("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver("cuCtxPopCurrent_v2", byref(c_void_p()))

    def map(self) -> None:
        """Takes memory, all zeros.

        Raises:
            torch.OutOfMemoryError: there is not enough.
            DecodeError: the driver refuses for another reason.
        """
        if self.mapped:
            return
        driver, handle = self._driver, c_ulonglong()
        with self._current(), contextlib.ExitStack() as undo:
            driver("cuMemCreate", byref(handle), self.nbytes, byref(self._properties), 0)
            with contextlib.ExitStack() as held:
                held.callback(driver, "cuMemRelease", handle.value)
                driver("cuMemMap", self.start, self.nbytes, 0, handle.value, 0)
                undo.callback(driver, "cuMemUnmap", self.start, self.nbytes)
            access = Access(Location(_DEVICE, self._device), _READ_WRITE)
            driver("cuMemSetAccess", self.start, self.nbytes, byref(access), 1)
            driver("cuMemsetD32_v2", self.start, 0, self.nbytes // _WORD)  # new memory holds anything
            driver("cuCtxSynchronize")  # streams of PyTorch do not wait for it by themselves
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
            self._driver("cuCtxSynchronize")
            self._driver("cuMemUnmap", self.start, self.nbytes)
            self.mapped = False

    def free(self) -> None:
        """Gives everything back, the addresses too.

        Raises:
            DecodeError: the driver refuses.
        """
        with contextlib.ExitStack() as last:
            last.callback(self._driver, "cuDevicePrimaryCtxRelease_v2", self._device)
            self.unmap()
            self._driver("cuMemAddressFree", self.start, self.nbytes)


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
