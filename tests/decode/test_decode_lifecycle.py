"""Weights, memory and graphs over the life of an engine; faults, and what is left after them."""

import functools
import logging

import numpy
import pytest
import torch
from transformers import BatchEncoding

from graphmod import CUDAGraphConfig, graph_layers
from graphmod.decode import DecodeEngine, DecodeError, RequestError, Sampling
from graphmod.decode.step import DecodeStep
from graphmod.errors import ConfigError
from graphmod.train.attention import use_static_causal_attention
from tests.support.decode_models import prompts_of, reference, tiny_model


def tokens_of(engine, prompts, **settings):
    return [done.tokens for done in engine.generate(prompts, **settings)]


def references(model, prompts, count):
    return [reference(model, prompt, count) for prompt in prompts]


def test_weights_changed_in_place_are_seen_without_recapture(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2)
    prompts = prompts_of(5, 9)
    before = tokens_of(engine, prompts, max_new_tokens=12)
    captures = engine.stats.total("captures")
    model.load_state_dict(tiny_model("llama", device, seed=1).state_dict())
    after = tokens_of(engine, prompts, max_new_tokens=12)
    assert after == references(model, prompts, 12) != before
    assert engine.stats.total("captures") == captures and engine.stats.total("recaptures") == 0


def test_weights_that_moved_are_noticed_and_captured_again(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2)
    prompts = prompts_of(5, 9)
    tokens_of(engine, prompts, max_new_tokens=12)
    model.load_state_dict(tiny_model("llama", device, seed=1).state_dict(), assign=True)
    assert tokens_of(engine, prompts, max_new_tokens=30) == references(model, prompts, 30)
    assert engine.stats.buckets[2].recaptures == 1
    eager = engine.stats.total("eager_steps")
    tokens_of(engine, prompts, max_new_tokens=12)
    assert engine.stats.total("eager_steps") == eager, "back to replays"


def test_a_training_loop_may_sample_between_steps(device):
    model = use_static_causal_attention(tiny_model("gpt2", device)).train()
    graph_layers(model, CUDAGraphConfig(warmup_steps=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    engine = DecodeEngine(model, max_batch_size=2)
    (prompt,) = prompts_of(6)
    batch = torch.tensor(prompts_of(16, 16), device=device)
    seen = set()
    model.transformer.h[0].eval()  # one module that is not in training mode, and must not be afterwards
    modes = [module.training for module in model.modules()]
    for _ in range(5):
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (done,) = engine.generate([prompt], max_new_tokens=10)
        assert [module.training for module in model.modules()] == modes
        with torch.no_grad():
            whole = torch.tensor([prompt + done.tokens], device=device)
            modes_now = model.training
            logits = model.eval()(whole, use_cache=False).logits[0]
            for module, mode in zip(model.modules(), modes, strict=True):
                module.training = mode
            assert modes_now
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == done.tokens
        seen.add(tuple(done.tokens))
    assert len(seen) > 1, "training changed nothing, so the test showed nothing"
    assert engine.stats.total("captures") == 1 and engine.stats.total("failures") == 0


def test_suspend_gives_memory_and_graphs_back_and_resume_takes_them_again(device):
    model = tiny_model("qwen3", device)
    engine = DecodeEngine(model, max_batch_size=2)
    prompts = prompts_of(5, 9)
    expected = tokens_of(engine, prompts, max_new_tokens=12)
    assert engine.stats.state == "valid" and engine.stats.cache_bytes > 0
    engine.suspend()
    engine.suspend()
    assert engine.stats.cache_bytes == 0 and engine.stats.state == "invalid"
    with pytest.raises(DecodeError, match="resume"):
        engine.generate(prompts)
    engine.resume()
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected
    captures = engine.stats.total("captures")
    engine.resume()
    assert tokens_of(engine, prompts, max_new_tokens=12) == expected
    assert engine.stats.total("captures") == captures, "nothing moved, nothing to capture"


@pytest.mark.gpu
def test_suspend_frees_the_memory_of_the_cache_and_of_the_graphs():
    model = tiny_model("llama", torch.device("cuda"))
    for _ in range(5):  # other tests take and give memory of the same GPU meanwhile
        torch.cuda.empty_cache()
        free = [torch.cuda.mem_get_info()[0]]  # the cache is no memory of PyTorch's
        engine = DecodeEngine(model, max_batch_size=4, cache_tokens=2**23)
        engine.generate(prompts_of(5, 9), max_new_tokens=12)
        cache = engine.stats.cache_bytes
        free.append(torch.cuda.mem_get_info()[0])
        engine.suspend()
        free.append(torch.cuda.mem_get_info()[0])
        assert cache >= 2**31 and not engine.memory.mapped
        if free[1] <= free[0] - cache / 2 < free[2]:
            return
    pytest.fail(f"free before, with a cache of {cache}, and suspended: {free}")


def test_a_cache_that_moved_is_noticed_and_a_cleared_one_needs_nothing(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2)
    prompts = prompts_of(5, 9)
    expected = tokens_of(engine, prompts, max_new_tokens=25)
    captures = engine.stats.total("captures")
    for tensor in (*engine.memory.keys, *engine.memory.values):
        tensor.zero_()
    assert tokens_of(engine, prompts, max_new_tokens=25) == expected
    assert engine.stats.total("captures") == captures
    kept = [*engine.memory.keys, *engine.memory.values]  # so that the new memory lies elsewhere
    engine.memory.allocate()
    assert tokens_of(engine, prompts, max_new_tokens=25) == expected
    assert engine.stats.total("recaptures") == 1
    del kept


def test_capture_ahead_of_time_covers_all_buckets_and_changes_nothing(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=10, buckets=[1, 2, 4], block_size=8)
    engine.warm_up(progress=False)
    stats = engine.stats
    assert [bucket.state for bucket in stats.buckets.values()] == ["valid"] * 4
    prompts = prompts_of(*range(3, 12))
    assert tokens_of(engine, prompts, max_new_tokens=9) == references(model, prompts, 9)
    assert engine.stats.total("captures") == stats.total("captures")
    assert engine.stats.total("eager_steps") == stats.total("eager_steps")


def failing_step(monkeypatch, fails):
    """Lets the capture of steps fail while `fails` holds their number of rows."""
    from graphmod.trace import dispatch

    forward = DecodeStep.forward

    def broken(self, rows, *given):
        recorder = dispatch.current()
        if recorder is not None and not recorder.watching and len(rows.integers) in fails:
            raise RuntimeError("injected")
        return forward(self, rows, *given)

    monkeypatch.setattr(DecodeStep, "forward", broken)


@pytest.mark.parametrize("broken", [1, 2, 4])
def test_a_bucket_whose_capture_fails_decodes_eagerly_and_is_disabled(broken, device, monkeypatch, caplog):
    model = tiny_model("llama", device)
    fails = {broken}
    failing_step(monkeypatch, fails)
    engine = DecodeEngine(model, max_batch_size=4, steps_per_sync=2)
    prompts = prompts_of(4, 6, 8, 10)
    settings = [Sampling(max_new_tokens=count) for count in (8, 14, 20, 30)]
    with caplog.at_level(logging.WARNING, "graphmod"):
        done = engine.generate(prompts, sampling=settings)
    for prompt, one, completion in zip(prompts, settings, done, strict=True):
        assert completion.tokens == reference(model, prompt, one.max_new_tokens)
    for size, bucket in engine.stats.buckets.items():
        assert bucket.state == ("disabled" if size == broken else "valid")
        assert bucket.failures == (3 if size == broken else 0)
    assert any("injected" in message for message in caplog.messages)
    fails.clear()
    engine.force_enable()
    engine.generate(prompts, sampling=settings)
    assert engine.stats.buckets[broken].state == "valid"


def test_nan_ends_its_request_with_an_error_and_the_others_go_on(device):
    model = tiny_model("llama", device)
    poison = 95
    prompts = [[poison, 4, 5], *prompts_of(6, 9)]
    prompts[1:] = [[token % 90 for token in prompt] for prompt in prompts[1:]]
    with torch.no_grad():
        clean = references(model, prompts[1:], 14)
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = DecodeEngine(model, max_batch_size=4, block_size=8, cache_tokens=8 * 6)
    for _ in range(2):  # the second round gets the blocks of the first
        bad, *good = engine.generate(prompts, max_new_tokens=14)
        assert bad.finish_reason == "error" and "NaN" in bad.error and bad.tokens == []
        assert [done.tokens for done in good if poison not in done.tokens] == [c for c in clean if poison not in c]


def test_nan_in_the_middle_ends_its_request_with_the_tokens_before_it(device):
    model = tiny_model("llama", device)
    prompts = prompts_of(6, 9, 12)
    free = references(model, prompts, 20)
    used = {token for tokens in (*free[1:], *prompts) for token in tokens}
    poison = next(token for token in free[0][5:15] if token not in used)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    engine = DecodeEngine(model, max_batch_size=3, steps_per_sync=4)
    bad, *good = engine.generate(prompts, max_new_tokens=20)
    assert bad.finish_reason == "error" and bad.tokens == free[0][: free[0].index(poison) + 1]
    assert [done.tokens for done in good] == free[1:]
    first = engine.memory.first_block
    assert all(torch.isfinite(tensor[first:]).all() for tensor in engine.memory.keys), "left for the next sequence"


def test_prompts_may_be_arrays_and_tensors(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=4, max_seq_len=64)
    (prompt,) = prompts_of(9)
    kinds = [prompt, tuple(prompt), numpy.array(prompt), torch.tensor(prompt), torch.tensor([prompt])]
    first, *others = tokens_of(engine, kinds, max_new_tokens=6)
    assert all(other == first for other in others)


def test_requests_wait_for_memory_and_none_is_lost(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=8, block_size=8, cache_tokens=8 * 7)
    prompts = prompts_of(20, 3, 17, 9, 25, 4, 11)
    assert tokens_of(engine, prompts, max_new_tokens=14) == references(model, prompts, 14)
    assert engine.scheduler.allocator.free_blocks == 7
    # What does not fit is shortened, as where a sequence would be longer than max_seq_len.
    (prompt,) = prompts_of(50)
    (done,) = engine.generate([prompt], max_new_tokens=20)
    assert done.finish_reason == "length" and done.tokens == reference(model, prompt, 7)
    with pytest.raises(RequestError, match="60 tokens and the KV cache holds 56 in all; shorten it"):
        engine.generate(prompts_of(60), max_new_tokens=10)


@pytest.fixture(scope="module")
def small_engine():
    """Gives the engine of a device that all wrong requests are made to."""
    return functools.cache(lambda device: DecodeEngine(tiny_model("llama", device), max_batch_size=2))


@pytest.mark.parametrize(
    ("prompt", "settings", "said"),
    [
        ([], {}, "prompt 1 is empty"),
        ([3] * 128, {}, "max_seq_len=128"),
        ([3, 96], {}, "96, which is not a token id"),
        ("text", {}, "codec"),
        ([3], {"stop": ["text"]}, "codec"),
        ([3], {"stop": [96]}, "unknown stop 96"),
        ([3], {"stop": [[]]}, "unknown stop"),
        ([3], {"stop": [3.5]}, "unknown stop 3.5"),
        ([3], {"stop": [True]}, "unknown stop True"),
        ([3], {"stop": [[3, False]]}, r"unknown stop \[3, False\]"),
        ([3], {"stop": list(range(9))}, "more than 8"),
        ([3], {"temperature": -1.0}, "temperature"),
        ([3], {"top_p": 0.0}, "top_p"),
        ([3], {"top_k": -1}, "top_k"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens"),
        ([3], {"temprature": 1.0}, "temperature"),
        ([3], {"n": 0}, "n must be"),
        ([3], {"n": "2"}, "n must be an integer of at least 1, got '2'"),
        ([3], {"max_new_tokens": 1.5}, "max_new_tokens must be an integer, got 1.5"),
        ([3], {"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ([3], {"seed": "a"}, "seed must be an integer, got 'a'"),
        ([3], {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ([3], {"sampling": {"temperature": 1.0}}, "must be a Sampling, .* got dict"),
        (None, {}, "prompt 1 must be token ids or a text, got NoneType"),
        (torch.tensor([[3, 4], [5, 6]]), {}, r"shape \(2, 2\); give each row as a prompt"),
        ([True, False], {}, "holds True, which is not a token id"),
    ],
    ids=str,
)
def test_a_wrong_request_is_one_clear_error_and_the_engine_goes_on(prompt, settings, said, device, small_engine):
    engine = small_engine(device)
    with pytest.raises(RequestError, match=said):
        engine.generate([[3, 4], prompt], **{"max_new_tokens": 5, **settings})
    assert len(engine.generate([[3, 4]], max_new_tokens=5)[0].tokens) == 5
    with pytest.raises(RequestError, match="got one tensor of token ids"):
        engine.generate(torch.tensor([3, 4]))


def test_what_a_tokenizer_returns_is_no_list_of_prompts(device):
    engine = DecodeEngine(tiny_model("llama", device), max_batch_size=2, codec=Letters())  # by which keys are prompts
    for encoded in (BatchEncoding({"input_ids": [[3, 4]]}), {"input_ids": [[3, 4]]}):
        with pytest.raises(RequestError, match=f"got {type(encoded).__name__}; give its input_ids"):
            engine.generate(encoded, max_new_tokens=3)
        with pytest.raises(RequestError, match=f"prompt 0 .* got {type(encoded).__name__}; give its input_ids"):
            engine.generate([encoded], max_new_tokens=3)
    with pytest.raises(RequestError, match=r"prompt 0 .* got int; write \[prompt\]"):
        engine.generate([3, 4], max_new_tokens=3)
    with pytest.raises(ConfigError, match=r"codec must have encode.text. and decode.tokens., got a str"):
        DecodeEngine(tiny_model("llama", device), codec="letters")


class Letters:
    def encode(self, text):
        return [ord(letter) - 32 for letter in text]

    def decode(self, tokens):
        return "".join(chr(token + 32) for token in tokens)


def test_stops_of_every_kind_end_a_sequence(device):
    model = tiny_model("llama", device)
    (prompt,) = prompts_of(7)
    free = reference(model, prompt, 30)
    engine = DecodeEngine(model, max_batch_size=2, codec=Letters())
    text = Letters().decode(free[10:13])
    for stop in ([free[10], free[11], free[12]], text, free[12]):
        (done,) = engine.generate([prompt], max_new_tokens=30, stop=[stop])
        until = min(index for index in range(30) if free[index] == free[12]) if isinstance(stop, int) else 12
        assert done.finish_reason == "stop" and len(done.tokens) <= until + 1
        assert done.tokens == free[: len(done.tokens)] and done.tokens[-1] == free[12]


def test_an_interruption_keeps_what_had_finished_and_leaves_the_engine_usable(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=4, steps_per_sync=2)
    prompts = prompts_of(4, 6, 8)
    settings = [Sampling(max_new_tokens=count) for count in (5, 40, 40)]
    kept = []

    def finish(done):
        kept.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, sampling=settings, on_finish=finish)
    assert [done.tokens for done in kept] == [reference(model, prompts[0], 5)]
    assert engine.scheduler.allocator.free_blocks == engine.scheduler.allocator.count
    assert tokens_of(engine, prompts, max_new_tokens=9) == references(model, prompts, 9)


def test_streams_run_beside_other_requests_and_closing_one_frees_its_requests(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=4)
    prompts = prompts_of(4, 5, 3)
    stream = engine.stream(prompts[:2], max_new_tokens=50)
    first = next(stream)
    assert not torch.is_inference_mode_enabled()
    with pytest.raises(DecodeError, match="running"):
        engine.suspend()
    assert tokens_of(engine, prompts[2:], max_new_tokens=6) == references(model, prompts[2:], 6)
    events = [first, *(next(stream) for _ in range(20))]
    for number in range(2):
        found = [event.token for event in events if event.request == number]
        assert found == reference(model, prompts[number], 50)[: len(found)] != []
    stream.close()
    assert engine.stats.blocks_used == 0 and not engine.unfinished
    engine.suspend()
    engine.resume()
    assert tokens_of(engine, prompts, max_new_tokens=6) == references(model, prompts, 6)


def test_settings_that_cannot_be_used_name_the_way_out(device):
    model = tiny_model("llama", device)
    with pytest.raises(ConfigError, match="128 positions"):
        DecodeEngine(model, max_seq_len=129)
    with pytest.raises(ConfigError, match="choose one of: auto"):
        DecodeEngine(model, attention="fast")
    with pytest.raises(ConfigError, match="steps_per_sync"):
        DecodeEngine(model, steps_per_sync=0)
    with pytest.raises(ConfigError, match=r"sizes=\[3\].*\[1, 2\]"):
        DecodeEngine(model, max_batch_size=2).warm_up([3])
    with pytest.raises(ConfigError, match="warmup_steps"):
        DecodeEngine(model, warmup_steps=0)


def test_an_attention_that_is_not_available_says_why():
    model = tiny_model("llama", torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"GPU.*use auto, or: sdpa"):
        DecodeEngine(model, attention="triton")


@pytest.mark.parametrize("after", [0, 1, 3, 9, 20])
def test_a_codec_that_raises_loses_no_memory(after, device):
    calls = []

    class Breaks(Letters):
        def decode(self, tokens):
            calls.append(None)
            if len(calls) > after:
                raise ValueError("no such token")
            return super().decode(tokens)

    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=2, codec=Breaks())
    prompts = prompts_of(5, 9, 20)
    with pytest.raises(ValueError, match="no such token"):
        engine.generate(prompts, max_new_tokens=20, stop=["qqq"])
    assert engine.scheduler.allocator.free_blocks == engine.scheduler.allocator.count
    engine.requests.codec = None
    assert tokens_of(engine, prompts, max_new_tokens=9) == references(model, prompts, 9)
