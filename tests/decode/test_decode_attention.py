"""Every attention over the paged cache gives what plain attention over the same keys gives."""

import itertools
import math

import pytest
import torch

from graphmod.config import CompileMode
from graphmod.decode import DecodeEngine
from graphmod.decode.attention import IMPLEMENTATIONS, OWN, choose, paged_sdpa
from graphmod.decode.blocks import BlockAllocator
from graphmod.decode.cache import CacheView, PagedCache, slot_mapping
from graphmod.decode.step import context_sizes
from graphmod.decode.types import AttentionName
from graphmod.trace.dispatch import is_recording
from graphmod.trace.operations import address
from graphmod.trace.recorder import Follower
from tests.support.decode_models import ARCHITECTURES, prompts_of, reference, tiny_model, uniform

HEADS, KV_HEADS, WIDTH = 8, 2, 32


LAYERS = uniform(HEADS, KV_HEADS, WIDTH, 2)


class Layer:
    layer_idx = 1


def filled(block_size, device, dtype=torch.float32):
    """A cache of random numbers, and rows of 5, 37, 64 and 100 tokens whose blocks lie scattered in it."""
    torch.manual_seed(0)
    memory = PagedCache(LAYERS, 40 * 64 // block_size, block_size, 4, dtype, device)
    for tensor in (*memory.keys, *memory.values):
        tensor.normal_()
    context = [5, 37, 64, 100]
    allocator = BlockAllocator(memory.blocks - memory.first_block, block_size, memory.first_block)
    order = torch.randperm(allocator.count).add(memory.first_block).tolist()
    width = -(-128 // block_size)
    table = torch.tensor([[order.pop() for _ in range(width)] for _ in context], device=device)
    query = torch.randn(4, HEADS, 1, WIDTH, device=device, dtype=dtype)
    return memory, table, torch.tensor(context, device=device), query


def plain(memory, table, context, query):
    """Attention of each row alone, in float64."""
    rows = []
    for row, length in enumerate(context.tolist()):
        at = [table[row, i // memory.block_size] * memory.block_size + i % memory.block_size for i in range(length)]
        index = torch.stack(at)
        keys, values = (
            held[1].view(-1, KV_HEADS, WIDTH)[index].double().repeat_interleave(HEADS // KV_HEADS, 1)
            for held in (memory.keys, memory.values)
        )
        weights = (torch.einsum("hd,thd->ht", query[row, :, 0].double(), keys) / math.sqrt(WIDTH)).softmax(-1)
        rows.append(torch.einsum("ht,thd->hd", weights, values))
    return torch.stack(rows).unsqueeze(1)


def attend(function, memory, table, context, query, visited):
    with torch.inference_mode():
        view = CacheView(memory, table.new_zeros(4), table, context, visited)
        return function(Layer, query, None, None, None, 1 / math.sqrt(WIDTH), cache_view=view)[0]


@pytest.mark.parametrize("usable", [("triton", "sdpa"), ("sdpa",), ()])
def test_auto_takes_the_first_that_can_be_used(monkeypatch, usable):
    memory, *_ = filled(16, torch.device("cpu"))
    for name, one in IMPLEMENTATIONS.items():
        reason = None if name.value in usable else "it is not tested here"
        way = one._replace(unavailable=lambda _, reason=reason: reason, prepare=lambda _: None)
        monkeypatch.setitem(IMPLEMENTATIONS, name, way)
    expected = IMPLEMENTATIONS[AttentionName(usable[0])] if usable else OWN
    assert choose(AttentionName.auto, memory) is expected


@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_the_reference_attends_to_the_context_and_nothing_else(block_size, device):
    memory, table, context, query = filled(block_size, device)
    got = attend(paged_sdpa, memory, table, context, query, 128)
    torch.testing.assert_close(got.double(), plain(memory, table, context, query), rtol=0, atol=1e-5)


def test_a_row_without_context_is_finite_or_ignored_but_never_spreads(device):
    memory, table, context, query = filled(16, device)
    expected = attend(paged_sdpa, memory, table, context, query, 128)
    context[1] = 0
    got = attend(paged_sdpa, memory, table, context, query, 128)
    for row in (0, 2, 3):
        assert torch.equal(got[row], expected[row])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_the_kernel_agrees_with_it(dtype, block_size):
    memory, table, context, query = filled(block_size, torch.device("cuda"), dtype)
    found = IMPLEMENTATIONS[AttentionName.triton]
    reason = found.unavailable(memory) or found.prepare(memory)
    if reason is not None:
        pytest.skip(reason)
    got = attend(found.function, memory, table, context, query, None)
    error = 2e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.double(), plain(memory, table, context, query), rtol=0, atol=error)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("mode", [CompileMode.none, CompileMode.default])
def test_kernels_in_a_graph_decode_the_tokens_of_generate(architecture, mode):
    model = tiny_model(architecture, torch.device("cuda"))
    if (model.config.get_text_config().hidden_size // 4) % 16 and architecture != "qwen3":
        pytest.skip("heads of this model are smaller than the kernels take")
    engine = DecodeEngine(model, max_batch_size=4, block_size=16, attention="triton", compile=mode)
    prompts = prompts_of(5, 20, 33)
    for prompt, done in zip(prompts, engine.generate(prompts, max_new_tokens=30), strict=True):
        assert done.tokens == reference(model, prompt, 30)
    assert engine.stats.total("failures") == 0 and engine.stats.total("captures") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_steps_see_weights_that_change_and_notice_weights_that_move(architecture):
    device = torch.device("cuda")
    model = tiny_model(architecture, device)
    engine = DecodeEngine(model, max_batch_size=2, attention="sdpa", compile="default")
    (prompt,) = prompts_of(9)
    assert engine.generate([prompt], max_new_tokens=20)[0].tokens == reference(model, prompt, 20)
    model.load_state_dict(tiny_model(architecture, device, seed=1).state_dict())
    assert engine.generate([prompt], max_new_tokens=20)[0].tokens == reference(model, prompt, 20)
    assert engine.stats.total("recaptures") == 0
    model.load_state_dict(tiny_model(architecture, device, seed=2).state_dict(), assign=True)
    assert engine.generate([prompt], max_new_tokens=30)[0].tokens == reference(model, prompt, 30)
    assert engine.stats.total("recaptures") == 1


def test_slots_follow_the_block_table_and_padding_has_spare_ones(device):
    table = torch.tensor([[7, 3], [5, 9], [4, 2]], device=device)
    position = torch.tensor([0, 6, 3], device=device)
    active = torch.tensor([True, True, False], device=device)
    assert slot_mapping(position, table, active, torch.tensor([1, 2, 3], device=device), 4).tolist() == [28, 38, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_rows_without_context_and_what_lies_behind_a_context_do_not_reach_others(rows):
    memory, table, context, query = filled(16, torch.device("cuda"))
    found = IMPLEMENTATIONS[AttentionName.triton]
    if found.unavailable(memory) is not None:
        pytest.skip(found.unavailable(memory))
    memory.rows = 4 * rows
    found.prepare(memory)
    table, context, query = (one.repeat(16, *[1] * (one.dim() - 1))[: 4 * rows] for one in (table, context, query))
    context[1] = 0
    with torch.inference_mode():
        view = CacheView(memory, table.new_zeros(len(table)), table, context, None)
        expected = found.function(Layer, query, None, None, None, scaling=0.2, cache_view=view)[0]
        assert not expected[1].any() and torch.isfinite(expected).all()
        last = table[0, 0] * 16
        for held in (*memory.keys, *memory.values):
            held.flatten(0, 1)[last + 5 : last + 16] = float("nan")  # behind the 5 tokens of row 0
        got = found.function(Layer, query, None, None, None, scaling=0.2, cache_view=view)[0]
    assert torch.equal(got, expected)


def test_padding_writes_to_no_block_of_a_sequence(device):
    model = tiny_model("llama", device)
    engine = DecodeEngine(model, max_batch_size=4, buckets=[2, 4], max_seq_len=64, block_size=8)
    engine.warm_up(progress=False)
    first = engine.memory.first_block
    assert not any(tensor[first:].any() or tensor[0].any() for tensor in (*engine.memory.keys, *engine.memory.values))


@pytest.mark.parametrize(("block_size", "most"), [(8, 128), (64, 2048), (2048, 2048), (48, 1008), (300, 1200)])
def test_visited_sizes_double_and_fit_blocks(block_size, most):
    sizes = context_sizes(block_size, most, False)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    assert all(size % block_size == 0 or size < block_size for size in sizes)
    assert all(b <= 2 * a + block_size for a, b in itertools.pairwise(sizes))
    assert context_sizes(block_size, most, True) == [None]


def test_compiled_code_is_used_in_a_capture_and_what_it_reads_is_known(device):
    compiled, runs = [], []

    def backend(graph, inputs):
        compiled.append(graph)

        def run(*args):
            runs.append(is_recording())
            return graph(*args)

        return run

    weight = torch.randn(4, 4, device=device)
    product = torch.compile(lambda x: x @ weight, backend=backend, dynamic=False)
    x = torch.randn(2, 4, device=device)
    expected = product(x)
    recorder = Follower([x], gpu=device.index or 0 if device.type == "cuda" else None)
    with recorder:
        got = product(x)
        assert is_recording(), "the recorder is back"
    assert len(compiled) == 1 and runs == [False, True]
    assert torch.equal(got, expected) and address(weight) in recorder.outside
