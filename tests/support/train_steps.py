"""Steps of a small language model through `TrainStep`, in every scope."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod.train.attention import use_static_causal_attention
from graphmod.train.step import TrainStep
from tests.support.harness import config

SCOPES = ["per_layer", "per_layer, eager optimizer", "full_iteration"]
scopes = pytest.mark.parametrize("scope", SCOPES)


def language_model(device, layers=2):
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=0.1))
    return use_static_causal_attention(model).to(device).train()


def build(device, layers=2):
    model = language_model(device, layers)
    rate = torch.tensor(0.01, device=device)
    capturable = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=capturable)
    return {"model": model, "optimizer": optimizer, "run": None}


def graphs(scope, **settings):
    def graph(side):
        kind = scope.partition(",")[0]
        made = config(scope=kind, optimizer="eager" not in scope)
        side.run = TrainStep(side.model, side.optimizer, config=made, **settings)
        side.graphs = [side.run]

    return graph


def stepper(settings, *, rows=lambda i: 2, micro=lambda i: 1, between=None):
    def step(side, i):
        if side.run is None:
            side.run = TrainStep(side.model, side.optimizer, config=config(scope="none"), **settings)
        batch = side.tokens(i, micro(i), rows(i), 7)
        loss = side.run(batch)
        side.losses = [*getattr(side, "losses", []), loss]
        side.note(loss=loss, norm=side.run.grad_norm, rate=side.run.learning_rate, losses=side.losses)
        if between is not None:
            between(side, i)

    return step


def replays(scope, micro=1, loss=1):
    layers = 2 if "eager" in scope else 5 + loss  # and embedding, final norm, head
    beside = 0 if "eager" in scope else micro + 1  # rotary frequencies, which have no backward, and the update
    return 1 if scope == "full_iteration" else 2 * layers * micro + beside
