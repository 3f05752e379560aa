"""Checks that ranks make together: what each of them is told."""

import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import graphmod
from graphmod.check.meeting import RanksMissing


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
