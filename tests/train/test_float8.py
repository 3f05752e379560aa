"""Matmuls in 8 bits: captured with eager's bits, near the losses of without, and refused where they cannot be."""

import functools

import pytest
import torch
from torch import nn

from graphmod.errors import ConfigError
from graphmod.train import float8
from graphmod.train.float8 import check_float8, use_float8
from graphmod.train.ranks import joined
from graphmod.train.run import train
from graphmod.train.settings import DeviceName, ModelConfig, ModelPrecision
from tests.support.ranks import on_ranks
from tests.train.test_run_on_ranks import run
from tests.train.test_split_models import with_text

FP8 = ModelPrecision.fp8
SCOPES = ("none", "per_layer", "full_iteration")


def any_size(recipe, filter_fqns):
    return lambda module, name: True


@pytest.fixture
def library():
    return pytest.importorskip("torchao.float8")


@pytest.fixture
def of_any_size(library, monkeypatch):
    """No matrix is too small."""
    monkeypatch.setattr(library, "_auto_filter_for_recipe", any_size)


KINDS = {
    "fp8": [],
    "rowwise": ["model.precision=fp8_rowwise"],
    "bf16": ["train.precision=bf16"],
    "autocast": ["train.precision=bf16_mixed"],
    "checkpoints": ["train.activation_checkpointing=true"],
    "fused loss, accumulated": ["train.loss=fused", "train.grad_accumulation=2", "train.ema_decay=0.9"],
    "compiled": ["graph.compile=default", "model.layers=1", "train.eval_every=0"],
}


@pytest.mark.parametrize("kind", [*list(KINDS)[:-1], pytest.param("compiled", marks=pytest.mark.slow)])
def test_graphs_have_eagers_losses_near_those_of_no_8_bits(of_any_size, on_text, tmp_path, kind, fresh_dynamo):
    settings = ["train.eval_every=4", "train.eval_batches=1", *KINDS[kind]]
    eager, *graphed = (
        train(on_text("model.precision=fp8", f"graph={scope}", *settings), tmp_path / scope) for scope in SCOPES
    )
    for one in graphed:
        assert (one.losses, one.eval_losses) == (eager.losses, eager.eval_losses)
        assert one.graph["replays"] > 0 and one.graph["failures"] == 0
    plain = train(on_text("graph=none", *settings, "model.precision=none"), tmp_path / "plain")
    assert eager.losses != plain.losses
    torch.testing.assert_close(eager.losses, plain.losses, rtol=0.01, atol=0)


class Layer(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.uneven, self.down = nn.Linear(width, 1040), nn.Linear(width, 1041), nn.Linear(1040, width)


def test_small_matrices_and_those_beside_the_layers_stay_as_they_are(library):
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "head": nn.Linear(64, 2048)})
    weight = model["layers"][0].up.weight
    use_float8(model, FP8, sharded=False)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert [name for name, kind in kinds.items() if kind == "Float8Linear"] == ["layers.0.up", "layers.1.up"]
    assert model["layers"][0].up.weight is weight and model["layers"][0].up.config.emulate
    with pytest.raises(
        ConfigError, match=r"model.precision=fp8_rowwise would take longer .* ModuleDict is large enough"
    ):
        use_float8(model, ModelPrecision.fp8_rowwise, sharded=False)


REFUSED = {
    "samples": (
        ["train.sample_every=4"],
        "train.sample_every=4 writes text .* model.precision=fp8 .*; drop one of them",
    ),
    "split layers": (["parallel=tp"], "model.precision=fp8, which scales whole matrices, needs all of it"),
    "sharded layers": (["parallel=fsdp", "graph=per_layer"], "gathers the weights .*; use graph=full_iteration"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_go_together_is_refused(library, tiny, kind):
    settings, said = REFUSED[kind]
    with pytest.raises(ConfigError, match=said):
        tiny("model.precision=fp8", *settings)


def test_a_model_without_a_list_of_layers_is_refused(library, tiny, tmp_path):
    config = tiny("model.precision=fp8", "data=synthetic", "data.vocab_size=60", "graph=none")
    target = {"_target_": "tests.support.my_parts.Unsplit"}
    config.model = ModelConfig("custom", target=target, precision=FP8)
    with pytest.raises(ConfigError, match=r"model.precision=fp8 goes layer by layer"):
        train(config, tmp_path)


@pytest.mark.parametrize(
    ("installed", "capability", "said"),
    [
        ("0.17.1+cu130", (9, 0), r"needs torchao 0.18 or newer, got 0.17.1\+cu130: pip install 'torchao>=0.18'"),
        ("0.18.0", (8, 0), r"compute capability 8.9: Ada, Hopper or newer\), got A100 \(8.0\); leave it out"),
    ],
)
def test_other_gpus_and_libraries_are_refused(monkeypatch, installed, capability, said):
    monkeypatch.setattr(float8, "version", lambda name: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=said):
        check_float8(FP8, torch.device("cuda"))


FULL = ["model.precision=fp8", "train.grad_accumulation=2", "train.ema_decay=0.9", "optim.max_grad_norm=0.5"]
ON_RANKS = {
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "fsdp, mixed": ["parallel=fsdp", "train.precision=bf16_mixed"],
}


GRAPHED = {kind: SCOPES if kind == "ddp" else ("none", "full_iteration") for kind in ON_RANKS}


def program(rank, folder):
    import torchao.float8 as library

    library._auto_filter_for_recipe, found = any_size, {}
    with joined(DeviceName.cpu) as ranks:
        go = functools.partial(run, ranks, folder)
        for kind, settings in ON_RANKS.items():
            for scope in GRAPHED[kind]:
                found[kind, scope] = go(f"{kind} {scope}", *FULL, *settings, f"graph={scope}")
        found["half"] = go("half", *FULL, "parallel=fsdp", "train.checkpoint_every=4")
        resume = f"train.resume={folder}/half/checkpoints/step_00000004"
        found["resumed"] = go("resumed", *FULL, "parallel=fsdp", resume)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("torchao.float8")
    return on_ranks(program, 2, with_text(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize(("kind", "scope"), [(kind, scope) for kind in ON_RANKS for scope in GRAPHED[kind][1:]])
def test_graphs_on_ranks_have_eagers_numbers(found, kind, scope):
    for one in found:
        assert one[kind, scope]["losses"] == one[kind, "none"]["losses"] == found[0][kind, "none"]["losses"]
        assert one[kind, scope]["averaged"] == one[kind, "none"]["averaged"]


def test_sharded_weights_are_gathered_with_the_numbers_of_whole_ones(found):
    torch.testing.assert_close(found[0]["fsdp", "none"]["losses"], found[0]["ddp", "none"]["losses"])


def test_a_sharded_run_resumes_with_the_bits_of_one_that_never_stopped(found):
    assert found[0]["resumed"]["losses"] == found[0]["half"]["losses"]


@pytest.mark.gpu
def test_on_a_gpu_a_step_in_8_bits_is_captured(library, tiny, tmp_path):
    sizes = [
        "model.hidden_size=1088",
        "model.heads=17",
        "model.kv_heads=17",
        "model.intermediate_size=2176",
        "data.batch_size=16",
    ]
    settings = ["train.device=cuda", "train.precision=bf16", "data.seq_len=64", *sizes]
    eager, graphed = (
        train(tiny("model.precision=fp8", f"graph={scope}", *settings), tmp_path / scope)
        for scope in ("none", "full_iteration")
    )
    assert graphed.losses == eager.losses and graphed.graph["replays"] > 0 and graphed.graph["failures"] == 0
    plain = train(tiny("graph=none", *settings), tmp_path / "plain")
    # Of the same weights first. The rate lets the second loss rise, and the runs drift apart in it and come back.
    torch.testing.assert_close(eager.losses[0], plain.losses[0], rtol=0.005, atol=0)
    ours, theirs = (sum(losses) / len(losses) for losses in (eager.losses, plain.losses))
    torch.testing.assert_close(ours, theirs, rtol=0.005, atol=0)
