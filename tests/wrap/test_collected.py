"""What transformers collects from inside layers (router logits, attention weights, hidden states) is eager's."""

import pytest
import torch
from harness import config
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from graphmod import CUDAGraphModule, graph_layers, ungraph

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
    if how == "layers":
        wrapped = graph_layers(model, config())
    if how == "step":
        run = CUDAGraphModule(step, config())
        wrapped = [run]
    given = [torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(i)).to(device) for i in range(7)]
    seen = [torch.stack([loss, *(one.sum() for one in found)]).tolist() for loss, found in map(run, given)]
    replays = [one.stats.replays for one in wrapped]
    assert model(input_ids=given[0]).logits.isfinite().all()  # nothing is asked for
    if how == "layers":
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
