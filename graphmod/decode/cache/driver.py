"""The calls of the CUDA driver for virtual memory, by ctypes: addresses stay, the memory behind them comes and goes.

Knows numbers, no tensors.

Structures, symbols and values are those of the driver API (CUDA 11.2 and later).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from typing import Any

import torch

from graphmod.decode.errors import DecodeError

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
