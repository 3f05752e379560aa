"""A CUDA driver without a GPU: C functions over the memory of this process, which note and check every call.

Memory that is not mapped cannot be touched: that would end the process. New memory is full of NaN.
"""

import contextlib
import ctypes
import gc
from ctypes import CFUNCTYPE, c_int

from graphmod.decode.memory import PROTOTYPES

PAGE = 2**21
SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 0, 1, 2, 801
CONTEXT = 0xC0
WORDS = {INVALID_VALUE: b"invalid argument", OUT_OF_MEMORY: b"out of memory", NOT_SUPPORTED: b"operation not supported"}
NONE, READ_WRITE = 0, 3
PRIVATE_ANONYMOUS = 0x22

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, c_int, c_int, c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, c_int)


class FakeDriver:
    """What `ctypes.CDLL` would give.

    Attributes:
        calls: names, in order.
        fails: name -> status of its next calls.
        free: bytes that may still be allocated.
        wrong: what a driver would not allow, in words; to be empty.
        able: whether the GPU maps memory.
        synchronized: whether nothing that was launched still runs.
    """

    def __init__(self, free=2**40):
        self.calls, self.fails, self.wrong = [], {}, []
        self.free, self.able = free, True
        self.ranges, self.handles, self.mappings, self.accessible = {}, {}, {}, set()
        self.contexts, self.retained, self.synchronized = [], 0, True
        self._number = 0x1000
        for name, arguments in PROTOTYPES.items():
            setattr(self, name, CFUNCTYPE(c_int, *arguments)(self._noting(name)))

    def _noting(self, name):
        act = getattr(self, f"_{name}")

        def call(*arguments):
            self.calls.append(name)
            if name in self.fails:
                return self.fails[name]
            try:
                return act(*arguments) or SUCCESS
            except Exception as error:  # which ctypes would only print
                self.wrong.append(f"{name}: {error!r}")
                return INVALID_VALUE

        return call

    @property
    def used(self):
        """Bytes of memory that somebody holds."""
        return sum(self.handles.values()) + sum(size for size, handle in self.mappings.values() if not handle)

    def nothing_left(self):
        """Whether all was given back."""
        return not (self.ranges or self.handles or self.mappings or self.retained or self.contexts or self.wrong)

    def _cuInit(self, flags):
        assert flags == 0

    def _cuGetErrorString(self, status, text):
        text[0] = WORDS.get(status)
        return SUCCESS if status in WORDS else INVALID_VALUE

    def _cuDeviceGet(self, device, ordinal):
        device[0] = ordinal

    def _cuDeviceGetAttribute(self, value, attribute, device):
        assert (attribute, device) == (102, 0)
        value[0] = int(self.able)

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context[0] = CONTEXT
        self.retained += 1

    def _cuDevicePrimaryCtxRelease_v2(self, device):
        assert self.retained > 0
        self.retained -= 1

    def _cuCtxPushCurrent_v2(self, context):
        assert context == CONTEXT
        self.contexts.append(context)

    def _cuCtxPopCurrent_v2(self, context):
        context[0] = self.contexts.pop()

    def _cuCtxSynchronize(self):
        assert self.contexts
        self.synchronized = True

    def _checked(self, properties):
        found = properties[0]
        assert self.contexts and (found.type, found.requestedHandleTypes) == (1, 0)
        assert (found.location.type, found.location.id) == (1, 0) and not found.win32HandleMetaData
        assert not any(bytes(found.allocFlags))

    def _cuMemGetAllocationGranularity(self, size, properties, option):
        self._checked(properties)
        assert option in (0, 1)
        size[0] = PAGE

    def _cuMemAddressReserve(self, start, size, alignment, wanted, flags):
        assert size and size % PAGE == alignment == wanted == flags == 0
        raw = _libc.mmap(None, size + PAGE, NONE, PRIVATE_ANONYMOUS, -1, 0)
        start[0] = -(-raw // PAGE) * PAGE
        self.ranges[start[0]] = size, raw

    def _cuMemAddressFree(self, start, size):
        found, raw = self.ranges[start]
        assert size == found and start not in self.mappings
        del self.ranges[start]
        _libc.munmap(raw, size + PAGE)

    def _cuMemCreate(self, handle, size, properties, flags):
        self._checked(properties)
        assert size and size % PAGE == flags == 0
        if size > self.free:
            return OUT_OF_MEMORY
        self.free -= size
        self._number += 1
        self.handles[self._number] = size
        handle[0] = self._number

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
        found = access[0]
        assert count == 1 and self.mappings[start][0] == size
        assert (found.location.type, found.location.id, found.flags) == (1, 0, READ_WRITE)
        _libc.mprotect(start, size, READ_WRITE)
        ctypes.memset(start, 0xFF, size)
        self.accessible.add(start)

    def _cuMemsetD32_v2(self, start, value, count):
        assert self.contexts and start in self.accessible and 4 * count == self.mappings[start][0] and value == 0
        ctypes.memset(start, 0, 4 * count)
        self.synchronized = False


@contextlib.contextmanager
def all_of_them():
    """A list for the drivers of several tests, none of which was used wrongly. What used them is gone for certain only
    after a look through the whole heap, which takes longer than many a test: once for all of them."""
    made = []
    yield made
    gc.collect()
    assert [one.wrong for one in made if one.wrong] == []
