"""A run on two ranks (gloo, on the CPU): its numbers, files, and what resumes it; all in one pair of processes."""

import json

import pytest
import torch

from graphmod.train.ranks import ALONE, joined
from graphmod.train.resume import claimed
from graphmod.train.run import train
from graphmod.train.settings import DeviceName
from tests.support.ranks import on_ranks
from tests.support.settings import DROPOUT, TINY, parsed

SCOPES = ("none", "per_layer", "full_iteration")
SETTINGS = [*TINY, "data=text", "train.eval_every=4", "train.eval_batches=3", "train.deterministic=true"]
UNEVEN = ["data.documents=line", "data.buckets=[8,16]", "train.grad_accumulation=2"]


def run(ranks, folder, name, *overrides):
    """The losses, evaluation losses and result of a run in `folder/name`."""
    config = parsed(*SETTINGS, f"data.path={folder}/text.txt", *overrides)
    if not ranks.first:
        result = train(config, folder / name, ranks.told(None), ranks=ranks)
    else:
        with claimed(config, folder / name, named=True) as point:
            result = train(config, folder / name, ranks.told(point), ranks=ranks)
    return {
        **{"losses": result.losses, "evaluated": result.eval_losses, "averaged": result.ema_loss},
        "spread": result.rank_step_ms,
    }


def program(rank, folder):
    found = {}
    with joined(DeviceName.cpu) as ranks:

        def go(name, *overrides):
            found[name] = run(ranks, folder, name, "parallel=ddp", *overrides)

        for scope in SCOPES:
            go(scope, f"graph={scope}", *UNEVEN, "train.ema_decay=0.9")
        go("rows")
        go("half", *DROPOUT, "train.checkpoint_every=4")
        go("resumed", *DROPOUT, f"train.resume={folder}/half/checkpoints/step_00000004")
        go("more", f"train.resume={folder}/alone/checkpoints/step_00000004")
        go("auto", "graph=auto", "train.steps=100", "train.eval_every=0")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    lines = [f"line {n} of a text about nothing in particular{' and more' * (n % 3)}\n" for n in range(200)]
    (folder / "text.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def found(folder):
    run(ALONE, folder, "alone", "train.checkpoint_every=4", "train.grad_accumulation=2")
    return on_ranks(program, 2, folder)


def test_all_ranks_know_the_same_numbers(found):
    first, second = found
    assert {name: one["losses"] for name, one in first.items()} == {name: one["losses"] for name, one in second.items()}
    assert first["none"]["evaluated"] == second["none"]["evaluated"]


@pytest.mark.parametrize("scope", SCOPES[1:])
def test_graphs_have_the_numbers_of_eager_data_parallel_training(found, scope):
    assert found[0][scope]["losses"] == found[0]["none"]["losses"]
    assert found[0][scope]["evaluated"] == found[0]["none"]["evaluated"]


def test_the_numbers_are_those_of_one_process_with_as_many_sequences_in_a_step(found, folder):
    """Each rank takes the microbatches that would be the next ones of one process."""
    alone = run(ALONE, folder, "uneven", "graph=none", *UNEVEN, "train.grad_accumulation=4", "train.ema_decay=0.9")
    torch.testing.assert_close(torch.tensor(found[0]["none"]["losses"]), torch.tensor(alone["losses"]))
    torch.testing.assert_close(torch.tensor(found[0]["none"]["evaluated"]), torch.tensor(alone["evaluated"]))
    rows = json.loads((folder / "alone" / "result.json").read_text())
    torch.testing.assert_close(torch.tensor(found[0]["rows"]["losses"]), torch.tensor(rows["losses"]))


def test_a_resumed_run_has_the_numbers_of_one_that_never_stopped(found):
    assert found[0]["resumed"]["losses"] == found[0]["half"]["losses"]
    assert found[0]["resumed"]["evaluated"] == found[0]["half"]["evaluated"]


def test_a_run_goes_on_with_more_ranks_where_one_process_was_in_the_data(found, folder):
    """With as many sequences in a step the losses differ by rounding alone."""
    rows = json.loads((folder / "alone" / "result.json").read_text())
    torch.testing.assert_close(torch.tensor(found[0]["more"]["losses"]), torch.tensor(rows["losses"]))
    manifest = json.loads((folder / "more" / "checkpoints" / "step_00000008" / "checkpoint.json").read_text())
    assert manifest["ranks"] == 2 and manifest["seen"][0] == 8 * 2 * 2


def test_and_with_fewer(found, folder):
    resume = f"train.resume={folder}/rows/checkpoints/step_00000008"
    longer = run(ALONE, folder, "fewer", resume, "train.steps=10", "train.grad_accumulation=2")
    assert longer["losses"][:8] == found[0]["rows"]["losses"] and len(longer["losses"]) == 10


def test_one_rank_writes_for_all(folder, found):
    names = {path.name for path in (folder / "half").iterdir()}
    assert {"result.json", "train.log", "checkpoints"} <= names
    assert len([name for name in names if name.startswith("events")]) == 1
    assert (folder / "half" / "train.log").read_text().count("each of 2 ranks x 2 x 16 tokens") == 1


def test_the_result_says_how_many_ranks_there_were_and_how_long_each_took(folder, found):
    result = json.loads((folder / "rows" / "result.json").read_text())
    assert result["ranks"] == 2 and len(result["rank_step_ms"]) == 2
    assert result["rank_step_ms_spread"]["min"] <= result["rank_step_ms_spread"]["max"]
    assert result["tokens_per_step"] == 2 * 2 * 16


def test_all_ranks_choose_one_scope(folder, found):
    chosen = json.loads((folder / "auto" / "result.json").read_text())["auto"]
    assert chosen["chosen"] in SCOPES and len(chosen["trials"]) == 3
