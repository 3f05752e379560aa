"""Ctrl-C at any moment, pauses that nobody leaves, signals in the middle, the end of the interpreter."""

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from graphmod.decode import DecodeEngine, DecodeError, EngineLoop, traffic
from graphmod.interrupts import Held
from tests.support.decode_models import prompts_of, reference, tiny_model
from tests.support.settings import ROOT


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


# -- Ctrl-C ---------------------------------------------------------------------------------------------------------


class Interrupting:
    """Raises SIGINT before the nth line or call in the files of an engine that this thread comes to."""

    def __init__(self, number):
        self.left, self.done = number, False

    def __call__(self, frame, event, _):
        name = frame.f_code.co_filename
        if "graphmod/decode" not in name and not name.endswith(
            ("contextlib.py", "graphmod/attention.py", "grad_mode.py")
        ):
            return None
        self.left -= 1
        if not self.left and not self.done:
            self.done = True
            sys.settrace(None)
            interrupt()
        return self if not self.done else None


def lines(act):
    """How many lines and calls there are to interrupt."""
    counted = Interrupting(10**9)
    sys.settrace(counted)
    try:
        act()
    finally:
        sys.settrace(None)
    return 10**9 - counted.left


def interrupted_anywhere(numbers, adapter):
    model, (prompt,) = tiny_model("llama", torch.device("cpu")), prompts_of(6)
    engine = DecodeEngine(model, max_batch_size=2, steps_per_sync=2, graphs=False, max_adapters=1)
    engine.adapters.put("a", {"model.layers.0.mlp.up_proj": {"A": torch.ones(1, 32), "B": torch.ones(64, 1)}})

    def generate():
        return engine.generate([prompt], max_new_tokens=5, adapter=adapter)[0].tokens

    expected = generate()
    assert (expected == reference(model, prompt, 5)) == (adapter is None)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before, met = signal.getsignal(signal.SIGINT), 0
    for number in numbers(lines(generate)):
        try:
            sys.settrace(Interrupting(number))
            assert generate() == expected
        except KeyboardInterrupt as error:
            sys.settrace(None)
            met += 1
            caught = error  # and with it all frames: nothing may be left to garbage collection
            assert [module.training for module in model.modules()] == modes, number
            assert not torch.is_inference_mode_enabled() and model.config._attn_implementation == "sdpa", number
            assert not any(module._forward_hooks for module in model.modules()), number
            assert not engine._traffic.turns._is_owned() and signal.getsignal(signal.SIGINT) == before, number
            del caught
        finally:
            sys.settrace(None)
        assert generate() == expected and engine.stats.blocks_used == 0 and not engine.unfinished, number
    assert met


@pytest.mark.parametrize("adapter", [None, "a"])
def test_ctrl_c_at_some_moments_leaves_the_model_as_it_was_and_the_engine_usable(adapter):
    chance = random.Random(0)
    interrupted_anywhere(lambda count: [chance.randint(1, count) for _ in range(60)], adapter)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, "a"])
def test_ctrl_c_at_any_moment_leaves_the_model_as_it_was_and_the_engine_usable(adapter):
    interrupted_anywhere(lambda count: range(1, count + 1), adapter)


def test_ctrl_c_waits_while_it_is_held_and_comes_when_it_may_be_heard():
    with pytest.raises(KeyboardInterrupt), Held() as held:
        interrupt()
        with Held() as inner:
            done = "not yet"
            with inner.heard():
                pass
            done = "still not"  # it came to the outer one, which nothing has let hear it
        with held.heard():
            done = "never"
    assert done == "still not" and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_presses_twice_does_not_wait():
    with pytest.raises(KeyboardInterrupt), Held():
        interrupt()
        done = "once"
        interrupt()
        done = "twice"
    assert done == "once"


def test_ctrl_c_comes_to_who_waits_for_his_turn():
    engine = DecodeEngine(tiny_model("llama", torch.device("cpu")), max_batch_size=2)
    inside, leave = threading.Event(), threading.Event()

    def pauses():
        with engine.pause():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=pauses)
    thread.start()
    inside.wait()
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts_of(5), max_new_tokens=3)
    leave.set()
    thread.join()
    assert len(engine.generate(prompts_of(5), max_new_tokens=3)[0].tokens) == 3


# -- pauses ---------------------------------------------------------------------------------------------------------


def test_a_pause_that_is_not_entered_says_so():
    engine = DecodeEngine(tiny_model("llama", torch.device("cpu")), max_batch_size=2)
    with pytest.warns(RuntimeWarning, match=r"test_decode_interrupts.py:\d+ was not entered.*with engine.pause"):
        engine.pause()
    pause = engine.pause()
    with pause:
        pass
    with pytest.raises(DecodeError, match="entered already"), pause:
        pass
    with warnings.catch_warnings(action="error"):
        del pause


def test_a_pause_that_nobody_holds_any_more_ends():
    engine = DecodeEngine(tiny_model("llama", torch.device("cpu")), max_batch_size=2)
    engine.pause().__enter__()
    gc.collect()
    loop = EngineLoop(engine)
    assert loop.submit([5], max_new_tokens=3).wait(60)[0].finish_reason == "length"
    loop.close()


def test_who_waits_for_a_pause_is_told_for_whom(monkeypatch, caplog):
    monkeypatch.setattr(traffic, "_LONG", 0.1)
    engine = DecodeEngine(tiny_model("llama", torch.device("cpu")), max_batch_size=2)
    loop = EngineLoop(engine)
    with caplog.at_level(logging.WARNING, "graphmod"), engine.pause():
        handle = loop.submit([5], max_new_tokens=3)
        with pytest.raises(TimeoutError):
            handle.wait(0.5)
        assert engine.generate([[6]], max_new_tokens=3), "the thread that has paused may go on"
    assert caplog.text.count("waiting for thread 'MainThread' to leave the engine.pause() of ") == 1
    assert handle.wait(60)[0].finish_reason == "length"
    loop.close()


def test_a_pause_of_a_thread_that_has_ended_is_an_error_for_who_comes_later():
    engine, kept = DecodeEngine(tiny_model("llama", torch.device("cpu")), max_batch_size=2), []

    def pauses():
        kept.append(engine.pause())
        kept[0].__enter__()

    thread = threading.Thread(target=pauses, name="careless")
    thread.start()
    thread.join()
    with pytest.raises(DecodeError, match=r"'careless' has ended and never left .*test_decode_interrupts.py:\d+"):
        engine.generate(prompts_of(5), max_new_tokens=3)


# -- calls from within ----------------------------------------------------------------------------------------------


def test_a_step_within_a_step_is_an_error_of_the_inner_one(monkeypatch):
    model, (prompt,) = tiny_model("llama", torch.device("cpu")), prompts_of(6)
    engine = DecodeEngine(model, max_batch_size=2)
    advance = engine._batch.advance

    def asking():
        with pytest.raises(DecodeError, match="in the middle of a step of this very thread"):
            engine.step()
        return advance()

    monkeypatch.setattr(engine._batch, "advance", asking)
    assert engine.generate([prompt], max_new_tokens=9)[0].tokens == reference(model, prompt, 9)


@pytest.mark.parametrize("what", ["submit", "close"])
def test_a_signal_may_call_into_a_loop_that_starts(what, monkeypatch):
    engine = DecodeEngine(tiny_model("llama", torch.device("cpu")), max_batch_size=2)
    loop, found = EngineLoop(engine), []
    start = threading.Thread.start

    def starts(thread):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        start(thread)

    def came(*_):
        found.append(loop.submit([6], max_new_tokens=3) if what == "submit" else loop.close())

    monkeypatch.setattr(threading.Thread, "start", starts)
    before = signal.signal(signal.SIGUSR1, came)
    try:
        assert loop.submit([5], max_new_tokens=3).wait(60)[0].finish_reason == "length"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert what == "close" or found[0].wait(60)[0].finish_reason == "length"
    loop.close()
    assert threading.active_count() == 1 or not any(one.name == "graphmod-engine" for one in threading.enumerate())


# -- the end --------------------------------------------------------------------------------------------------------

PROGRAM = """
import threading, time
from tests.support.decode_models import prompts_of, tiny_model
from graphmod.decode import DecodeEngine
engine, begun = DecodeEngine(tiny_model("llama", "cpu"), max_batch_size=2), threading.Event()
def work():
    while True:
        engine.generate(prompts_of(5, 40), max_new_tokens=60)
        begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_daemon_thread_may_generate_when_the_interpreter_ends():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    began = time.monotonic()
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ended.returncode == 0 and time.monotonic() - began < 60, ended.stderr
