"""The calls of the CUDA driver: what is asked of it, in which order, and what is left when one of them fails."""

import ctypes
import sys

import pytest
import torch

from graphmod.decode import DecodeError
from graphmod.decode.memory import Addresses
from tests.support.fake_driver import INVALID_VALUE, OUT_OF_MEMORY, PAGE, FakeDriver, stand_in

MAKING = ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"]
MAKING += ["cuMemGetAllocationGranularity", "cuMemAddressReserve", "cuCtxPopCurrent"]
MAPPING = ["cuCtxPushCurrent", "cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess", "cuMemsetD32"]
MAPPING += ["cuCtxSynchronize", "cuCtxPopCurrent"]
UNMAPPING = ["cuCtxPushCurrent", "cuCtxSynchronize", "cuMemUnmap", "cuCtxPopCurrent"]
FREEING = ["cuMemAddressFree", "cuDevicePrimaryCtxRelease"]


@pytest.fixture
def fake(monkeypatch):
    found = FakeDriver()
    stand_in(found, monkeypatch)
    yield found
    assert found.wrong == []


def new_calls(fake, act):
    before = len(fake.calls)
    act()
    return fake.calls[before:]


def test_a_life_is_these_calls_in_this_order(fake):
    addresses = Addresses(0, 3 * PAGE - 5)
    assert fake.calls == MAKING and addresses.nbytes == 3 * PAGE and not addresses.mapped
    assert new_calls(fake, addresses.map) == MAPPING
    assert addresses.mapped and fake.used == 3 * PAGE and not fake.handles, "the mapping alone keeps the memory"
    assert new_calls(fake, addresses.map) == []
    assert new_calls(fake, addresses.unmap) == UNMAPPING
    assert new_calls(fake, addresses.unmap) == [] and fake.used == 0 and len(fake.ranges) == 1
    start = addresses.start
    addresses.map()
    assert addresses.start == start
    assert new_calls(fake, addresses.free) == UNMAPPING + FREEING
    assert fake.nothing_left()


def test_memory_is_zeros_whatever_it_held_before(fake):
    addresses = Addresses(0, PAGE)
    for _ in range(3):
        addresses.map()
        assert ctypes.string_at(addresses.start, PAGE) == bytes(PAGE)
        ctypes.memset(addresses.start, 1, PAGE)
        addresses.unmap()
    addresses.free()


@pytest.mark.parametrize("name", MAKING)
def test_a_range_that_cannot_be_made_leaves_nothing(name, fake):
    fake.fails[name] = INVALID_VALUE
    with pytest.raises(DecodeError, match=f"{name}: invalid argument"):
        Addresses(0, PAGE)
    if name != "cuCtxPopCurrent":  # then the context stays with the thread, which is the driver's doing
        assert fake.nothing_left()
    assert not fake.ranges and not fake.retained


@pytest.mark.parametrize("status", [INVALID_VALUE, OUT_OF_MEMORY])
@pytest.mark.parametrize("name", MAPPING[:-1])
def test_memory_that_cannot_be_mapped_leaves_only_the_addresses(name, status, fake):
    addresses = Addresses(0, PAGE)
    free = fake.free
    fake.fails[name] = status
    kind = torch.OutOfMemoryError if status == OUT_OF_MEMORY else DecodeError
    with pytest.raises(kind, match=name):
        addresses.map()
    assert not addresses.mapped and not fake.mappings and not fake.contexts
    if name == "cuMemRelease":
        return  # the driver keeps what it does not release
    assert not fake.handles and fake.free == free
    fake.fails.clear()
    addresses.map()
    addresses.free()
    assert fake.nothing_left()


@pytest.mark.parametrize("name", UNMAPPING[:-1])
def test_memory_that_cannot_be_unmapped_stays(name, fake):
    addresses = Addresses(0, PAGE)
    addresses.map()
    fake.fails[name] = INVALID_VALUE
    with pytest.raises(DecodeError, match=name):
        addresses.unmap()
    assert addresses.mapped and fake.used == PAGE and not fake.contexts
    fake.fails.clear()
    addresses.unmap()
    addresses.free()
    assert fake.nothing_left()


def test_too_little_memory_is_an_out_of_memory_error(fake):
    addresses = Addresses(0, 3 * PAGE)
    fake.free = 2 * PAGE
    with pytest.raises(torch.OutOfMemoryError, match=r"cuMemCreate: out of memory \(CUDA error 2\)"):
        addresses.map()
    assert not addresses.mapped and fake.used == 0
    fake.free = 3 * PAGE
    addresses.map()
    assert fake.free == 0
    addresses.free()
    assert fake.free == 3 * PAGE


def test_a_status_without_words_is_told_by_its_number(fake):
    fake.fails["cuDeviceGet"] = 4711
    with pytest.raises(DecodeError, match=r"cuDeviceGet: unknown error \(CUDA error 4711\)"):
        Addresses(0, PAGE)


def test_a_gpu_without_virtual_memory_is_told_so_and_nothing_is_taken(fake):
    fake.able = False
    with pytest.raises(DecodeError, match="cannot map memory"):
        Addresses(0, PAGE)
    assert fake.nothing_left()


def test_amd_and_a_machine_without_bindings_are_told_so(fake, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(DecodeError, match="AMD"):
        Addresses(0, PAGE)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DecodeError, match=r"cuda\.bindings"):
        Addresses(0, PAGE)


def test_a_driver_that_lacks_a_call_is_told_so(fake, monkeypatch):
    def lacking(*_):  # as the bindings say it
        raise RuntimeError('Function "cuMemCreate" not found')

    addresses = Addresses(0, PAGE)
    monkeypatch.setattr(fake, "cuMemCreate", lacking, raising=False)
    with pytest.raises(DecodeError, match='"cuMemCreate" not found'):
        addresses.map()
    assert not addresses.mapped and not fake.contexts
    addresses.free()
