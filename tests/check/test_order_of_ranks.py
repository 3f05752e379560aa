"""`graphmod check --ranks N`: ranks that nobody connects are compared, and told where they diverge."""

import json
import os
from pathlib import Path

import pytest

from graphmod.check import Finding, Report, cli, one_rank
from graphmod.check.cli import main
from graphmod.check.meeting import Collective
from graphmod.check.order import Way, divergences
from graphmod.check.report import of_all_ranks
from tests.check import rank_steps
from tests.support.processes import Python, finished

HERE = Path(__file__).parent


def line(text):
    return next(
        f"rank_steps.py:{number}"
        for number, one in enumerate((HERE / "rank_steps.py").read_text().splitlines(), start=1)
        if text in one
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four ranks is told of each step."""
    folder = tmp_path_factory.mktemp("ranks")
    words = [HERE / "rank_steps.py", folder / "store"]
    started = [
        Python([*words, folder / str(rank)], HERE, {**os.environ, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
        for rank in range(4)
    ]
    for one in started:
        _, err = one.communicate(180)
        assert one.returncode == 0, err
    return [json.loads((folder / str(rank)).read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", [one.__name__ for one in rank_steps.SAME])
def test_ranks_that_communicate_alike_agree(found, name):
    for text, told in (rank[name] for rank in found):
        assert not told["divergences"] and "The 4 ranks communicate in the same order" in text, text
        assert max(told["collectives"]) > 0
        assert told["captured"] is (name != "ddp_unused"), text


def stands(found, name, after):
    """What ranks do where they diverge, which all of them are told alike."""
    text, told = found[0][name]
    assert not told["captured"] and all(rank[name][1]["divergences"] == told["divergences"] for rank in found)
    (divergence,) = told["divergences"]
    assert divergence["after"] == after and "its ranks diverge" in text
    return {tuple(one["ranks"]): one for one in divergence["stands"]}


def test_a_branch_is_told_with_both_lines_and_what_follows(found):
    there = stands(found, "branch", after=1)
    assert there[0,]["does"] == "all_reduce (sum) of (16, 16) float32"
    assert there[0,]["follow"] == 1 and there[1, 2, 3]["follow"] == 0
    assert there[1, 2, 3]["does"] == "broadcast from rank 0 of (4,) float32"
    text = found[0]["branch"][0]
    assert "The ranks diverge after 1 collective in the same order:" in text
    assert f"ranks 1, 2 and 3: broadcast from rank 0 of (4,) float32 at {line('# of others')} in step" in text
    assert there[0,]["location"]["function"] == "sums"


@pytest.mark.parametrize(
    ("name", "after", "does"),
    [
        ("other_shape", 0, {(0, 1, 3): "(8,) float32", (2,): "(4,) float32"}),
        ("other_operation", 0, {(0,): "all_reduce (sum)", (1, 2, 3): "all_reduce (max)"}),
        ("other_root", 0, {(0, 1): "from rank 0", (2, 3): "from rank 1"}),
        ("other_group", 1, {(0,): "over ranks 0 and 1", (1, 2, 3): "all_reduce (sum)"}),
        ("another_group_of_all", 0, {(0,): "(group 2 of these ranks)", (1, 2, 3): "all_reduce (sum)"}),
        ("circle", 0, {(0,): "over ranks 0 and 1", (1,): "over ranks 1 and 2", (2,): "over ranks 0 and 2"}),
        ("one_more", 1, {(0, 1, 2): "ends here", (3,): "all_reduce (sum) of (5,) float32"}),
        ("send_without_recv", None, {(1,): "send to rank 2", (2,): "receives nothing more from rank 1"}),
        ("other_message", None, {(0,): "send to rank 1 of (4, 8)", (1,): "recv from rank 0 of (2,)"}),
        ("unused_by_one", 1, {(0, 2, 3): "all_gather_into_tensor", (1,): "reduce_scatter_tensor"}),
    ],
)
def test_ranks_that_part_are_told_where(found, name, after, does):
    there = stands(found, name, after)
    assert there.keys() == does.keys()
    assert all(does[ranks] in one["does"] for ranks, one in there.items()), there


def collective(name, *ranks, call=1, peer=None):
    return Collective(name, ranks, 0, (), name, "there", peer, call=call)


def test_one_more_collective_is_not_taken_for_the_first_of_the_next_call():
    one = [collective("all_reduce", 0, 1, call=call) for call in (1, 2)]
    (divergence,) = divergences([Way(0, [one[0], *one], calls=2), Way(1, one, calls=2)])
    assert [stand.does for stand in divergence.stands] == ["all_reduce", "ends here"]


def test_a_message_from_any_rank_takes_what_is_left():
    sends = [Way(rank, [collective("send", 0, 1, 2, peer=2)]) for rank in (0, 1)]
    receives = [collective("recv", 0, 1, 2, peer=peer) for peer in (None, 0)]
    assert not divergences([*sends, Way(2, receives)])
    assert divergences([*sends, Way(2, receives[:1])])


def test_a_hazard_of_all_ranks_is_told_once_and_one_of_few_with_their_numbers():
    def hazard(line, value):
        effect = f"changes 'n' from {value} to {value + 1} as it runs, which a replay would not do"
        return Finding("Python", effect, "remedy", f"{line} in step")

    reports = [Report("step", hazards=[hazard("train.py:1", rank)], collectives=[0, 0, 0]) for rank in range(3)]
    reports[1].hazards.append(hazard("train.py:2", 7))
    report = of_all_ranks(reports)
    assert [one.ranks for one in report.hazards] == [[0, 1, 2], [1]]
    assert "train.py:1 in step  (on all ranks)" in str(report) and "train.py:2 in step  (on rank 1 only)" in str(report)


PROGRAM = """
import os

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])


def make():
    distributed.init_process_group("nccl", rank=rank, world_size=2)
    agreed = [{"width": 8} if rank == 0 else None]
    distributed.broadcast_object_list(agreed, 0)
    model = DistributedDataParallel(torch.nn.Linear(agreed[0]["width"], 8))

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        print("a line of the program")
        told = [None, None]
        distributed.all_gather_object(told, rank)
        assert told == [0, 1]
        if rank == 1:
            loss.item()
            distributed.barrier()
        model.zero_grad()

    return step, (torch.ones(4, 8),)
"""


def command(folder, *arguments):
    (folder / "train.py").write_text(PROGRAM)
    done = finished(["-m", "graphmod.check", *arguments], folder, timeout=180)
    return done.returncode, done.stdout, done.stderr


def test_the_command_starts_ranks_that_exchange_objects_and_makes_one_report(tmp_path):
    status, out, err = command(tmp_path, "train:make", "--ranks", "2", "--json")
    assert status == 1, err
    told = json.loads(out)
    assert told["collectives"] == [2, 3]
    ranks = {one["what"]: one["ranks"] for one in told["hazards"]}
    assert ranks == {"_local_scalar_dense": [1], "all_gather_object": [0, 1]}, told["hazards"]
    (divergence,) = told["divergences"]
    assert [one["does"] for one in divergence["stands"]] == ["ends here", "barrier"]
    assert divergence["stands"][1]["location"] == {"file": "train.py", "line": 26, "function": "step"}
    assert "a line of the program" in err


def test_a_rank_that_fails_ends_the_others(tmp_path, monkeypatch, capsys):
    killed = []

    class Process:
        """Rank 1, which makes its check here and at once, or another, which waits for it."""

        def __init__(self, command, env, **_):
            self.rank, self.returncode = env["RANK"], None
            if self.rank == "1":
                with monkeypatch.context() as patch:
                    patch.setattr(os, "environ", env)
                    self.returncode = one_rank.main(Path(command[3]), command[4:])

        def poll(self):
            return self.returncode

        def kill(self):
            killed.append(self.rank)

        def wait(self):
            assert self.rank in killed

    (tmp_path / "with_no_data.py").write_text('def fails():\n    raise ValueError("no data")\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cli.subprocess, "Popen", Process)
    monkeypatch.setattr(cli, "_OTHERS", 0.1)
    monkeypatch.setattr(one_rank, "pretend", lambda store, meeting: None)  # which changes this process for good
    status = main(["with_no_data:fails", "--ranks", "2"])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert "error: rank 1: with_no_data:fails raised ValueError: no data at with_no_data.py:2" in err
    assert "0" in killed
