"""A CUDA driver without a GPU, over the memory of this process, which notes and checks every call.

Memory that is not mapped cannot be touched: that would end the process. New memory is full of NaN.
"""

import contextlib
import ctypes
import gc
import sys
from types import ModuleType, SimpleNamespace

import pytest

from graphmod.decode.memory import Addresses

PAGE = 2**21
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 0, 1, 2, 801
CONTEXT = 0xC0
WORDS = {INVALID_VALUE: b"invalid argument", OUT_OF_MEMORY: b"out of memory", NOT_SUPPORTED: b"operation not supported"}
NONE, READ_WRITE = 0, 3
PRIVATE_ANONYMOUS = 0x22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Names:
    """An enumeration, whose members are their own names without what all of them begin with."""

    def __init__(self, prefix):
        self._prefix = prefix

    def __getattr__(self, name):
        assert name.startswith(self._prefix)
        return name.removeprefix(self._prefix)


def struct(**parts):
    """What makes a structure, in which one of another kind is another such function."""
    return lambda: SimpleNamespace(**{name: part() if callable(part) else part for name, part in parts.items()})


def location():
    return SimpleNamespace(type=None, id=None)


class FakeDriver:
    """What stands for `cuda.bindings.driver`.

    Attributes:
        calls: names, in order.
        fails: name -> status of its next calls.
        free: bytes that may still be allocated.
        wrong: what a driver would not allow, in words; to be empty.
        able: whether the GPU maps memory.
        synchronized: whether nothing that was launched still runs.
    """

    CUdevice_attribute = Names("CU_DEVICE_ATTRIBUTE_")
    CUmemAllocationType = Names("CU_MEM_ALLOCATION_TYPE_")
    CUmemLocationType = Names("CU_MEM_LOCATION_TYPE_")
    CUmemAccess_flags = Names("CU_MEM_ACCESS_FLAGS_PROT_")
    CUmemAllocationGranularity_flags = Names("CU_MEM_ALLOC_GRANULARITY_")
    CUmemAllocationProp = staticmethod(struct(type=None, location=location))
    CUmemAccessDesc = staticmethod(struct(location=location, flags=None))

    def __init__(self, free=2**40):
        self.calls, self.fails, self.wrong = [], {}, []
        self.free, self.able = free, True
        self.ranges, self.handles, self.mappings, self.accessible = {}, {}, {}, set()
        self.contexts, self.retained, self.synchronized = [], 0, True
        self._number = 0x1000

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        act = getattr(self, f"_{name}")

        def call(*arguments):
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name], None
            try:
                found = act(*arguments)
            except OutOfMemory:
                return OUT_OF_MEMORY, None
            except Exception as error:
                self.wrong.append(f"{name}: {error!r}")
                return INVALID_VALUE, None
            return (SUCCESS,) if found is None else (SUCCESS, found)

        return call

    def cuGetErrorString(self, status):
        return (SUCCESS, WORDS[status]) if status in WORDS else (INVALID_VALUE, None)

    @property
    def used(self):
        """Bytes of memory that somebody holds."""
        return sum(self.handles.values()) + sum(size for size, handle in self.mappings.values() if not handle)

    def nothing_left(self):
        """Whether all was given back."""
        return not (self.ranges or self.handles or self.mappings or self.retained or self.contexts or self.wrong)

    def _cuInit(self, flags):
        assert flags == 0

    def _cuDeviceGet(self, ordinal):
        return ordinal

    def _cuDeviceGetAttribute(self, attribute, device):
        assert (attribute, device) == ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", 0)
        return int(self.able)

    def _cuDevicePrimaryCtxRetain(self, device):
        self.retained += 1
        return CONTEXT

    def _cuDevicePrimaryCtxRelease(self, device):
        assert self.retained > 0
        self.retained -= 1

    def _cuCtxPushCurrent(self, context):
        assert context == CONTEXT
        self.contexts.append(context)

    def _cuCtxPopCurrent(self):
        return self.contexts.pop()

    def _cuCtxSynchronize(self):
        assert self.contexts
        self.synchronized = True

    def _checked(self, found):
        assert self.contexts and {**vars(found)}.keys() == {"type", "location"} and found.type == "PINNED"
        assert found.location == SimpleNamespace(type="DEVICE", id=0)

    def _cuMemGetAllocationGranularity(self, properties, option):
        self._checked(properties)
        assert option in ("MINIMUM", "RECOMMENDED")
        return PAGE

    def _cuMemAddressReserve(self, size, alignment, wanted, flags):
        assert size and size % PAGE == alignment == wanted == flags == 0
        raw = _libc.mmap(None, size + PAGE, NONE, PRIVATE_ANONYMOUS, -1, 0)
        start = -(-raw // PAGE) * PAGE
        self.ranges[start] = size, raw
        return start

    def _cuMemAddressFree(self, start, size):
        found, raw = self.ranges[start]
        assert size == found and start not in self.mappings
        del self.ranges[start]
        _libc.munmap(raw, size + PAGE)

    def _cuMemCreate(self, size, properties, flags):
        self._checked(properties)
        assert size and size % PAGE == flags == 0
        if size > self.free:
            raise OutOfMemory
        self.free -= size
        self._number += 1
        self.handles[self._number] = size
        return self._number

    def _cuMemRelease(self, handle):
        size = self.handles.pop(handle)
        holders = [start for start, mapping in self.mappings.items() if mapping[1] == handle]
        for start in holders:
            self.mappings[start] = size, None
        if not holders:
            self.free += size

    def _cuMemMap(self, start, size, offset, handle, flags):
        assert self.contexts and offset == flags == 0
        assert self.handles[handle] == size == self.ranges[start][0] and start not in self.mappings
        self.mappings[start] = size, handle

    def _cuMemUnmap(self, start, size):
        found, handle = self.mappings[start]
        assert found == size and (self.synchronized or "cuCtxSynchronize" in self.fails)
        del self.mappings[start]
        self.accessible.discard(start)
        if handle is None:
            self.free += size
        _libc.mprotect(start, size, NONE)

    def _cuMemSetAccess(self, start, size, access, count):
        assert len(access) == count == 1 and self.mappings[start][0] == size
        assert access[0] == SimpleNamespace(location=SimpleNamespace(type="DEVICE", id=0), flags="READWRITE")
        _libc.mprotect(start, size, READ_WRITE)
        ctypes.memset(start, 0xFF, size)
        self.accessible.add(start)

    def _cuMemsetD32(self, start, value, count):
        assert self.contexts and start in self.accessible and 4 * count == self.mappings[start][0] and value == 0
        ctypes.memset(start, 0, 4 * count)
        self.synchronized = False


class OutOfMemory(Exception):
    pass


_free, _BINDINGS = Addresses.free, "cuda.bindings"


def stand_in(fake, monkeypatch):
    """Has a fake driver called from now on. What another test has of a real GPU is given back to that."""
    real = sys.modules.get(_BINDINGS)
    monkeypatch.setitem(sys.modules, _BINDINGS, SimpleNamespace(driver=fake))
    if isinstance(real, ModuleType):

        def free(space):  # whose structures tell by which driver it was made
            _free(space) if isinstance(space._properties, SimpleNamespace) else _free_by(real, space)

        monkeypatch.setattr(Addresses, "free", free)


def _free_by(bindings, space):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, _BINDINGS, bindings)
        _free(space)


def addresses_of(fake):
    """What makes a range of addresses that is given back to this driver, whichever is called by then."""

    class Own(Addresses):
        def free(self):
            _free_by(SimpleNamespace(driver=fake), self)

    return Own


@contextlib.contextmanager
def all_of_them():
    """A list for the drivers of several tests, none of which was used wrongly. What used them is gone for certain only
    after a look through the whole heap, which takes longer than many a test: once for all of them."""
    made = []
    yield made
    gc.collect()
    assert [one.wrong for one in made if one.wrong] == []
