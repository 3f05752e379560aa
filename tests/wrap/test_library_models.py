"""Models that a library wraps (PEFT, Lightning) are trained without a key-value cache, also past their hooks."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod import graph_layers, ungraph
from tests.support.harness import config


class Adapted(nn.Module):
    """Calls `forward` of what it wraps, as PEFT does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **kwargs):
        return self.model.forward(**kwargs)


class Held(Adapted):
    def forward(self, **kwargs):
        return self.model(**kwargs)


@pytest.mark.parametrize("kind", [Adapted, Held, None])
@pytest.mark.parametrize("training", [True, False])
def test_its_layers_are_captured(kind, training, device):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    inner = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to(device).train(training)
    model = inner if kind is None else kind(inner).train(training)
    tokens = torch.randint(3, 60, (2, 12), device=device)
    expected = model(input_ids=tokens, labels=tokens).loss
    wrapped = graph_layers(model, config())
    for _ in range(6):
        with torch.set_grad_enabled(training):
            loss = model(input_ids=tokens, labels=tokens).loss
        if training:
            loss.backward()
        assert torch.equal(loss, expected)
    captured = training or kind is not Adapted  # without gradients only where the labels can be seen
    assert all((one.stats.replays > 0) is captured for one in wrapped), wrapped[0].last_failure
    assert sum(one.stats for one in wrapped).replays == sum(one.stats.replays for one in wrapped)
    ungraph(model)
    assert model(input_ids=tokens, use_cache=None).past_key_values is not None
