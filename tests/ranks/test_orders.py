"""`graphmod.check` in a program of several ranks: they compare what they communicate, and none hangs."""

import time

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import graphmod
from graphmod.check.meeting import RanksMissing
from tests.support.ranks import Ranks


def agrees(device, rank):
    model = DistributedDataParallel(torch.nn.Linear(8, 8))

    def step():
        model(torch.ones(4, 8)).square().mean().backward()
        model.zero_grad()
        distributed.all_reduce(torch.ones(3), group=None)

    report = graphmod.check(step)
    return report.captured, report.collectives, str(report)


def parts(device, rank, how):
    def step():
        distributed.all_reduce(torch.ones(3))
        if how == "raises" and rank:
            raise ValueError("no data")
        if how == "branch" and rank:
            distributed.broadcast(torch.ones(4), 0)
        elif rank == 0:
            distributed.all_reduce(torch.ones(3))

    try:
        report = graphmod.check(step)
        (divergence,) = report.divergences
        assert report.stopped and "This rank was stopped where they do" in str(report)
        told = [(stand.ranks, stand.does) for stand in divergence.stands]
    except ValueError as error:
        told = str(error)
    after = torch.ones(1)
    distributed.all_reduce(after)  # the group is as good as before
    return told, after.item()


def alone(device, rank):
    try:
        if rank == 0:
            graphmod.check(lambda: distributed.all_reduce(torch.ones(3)), timeout=1.0)
    except RanksMissing as error:
        return str(error)
    finally:
        time.sleep(1.5 * rank)


@pytest.fixture(scope="module")
def ranks():
    with Ranks("cpu") as ranks:
        yield ranks


def test_ranks_that_agree_are_told_so(ranks):
    for captured, collectives, text in ranks.run(agrees):
        assert captured and collectives == [2, 2]
        assert "The 2 ranks communicate in the same order: 2 collectives on each." in text


@pytest.mark.parametrize(
    ("how", "other"), [("branch", "broadcast from rank 0 of (4,) float32"), ("one more", "ends here")]
)
def test_ranks_that_part_are_stopped_before_they_hang_and_both_are_told(ranks, how, other):
    for told, after in ranks.run(parts, how):
        assert told == [([0], "all_reduce (sum) of (3,) float32"), ([1], other)]
        assert after == 2


def test_a_rank_that_raises_stops_those_that_would_wait_for_it(ranks):
    (told, _), (raised, _) = ranks.run(parts, "raises")
    assert raised == "no data" and told[1] == ([1], "raised ValueError: no data")


def test_a_rank_that_does_not_come_is_named_in_time(ranks):
    said, _ = ranks.run(alone)
    assert "rank 0 waited 1 s in all_reduce (sum) of (3,) float32 at" in said
    assert "for rank 1 (rank 1 came to none before); all ranks have to make the same check" in said
