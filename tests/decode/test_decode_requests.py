"""Requests join and leave a running engine: from loops, threads and coroutines, with errors, aborts and pauses."""

import asyncio
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphmod.decode import DecodeEngine, DecodeError, EngineLoop, RequestError, batch, prefill
from tests.support.decode_models import VOCABULARY, prompts_of, reference, tiny_model


def run(engine):
    while engine.unfinished:
        engine.step()


def test_requests_join_a_running_engine_and_each_gets_its_own_tokens(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=3, steps_per_sync=2)
    prompts = prompts_of(5, 9, 3, 12, 7)
    handles = []
    for prompt in prompts:
        handles.append(engine.submit(prompt, max_new_tokens=14))
        engine.step()
        engine.step()
    assert engine.stats.running and engine.stats.blocks_used
    run(engine)
    assert [handle.completions[0].tokens for handle in handles] == [reference(model, p, 14) for p in prompts]
    assert all(handle.done for handle in handles) and engine.stats.blocks_used == 0 and engine.step() == []


def test_several_prompts_may_be_one_request_which_is_taken_or_refused_as_a_whole(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=3)
    prompts = prompts_of(5, 9)
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        engine.submit_all([prompts[0], []])
    assert not engine.unfinished
    handle = engine.submit_all(prompts, 2, max_new_tokens=6)
    run(engine)
    assert [(done.request, done.sample) for done in handle.wait(0)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [done.tokens for done in handle.completions] == [reference(model, p, 6) for p in prompts for _ in range(2)]


def test_who_waits_where_nobody_steps_is_told_so(device, monkeypatch, caplog):
    monkeypatch.setattr("graphmod.decode.streams._SILENCE", 0.1)
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2)
    waits = engine.submit(prompts_of(5)[0], max_new_tokens=3)
    with pytest.raises(TimeoutError, match="does not step the engine"):
        waits.wait(0.3)
    assert caplog.text.count("a request has no token after 0.1 s") == 1
    threading.Timer(0.3, run, [engine]).start()
    assert waits.wait()[0].tokens == waits.wait(0)[0].tokens != []


def test_runs_are_told_as_they_come_and_make_up_the_completions(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=4, steps_per_sync=3)
    told, stepped = [], []
    handle = engine.submit(prompts_of(6)[0], 3, temperature=1.0, seed=4, max_new_tokens=11, on_run=told.append)
    while engine.unfinished:
        stepped += engine.step()
    assert len(handle.completions) == 3 and stepped == told
    for number, done in enumerate(handle.completions):
        mine = [one for one in told if one.completion is done]
        assert done.sample == number and [one.ended for one in mine] == [False] * (len(mine) - 1) + [True]
        assert [token for one in mine for token in one.tokens] == done.tokens
        assert [value for one in mine for value in one.logprobs] == done.logprobs
    assert len({tuple(done.tokens) for done in handle.completions}) > 1


@pytest.mark.parametrize("turns", [0, 2, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 5))])
def test_an_aborted_request_frees_its_blocks_at_once_and_the_others_go_on(turns, device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, block_size=8, steps_per_sync=2)
    prompts = prompts_of(20, 9, 5)
    handles = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
    for _ in range(turns):
        engine.step()
    used = engine.stats.blocks_used
    engine.abort(handles[0])
    engine.abort(handles[0])
    assert handles[0].done and handles[0].completions[0].finish_reason == "abort" and handles[0].error is None
    assert engine.stats.blocks_used < used or not turns
    late = engine.submit(prompts[0], max_new_tokens=20)
    run(engine)
    for handle, prompt in zip((*handles[1:], late), (*prompts[1:], prompts[0]), strict=True):
        assert handle.completions[0].tokens == reference(model, prompt, 20)
    kept = handles[0].completions[0].tokens
    assert kept == reference(model, prompts[0], 20)[: len(kept)]
    assert engine.stats.blocks_used == 0


def test_aborting_everything_leaves_an_engine_at_rest(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2)
    for _ in range(3):
        engine.submit(prompts_of(5)[0], max_new_tokens=40)
    engine.step()
    engine.abort_all()
    assert not engine.unfinished and engine.stats.blocks_used == engine.stats.waiting == 0
    assert engine.generate(prompts_of(5), max_new_tokens=9)[0].tokens == reference(model, prompts_of(5)[0], 9)


def test_a_request_is_aborted_by_its_own_engine_alone(device):
    model = tiny_model("llama", device)
    own, other = DecodeEngine(model, max_batch_size=2), DecodeEngine(model, max_batch_size=2)
    (prompt,) = prompts_of(6)
    handle = own.submit(prompt, max_new_tokens=12)
    own.step()
    with pytest.raises(DecodeError, match="another engine's; abort it there"):
        other.abort(handle)
    assert not other.unfinished and not handle.done
    run(own)
    assert handle.completions[0].tokens == reference(model, prompt, 12)
    other.abort(handle)  # there is nothing left to end


def test_a_long_prompt_goes_in_pieces_and_does_not_stall_those_that_run(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, steps_per_sync=2, prefill_tokens=8, block_size=8)
    short, long = prompts_of(5, 70)
    first = engine.submit(short, max_new_tokens=40)
    engine.step()
    second, got = engine.submit(long, max_new_tokens=9), []
    while not second.completions[0].tokens:
        before = len(first.completions[0].tokens)
        engine.step()
        got.append(len(first.completions[0].tokens) - before)
    assert len(got) >= 70 // 8 and all(got[1:]), "every turn brought tokens to the one that ran"
    run(engine)
    assert first.completions[0].tokens == reference(model, short, 40)
    assert second.completions[0].tokens == reference(model, long, 9)


@pytest.mark.parametrize(
    ("rows", "waiting", "turns"),
    [
        (8, 1, [32, 32, 26]),
        (8, 3, [64, 64, 32, 32, 32, 32, 14]),
        (4, 3, [32, 32, 26]),  # one has a row: nobody else is held up, and the others come when it is free
    ],
)
def test_a_turn_prefills_more_where_several_join(rows, waiting, turns, device, monkeypatch):
    monkeypatch.setattr(batch, "_LEAST_TOKENS", 32)
    monkeypatch.setattr(prefill, "_LEAST_TOKENS", 32)
    monkeypatch.setattr(batch, "_TOKENS_PER_ROW", 2)
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=rows, steps_per_sync=2, prefill_tokens=128, block_size=8)
    handles = [engine.submit(prompt, max_new_tokens=40) for prompt in prompts_of(5, 6, 7)]
    engine.step()
    prompts = prompts_of(*waiting * [90])
    handles += [engine.submit(prompt, max_new_tokens=5) for prompt in prompts]
    given, before = [], engine.stats
    while engine.stats.prompt_tokens < 18 + 90 * min(waiting, rows - 3):
        last = engine.stats.prompt_tokens
        engine.step()
        given.append(engine.stats.prompt_tokens - last)
    assert given == turns
    assert engine.stats.prefill.padding_row_steps - before.prefill.padding_row_steps < 32
    run(engine)
    assert [handle.completions[0].tokens for handle in handles[3:]] == [reference(model, p, 5) for p in prompts]


@pytest.mark.parametrize("where", ["prefill", "step", "read"])
def test_an_error_of_the_engine_reaches_every_waiter_and_what_had_finished_is_kept(where, device, monkeypatch):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=3, steps_per_sync=2)
    prompts = prompts_of(4, 6, 8, 5)
    done = engine.submit(prompts[0], max_new_tokens=3)
    others = [engine.submit(prompt, max_new_tokens=30) for prompt in prompts[1:3]]
    while not done.done:
        engine.step()
    waits = engine.submit(prompts[3], max_new_tokens=5)
    place, name = {
        "prefill": (type(engine._batch._prefill), "__call__"),
        "step": (engine.graphs, "launch"),
        "read": (engine.state, "results_at"),
    }[where]
    with monkeypatch.context() as patch:

        def broken(*_):
            raise RuntimeError("injected")

        patch.setattr(place, name, broken)
        with pytest.raises(RuntimeError, match="injected"):
            run(engine)
    assert done.error is None and done.wait()[0].tokens == reference(model, prompts[0], 3)
    for handle, prompt in zip(others, prompts[1:3], strict=True):
        (completion,) = handle.completions
        assert handle.done and completion.finish_reason == "error" and "injected" in completion.error
        assert completion.tokens == reference(model, prompt, 30)[: len(completion.tokens)] != []
        with pytest.raises(RuntimeError, match="injected"):
            handle.wait()
    assert waits.done and "injected" in str(waits.error)
    assert not engine.unfinished and engine.stats.blocks_used == 0
    assert engine.generate(prompts[:1], max_new_tokens=9)[0].tokens == reference(model, prompts[0], 9)


def test_weights_may_change_in_a_pause(device):
    model, other = tiny_model("llama", device), tiny_model("llama", device, seed=1)
    engine = DecodeEngine(model, max_batch_size=2, steps_per_sync=4)
    (prompt,) = prompts_of(6)
    handle = engine.submit(prompt, max_new_tokens=30)
    for _ in range(3):
        engine.step()
    with engine.pause():
        so_far = list(handle.completions[0].tokens)
        assert 0 < len(so_far) < 30
        model.load_state_dict(other.state_dict())
    run(engine)
    (done,) = handle.completions
    assert len(done.tokens) == 30 and done.tokens[: len(so_far)] == so_far
    assert engine.generate([prompt], max_new_tokens=9)[0].tokens == reference(other, prompt, 9)


def test_threads_submit_abort_and_pause_while_a_loop_decodes(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=4, steps_per_sync=2)
    loop, prompts = EngineLoop(engine), prompts_of(5, 9, 3, 12, 7, 4)
    expected = [reference(model, prompt, 12) for prompt in prompts]
    wrong = []

    def client(number):
        for _ in range(3):
            handle = loop.submit(prompts[number], max_new_tokens=12)
            if number == 5:
                loop.abort(handle)
                if handle.wait(60)[0].finish_reason not in ("abort", "length"):
                    wrong.append(number)
            elif handle.wait(60)[0].tokens != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        with engine.pause():
            assert not torch.is_inference_mode_enabled()
    for thread in threads:
        thread.join()
    assert not wrong
    assert engine.generate(prompts, max_new_tokens=12)[0].tokens == expected[0], "beside a loop"
    last = loop.submit(prompts[0], max_new_tokens=12)
    loop.close()
    assert last.done and last.completions[0].tokens == expected[0] and engine.stats.blocks_used == 0
    with pytest.raises(DecodeError, match="closed"):
        loop.submit(prompts[0])


def test_a_loop_that_is_closed_without_draining_ends_its_requests(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2)
    loop = EngineLoop(engine)
    handles = [loop.submit(prompt, max_new_tokens=100) for prompt in prompts_of(5, 6, 7)]
    loop.close(drain=False)
    assert all(handle.done for handle in handles) and engine.stats.blocks_used == 0
    assert {handle.completions[0].finish_reason for handle in handles} <= {"abort", "length"}


def test_a_loop_tells_errors_to_those_who_wait_and_goes_on_with_the_next(device, monkeypatch):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2)
    loop, (prompt,) = EngineLoop(engine), prompts_of(5)
    with monkeypatch.context() as patch:

        def broken(*_):
            raise RuntimeError("injected")

        patch.setattr(engine.graphs, "launch", broken)
        with pytest.raises(RuntimeError, match="injected"):
            loop.submit(prompt, max_new_tokens=9).wait(60)
    assert "injected" in str(loop.error)
    assert loop.submit(prompt, max_new_tokens=9).wait(60)[0].tokens == reference(model, prompt, 9)
    with pytest.raises(RequestError, match="empty"):
        loop.submit([])
    with pytest.raises(TimeoutError):
        loop.submit(prompt, max_new_tokens=100).wait(0)
    loop.close()


def test_coroutines_share_an_engine(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=4, steps_per_sync=2)
    prompts = prompts_of(5, 9, 3)

    async def tokens(prompt):
        return [event.token async for event in engine.stream([prompt], max_new_tokens=12)]

    async def slow(handle):
        found = []
        async for one in handle.runs():
            found += one.tokens
            await asyncio.sleep(0.02)
        return found

    async def leaves(prompt):
        stream = engine.stream([prompt], max_new_tokens=100)
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.to_thread(stream.handle.wait, 60)
        return stream.handle.completions[0].finish_reason

    async def everything():
        handle = engine.loop.submit(prompts[0], max_new_tokens=12)
        return await asyncio.gather(slow(handle), leaves(prompts[1]), *map(tokens, prompts))

    first, reason, *found = asyncio.run(everything())
    expected = [reference(model, prompt, 12) for prompt in prompts]
    assert found == expected and first == expected[0] and reason == "abort"
    engine.loop.close()
    assert engine.stats.blocks_used == 0


# -- the beginnings of prompts --------------------------------------------------------------------------------------


def test_beginnings_that_are_in_the_cache_are_not_computed_again(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, block_size=8)
    (shared,) = prompts_of(40)
    prompts = [shared + tail for tail in ([5, 6], [7], [8, 9, 10])]
    handles = [engine.submit(prompt, max_new_tokens=7) for prompt in prompts]
    run(engine)
    assert [handle.completions[0].tokens for handle in handles] == [reference(model, p, 7) for p in prompts]
    assert engine.stats.prefix_tokens == 2 * 40 and engine.stats.prompt_tokens == 42 + 1 + 3
    engine.generate(prompts[:1], max_new_tokens=7)
    assert engine.stats.prefix_tokens == 2 * 40, "an engine that had nothing to do remembers nothing"


def test_a_conversation_goes_on_from_what_was_generated(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, block_size=8, keep_prefixes=True)
    (prompt,) = prompts_of(21)
    for _ in range(3):
        (done,) = engine.generate([prompt], max_new_tokens=9)
        assert done.tokens == reference(model, prompt, 9)
        prompt = prompt + done.tokens + [5, 6]
    stats = engine.stats
    assert stats.prefix_tokens == (21 + 8) // 8 * 8 + (21 + 11 + 8) // 8 * 8
    assert stats.blocks_used == 0


@pytest.mark.parametrize("how", ["in place", "exchanged", "in a pause"])
def test_what_was_computed_with_other_weights_is_not_taken_for_a_beginning(how, device):
    model, other = tiny_model("llama", device), tiny_model("llama", device, seed=1)
    engine = DecodeEngine(model, max_batch_size=2, block_size=8, keep_prefixes=True)
    (prompt,) = prompts_of(40)
    held = engine.submit([5] * 9, max_new_tokens=100)  # so that the engine is never at rest
    before = engine.generate([prompt], max_new_tokens=7)[0].tokens
    if how == "in a pause":
        with engine.pause(), torch.inference_mode():
            for mine, new in zip(model.parameters(), other.parameters(), strict=True):
                mine.data.copy_(new.data)
    else:
        model.load_state_dict(other.state_dict(), assign=how == "exchanged")
    after = engine.generate([prompt], max_new_tokens=7)[0].tokens
    assert after == reference(other, prompt, 7) != before and engine.stats.prefix_tokens == 0
    run(engine)
    assert held.done


def test_beginnings_are_given_up_for_room(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, block_size=8, cache_tokens=8 * 8, keep_prefixes=True)
    prompts = prompts_of(40, 33, 41, 40)
    for prompt in (*prompts, *prompts):
        assert engine.generate([prompt], max_new_tokens=9)[0].tokens == reference(model, prompt, 9)
    assert engine.stats.blocks_used == 0


def test_nan_in_a_beginning_is_forgotten_with_its_request(device):
    model = tiny_model("llama", device)
    (prompt,) = prompts_of(30)
    expected = reference(model, prompt, 5)
    engine = DecodeEngine(model, max_batch_size=2, block_size=8, keep_prefixes=True)
    poison = next(token for token in range(3, VOCABULARY) if token not in (*prompt, *expected))
    row = model.get_input_embeddings().weight.detach()[poison].clone()
    with torch.no_grad():
        model.get_input_embeddings().weight.data[poison] = float("nan")
    spoilt = [*prompt[:16], poison, *prompt[16:]]
    both = engine.generate([spoilt, prompt], max_new_tokens=5)
    assert both[0].finish_reason == "error" and both[1].tokens == expected
    with torch.no_grad():
        model.get_input_embeddings().weight.data[poison] = row  # which leaves no trace
    assert engine.generate([spoilt], max_new_tokens=5)[0].tokens == reference(model, spoilt, 5)


# -- any order ------------------------------------------------------------------------------------------------------

moves = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 5), st.integers(1, 3), st.integers(1, 20)),
        st.tuples(st.just("step")),
        st.tuples(st.just("step")),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("pause")),
    ),
    min_size=3,
    max_size=25,
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=moves,
    rows=st.integers(1, 5),
    steps=st.integers(1, 4),
    prefill=st.sampled_from([3, 16, 64]),
    spare=st.integers(0, 8),
    keep=st.booleans(),
)
def test_any_order_of_joining_and_leaving_gives_the_tokens_of_each_request_alone(
    device, moves, rows, steps, prefill, spare, keep
):
    model = tiny_model("qwen3", device, scale=1.5)
    (shared,) = prompts_of(20)
    prompts = [[*shared[:8], 5], [*shared[:8], 6], shared, shared[:17], *prompts_of(3, 11)]
    engine = DecodeEngine(
        model,
        max_batch_size=rows,
        max_seq_len=64,
        block_size=4,
        cache_tokens=(10 + spare) * 4,
        steps_per_sync=steps,
        prefill_tokens=prefill,
        keep_prefixes=keep,
    )
    handles = []
    for move, *more in moves:
        if move == "submit":
            which, n, count = more
            asked = (prompts[which], n, {"max_new_tokens": count, "temperature": 0.8, "seed": which})
            handles.append((engine.submit(asked[0], n, **asked[2]), asked))
        elif move == "step":
            engine.step()
        elif move == "pause":
            with engine.pause():
                pass
        elif handles:
            engine.abort(handles[more[0] % len(handles)][0])
    run(engine)
    alone = DecodeEngine(model, max_batch_size=1, max_seq_len=64, graphs=False)
    for handle, (prompt, n, asked) in handles:
        assert handle.done and handle.error is None
        for done, want in zip(handle.completions, alone.generate([prompt], n, **asked), strict=True):
            aborted = done.finish_reason == "abort"
            assert aborted or done.finish_reason == want.finish_reason
            assert done.tokens == (want.tokens[: len(done.tokens)] if aborted else want.tokens)
    assert engine.stats.blocks_used == 0 and engine.stats.total("failures") == engine.stats.prefill.failures == 0
