"""What comes at a bad moment: garbage collection, other threads, errors of those who are told, changed weights."""

import asyncio
import gc
import os
import subprocess
import sys
import threading

import pytest

from graphmod.decode import DecodeEngine, DecodeError, EngineLoop
from tests.support.decode_models import prompts_of, reference, tiny_model
from tests.support.settings import ROOT


def run(engine):
    while engine.unfinished:
        engine.step()


class Letters:
    """Tokens are letters; fails when it is told to."""

    fails = False

    def encode(self, text):
        return [3 + ord(letter) % 90 for letter in text]

    def decode(self, tokens):
        if self.fails:
            raise ValueError("injected")
        return "".join(chr(97 + token % 26) for token in tokens)


def test_a_stream_that_garbage_collection_ends_in_the_middle_of_a_step(device, monkeypatch):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=3, steps_per_sync=2, prefill_tokens=8)
    other, long = prompts_of(6, 15)
    handle = engine.submit(other, max_new_tokens=9)
    engine.step()
    stream = engine.stream([long], max_new_tokens=9)
    stream.itself = stream  # so that nothing but garbage collection finds it
    ended = stream.handle
    engine.step()
    assert engine.scheduler.filling
    kind = type(engine._batch._prefill)
    prefill = kind.__call__

    def collecting(self, pieces):
        nonlocal stream
        if stream is not None:  # what comes later finds it ended
            stream = None
            gc.collect()
        return prefill(self, pieces)

    monkeypatch.setattr(kind, "__call__", collecting)
    run(engine)
    assert handle.wait()[0].tokens == reference(model, other, 9)
    assert ended.done and ended.completions[0].finish_reason == "abort" and engine.stats.blocks_used == 0


def test_a_stream_that_nobody_holds_ends_without_garbage_collection(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2)
    stream = engine.stream(prompts_of(6), max_new_tokens=90)
    handle = stream.handle
    next(stream)
    gc.disable()
    try:
        del stream
        assert handle.done and engine.stats.blocks_used == 0
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_stream_may_be_left_when_the_interpreter_ends():
    program = """
from tests.support.decode_models import prompts_of, tiny_model
from graphmod.decode import DecodeEngine
stream = DecodeEngine(tiny_model("llama", "cpu"), max_batch_size=2).stream(prompts_of(5), max_new_tokens=90)
next(stream)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ended.returncode == 0 and "Exception" not in ended.stderr, ended.stderr


def test_another_thread_may_close_a_stream_that_is_read(device, monkeypatch):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2, steps_per_sync=1)
    stream, advance = engine.stream(prompts_of(6), max_new_tokens=90), engine._batch.advance

    def closing():
        thread = threading.Thread(target=stream.close)
        thread.start()
        thread.join()
        return advance()

    monkeypatch.setattr(engine._batch, "advance", closing)
    assert len(list(stream)) <= 2 and stream.handle.completions[0].finish_reason == "abort"


def test_who_is_aborted_in_the_last_step_of_others_is_let_out_after_it(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2, steps_per_sync=1)
    waits = engine.submit(prompts_of(6)[0], max_new_tokens=90)

    def abort(_):
        thread = threading.Thread(target=engine.abort, args=(waits,))
        thread.start()
        thread.join()

    engine.generate(prompts_of(5), max_new_tokens=1, on_finish=abort)
    assert waits.wait(0)[0].finish_reason == "abort" and not engine.unfinished
    engine.suspend()


def test_no_prompts_leave_nothing_behind(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2)
    assert engine.generate([]) == [] and list(engine.stream([])) == [] and not engine.unfinished
    engine.suspend()


def test_a_request_that_comes_while_the_engine_is_suspended_is_told_so(device, monkeypatch):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2)
    read = engine.requests.read

    def suspending(*given):
        found = read(*given)
        engine.suspend()
        return found

    monkeypatch.setattr(engine.requests, "read", suspending)
    handle = engine.submit([5])
    with pytest.raises(DecodeError, match="suspended"):
        engine.step()
    assert "suspended" in str(handle.error) and not engine.unfinished


def test_only_a_handle_can_be_aborted(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=1)
    handle = engine.submit([5, 6], max_new_tokens=90)
    with pytest.raises(DecodeError, match=r"takes what submit\(\) returns, or a stream's .handle, got TokenStream"):
        engine.abort(engine.stream([[5, 6]], max_new_tokens=90))
    engine.abort(handle)
    assert not engine.unfinished


def test_an_error_in_an_abort_reaches_those_who_wait(device):
    codec = Letters()
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=3, codec=codec)
    aborted, other = engine.submit([5, 6], 2, max_new_tokens=90), engine.submit([7], max_new_tokens=90)
    engine.step()
    codec.fails = True
    with pytest.raises(ValueError, match="injected"):
        engine.abort(aborted)
    codec.fails = False
    for handle in (aborted, other):
        with pytest.raises(ValueError, match="injected"):
            handle.wait(0)
    assert engine.stats.blocks_used == 0 and not engine.unfinished
    assert engine.generate([[7]], max_new_tokens=9)[0].tokens == reference(model, [7], 9)


def test_who_is_told_and_fails_takes_nothing_from_those_that_end_at_the_same_time(device):
    model, told = tiny_model("llama", device), []
    engine = DecodeEngine(model, max_batch_size=4)
    other = engine.submit([7], max_new_tokens=5)

    def take(done):
        told.append(done.sample)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([[5]], 3, max_new_tokens=5, on_finish=take)
    assert sorted(told) == [0, 1, 2] and other.wait(0)[0].tokens == reference(model, [7], 5)
    assert not engine.unfinished and engine.stats.blocks_used == 0


def test_an_error_that_comes_again_in_tidying_up_reaches_those_who_wait(device, monkeypatch):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2)
    handles = [engine.submit([5, 6], 3, max_new_tokens=90) for _ in range(2)]

    def broken(*_):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:  # as a GPU does that has failed
        patch.setattr(engine.graphs, "launch", broken)
        patch.setattr(engine.state, "restart", broken)
        with pytest.raises(RuntimeError, match="injected"):
            engine.step()
        late = engine.submit([8], max_new_tokens=9)
        with pytest.raises(RuntimeError, match="injected"):
            engine.step()
        assert "injected" in str(late.error) and not engine.unfinished, "nobody waits for what cannot go on"
    assert all(handle.done and "injected" in str(handle.error) for handle in handles) and not engine.unfinished
    assert engine.generate([[7]], max_new_tokens=9)[0].tokens == reference(model, [7], 9)
    assert engine.stats.blocks_used == 0


@pytest.mark.parametrize("where", ["end", "restart"])
def test_an_interruption_while_everything_is_put_back_breaks_no_later_request(where, device, monkeypatch):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, steps_per_sync=2)
    with monkeypatch.context() as patch:
        place = engine._batch if where == "end" else engine.state
        whole, times = getattr(place, where), []

        def interrupted(*given):
            whole(*given)
            times.append(1)
            if len(times) == 1:
                raise KeyboardInterrupt

        patch.setattr(place, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[5, 6]], max_new_tokens=4)
    for prompt in prompts_of(5, 6, 7):
        assert engine.generate([prompt], max_new_tokens=9)[0].tokens == reference(model, prompt, 9)


def test_a_loop_may_be_closed_by_who_is_told_of_a_run(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2)
    loop = EngineLoop(engine)
    handle = loop.submit([5], max_new_tokens=30, on_run=lambda _: loop.close())
    assert handle.wait(60)[0].finish_reason == "length"
    loop.close()


def test_a_loop_whose_thread_cannot_start_ends_the_request_and_tries_again(device, monkeypatch):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2)
    loop = EngineLoop(engine)
    with monkeypatch.context() as patch:

        def broken(_):
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", broken)
        with pytest.raises(RuntimeError, match="new thread"):
            loop.submit([5])
    assert not engine.unfinished
    assert loop.submit([5], max_new_tokens=3).wait(60)[0].finish_reason == "length"
    loop.close()


def test_a_reader_whose_asyncio_loop_is_closed_meanwhile_disturbs_nobody(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2)
    handle, loop = engine.submit([5], max_new_tokens=30), asyncio.new_event_loop()
    engine.step()
    reader = handle.runs()
    loop.run_until_complete(anext(reader))
    loop.close()
    loop.is_closed = lambda: False  # as if it were closed right after it was asked
    run(engine)
    del loop.is_closed
    assert handle.wait(0)[0].finish_reason == "length"
