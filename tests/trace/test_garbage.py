"""No garbage is collected in the middle of a recording, in whichever thread, and always again afterwards."""

import contextlib
import gc
import logging
import threading

import pytest
import torch

from graphmod import CUDAGraphModule
from graphmod.trace.dispatch import is_recording
from graphmod.trace.garbage import Ages, frozen_heap, no_garbage_collection
from tests.support.harness import config


@pytest.fixture(autouse=True)
def collecting():
    gc.enable()
    yield
    assert gc.isenabled()


def test_the_last_of_several_threads_lets_it_go_on():
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other():
        with no_garbage_collection():
            inside.set()
            leave.wait(10)
            seen.append(gc.isenabled())

    thread = threading.Thread(target=other)
    with no_garbage_collection():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert seen == [False] and gc.isenabled()


def test_who_had_it_off_keeps_it_off():
    gc.disable()
    with no_garbage_collection(), no_garbage_collection():
        pass
    assert not gc.isenabled()
    gc.enable()


def test_what_is_frozen_stays_so_while_calls_are_recorded():
    double = CUDAGraphModule(lambda x: x * 2)
    with frozen_heap():
        counts = [gc.get_freeze_count()]
        for _ in range(6):
            double(torch.ones(2))
            counts.append(gc.get_freeze_count())
    assert double.stats.replays and min(counts) > 10_000
    assert gc.get_freeze_count() < 1_000  # those that Python itself has frozen


def test_what_a_program_has_frozen_stays_so():
    gc.freeze()
    before = gc.get_freeze_count()
    double = CUDAGraphModule(lambda x: x * 2)
    try:
        for _ in range(6):
            double(torch.ones(2))
        assert double.stats.replays and gc.get_freeze_count() >= before * 0.9
    finally:
        gc.unfreeze()


def test_what_was_made_since_is_told_from_what_was_there_whoever_else_asks():
    there, plain = [object()], {"a": 1}
    with Ages() as ages:
        first = [1]
        assert ages.is_old(there) and not ages.is_old(first) and not ages.is_old(plain)
        with Ages() as inner, frozen_heap():
            second = [2]
            assert inner.is_old(first) and not inner.is_old(second)
            ages.there(plain)
            gc.collect()
        assert [ages.is_old(one) for one in (there, plain, first, second, [3])] == [True, True, False, False, False]


class Config:
    scale = 2.0


@pytest.mark.parametrize("meanwhile", ["another thread records", "a frozen heap is left"])
def test_guards_hold_though_the_heap_is_frozen_and_given_back_meanwhile(meanwhile):
    inside, leave, config = threading.Event(), threading.Event(), Config()

    def record(x):
        if is_recording():
            inside.set()
            leave.wait(10)
        return x * 2

    def other():
        if meanwhile == "another thread records":
            called = CUDAGraphModule(record)
            for _ in range(4):
                called(torch.ones(3))
        else:
            with frozen_heap():
                inside.set()
                leave.wait(10)

    def step(x):
        if is_recording() and meanwhile == "a frozen heap is left":
            leave.set()
            thread.join()
        return x * config.scale

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    config.scale = 2.0  # an attribute of its own, made while the other thread is in the middle of it
    config, called = Config(), CUDAGraphModule(step)
    config.scale = 2.0
    for _ in range(6):
        assert called(torch.ones(3)).tolist() == [2.0] * 3
    config.scale = 10.0
    assert called(torch.ones(3)).tolist() == [10.0] * 3
    leave.set()
    thread.join()
    assert gc.get_freeze_count() < 1_000  # those that Python itself has frozen


class Seen(logging.Handler):
    """Keeps what was logged: no watch looks into loggers."""

    def __init__(self):
        super().__init__()
        self.values = []

    def emit(self, record):
        self.values.append(record.args[0])


def test_it_is_off_in_recorded_calls_and_on_around_them(device, monkeypatch):
    log, handler = logging.getLogger("test_garbage"), Seen()
    log.setLevel(logging.INFO)
    monkeypatch.setattr(log, "handlers", [handler])
    seen = handler.values

    def call(x):
        log.info("%s", gc.isenabled())
        if x.numel() == 5 and is_recording():
            raise KeyError("the user's")
        return x * 2

    module = CUDAGraphModule(call, config(warmup_steps=2))
    for _ in range(6):
        module(torch.ones(3, device=device))
        assert gc.isenabled()
    assert seen == [True, False, False]
    for _ in range(6):
        with contextlib.suppress(KeyError):
            module(torch.ones(5, device=device))
        assert gc.isenabled()
    assert seen[3:5] == [True, False]
