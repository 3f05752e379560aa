"""Tensors whose memory comes and goes while their addresses stay."""

import contextlib
import copy
import ctypes
import gc
import mmap
import os
import pickle
import struct
import subprocess
import sys
import threading

import pytest
import torch

from graphmod.backend import lifetime
from graphmod.decode import DecodeError
from graphmod.decode import memory as module
from graphmod.decode.cache import PagedCache
from graphmod.decode.memory import HostSpace, Ordinary, Pages, zeros
from tests.support.decode_models import uniform
from tests.support.fake_driver import INVALID_VALUE, PAGE, FakeDriver, addresses_of, all_of_them, stand_in

CPU = torch.device("cpu")
SHAPES = [(3, 5, 2, 8), (3, 5, 2, 4), (700, 1024)]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system takes no pages back")


def over_host(space, pages, start, size, device):
    """What PyTorch makes of memory on a GPU, over that of the fake driver, which lies in this process."""
    raw = (ctypes.c_ubyte * size).from_address(space.start + start)
    raw.pages = pages
    return torch.frombuffer(raw, dtype=torch.uint8)


def lay_on(fake, monkeypatch):
    """Lets caches lie in the memory of a fake driver."""
    stand_in(fake, monkeypatch)
    monkeypatch.setattr(module, "_space", lambda device, nbytes: addresses_of(fake)(0, nbytes))
    monkeypatch.setattr(module, "_over", over_host)


@pytest.fixture(scope="module")
def drivers():
    with all_of_them() as made:
        yield made


@pytest.fixture
def fake(monkeypatch, drivers):
    found = FakeDriver()
    drivers.append(found)
    lay_on(found, monkeypatch)
    yield found
    assert found.wrong == []


@pytest.fixture(params=["host", "driver"])
def either(request):
    """The memory of the system, or that of a driver."""
    if request.param == "driver":
        request.getfixturevalue("fake")


def resident(tensor):
    """Bytes of a tensor that are in memory now. (Linux, "pagemap": bit 63 of a page's entry tells.)"""
    size = mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(tensor.data_ptr() // size * 8)
        entries = table.read(tensor.nbytes // size * 8)
    return sum(entry >> 63 for (entry,) in struct.iter_unpack("Q", entries)) * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_are_zeros_of_their_own(dtype, either):
    tensors, pages = zeros(SHAPES, dtype, CPU)
    assert [tuple(one.shape) for one in tensors] == SHAPES and pages.mapped
    for one in tensors:
        assert one.dtype is dtype and one.is_contiguous() and not one.any() and one.data_ptr() % 512 == 0
        assert not one._is_view() and one.untyped_storage().nbytes() == one.nbytes
    for number, one in enumerate(tensors):
        one.fill_(number + 1)
    assert [one.unique().tolist() for one in tensors] == [[1], [2], [3]], "they share no memory"
    versions = [one._version for one in tensors]
    tensors[0].zero_()
    assert [one._version - before for one, before in zip(tensors, versions, strict=True)] == [1, 0, 0]


def test_memory_goes_and_comes_back_as_zeros_at_the_same_addresses(either):
    tensors, pages = zeros(SHAPES, torch.float32, CPU)
    before = [one.data_ptr() for one in tensors]
    for _ in range(3):
        for one in tensors:
            one.fill_(float("nan"))
        pages.unmap()
        assert not pages.mapped
        pages.map()
        assert pages.mapped and not any(one.any() for one in tensors)
        assert [one.data_ptr() for one in tensors] == before


def test_the_system_has_the_memory_back_meanwhile():
    (one,), pages = zeros([(64, 2**20)], torch.uint8, CPU)
    one.fill_(1)
    assert resident(one) >= one.nbytes
    pages.unmap()
    assert resident(one) < one.nbytes // 8
    pages.map()
    one.fill_(1)
    assert resident(one) >= one.nbytes


def test_a_driver_gets_all_back_with_the_last_tensor(fake):
    tensors, pages = zeros(SHAPES, torch.float32, CPU)
    assert fake.used >= sum(one.nbytes for one in tensors)
    kept = tensors[1][0]  # a view
    del tensors, pages
    assert not fake.nothing_left() and not kept.any()
    del kept
    assert fake.nothing_left()


def test_what_is_deleted_without_memory_gives_its_addresses_back(fake):
    tensors, pages = zeros(SHAPES, torch.float32, CPU)
    pages.unmap()
    assert fake.used == 0 and fake.ranges
    del tensors, pages
    assert fake.nothing_left()


def test_memory_is_asked_for_again_without_what_pytorch_keeps_for_later(fake, monkeypatch):
    tensors, pages = zeros([(PAGE,)], torch.uint8, CPU)
    pages.unmap()
    emptied = []

    def empty_cache():
        emptied.append(fake.free)
        fake.free += PAGE

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    fake.free = 0
    pages.map()
    assert pages.mapped and emptied == [0] and not tensors[0].any()


def test_the_memory_of_garbage_is_found(fake):
    garbage = [zeros([(PAGE,)], torch.uint8, CPU)]
    garbage.append(garbage)  # as a dropped engine and its graphs hold each other
    fake.free = 0
    del garbage
    tensors, pages = zeros([(PAGE,)], torch.uint8, CPU)
    assert pages.mapped and not tensors[0].any()


def test_too_little_memory_is_told_and_may_be_there_later(fake):
    tensors, pages = zeros([(PAGE + 1,)], torch.uint8, CPU)
    pages.unmap()
    fake.free -= (gone := fake.free)
    with pytest.raises(torch.OutOfMemoryError, match=r"the KV cache needs 4 MiB, which are not free: cuMemCreate"):
        pages.map()
    assert not pages.mapped
    fake.free += gone
    pages.map()
    assert pages.mapped and not tensors[0].any()


def test_a_cache_that_finds_no_memory_takes_none(fake):
    fake.free = 0
    with pytest.raises(torch.OutOfMemoryError):
        zeros(SHAPES, torch.float32, CPU)
    gc.collect()
    assert fake.nothing_left()


@pytest.mark.parametrize("name", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_driver_that_refuses_leaves_the_cache_in_ordinary_memory(name, fake):
    fake.fails[name] = INVALID_VALUE
    tensors, pages = zeros(SHAPES, torch.float32, CPU)
    assert isinstance(pages, Ordinary) and pages.mapped and name in pages.reason
    assert not any(one.any() for one in tensors) and fake.nothing_left()
    pages.map()
    with pytest.raises(DecodeError, match=rf"{name}: invalid argument.*Use suspend\(\) without keep"):
        pages.unmap()
    assert pages.mapped


def test_a_pytorch_that_copies_such_memory_has_ordinary_memory(monkeypatch):
    fake = FakeDriver()
    stand_in(fake, monkeypatch)
    monkeypatch.setattr(module, "_space", lambda device, nbytes: addresses_of(fake)(0, nbytes))
    monkeypatch.setattr(torch, "as_tensor", lambda given, device: torch.zeros(5))
    tensors, pages = zeros(SHAPES, torch.float32, CPU)
    assert "copies memory" in pages.reason and len(tensors) == 3 and fake.nothing_left()


def test_pytorch_is_told_of_memory_on_a_gpu_as_of_bytes(fake):
    space = addresses_of(fake)(0, PAGE)
    given = module._Bytes(space.start + 512, 100, Pages(space))
    told = given.__cuda_array_interface__
    assert told["data"] == (space.start + 512, False) and told["shape"] == (100,) and told["typestr"] == "|u1"


def test_other_devices_and_systems_have_ordinary_memory(monkeypatch):
    assert "meta" in zeros(SHAPES, torch.float32, torch.device("meta"))[1].reason
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "cpu on darwin" in zeros(SHAPES, torch.float32, CPU)[1].reason


@pytest.mark.parametrize("elsewhere", [False, True])
def test_memory_is_not_freed_during_a_capture_but_right_after(elsewhere, fake):
    found, begun, end = [zeros(SHAPES, torch.float32, CPU)], threading.Event(), threading.Event()

    def capture():
        with lifetime.capturing():
            begun.set()
            assert end.wait(60)

    thread = threading.Thread(target=capture)
    with contextlib.nullcontext() if elsewhere else lifetime.capturing():
        if elsewhere:
            thread.start()
            assert begun.wait(60)
        before = len(fake.calls)
        found.clear()
        assert len(fake.calls) == before and not fake.nothing_left()
    if elsewhere:
        end.set()
        thread.join()
    assert fake.nothing_left()


def test_memory_that_a_capture_by_others_held_back_is_freed_when_memory_is_taken(fake, monkeypatch):
    first, second = (zeros(SHAPES, torch.float32, CPU) for _ in range(2))
    second[1].unmap()
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    del first
    assert len(fake.ranges) == 2
    capturing[0] = False
    second[1].map()
    assert len(fake.ranges) == 1


def test_memory_that_cannot_be_freed_is_logged_and_disturbs_nobody(fake, caplog):
    found = zeros(SHAPES, torch.float32, CPU)
    fake.fails["cuMemUnmap"] = INVALID_VALUE
    del found
    assert "could not be given back: cuMemUnmap: invalid argument" in caplog.text
    fake.fails.clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_leaves_the_gpu_to_its_parent(fake):
    found = zeros(SHAPES, torch.float32, CPU)
    calls, child = len(fake.calls), os.fork()
    if not child:
        found = None
        os._exit(len(fake.calls) - calls)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not fake.nothing_left()
    del found
    assert fake.nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [True, False])
def test_a_process_ends_without_a_word(mapped):
    program = f"""
import atexit, sys
atexit.register(lambda: print(len(fake.calls) - calls))  # first, and therefore called last
sys.path[:0] = {sys.path!r}
import pytest, torch
from tests.decode import test_decode_pages as tests
fake = tests.FakeDriver()
tests.lay_on(fake, pytest.MonkeyPatch())
kept = tests.zeros(tests.SHAPES, torch.float32, tests.CPU)
if not {mapped}:
    kept[1].unmap()
kept[1].itself = kept  # a circle, which is collected while the interpreter ends
calls = len(fake.calls)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_such_memory_is_not_copied(copier, either):
    memory = PagedCache(uniform(2, 2, 4, 3), 5, 8, 2, torch.float32, CPU)
    memory.unmap()
    for one in (memory.pages, memory) if copier is not copy.copy else (memory.pages,):
        with pytest.raises(TypeError, match="neither be copied nor pickled"):
            copier(one)


def test_a_cache_without_memory_counts_none_and_clears_nothing(either):
    memory = PagedCache(uniform(2, 2, 4, 3), 5, 8, 2, torch.float32, CPU)
    size = memory.nbytes
    assert size == sum(one.nbytes for one in (*memory.keys, *memory.values)) and memory.mapped
    memory.unmap()
    memory.clear([2])
    assert memory.nbytes == 0 and memory.allocated and not memory.mapped
    memory.map()
    assert memory.nbytes == size
    memory.release()
    assert memory.nbytes == 0 and not memory.allocated and not memory.mapped
    memory.map()
    assert memory.mapped and memory.nbytes == size, "there are no addresses to map it at, so it takes others"


def test_an_empty_range_can_be_mapped():
    space = HostSpace(0)
    space.map()
    space.unmap()
    assert zeros([], torch.float32, CPU)[0] == []
