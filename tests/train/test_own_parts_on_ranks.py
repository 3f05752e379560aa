"""Parts of one's own on two ranks (gloo, on the CPU); all in one pair of processes."""

import json

import pytest
import torch
from safetensors.torch import load_model

from graphmod.errors import ConfigError
from graphmod.train.ranks import ALONE, joined
from graphmod.train.resume import claimed
from graphmod.train.run import train
from graphmod.train.settings import DataConfig, DeviceName, ModelConfig, Source
from tests.support.my_parts import Net
from tests.support.ranks import on_ranks
from tests.support.settings import TINY, parsed

PARTS = "tests.support.my_parts"
SCOPES = ("none", "per_layer", "full_iteration")
SETTINGS = [*TINY, "train.eval_every=4", "train.eval_batches=3", "train.deterministic=true", "train.ema_decay=0.9"]


def run(ranks, folder, name, *overrides, p=0.1, model=f"{PARTS}.Net", data=f"{PARTS}.Labelled"):
    """The losses of a run in `folder/name`, or what it is refused for."""
    config = parsed(*SETTINGS, *overrides)
    arguments = {"p": p, "width": 8} if model == f"{PARTS}.Net" else {}
    config.model = ModelConfig("custom", target={"_target_": model, **arguments})
    target = {"_target_": data}
    config.data = DataConfig(Source.custom, target=target, seq_len=16, batch_size=2, eval_fraction=0.2)
    try:
        if not ranks.first:
            result = train(config, folder / name, ranks.told(None), ranks=ranks)
        else:
            with claimed(config, folder / name, named=True) as point:
                result = train(config, folder / name, ranks.told(point), ranks=ranks)
    except ConfigError as error:
        return str(error)
    return {"losses": result.losses, "evaluated": result.eval_losses, "averaged": result.ema_loss}


def program(rank, folder):
    found = {}
    with joined(DeviceName.cpu) as ranks:

        def go(name, *overrides, **more):
            found[name] = run(ranks, folder, name, *overrides, **more)

        for mode in ("ddp", "fsdp"):
            for scope in SCOPES:
                go(f"{mode}_{scope}", f"parallel={mode}", f"graph={scope}", "train.checkpoint_every=4")
            go(f"{mode}_plain", f"parallel={mode}", p=0.0)
            resume = f"train.resume={folder}/{mode}_full_iteration/checkpoints/step_00000004"
            go(f"{mode}_resumed", f"parallel={mode}", resume)
        go("tp", "parallel=tp")
        go("unused", "parallel=ddp", model=f"{PARTS}.Unused")
        go("other", "parallel=ddp", data=f"{PARTS}.OfThisProcess")
        go("unused_fsdp", "parallel=fsdp", "train.checkpoint=false", model=f"{PARTS}.Unused")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(folder):
    return on_ranks(program, 2, folder)


modes = pytest.mark.parametrize("mode", ["ddp", "fsdp"])


@modes
@pytest.mark.parametrize("scope", SCOPES[1:])
def test_graphs_have_the_numbers_of_eager_ranks(found, mode, scope):
    first, second = found
    assert first[f"{mode}_{scope}"] == first[f"{mode}_none"]
    assert first[f"{mode}_{scope}"]["losses"] == second[f"{mode}_{scope}"]["losses"]


@modes
def test_the_numbers_are_those_of_one_process_with_as_many_items_in_a_step(found, folder, mode):
    alone = run(ALONE, folder, f"alone_{mode}", "train.grad_accumulation=2", p=0.0)
    for name in ("losses", "evaluated"):
        torch.testing.assert_close(torch.tensor(found[0][f"{mode}_plain"][name]), torch.tensor(alone[name]))


@modes
def test_a_resumed_run_has_the_numbers_of_one_that_never_stopped(found, mode):
    assert found[0][f"{mode}_resumed"] == found[0][f"{mode}_full_iteration"]


@modes
def test_the_checkpoint_is_that_of_a_whole_model(found, folder, mode):
    model = Net(64, width=8)
    load_model(model, folder / f"{mode}_none" / "checkpoints" / "step_00000008" / "model.safetensors")
    assert model.head.weight is model.embed.weight
    result = json.loads((folder / f"{mode}_none" / "result.json").read_text())
    assert result["ranks"] == 2 and result["tokens_per_step"] == 2 * 2 * 17


def test_what_ranks_cannot_share_is_told(found):
    for one in found:
        assert "parallel=tp splits models of transformers" in one["tp"] and "Net is a model of your own" in one["tp"]
        assert "the loss does not depend on spare.weight, spare.bias" in one["unused"]
        assert len(one["unused_fsdp"]["losses"]) == 8
        assert f"{PARTS}.OfThisProcess has other items on each rank" in one["other"]
