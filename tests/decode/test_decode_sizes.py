"""Attentions over caches of the size real models have, in and out of a graph, against SDPA in float32."""

from types import SimpleNamespace

import pytest
import torch

from graphmod import CUDAGraphModule
from graphmod.decode.attention import IMPLEMENTATIONS, paged_sdpa
from graphmod.decode.cache import CacheView, PagedCache
from graphmod.decode.types import AttentionName
from tests.support.decode_models import uniform
from tests.support.harness import config

LAYERS = 2


def cache(rows, heads, tokens, block_size, device):
    """A bf16 cache of random numbers, and a scattered block table for `tokens` tokens a row."""
    width = tokens // block_size
    memory = PagedCache(uniform(heads, 8, 128, LAYERS), rows * width, block_size, rows, torch.bfloat16, device)
    torch.manual_seed(0)
    for tensor in (*memory.keys, *memory.values):
        tensor[memory.first_block :].normal_()
    order = torch.randperm(rows * width, device=device) + memory.first_block
    return memory, order.view(rows, width)


def attend(function, memory, table, context, query, visited):
    view = CacheView(memory, table.new_zeros(len(table)), table, context, visited)
    layers = [SimpleNamespace(layer_idx=index) for index in range(LAYERS)]
    return torch.stack([function(one, query, None, None, None, None, cache_view=view)[0] for one in layers])


def expected(memory, table, context, query):
    """Row by row: the float32 copies of one are small."""
    found = []
    for row in range(len(table)):
        tokens = table.shape[1] * memory.block_size
        wide = PagedCache.__new__(PagedCache)
        held = [[one[table[row]].float() for one in both] for both in (memory.keys, memory.values)]
        wide.__dict__.update(memory.__dict__, keys=held[0], values=held[1])
        blocks = torch.arange(table.shape[1], device=table.device).unsqueeze(0)
        found.append(attend(paged_sdpa, wide, blocks, context[row : row + 1], query[row : row + 1].float(), tokens))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", [AttentionName.sdpa, AttentionName.triton])
@pytest.mark.parametrize(("rows", "heads", "tokens"), [(1, 32, 512), (32, 16, 2048), (32, 32, 2048), (128, 32, 2048)])
def test_an_attention_agrees_with_the_reference(name, rows, heads, tokens, device):
    if device.type == "cpu":
        rows, tokens = min(rows, 3), min(tokens, 512)
    found = IMPLEMENTATIONS[name]
    memory, table = cache(rows, heads, tokens, 64, device)
    reason = found.unavailable(memory) or found.prepare(memory)
    if reason is not None:
        pytest.skip(reason)
    visited = None if found.stops_at_context else tokens
    query = torch.randn(rows, heads, 1, 128, device=device, dtype=torch.bfloat16)
    context = torch.randint(1, tokens + 1, (rows,), device=device)
    out = torch.empty(LAYERS, rows, 1, heads, 128, device=device, dtype=torch.bfloat16)
    graphed = CUDAGraphModule(
        lambda: out.copy_(attend(found.function, memory, table, context, query, visited)) is None, config()
    )
    with torch.inference_mode():
        for lengths in (tokens, None, 1, None, tokens, None):
            context.copy_(torch.randint(1, tokens + 1, (rows,)) if lengths is None else torch.tensor(lengths))
            query.normal_()
            wanted = expected(memory, table, context, query)
            apart = attend(found.function, memory, table, context, query, visited)
            torch.testing.assert_close(apart.float(), wanted, rtol=2e-2, atol=2e-2)
            graphed()
            assert torch.equal(out, apart), "the same kernels, so the same bits"
    assert graphed.stats.replays >= 3, graphed.last_failure
