"""Experts shared out over ranks: the numbers of the whole model, with and without room for all tokens."""

import json

import pytest
import torch
from torch import distributed
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    Qwen3MoeConfig,
)

from graphmod import CUDAGraphModule
from graphmod.errors import ConfigError
from graphmod.train.attention import use_static_causal_attention
from graphmod.train.experts import split_experts
from graphmod.train.optim import build_optimizer
from graphmod.train.parallel import whole
from graphmod.train.ranks import ALONE, joined
from graphmod.train.settings import DeviceName, OptimConfig, OptimizerName, TrainGraphConfig
from graphmod.train.step import TrainStep, next_token_loss
from tests.support.ranks import in_group, on_ranks
from tests.train.test_run_on_ranks import run
from tests.train.test_split_models import assert_like, with_text

SIZES = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "num_experts_per_tok": 2},
}
HYBRID = {"layers_block_type": ["attention", "moe"], "moe_shared_expert_intermediate_size": 8}
KINDS = {  # two with a gate; one with a gate and biases, transposed; one without a gate
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=16, attention_dropout=0.1),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=8),
    "gpt_oss": lambda: GptOssConfig(**SIZES, num_local_experts=8, layer_types=["full_attention"] * 2),
    "nemotron_h": lambda: NemotronHConfig(**SIZES, **HYBRID, n_routed_experts=8, n_group=1, topk_group=1),
}
STEPS, ALIKE = 9, (5, 8)  # steps, and those in which all tokens are alike, and go to the same experts
SCOPES, WHOLE_STEP = ("none", "per_layer", "full_iteration"), ("none", "full_iteration")
ROOMY, TIGHT = 2.0, 1.5


def model_of(kind):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(KINDS[kind]()).eval()


def batch_of(step, rank):
    """(2, 2, 13): two microbatches."""
    if step in ALIKE:
        return torch.full((2, 2, 13), 8)
    return torch.randint(0, 32, (2, 2, 13), generator=torch.Generator().manual_seed(100 * step + rank))


def by_name(model, values):
    return {name: whole(one.detach()) for (name, _), one in zip(model.named_parameters(), values, strict=True)}


def trained(rank, scope, factor=None, dropout=False, **settings):
    """A run on all ranks; or, without a capacity, on this one alone with the batches of both."""
    model, group = model_of("qwen3_moe").train(dropout), None
    if factor is None:
        model.set_experts_implementation("eager")
    else:
        use_static_causal_attention(model)
        group = distributed.group.WORLD
        split_experts(model, group, capacity_factor=factor)
    optimizer = build_optimizer(model, OptimConfig(name=OptimizerName.adamw), torch.device("cpu"))
    settings = {"max_grad_norm": 0.5, "nonfinite": "skip", "ema_decay": 0.9, **settings}
    step = TrainStep(model, optimizer, config=TrainGraphConfig(scope=scope), process_group=group, **settings)
    ranks = [rank] if group else range(2)
    losses, norms = [], []
    for index in range(STEPS):
        losses.append(float(step(torch.cat([batch_of(index, one) for one in ranks]))))
        norms.append(float(step.grad_norm))
    average = dict(zip(map(id, step.iteration.trained), step.iteration.ema, strict=True))
    found = {
        **{"losses": losses, "norms": norms, "evaluated": float(step.evaluate(batch_of(ALIKE[0], rank)))},
        **{"weights": by_name(model, model.parameters())},
        **{"averages": by_name(model, [average[id(one)] for one in model.parameters()])},
        **{"counters": [step.state_dict()[name].tolist() for name in ("position", "first_bad", "skipped")]},
        **{"scale": None if step.loss_scale is None else [float(step.loss_scale), int(step.iteration.growth)]},
    }
    counted = {"reruns": step.reruns, "replays": step.stats.replays, "failures": step.stats.failures}
    step.reset()
    return found, counted


def gradients(rank, kind, split):
    """Of a forward and backward without a capacity."""
    model = model_of(kind)
    if split:
        split_experts(model)
        loss = next_token_loss(model, batch_of(0, rank)[0])
    else:
        model.set_experts_implementation("eager")
        loss = next_token_loss(model, torch.cat([batch_of(0, one)[0] for one in range(2)]))
    loss.backward()
    found = by_name(model, [one.grad for one in model.parameters()])
    for name, value in found.items() if split else ():
        if ".experts." not in name:  # which DistributedDataParallel does
            distributed.all_reduce(value)
            found[name] = value / 2
    return found


def what_is_refused(rank):
    """What errors say of a step with another group, or an optimizer that cannot make it, and of experts split twice."""
    model, world = split_experts(model_of("qwen3_moe")), distributed.group.WORLD
    split = build_optimizer(model, OptimConfig(), torch.device("cpu"))
    made = {
        "no group": lambda: TrainStep(model, split),
        "another group": lambda: TrainStep(model, split, process_group=distributed.new_group([0, 1])),
        "one list": lambda: TrainStep(model, torch.optim.AdamW(model.parameters(), fused=True), process_group=world),
        "not fused": lambda: TrainStep(model, torch.optim.AdamW(model.parameters()), process_group=world),
        "twice": lambda: split_experts(model),
    }
    said = {}
    for name, make in made.items():
        with pytest.raises(ValueError) as caught:
            make()
        said[name] = str(caught.value)
    own = CUDAGraphModule(lambda tokens: next_token_loss(model, tokens).backward(), name="own step")
    for index in range(4):
        own(batch_of(index, rank)[0])
    return said | {"own step": own.last_failure}


MIXED = {"autocast_dtype": torch.bfloat16}
SCALED = {"scale_loss": True, "autocast_dtype": torch.float16, "nonfinite": "ignore"}


RUN = ["model=qwen3_moe_tiny", "train.ema_decay=0.9", "train.checkpoint_every=4"]
SHARED = ["parallel=experts", "parallel.capacity_factor=1.3"]
HALF = "checkpoints/step_00000004"


def runs(ranks, folder):
    return {
        "run": run(ranks, folder, "experts", *RUN, *SHARED),
        "run, resumed": run(ranks, folder, "resumed", *RUN, *SHARED, f"train.resume={folder}/experts/{HALF}"),
        "run, from one": run(ranks, folder, "from_one", *RUN, *SHARED, f"train.resume={folder}/alone/{HALF}"),
    }


def program(rank, folder):
    """All that the tests below look at; in one group, because processes take seconds to start."""
    with joined(DeviceName.cpu) as ranks:
        return steps(rank) | runs(ranks, folder)


def steps(rank):
    return {
        **{("roomy", scope): trained(rank, scope, ROOMY) for scope in WHOLE_STEP},
        **{("tight", scope): trained(rank, scope, TIGHT, dropout=True) for scope in SCOPES},
        "tight": trained(rank, "none", TIGHT),
        **{("scaled", scope): trained(rank, scope, TIGHT, **SCALED) for scope in WHOLE_STEP},
        **{("mixed", scope): trained(rank, scope, TIGHT, **MIXED) for scope in WHOLE_STEP},
        **{kind: gradients(rank, kind, split=True) for kind in KINDS},
        "refused": what_is_refused(rank),
    }


def on_four(rank):
    return {scope: trained(rank, scope, 1.7, dropout=True) for scope in SCOPES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_text(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(folder):
    return run(ALONE, folder, "alone", *RUN, "train.grad_accumulation=2")


@pytest.fixture(scope="module")
def found(folder, alone):
    return on_ranks(program, 2, folder)


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


CASES = [("tight", "per_layer"), *((kind, "full_iteration") for kind in ("roomy", "tight", "scaled", "mixed"))]


@pytest.mark.parametrize(("kind", "scope"), CASES)
def test_graphs_have_the_numbers_of_eager_steps(found, kind, scope):
    for one in found:
        assert_same(one[kind, scope][0], found[0][kind, "none"][0] | {"evaluated": one[kind, "none"][0]["evaluated"]})
        counted = one[kind, scope][1]
        assert counted["replays"] > 0 and counted["failures"] == 0
        assert counted["reruns"] == one[kind, "none"][1]["reruns"]


@pytest.mark.parametrize("kind", ["tight", "scaled", "mixed"])
def test_steps_without_room_run_again_and_nothing_counts_them_twice(found, kind):
    numbers, counted = found[0][kind, "full_iteration"]
    assert 0 < counted["reruns"] <= len(ALIKE) + 1  # and the evaluation
    position, _, skipped = numbers["counters"]
    assert position == [STEPS] and skipped == [0]
    assert found[0]["roomy", "full_iteration"][1]["reruns"] == 0


@pytest.fixture(scope="module")
def whole_model():
    return trained(0, "none")[0]


@pytest.mark.parametrize("key", [("roomy", "none"), "tight"])
def test_the_numbers_are_those_of_the_whole_model_with_all_batches(found, whole_model, key):
    """In fp32, where only sums have another order."""
    alone, split = whole_model, found[0][key][0]
    for name in ("losses", "norms"):
        torch.testing.assert_close(torch.tensor(split[name]), torch.tensor(alone[name]), rtol=1e-5, atol=1e-6)
    for name in ("weights", "averages"):
        torch.testing.assert_close(split[name], alone[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_whole_model(found, kind):
    expected = gradients(0, kind, split=False)
    for one in found:
        torch.testing.assert_close(one[kind], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no group", "process_group=torch.distributed.group.WORLD"),
        ("another group", "give split_experts and TrainStep the same one"),
        ("one list", "make a group of each kind"),
        ("not fused", "split experts need an optimizer that can skip an update"),
        ("twice", "split or sharded over ranks already"),
        ("own step", "which the host reads; train them by TrainStep"),
    ],
)
def test_what_cannot_be_trained_is_refused(found, what, said):
    assert said in found[0]["refused"][what]


def test_a_run_has_the_numbers_of_one_process_and_of_one_that_is_resumed(found, alone, folder):
    first, resumed = found[0]["run"], found[0]["run, resumed"]
    assert all(resumed[name] == first[name] for name in ("losses", "evaluated", "averaged"))
    for one in (found[0]["run"], found[0]["run, from one"]):
        assert_like(one, alone)
    result = json.loads((folder / "experts" / "result.json").read_text())
    assert result["graph"]["replays"] > 0 and result["graph"]["failures"] == 0
    assert 0 < result["rerun_steps"] < 16  # and batches of evaluations
    log = (folder / "experts" / "train.log").read_text()
    assert log.count("capacity_factor=1.3 has places for") == 1 and "ran again without a graph, for want" in log


def test_its_checkpoint_is_one_of_a_whole_model(found, alone, folder):
    again = run(ALONE, folder, "whole", *RUN, "train.grad_accumulation=2", f"train.resume={folder}/experts/{HALF}")
    assert_like(again, alone)
    assert again["averaged"] == pytest.approx(alone["averaged"], rel=1e-5)


@pytest.mark.slow
def test_four_ranks_have_the_numbers_of_eager_steps():
    for one in on_ranks(in_group(on_four), 4):
        for scope in SCOPES[1:]:
            assert_same(one[scope][0], one["none"][0])
            assert one[scope][1]["replays"] > 0 and one[scope][1]["reruns"] == one["none"][1]["reruns"] > 0


class OfThree:
    """Of the group only its size is asked before a model is split."""

    def size(self):
        return 3


@pytest.mark.parametrize(
    ("make", "factor", "said"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), 2.0, "LlamaForCausalLM has no experts to share out"),
        (lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)), 2.0, "4 experts .* over 3 ranks"),
        (lambda: model_of("mixtral"), 0.0, "capacity_factor must be above 0 and finite, got 0.0"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_anything_of_it_is(make, factor, said, monkeypatch):
    monkeypatch.setattr(distributed, "get_world_size", lambda group: group.size())
    model = make()
    with pytest.raises(ConfigError, match=said):
        split_experts(model, OfThree(), capacity_factor=factor)
    assert not hasattr(model.model.layers[0].mlp, "over_ranks")
