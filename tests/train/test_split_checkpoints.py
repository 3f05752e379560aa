"""Checkpoints of runs whose ranks hold a part of the model each: what they hold, and who goes on from them how."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.distributed import checkpoint
from transformers import AutoModelForCausalLM

from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.folders import FORMAT, verify
from graphmod.train.ranks import ALONE, joined
from graphmod.train.settings import DeviceName
from tests.cli.test_parallel_commands import ended, under_way
from tests.support.processes import shell
from tests.support.ranks import on_ranks
from tests.support.settings import ROOT, TINY
from tests.train.test_run_on_ranks import run
from tests.train.test_split_models import assert_like, with_text

SETTINGS = ["train.ema_decay=0.9", "optim.max_grad_norm=0.5", "train.checkpoint_every=4"]
HALF = "checkpoints/step_00000004"
# How each mode trains on as many sequences in a step as one process does with two microbatches.
ALIKE = {
    "none": ["parallel=none", "train.grad_accumulation=2"],
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "tp": ["parallel=tp", "train.grad_accumulation=2"],
    "fsdp_tp": ["parallel=fsdp_tp"],
}


def goes_on(ranks, folder, before, mode):
    """A run of this mode that resumes a run of another after half its steps."""
    resume = f"train.resume={folder}/{before}/{HALF}"
    return run(ranks, folder, f"{before}_to_{mode}", *SETTINGS, *ALIKE[mode], resume)


def program(rank, folder, through, goals):
    found = {}
    with joined(DeviceName.cpu) as ranks:
        for mode in through:
            found[mode] = run(ranks, folder, mode, *SETTINGS, *ALIKE[mode])
        for before, mode in goals:
            found[before, mode] = goes_on(ranks, folder, before, mode)
        found["full"] = fills_the_disk_of_the_second(ranks, folder)
    return found


def fills_the_disk_of_the_second(ranks, folder):
    """What each rank says of a run in which the second one cannot write its part of the second checkpoint."""
    write, written = checkpoint.FileSystemWriter.write_data, []

    def fails(self, *args):
        written.append(args)
        if ranks.rank == 1 and len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args)

    checkpoint.FileSystemWriter.write_data = fails
    try:
        run(ranks, folder, f"full_{ranks.count}", *SETTINGS, *ALIKE["fsdp"])
    except GraphmodError as error:
        return str(error)
    finally:
        checkpoint.FileSystemWriter.write_data = write


def test_a_rank_that_cannot_write_its_part_is_named_and_what_was_saved_stays(found, folder):
    assert "cannot save the checkpoint" in found["full"] and "rank 1: [Errno 28]" in found["full"]
    (left,) = (folder / "full_2" / "checkpoints").iterdir()
    assert verify(left)["steps_done"] == 4


GOALS = [("fsdp", "fsdp"), ("none", "fsdp"), ("fsdp", "tp"), ("tp", "tp"), ("tp", "ddp")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_text(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(folder):
    return run(ALONE, folder, "none", *SETTINGS, *ALIKE["none"])


@pytest.fixture(scope="module")
def found(folder, alone):
    return on_ranks(program, 2, folder, ["fsdp", "tp"], GOALS)[0]


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_a_resumed_run_has_the_numbers_of_one_that_never_stopped(found, mode):
    again = found[mode, mode]
    assert [again[name] for name in ("losses", "evaluated", "averaged")] == [
        found[mode][name] for name in ("losses", "evaluated", "averaged")
    ]


@pytest.mark.parametrize("way", [("none", "fsdp"), ("fsdp", "tp"), ("tp", "ddp")])
def test_ranks_that_share_the_model_otherwise_go_on(found, alone, way):
    assert_like(found[way], alone)
    assert found[way]["averaged"] == pytest.approx(alone["averaged"], rel=1e-5)


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_so_does_one_process(found, alone, folder, mode):
    again = goes_on(ALONE, folder, mode, "none")
    assert_like(again, alone)
    assert again["averaged"] == pytest.approx(alone["averaged"], rel=1e-5)
    assert again["losses"][:4] == found[mode]["losses"][:4]


@pytest.mark.parametrize("inside", ["", "ema"])
def test_a_checkpoint_is_a_model_that_transformers_loads(found, alone, folder, inside):
    for mode in ("fsdp", "tp"):
        saved = AutoModelForCausalLM.from_pretrained(folder / mode / HALF / inside)
        plain = AutoModelForCausalLM.from_pretrained(folder / "none" / HALF / inside)
        assert saved.config.architectures == plain.config.architectures == [type(plain).__name__]
        for one, other in zip(saved.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_each_rank_writes_its_part_which_is_verified_like_all_else(found, folder):
    manifest = verify(folder / "fsdp" / HALF)
    parts = {name: size for name, (size, _) in manifest["files"].items() if name.startswith("shards/__")}
    assert len(parts) == 2 and min(parts.values()) > 0.8 * max(parts.values())
    assert manifest["format"] == FORMAT and manifest["ranks"] == 2
    assert manifest["arrangement"] == "parallel=fsdp on 2 ranks"
    target = folder / "damaged" / HALF
    target.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", folder / "fsdp" / HALF, target], check=True)
    (target / next(iter(parts))).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"is damaged: shards/__0_0.distcp has 7 bytes"):
        run(ALONE, folder, "from_damaged", *SETTINGS, *ALIKE["none"], f"train.resume={target}")


@pytest.mark.slow
def test_a_mesh_of_both_saves_and_resumes_too(folder, alone):
    ways = [("fsdp_tp", "fsdp_tp"), ("none", "fsdp_tp")]
    first, *_ = on_ranks(program, 4, folder, ["fsdp_tp"], ways)
    assert first["fsdp_tp", "fsdp_tp"]["losses"] == first["fsdp_tp"]["losses"]
    assert first["fsdp_tp", "fsdp_tp"]["averaged"] == first["fsdp_tp"]["averaged"]
    assert_like(first["none", "fsdp_tp"], alone)
    assert_like(goes_on(ALONE, folder, "fsdp_tp", "none"), alone)


@pytest.mark.slow
def test_a_killed_rank_loses_nothing_that_was_saved_and_another_mode_and_generate_go_on(tmp_path, text):
    run = [*TINY, "data=text", "data.path=text.txt", "parallel=fsdp", "parallel.gpus=2", "hydra.run.dir=run"]
    process = shell(tmp_path, *run, "train.steps=100000", "train.checkpoint_every=3")
    os.kill(under_way(tmp_path, process)[1], signal.SIGKILL)
    status, _, err = ended(process)
    assert status == 1 and "error: rank 1 ended without an error message" in err
    done = int(sorted(os.listdir(tmp_path / "run" / "checkpoints"))[-1][5:])
    again = ["train.resume=run", f"train.steps={done + 2}", "parallel=none", "train.grad_accumulation=2"]
    status, out, err = ended(shell(tmp_path, *again))
    assert status == 0 and f"resuming from step {done} of {done + 2}" in out, err
    assert len(json.loads((tmp_path / "run" / "result.json").read_text())["losses"]) == done + 2
    status, out, err = ended(shell(tmp_path, "train.resume=run", f"train.steps={done + 4}", "parallel=tp"))
    assert status == 0 and "parallel=tp on 2 ranks" in out, err
    generate = [sys.executable, ROOT / "generate.py", "model.path=run", "prompt=line"]
    written = subprocess.run(generate, cwd=tmp_path, capture_output=True, text=True)
    assert written.returncode == 0 and written.stdout, written.stderr
