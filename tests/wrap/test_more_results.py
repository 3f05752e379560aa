"""What layers do beside giving a result is eager's: what transformers collects inside them, and mappings they fill."""

import copy
from collections import UserDict

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from graphmod import CUDAGraphModule, graph_layers, ungraph
from tests.support.harness import config

SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32},
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager"))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True))


ASKED = {
    "router": (mixtral, {}),
    "router and hidden": (mixtral, {"output_hidden_states": True}),
    "hidden": (llama, {"output_hidden_states": True}),
    "hidden of one": (llama, {"output_hidden_states": [1]}),
    "attention": (llama, {"output_attentions": True}),
}


def trained(make, asked, how, device):
    """All that the steps gave, and the wrappers."""
    torch.manual_seed(0)
    model = make().to(device)
    if device.type == "cuda" and make is mixtral:
        model.set_experts_implementation("batched_mm")  # grouped products in fp32 read on the host
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens):
        out = model(input_ids=tokens, labels=tokens, use_cache=False, **asked)
        found = [*(out.hidden_states or ()), *(out.attentions or ()), *(getattr(out, "router_logits", None) or ())]
        found = [one for one in found if one is not None]
        loss = out.loss + sum(one.square().mean() for one in found[:-1])  # the last is in no loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), [one.detach() for one in found]

    run, wrapped = step, []
    if how in ("layers", "body"):
        wrapped = graph_layers(model, config(body=how == "body"))
    if how == "step":
        run = CUDAGraphModule(step, config())
        wrapped = [run]
    given = [torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(i)).to(device) for i in range(7)]
    seen = [torch.stack([loss, *(one.sum() for one in found)]).tolist() for loss, found in map(run, given)]
    replays = [one.stats.replays for one in wrapped]
    assert model(input_ids=given[0]).logits.isfinite().all()  # nothing is asked for
    if how in ("layers", "body"):
        ungraph(model)
    after = model(input_ids=given[0], **asked)
    return seen, [*model.parameters(), after.logits], replays


@pytest.mark.parametrize("how", ["layers", "step"])
@pytest.mark.parametrize("asked", ASKED)
def test_it_is_captured_and_the_same(asked, how, device):
    expected, weights, _ = trained(*ASKED[asked], "eager", device)
    seen, found, replays = trained(*ASKED[asked], how, device)
    assert seen == expected
    assert all(map(torch.equal, found, weights))
    assert min(replays) > 0


def bert_in_checkpoints():
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    model = BertForMaskedLM(BertConfig(**sizes))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def test_layers_collect_in_a_body_that_collects_and_runs_eagerly(device):
    """The body is refused, since its checkpoints draw; what its layers collect goes to the collector of its own."""
    asked = {"output_hidden_states": True}
    expected, weights, _ = trained(bert_in_checkpoints, asked, "eager", device)
    seen, found, (of_body, *of_layers) = trained(bert_in_checkpoints, asked, "body", device)
    assert seen == expected
    assert all(map(torch.equal, found, weights))
    assert of_body == 0 < min(of_layers)


def test_what_was_collected_before_an_error_is_not_handed_on_later(device):
    model = llama().to(device)
    graph_layers(model, config())
    tokens = torch.arange(4, 12, device=device)[None]
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            model(input_ids=tokens, use_cache=False, output_attentions=True)
    handle.remove()
    for _ in range(5):
        assert len(model(input_ids=tokens, use_cache=False, output_attentions=True).attentions) == 2


class Shares(nn.Module):
    """Of a mapping that layers share, one reads and changes an item, and takes away another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, shared):
        x = self.linear(x) + sum(value.sum() for value in shared.values())
        shared["last"] = x
        shared.pop("gone", None)
        if "sum" in shared:
            shared["gone"] = x.detach() * 2
        shared["sum"] = shared.get("sum", 0) + x
        return torch.tanh(x)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Shares() for _ in range(3))

    def forward(self, x):
        shared, keys = UserDict(), []
        for layer in self.layers:
            x = layer(x, shared=shared)
            keys.append(list(shared))
        return x + shared["sum"] + shared["last"], keys


def test_a_mapping_is_filled_as_by_the_layer_itself(device):
    torch.manual_seed(0)
    plain = Stack().to(device)
    graphed = copy.deepcopy(plain)
    wrapped = graph_layers(graphed, config())
    for index in range(7):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(index)).to(device)
        expected, found = (model(x.clone().requires_grad_()) for model in (plain, graphed))
        assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
        for model, (out, _) in ((plain, expected), (graphed, found)):
            model.zero_grad()
            out.square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), graphed.parameters(), strict=True))
    assert min(one.stats.replays for one in wrapped) > 0


SHARING = {
    **SIZES,
    **{"vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "head_dim": 8},
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8, "pad_token_id": 0},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
MORE = {
    "gemma4_text": {"global_head_dim": 8},
    "gemma3n_text": {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
}


@pytest.mark.parametrize("kind", MORE)
def test_layers_that_share_keys_and_values_are_captured(kind, device):
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHARING, **MORE[kind]))
    runs = []
    for how in ("eager", "layers"):
        model = copy.deepcopy(built).to(device).train()
        wrapped = graph_layers(model, config()) if how == "layers" else []
        losses = []
        for index in range(6):
            tokens = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(index)).to(device)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            losses.append(loss.item())
        runs.append((losses, [p.grad for p in model.parameters()], wrapped))
    assert runs[0][0] == runs[1][0]
    for one, other in zip(runs[0][1], runs[1][1], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert min(one.stats.replays for one in runs[1][2]) > 0, runs[1][2][0].last_failure


def test_a_layer_that_a_backward_runs_again_collects_for_itself(device):
    grads = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = llama().to(device)
        wrapped = graph_layers(model, config()) if graphed else []
        for index in range(8):
            tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(index)).to(device)
            out = model(input_ids=tokens, labels=tokens, use_cache=False, output_hidden_states=True)
            out.loss.backward(retain_graph=index == 6)
            if index == 6:  # the graph of a replay is run once
                out.loss.backward()
            grads += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
    assert all(one.stats.replays for one in wrapped)
    half = len(grads) // 2
    assert all(map(torch.equal, grads[:half], grads[half:]))
