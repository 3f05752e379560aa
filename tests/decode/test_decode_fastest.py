"""`attention=fastest` takes what a measurement finds the fastest; `auto` goes by a rule."""

import logging

import pytest
import torch

from graphmod.cli import decode as run
from graphmod.decode import DecodeEngine, attention
from graphmod.decode.attention import IMPLEMENTATIONS, choose
from graphmod.decode.types import AttentionName
from tests.decode.test_decode_attention import attend, filled
from tests.support.decode_models import prompts_of, reference, tiny_model

ALL = [AttentionName.flashinfer, AttentionName.triton, AttentionName.sdpa]


@pytest.fixture
def usable(monkeypatch):
    """`usable("triton", ...)` makes these the implementations that can be used, besides the reference."""

    def set_usable(*names):
        for name in ALL[:-1]:
            reason = None if name.value in names else "it is not tested here"
            found = IMPLEMENTATIONS[name]._replace(
                unavailable=lambda _, reason=reason: reason,
                prepare=lambda _: None,
                function=attention.paged_sdpa,
                stops_at_context=False,
            )
            monkeypatch.setitem(IMPLEMENTATIONS, name, found)

    return set_usable


def chosen(name):
    memory, *_ = filled(16, torch.device("cpu"))
    return choose(AttentionName(name), memory, 128)


def test_with_one_candidate_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(attention, "time_graph", lambda *_: pytest.fail("measured"))
    model = tiny_model("llama", torch.device("cpu"))
    engine = DecodeEngine(model, max_batch_size=2, attention="fastest")
    assert engine.attention.name == "graphmod_sdpa" and engine.attention_us == engine.stats.attention_us == {}
    (prompt,) = prompts_of(9)
    assert engine.generate([prompt], max_new_tokens=10)[0].tokens == reference(model, prompt, 10)


@pytest.mark.parametrize("winner", ["sdpa", "flashinfer", "triton"])
def test_the_smallest_time_wins(usable, monkeypatch, winner):
    usable("flashinfer", "triton")
    asked = []

    def measure(candidates, memory, max_seq_len):
        asked.append((list(candidates), max_seq_len))
        return {name: 1.0 if name == winner else 2.0 for name in candidates}

    monkeypatch.setattr(attention, "measure", measure)
    found, times = chosen("fastest")
    assert found is IMPLEMENTATIONS[AttentionName(winner)] and times[winner] == 1.0
    assert asked == [(["flashinfer", "triton", "sdpa"], 128)]


def test_what_was_measured_is_logged_and_reported(usable, monkeypatch, caplog):
    usable("triton")
    times = iter([12.34, 56.78])
    monkeypatch.setattr(attention, "time_graph", lambda *_: next(times))
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.inference_mode())
    with caplog.at_level(logging.INFO, "graphmod"):
        engine = DecodeEngine(tiny_model("llama", torch.device("cpu")), max_batch_size=4, attention="fastest")
    assert "one layer with 4 rows takes triton 12.3 us, sdpa 56.8 us" in caplog.text
    assert engine.attention.name == "graphmod_triton" and engine.stats.attention_us == {"triton": 12.34, "sdpa": 56.78}
    engine.generate(prompts_of(4), max_new_tokens=4)
    assert "attention, per layer: triton 12.3 us, sdpa 56.8 us" in run.speed_of(4, 1.0, engine)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("no kernel image"), "it failed: no kernel image"),
        (torch.OutOfMemoryError("out of memory"), "the GPU has no memory left"),
    ],
)
def test_a_candidate_that_fails_is_left_out(usable, monkeypatch, caplog, error, why):
    usable("flashinfer", "triton")
    results = iter([AssertionError("page size"), error, 3.0])

    def timed(*_):
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(attention, "time_graph", timed)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.inference_mode())
    found, times = chosen("fastest")
    assert times == {"sdpa": 3.0} and found is IMPLEMENTATIONS[AttentionName.sdpa]
    assert f"triton is skipped, because {why}" in caplog.text
    assert "flashinfer is skipped, because it failed: page size" in caplog.text


def test_what_cannot_be_prepared_is_no_candidate(usable, monkeypatch):
    usable("flashinfer")
    broken = IMPLEMENTATIONS[AttentionName.flashinfer]._replace(prepare=lambda _: "nvcc is missing")
    monkeypatch.setitem(IMPLEMENTATIONS, AttentionName.flashinfer, broken)
    assert chosen("fastest")[0] is IMPLEMENTATIONS[AttentionName.sdpa]


def test_auto_measures_nothing_and_goes_by_its_order(usable, monkeypatch):
    monkeypatch.setattr(attention, "measure", lambda *_: pytest.fail("measured"))
    for names in (["triton", "flashinfer"], ["flashinfer"]):
        usable(*names)
        assert chosen("auto") == (IMPLEMENTATIONS[AttentionName(names[0])], {})
    usable()
    assert chosen("auto")[0] is IMPLEMENTATIONS[AttentionName.sdpa]


@pytest.mark.parametrize("context", [0, 40, 128])
def test_what_is_timed_attends_to_that_context_in_every_layer(context, monkeypatch):
    memory, _, _, query = filled(16, torch.device("cpu"))
    one = IMPLEMENTATIONS[AttentionName.sdpa]
    calls, layers = attention.layers_of(one, memory, 4, context, 128)
    results = calls()
    assert layers == len(memory.layers) == len(results)
    table = torch.arange(32).view(4, 8) + memory.first_block
    lengths = torch.full((4,), max(1, context))
    expected = attend(one.function, memory, table, lengths, torch.ones_like(query), 128)
    torch.testing.assert_close(results[1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "default"])
def test_the_fastest_is_one_that_was_measured_and_generates(mode):
    device = torch.device("cuda")
    model = tiny_model("qwen3", device)
    state = torch.cuda.get_rng_state()
    engine = DecodeEngine(model, max_batch_size=4, attention="fastest", compile=mode, buckets=[4])
    assert torch.equal(state, torch.cuda.get_rng_state()), "measuring draws no random numbers"
    times = engine.stats.attention_us
    assert {"sdpa", "triton"} <= set(times) and all(0 < us < 1e5 for us in times.values())
    assert engine.attention is IMPLEMENTATIONS[AttentionName(min(times, key=times.get))]
    prompts = prompts_of(5, 20, 33)
    for prompt, done in zip(prompts, engine.generate(prompts, max_new_tokens=30), strict=True):
        assert done.tokens == reference(model, prompt, 30)
    assert engine.stats.total("failures") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_timed_runs_on_the_gpu_in_every_replay(compiled):
    tensor = torch.zeros(3, device="cuda")
    add_one = torch.compile(lambda t: t.add_(1)) if compiled else (lambda t: t.add_(1))

    def add():
        add_one(tensor)

    assert 0 < attention.time_graph(add, 1) < 1e5
    replays = int(tensor[0].item()) - attention._WARMUP
    assert replays % attention._REPLAYS == 0 and replays > 15 * attention._REPLAYS
