"""Language models of transformers train to the same bits per layer and as one graph of a whole iteration."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from graphmod import CUDAGraphModule, graph_layers
from graphmod.train.attention import use_static_causal_attention
from graphmod.train.settings import Scope
from graphmod.train.step import TrainStep, next_token_loss
from tests.support.harness import config, play, twins

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, **HEADS, head_dim=8))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32))


MODELS = {"llama": llama, "qwen3": qwen3, "gpt2": gpt2}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
models = pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("llama", "fp32"), *((name, "bf16") for name in MODELS)),
        *(pytest.param(name, "fp32", marks=pytest.mark.slow) for name in ("qwen3", "gpt2")),
    ],
)


def builder(name, dtype=torch.float32):
    def build(device):
        model = use_static_causal_attention(MODELS[name]()).to(device, dtype).train()
        capturable = device.type == "cuda"
        rate = torch.tensor(1e-2, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=capturable)
        return {"model": model, "optimizer": optimizer}

    return build


def loop(side, i):
    """A loop as users write it."""
    for micro in range(2):
        loss = next_token_loss(side.model, side.tokens(i, 2, 9, key=micro)) / 2
        loss.backward()
        side.note(loss=loss)
    side.note(norm=nn.utils.clip_grad_norm_(side.model.parameters(), 1.0))
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad()


@models
def test_layers_of_a_language_model_equal_eager(name, precision, device):
    def graph(side):
        side.graphs = graph_layers(side.model, config())

    build = builder(name, PRECISIONS[precision])
    twins(build, loop, device, graph=graph, replays=2 * 2 * 2)


@models
def test_a_hand_written_iteration_of_a_language_model_equals_eager(name, precision, device):
    def iteration_of(side):
        def iteration(batch):
            total = 0
            for tokens in batch:
                loss = next_token_loss(side.model, tokens) / len(batch)
                loss.backward()
                total = total + loss.detach()
            norm = nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=True)
            return {"loss": total, "norm": norm}

        return iteration

    def graph(side):
        side.run = CUDAGraphModule(iteration_of(side), config(), name="iteration")
        side.graphs = [side.run]

    def step(side, i):
        run = side.run if side.graphed else iteration_of(side)
        return run(side.tokens(i, 2, 2, 9))

    twins(builder(name, PRECISIONS[precision]), step, device, graph=graph, replays=1)


@pytest.mark.parametrize("scope", ["per_layer", "full_iteration"])
@models
def test_a_train_step_of_a_language_model_equals_eager(name, precision, scope, device):
    def make(device):
        return {**builder(name, PRECISIONS[precision])(device), "run": None}

    def graph(side):
        side.run = TrainStep(side.model, side.optimizer, max_grad_norm=1.0, config=config(scope=scope))
        side.graphs = [side.run]

    def step(side, i):
        if side.run is None:
            side.run = TrainStep(side.model, side.optimizer, max_grad_norm=1.0, config=config(scope=Scope.none))
        loss = side.run(side.tokens(i, 2, 2, 9))
        return loss, side.run.grad_norm

    build = builder(name, PRECISIONS[precision])
    parts = edge_parts(build(torch.device("cpu"))["model"])
    edges = sum(any(True for _ in part.parameters()) for part in parts)
    rotary = sum(any(True for _ in part.buffers()) for part in parts)  # it has no backward
    per_layer = 2 * (2 * (2 + edges + 1) + rotary) + 1  # the loss has a graph, and so has the update
    twins(make, step, device, graph=graph, replays=1 if scope == "full_iteration" else per_layer)


def edge_parts(model):
    """What a model has besides its layers: embeddings, final norm, head."""
    inner = model.transformer if hasattr(model, "transformer") else model.model
    return [part for _, part in inner.named_children() if not isinstance(part, nn.ModuleList)] + [model.lm_head]


def test_layers_graphed_under_a_model_in_evaluation_generate_what_eager_generates(device):
    """Generating grows a cache with every token, which no graph can hold: it must stay right, however it runs."""

    def step(side, i):
        side.model.eval()
        side.model.set_attn_implementation("sdpa")
        with torch.no_grad():
            tokens = side.model.generate(side.tokens(i, 1, 5), max_new_tokens=4, do_sample=False, pad_token_id=0)
        side.model.train()
        use_static_causal_attention(side.model)
        loop(side, i)
        return tokens

    def graph(side):
        side.graphs = graph_layers(side.model, config())

    _, history = play(builder("llama"), step, device, graph=graph, steps=9)
    assert history[-1][0] - history[-4][0] >= 3 * 8, "training no longer runs from graphs"
