"""Runs on ranks that hold a part of the model each: sharded, or with split layers (gloo, on the CPU)."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from graphmod.cli.app import parse
from graphmod.errors import ConfigError
from graphmod.train.parallel import is_split, split_layers
from graphmod.train.ranks import ALONE, joined, ranks_of
from graphmod.train.settings import DeviceName
from tests.support.ranks import on_ranks
from tests.support.settings import TINY, composed
from tests.train.test_run_on_ranks import run

SCOPES = ("none", "full_iteration")
MODES = {"fsdp": ["parallel=fsdp"], "tp": ["parallel=tp"]}
UNEVEN = ["data.documents=line", "data.buckets=[8,16]", "train.checkpoint=false"]
# Of all kinds that a step is made of: clipping, averaged weights, microbatches with different numbers of targets.
FULL = [*UNEVEN, "train.grad_accumulation=2", "train.ema_decay=0.9", "optim.max_grad_norm=0.5"]
QWEN = [
    *("model=qwen3_0_6b", "model.layers=2", "model.hidden_size=32", "model.heads=4", "model.kv_heads=2"),
    *("model.head_dim=8", "model.intermediate_size=64", "model.vocab_size=null", "train.checkpoint=false"),
]
MIXED = ["train.checkpoint=false", "train.precision=fp16_mixed", "parallel.reshard_after_forward=false"]
WIDE = ["parallel=fsdp_tp", "parallel.tp=2"]
SIZES = {
    **{"vocab_size": 16, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": None},
}


def llama(**changed):
    return LlamaConfig(**SIZES | changed)


def go(ranks, folder, found, name, *overrides):
    found[name] = run(ranks, folder, name, *overrides)


def program(rank, folder):
    found = {}
    with joined(DeviceName.cpu) as ranks:
        for mode, settings in MODES.items():
            for scope in SCOPES:
                go(ranks, folder, found, f"{mode}_{scope}", *settings, *FULL, f"graph={scope}")
            go(ranks, folder, found, f"{mode}_per_layer", *settings, *FULL, "graph=per_layer")
        go(ranks, folder, found, "qwen", "parallel=tp", *QWEN)
        go(ranks, folder, found, "mixed", "parallel=fsdp", *MIXED)
        for scope in ("none", "per_layer"):
            go(ranks, folder, found, f"mixed_{scope}", "parallel=fsdp", *MIXED, f"graph={scope}")
    return found


def on_a_mesh(rank, folder):
    found = {}
    with joined(DeviceName.cpu) as ranks:
        for scope in SCOPES:
            go(ranks, folder, found, scope, *WIDE, *FULL, f"graph={scope}")
    return found


def with_text(folder):
    """A folder for runs, with the text that they train on."""
    lines = [f"line {n} of a text about nothing in particular{' and more' * (n % 3)}\n" for n in range(200)]
    (folder / "text.txt").write_text("".join(lines))
    return folder


def compiled(rank, folder):
    found = {}
    with joined(DeviceName.cpu) as ranks:
        for mode, settings in MODES.items():
            for scope in SCOPES:
                name = f"compiled_{mode}_{scope}"
                go(ranks, folder, found, name, *settings, *FULL[2:], "graph.compile=default", f"graph={scope}")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_text(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def found(folder):
    return on_ranks(program, 2, folder)


def assert_like(one, other):
    for name in ("losses", "evaluated"):
        torch.testing.assert_close(torch.tensor(one[name]), torch.tensor(other[name]))


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_know_the_same_numbers_and_a_graph_has_those_of_eager_training(found, folder, mode):
    eager = found[0][f"{mode}_none"]
    for one in found:
        for scope in SCOPES:
            assert one[f"{mode}_{scope}"]["losses"] == eager["losses"]
            assert one[f"{mode}_{scope}"]["evaluated"] == eager["evaluated"]
    graph = json.loads((folder / f"{mode}_full_iteration" / "result.json").read_text())["graph"]
    assert graph["replays"] > 0 and graph["failures"] == 0


@pytest.mark.parametrize(("mode", "accumulation"), [("fsdp", 4), ("tp", 2)])
def test_the_numbers_are_those_of_one_process(found, folder, mode, accumulation):
    """Sharded, ranks take the microbatches that would be the next ones; with split layers all take the same."""
    settings = [*FULL, "graph=none", f"train.grad_accumulation={accumulation}"]
    assert_like(found[0][f"{mode}_none"], run(ALONE, folder, f"alone_{mode}", *settings))
    tokens = json.loads((folder / f"{mode}_none" / "result.json").read_text())["tokens_per_step"]
    assert tokens == accumulation * 2 * 16


def test_norms_within_attention_get_the_gradients_of_all_heads(found, folder):
    assert_like(found[0]["qwen"], run(ALONE, folder, "alone_qwen", *QWEN))


def test_layers_are_collected_in_the_dtype_of_autocast(found, folder):
    alone = run(ALONE, folder, "alone_mixed", *MIXED[:2], "train.grad_accumulation=2")
    torch.testing.assert_close(
        torch.tensor(found[0]["mixed"]["losses"]), torch.tensor(alone["losses"]), atol=2e-3, rtol=0
    )
    assert found[0]["mixed"]["losses"] == found[0]["mixed_none"]["losses"]


@pytest.mark.parametrize("name", ["fsdp", "mixed", "tp"])
def test_layers_have_graphs_of_their_own(found, folder, name):
    for one in found:
        assert one[f"{name}_per_layer"]["losses"] == one[f"{name}_none"]["losses"]
    graph = json.loads((folder / f"{name}_per_layer" / "result.json").read_text())["graph"]
    assert graph["replays"] > 10 and not graph["failures"]


@pytest.mark.slow
def test_compiled_layers_of_which_a_rank_has_parts_are_captured_with_the_numbers_of_eager_ones(folder):
    found = on_ranks(compiled, 2, folder)[0]
    for mode in MODES:
        name = f"compiled_{mode}_full_iteration"
        assert found[name]["losses"] == found[f"compiled_{mode}_none"]["losses"]
        assert found[name]["evaluated"] == found[f"compiled_{mode}_none"]["evaluated"]
        assert json.loads((folder / name / "result.json").read_text())["graph"]["replays"] > 0


@pytest.mark.slow
def test_layers_may_be_split_and_sharded(folder):
    found = on_ranks(on_a_mesh, 4, folder)
    assert all(one[scope] == found[0]["none"] | {"spread": one[scope]["spread"]} for one in found for scope in SCOPES)
    alone = run(ALONE, folder, "alone_on_a_mesh", *FULL, "graph=none", "train.grad_accumulation=4")
    assert_like(found[0]["none"], alone)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel=tp", "train.sample_every=2"], "needs all of it"),
        (["parallel=fsdp", "optim=muon"], "updates whole matrices"),
        (["parallel=tp", "optim=sgd"], "for whole parameters only, needs all of it"),
        (["parallel=fsdp", "parallel.tp=2"], "does nothing with parallel=fsdp; .* parallel=fsdp_tp"),
        (["parallel=fsdp_tp", "parallel.tp=null"], "such as parallel.tp=2"),
        (["parallel=experts", "train.sample_every=2"], "needs all of it"),
        (["parallel=experts", "optim=sgd"], "for whole parameters only, needs all of it"),
        (["parallel=experts", "parallel.capacity_factor=0"], "capacity_factor must be above 0 and finite"),
        (["parallel=ddp", "parallel.capacity_factor=3"], "does nothing with parallel=ddp; .* parallel=experts"),
        (["parallel=experts", "data.buckets=[8,16]", "train.eval_every=2"], "set train.eval_every=0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        parse(composed(*TINY, "train.checkpoint=false", *overrides))


@pytest.mark.parametrize(
    ("overrides", "ranks", "said"),
    [
        (["parallel=fsdp_tp", "parallel.tp=2"], 2, "takes a multiple of 2 ranks, at least 4, got 2"),
        (["parallel=fsdp_tp", "parallel.tp=3"], 8, "takes a multiple of 3 ranks, at least 6, got 8"),
        (["parallel=tp", "parallel.tp=2"], 4, "start 2 ranks, or let groups of 2 share the batches"),
    ],
)
def test_so_are_numbers_of_ranks_that_cannot_be_arranged(overrides, ranks, said, monkeypatch):
    config = parse(composed(*TINY, "train.checkpoint=false", *overrides, f"parallel.gpus={ranks}"))
    with pytest.raises(ConfigError, match=said):
        ranks_of(config)


class OfTwo:
    """Of the mesh, only its size is asked before a model is split."""

    @staticmethod
    def size():
        return 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2)), "attn.c_attn"),
        (lambda: LlamaForCausalLM(llama(num_attention_heads=3, num_key_value_heads=3)), "3 attention heads"),
        (lambda: LlamaForCausalLM(llama(num_key_value_heads=1)), "1 key-value heads"),
        (lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)), "self_attn.q_norm"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_anything_of_it_is(make, said):
    model = make()
    with pytest.raises(ConfigError, match=said):
        split_layers(model, OfTwo())
    assert not is_split(model)
