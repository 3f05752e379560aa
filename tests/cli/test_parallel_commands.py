"""`python train.py parallel=ddp` as a command: who starts the ranks, and how all of them end."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from graphmod.train.folders import FolderInUse, owned
from tests.support.processes import shell
from tests.support.settings import ROOT, TINY

ON_TWO = [*TINY, "data=text", "data.path=text.txt", "parallel=ddp", "parallel.gpus=2", "hydra.run.dir=run"]
LONG = [*ON_TWO, "train.steps=100000", "train.checkpoint_every=5", "train.log_every=5"]


@pytest.fixture
def folder(tmp_path, text):
    return tmp_path


def ended(process):
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def ranks(pid):
    """The process of each rank that `pid` has started."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{name}/environ") as environ:
                rank = re.search(r"(?:^|\0)RANK=(\d+)", environ.read())
        except OSError:
            continue
        if parent == pid and rank:
            found[int(rank[1])] = int(name)
    return found


def under_way(folder, process):
    """Waits until a checkpoint is there; the processes of the ranks."""
    for _ in range(600):
        if any((folder / "run" / "checkpoints").glob("step_*")):
            return ranks(process.pid)
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError("no checkpoint came")


def gone(pid):
    return not os.path.exists(f"/proc/{pid}")


def test_a_killed_rank_ends_all_within_seconds_and_the_next_start_resumes(folder):
    process = shell(folder, *LONG)
    found = under_way(folder, process)
    with pytest.raises(FolderInUse, match=f"process {process.pid} on"), owned(folder / "run"):
        pass
    os.kill(found[1], signal.SIGKILL)
    began = time.monotonic()
    status, _, err = ended(process)
    assert status == 1 and time.monotonic() - began < 10 and all(map(gone, found.values()))
    (said,) = [line for line in err.splitlines() if line.startswith("error")]
    assert said.startswith("error: rank 1 ended without an error message") and "newest checkpoint is" in said
    assert "error: rank 1 ended" in (folder / "run" / "train.log").read_text()
    done = int(sorted(os.listdir(folder / "run" / "checkpoints"))[-1][5:])
    status, out, err = ended(shell(folder, "train.resume=run", f"train.steps={done + 2}"))
    assert status == 0 and f"resuming from step {done} of {done + 2}" in out, err
    assert "on 2 ranks" in out


@pytest.mark.slow
@pytest.mark.parametrize("whom", [None, 0, 1])
def test_a_signal_to_the_command_or_to_one_rank_stops_all_after_one_step(folder, whom):
    process = shell(folder, *LONG)
    found = under_way(folder, process)
    os.kill(process.pid if whom is None else found[whom], signal.SIGTERM)
    status, out, err = ended(process)
    assert status == 143 and all(map(gone, found.values()))
    assert "stopped by SIGTERM after step" in out and "to resume:" in out
    assert err.count("SIGTERM: stopping after this step and saving") == 1 and "Traceback" not in err


@pytest.mark.slow
def test_the_first_rank_may_be_killed_too_and_without_the_command_the_ranks_save_and_end(folder):
    process = shell(folder, *LONG)
    found = under_way(folder, process)
    os.kill(found[0], signal.SIGKILL)
    status, _, err = ended(process)
    assert (
        status == 1
        and err.count("error: rank 0 ended without an error message") == 1
        and all(map(gone, found.values()))
    )
    process = shell(folder, *LONG, "train.resume=auto")
    time.sleep(0.5)
    found = under_way(folder, process)
    for _ in range(300):
        if "resuming from" in (folder / "run" / "train.log").read_text() or len(found) == 2:
            break
        time.sleep(0.1)
        found = ranks(process.pid)
    process.kill()
    for _ in range(300):
        if all(map(gone, found.values())):
            return
        time.sleep(0.1)
    raise AssertionError("the ranks go on")


@pytest.mark.slow
def test_torchrun_starts_the_ranks_as_well(folder):
    arguments = [one for one in ON_TWO if not one.startswith(("parallel.gpus", "hydra.run.dir"))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(ROOT / "train.py"), *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on 2 ranks") == 1
    (run,) = (folder / "runs" / "train").iterdir()
    assert json.loads((run / "result.json").read_text())["ranks"] == 2
    status, _, err = ended(shell(folder, *ON_TWO))
    assert status == 0, err
    both = [json.loads((path / "result.json").read_text())["losses"] for path in (run, folder / "run")]
    assert both[0] == both[1]
    again = shell(folder, f"train.resume={run}", "train.steps=10")
    status, out, err = ended(again)
    assert status == 0 and "on 2 ranks" in out, err
    assert json.loads((run / "result.json").read_text())["ranks"] == 2


def test_what_cannot_be_is_said_once(folder):
    status, _, err = ended(shell(folder, *ON_TWO, "data.seq_len=64", "model.max_positions=64", "data.max_bytes=50"))
    assert status == 2
    (said,) = [line for line in err.splitlines() if "error" in line]
    assert said.startswith("error: the data is too short")
    assert not (folder / "run").exists()


@pytest.mark.slow
def test_a_multirun_compares_one_rank_with_two(folder):
    sweep = ["--multirun", *ON_TWO[:-3], "parallel=none,ddp,fsdp", "parallel.gpus=2", "graph=none,full_iteration"]
    status, out, err = ended(shell(folder, *sweep, "train.steps=16", "hydra.sweep.dir=sweep"))
    assert status == 0, err
    runs = {row["name"]: row for row in json.loads((folder / "sweep" / "comparison.json").read_text())["runs"]}
    assert {name: row["ranks"] for name, row in runs.items()} == {
        **{"none_none": 1, "none_full_iteration": 1, "ddp_none": 2, "ddp_full_iteration": 2},
        **{"fsdp_none": 2, "fsdp_full_iteration": 2},
    }
    assert runs["fsdp_full_iteration"]["baseline"] == "fsdp_none" and runs["fsdp_full_iteration"]["losses_equal"]
    assert runs["fsdp_full_iteration"]["scaling"] > 0
    assert runs["ddp_full_iteration"]["baseline"] == "ddp_none" and runs["ddp_full_iteration"]["losses_equal"]
    assert runs["ddp_full_iteration"]["scaling"] > 0 and runs["none_none"]["scaling"] is None
    assert "scaling" in out
