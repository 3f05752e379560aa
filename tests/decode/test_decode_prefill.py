"""Prefill in graphs: what pieces of prompts attend to, and how many graphs that takes."""

import pytest
import torch

from graphmod.decode import DecodeEngine, prefill
from graphmod.decode.adapters import Adapters
from graphmod.decode.cache import PagedCache
from graphmod.decode.prefill import HELD, Limits, PackedBuffer, Piece, gather_columns
from tests.support.decode_models import prompts_of, reference, tiny_model, uniform

SIZES = [
    (2, 64, 64, 256, 77),
    (3, 24, 40, 300, 300),
    (8, 128, 128, 4096, 130),
    (1, 8, 8, 5000, 3333),
    (2, 256, 16, 9, 0),
]


@pytest.mark.parametrize(("heads", "width", "value_width", "room", "count"), SIZES)
def test_what_lies_in_the_slots_is_brought_together(heads, width, value_width, room, count, device):
    torch.manual_seed(0)
    keys, values = (
        torch.randn(20, 16, heads, one, device=device, dtype=torch.bfloat16) for one in (width, value_width)
    )
    slots = torch.randint(20 * 16, (room,), device=device)
    if device.type == "cuda":
        slots[count:] = 10**12  # nobody looks there
    starts = torch.tensor([0, count // 2, count, count], dtype=torch.int32, device=device)
    found = gather_columns(keys, values, slots, starts)
    for gathered, kept in zip(found, (keys, values), strict=True):
        assert gathered.shape == (room, *kept.shape[2:])
        assert torch.equal(gathered[:count], kept.flatten(0, 1)[slots[:count]])


def test_only_columns_that_are_there_are_written(device):
    cache = PagedCache(uniform(1, 1, 8, 1), 12, 4, 2, torch.float32, device)
    none = Adapters(tiny_model("llama", device), {}, 0, 1)
    buffer = PackedBuffer(cache, Limits(tokens=8, pieces=3, columns=32), True, none)
    pieces = [Piece([5, 6], 3, [2, 3], True), Piece([7], 0, [5], False)]
    packed = buffer.fill(pieces, (4, 32, False, False))
    assert packed.columns[HELD, :6].tolist() == [8, 9, 10, 11, 12, 20] and packed.columns.shape == (3, 32)
    assert packed.starts.tolist() == [[0, 2, 3, 3, 4], [0, 5, 6, 6, 6]], "the padding has tokens, and no columns"
    assert buffer.fill([], (4, 32, False, False)).starts[1].tolist() == [0] * 5


def flash(query, key, value, starts, columns, tokens, room, dropout, causal, debug, scale=None, **window):
    """What flash attention gives, for a CPU: each piece sees its own columns, its last token all of them."""
    assert causal and not window and (tokens, room) == (len(query), len(key))
    row, column = torch.arange(tokens), torch.arange(room)
    piece, of = (torch.searchsorted(begin, at, right=True) for begin, at in ((starts, row), (columns, column)))
    last, whole = starts[piece], columns[piece]  # where the next piece begins
    seen = (piece[:, None] == of) & (column - whole[:, None] <= (row - last)[:, None])
    key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(0, 1) for one in (key, value))
    scores = (query.transpose(0, 1) @ key.transpose(1, 2)) * (query.shape[2] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    value = value.where((column < columns[-1])[None, :, None], 0)
    return ((weights.nan_to_num() @ value).transpose(0, 1),)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    def gather(keys, values, slots, starts):
        there = (torch.arange(len(slots)) < starts[-2])[:, None, None]
        found = (kept.flatten(0, 1).index_select(0, slots) for kept in (keys, values))
        return [one.where(there, float("nan")) for one in found]

    monkeypatch.setattr(prefill, "_is_flash", lambda memory, layer: True)
    monkeypatch.setattr(prefill, "copies_by_length", lambda device: True)
    monkeypatch.setattr(prefill, "gather_columns", gather)
    monkeypatch.setattr(prefill, "flash_attention", flash)


@pytest.mark.parametrize(
    "settings",
    [
        {"prefill_tokens": 256},
        {"prefill_tokens": 16, "block_size": 4},
        {"prefill_tokens": 8, "block_size": 8, "cache_tokens": 128},
        {"prefill_tokens": 200, "graphs": False},
    ],
)
@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_prompts_in_pieces_with_shared_beginnings_get_the_tokens_of_generate(architecture, settings, as_on_a_gpu):
    model = tiny_model(architecture, torch.device("cpu"))
    engine = DecodeEngine(model, max_batch_size=3, keep_prefixes=True, **settings)
    begun = prompts_of(40, seed=7)[0]
    prompts = [begun, *prompts_of(30, 1, 100, 17), *(begun[:30] + one for one in prompts_of(5, 40, 2, seed=3))]
    for _ in range(2):
        done = engine.generate(prompts, max_new_tokens=5)
        assert [one.tokens for one in done] == [reference(model, prompt, 5) for prompt in prompts]
    assert engine.stats.prefix_tokens > 0
    assert {columns for _, columns, *_ in engine.prefill.wrappers} <= {engine.prefill.columns[-1]}
    assert engine.stats.prefill.failures == 0 and settings.get("graphs", True) == (engine.stats.prefill.launches > 0)


def test_keys_of_far_layers_do_not_come_back_for_prefill(as_on_a_gpu):
    engine = DecodeEngine(tiny_model("llama", torch.device("cpu")), max_batch_size=2, offload="layers")
    assert engine.generate(prompts_of(9), max_new_tokens=3)
    assert {columns for _, columns, *_ in engine.prefill.wrappers} == {None}


@pytest.mark.gpu
def test_on_a_gpu_prompts_of_any_kind_run_in_the_graphs_that_were_captured_ahead_of_time():
    model = tiny_model("qwen3", torch.device("cuda"), scale=2.0).bfloat16()
    engine = DecodeEngine(model, max_batch_size=6, block_size=16, prefill_tokens=256)
    engine.warm_up(progress=False)
    captured = engine.stats.prefill
    assert captured.captures == len(engine.prefill.tokens)
    begun = prompts_of(48, seed=7)[0]
    engine.generate([begun + one for one in prompts_of(9)], max_new_tokens=3)  # others share its blocks
    prompts = [*prompts_of(100, 3, 120, 17, 118, 64, 31, 90), *(begun + one for one in prompts_of(5, 40, 70, seed=3))]
    done = engine.generate(prompts, max_new_tokens=6)
    used = engine.stats.prefill
    assert used.captures == captured.captures and used.eager_steps == captured.eager_steps
    assert used.launches > captured.launches and engine.stats.prefix_tokens > 0
    for prompt, one in zip(prompts, done, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + one.tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(one.tokens, device="cuda").unsqueeze(1))[:, 0]
        assert (logits.amax(1) - chosen).max() < 0.25, "bf16 rounds otherwise in another batch"
