"""Traced steps in pieces: those that are alike are compiled once, others are not, and numbers stay."""

import pytest
import torch
from decode_models import ROTARY
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from graphmod import CUDAGraphModule
from graphmod.config import CUDAGraphConfig
from graphmod.decode import DecodeEngine
from graphmod.decode.model_state import decoding
from graphmod.decode.step import compile as compiling
from graphmod.decode.step.pieces import compile_pieces
from graphmod.decode.step.step import next_logits
from graphmod.models.exchange import attention


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """Compiles a function for a fixed shape and counts the graphs that a compiler is given."""

    def __init__(self, function):
        self.sizes = []
        self.run = torch.compile(function, backend=self._backend, dynamic=False, fullgraph=True)

    def _backend(self, graph, inputs):
        def compile(piece, given):
            assert len(given) == sum(node.op == "placeholder" for node in piece.graph.nodes)
            self.sizes.append(len(piece.graph.nodes))
            return piece.forward

        return compile_pieces(graph, inputs, compile)


def attend(x, weight, scale=None):
    y = F.linear(x, weight).view(2, 1, 4, 8)
    return F.scaled_dot_product_attention(y, y, y, scale=scale).reshape(2, 4, 8).reshape(-1, 8)


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
WEIGHTS = [torch.randn(8, 8, generator=torch.Generator().manual_seed(number)) for number in range(5)]


def compare(function, *given):
    """The number of pieces compiled for `function`, which computes and changes what it does uncompiled."""
    counting = Counting(function)
    for call in range(3):
        mine, plain = (tuple(one.clone() + call if one is given[0] else one.clone() for one in given) for _ in range(2))
        with torch.inference_mode():
            found, expected = counting.run(*mine), function(*plain)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for one, other in zip(mine, plain, strict=True):
            assert torch.equal(one, other), "it changes what uncompiled code changes"
    return len(counting.sizes)


def test_layers_that_are_alike_are_compiled_once():
    def layers(x, *weights):
        for weight in weights:
            x = x + attend(x, weight)
        return (x.sum(), x)

    assert compare(layers, X, *WEIGHTS) == 3, "up to the first attention, between two, and after the last"


def test_what_is_changed_in_place_and_what_is_kept_for_later_pass_through_pieces():
    def layers(x, kept, *weights):
        first = x * 2
        for number, weight in enumerate(weights):
            x = x + attend(x, weight) * first
            kept[number].add_(x)
            x = x + kept[number].view(-1).view(8, 8)
        return x, first

    assert compare(layers, X, torch.zeros(5, 8, 8), *WEIGHTS) <= 7, "each writes to another place of one tensor"


@pytest.mark.parametrize("what", ["constant", "scale", "kind", "size", "order", "shared", "strides", "result"])
def test_layers_that_differ_in_anything_are_not_taken_for_one(what):
    def layers(x, *weights):
        kept = []
        for number, weight in enumerate(weights):
            odd = number == 2
            if odd and what == "size":
                weight = torch.cat((weight, weight))[4:12]
            if odd and what == "strides":
                weight = weight.t()
            y = attend(x, weight, scale=0.25 if odd and what == "scale" else None)
            y = F.relu(y) if odd and what == "kind" else F.silu(y)
            y = y * (0.5 if odd and what == "constant" else 0.25)
            y = x - y if odd and what == "order" else y - x
            x = x + (y * y if odd and what == "shared" else y * x)
            if odd and what == "result":
                kept.append(y)
        return (x, *kept)

    assert compare(layers, X, *WEIGHTS) > 3


def test_inputs_that_share_memory_are_no_others():
    def layers(x, whole, part, other, another):
        for one in (other, part, another, other):
            x = x + attend(x, whole)
            one.add_(1)
            x = x + whole.sum() + one.sum()
        return (x,)

    counting = Counting(layers)
    mine, plain = torch.ones(8, 8), torch.ones(8, 8)
    others = [[torch.zeros(4, 8) for _ in range(2)] for _ in range(2)]
    with torch.inference_mode():
        found = counting.run(X, mine, mine[:4], *others[0])
        expected = layers(X, plain, plain[:4], *others[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(counting.sizes) == 4, "the second piece changes what it also reads as a whole"


@pytest.mark.parametrize("count", [1, 2])
def test_few_attentions_are_compiled_as_a_whole(count):
    def layers(x, *weights):
        for weight in weights:
            x = x + attend(x, weight)
        return (x,)

    assert compare(layers, X, *WEIGHTS[:count]) == 1


def test_where_something_else_than_tensors_passes_the_whole_is_compiled():
    def layers(x, *weights):
        parts = torch.split(x, 4)
        for weight in weights:
            x = x + attend(x, weight)
        return (x[:4] + parts[0],)

    assert compare(layers, X, *WEIGHTS) == 3, "a part is a tensor"

    def autocast(x, *weights):
        with torch.autocast("cpu", torch.bfloat16):
            for weight in weights:
                x = x + attend(x, weight)
        return (x,)

    assert compare(autocast, X, *WEIGHTS) == 1


def test_flex_attention_ends_a_piece_with_all_of_its_results():
    def layers(x, *weights):
        mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 8, 8, device="cpu", _compile=False)
        for number, weight in enumerate(weights):
            y = F.linear(x, weight).view(1, 1, 8, 8).expand(1, 2, 8, 8)
            cap = 2.0 if number < 4 else 3.0
            out, more = flex_attention(y, y, y, lambda s, *_: torch.tanh(s / cap), mask, return_lse=True)  # noqa: B023
            x = x + out[0, 0] + more[0, 0, :, None]
        return (x,)

    counting = Counting(layers)
    with torch.inference_mode():
        torch.testing.assert_close(counting.run(X, *WEIGHTS)[0], layers(X, *WEIGHTS)[0])
    assert len(counting.sizes) == 4, "the last has another cap inside"


SLIDING = ["sliding_attention", "full_attention"] * 3
MODELS = {
    "llama": (LlamaConfig(**ROTARY | {"num_hidden_layers": 6}), 3),
    "qwen3": (Qwen3Config(**ROTARY | {"num_hidden_layers": 6}, head_dim=16), 3),
    # The first of each kind makes its mask; else they are alike up to what they are given.
    "gemma3": (Gemma3TextConfig(**ROTARY | {"num_hidden_layers": 6}, layer_types=SLIDING, sliding_window=4), 4),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_models_layers_are_compiled_once(kind):
    config, pieces = MODELS[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = DecodeEngine(model, max_batch_size=2, max_seq_len=64, attention="sdpa")
    rows, visited = engine._parts.state.rows(2), engine._parts.graphs.visited(8)
    counting = Counting(next_logits)

    def logits(function):
        rows.integers.zero_()
        rows.integers[:, :3] = torch.tensor([[5, 3, 1], [9, 6, 1]])
        for one in (*engine.memory.keys, *engine.memory.values):
            one.fill_(0.5)
        with torch.inference_mode(), attention(model, engine.attention.name):
            found = function(model, engine.memory, rows, visited, engine.attention.name is None).clone()
            return found, [one.clone() for one in (*engine.memory.keys, *engine.memory.values)]

    found, expected = (decoding(list(model.modules()), logits, one) for one in (counting.run, next_logits))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(counting.sizes) == pieces


def test_compiled_pieces_are_captured(monkeypatch):
    monkeypatch.setattr(compiling, "_can_launch_early", lambda: False)
    compiling._inductor.cache_clear()
    kept = torch.zeros(8, 8)

    def layers(x, *weights):
        for weight in weights:
            x = x + attend(x, weight)
        kept.add_(x)
        return x

    compiled = compiling.for_decode(layers, tuned=False)

    def step(x):
        with compiling.compiled_code():
            return compiled(x, *WEIGHTS)

    graphed = CUDAGraphModule(step, CUDAGraphConfig(warmup_steps=1))
    try:
        with torch.inference_mode():
            total = torch.zeros(8, 8)
            for call in range(7):
                found, before = graphed(X + call), kept.clone()
                kept.copy_(total)
                expected = layers(X + call, *WEIGHTS)
                total = kept.clone()
                torch.testing.assert_close(found, expected)
                torch.testing.assert_close(before, total)
        assert graphed.stats.replays >= 4, graphed.last_failure
    finally:
        compiling._inductor.cache_clear()
