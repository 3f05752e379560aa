"""Averages gradients over ranks while a backward still runs, in buckets.

The buckets are those of DistributedDataParallel: one at first, and from the second backward on as many as its limits
say, filled in the order in which gradients came (`dist._compute_bucket_assignment_by_size`, which it uses itself), so
that a sum over ranks is made in the same order. Unlike its own reducer this one hangs at parameters, whose
AccumulateGrad nodes a capture makes anew; waits for nothing on the host, so that it can be captured; and communicates
on the stream of the backward, because kernels on a second one would slow down every later graph.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Variable

from graphmod.trace.dispatch import hidden


class Bucket:
    """Gradients that are summed in one collective.

    Attributes:
        members: the indices of their parameters.
        pending: how many are still to come in this backward.
        flat: them all, once they are being summed.
    """

    def __init__(self, members: list[int]) -> None:
        self.members, self.pending = members, len(members)
        self.flat: Tensor | None = None


class Reducer:
    """The gradients of some parameters, averaged in the backward that follows `begin`.

    Args:
        parameters: name -> parameter, all that require grad.
        group: the process group.
        limits: bytes of the first bucket, and of the others.
    """

    def __init__(self, parameters: dict[str, Tensor], group: Any, limits: list[int]) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._group, self._limits = group, limits
        self._size = distributed.get_world_size(group)
        self._expects = False
        self._planned = False
        self._order: list[int] = []
        self._plan(*distributed._compute_bucket_assignment_by_size(self._parameters, [sys.maxsize])[:1])
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def _plan(self, buckets: list[list[int]]) -> None:
        self._buckets = [Bucket(list(members)) for members in buckets]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.members}
        self._next = 0

    def begin(self, averages: bool) -> None:
        """A forward begins, whose backward is to average gradients, or only to add to them.

        Raises:
            RuntimeError: some parameters had no part in the backward before.
        """
        missing = [self._names[i] for bucket in self._buckets for i in bucket.members if i not in self._order]
        if self._order and missing:
            self._order = []
            self._plan([bucket.members for bucket in self._buckets])
            raise RuntimeError(
                f"{len(missing)} parameters got no gradient in the last backward, so that it was not averaged over "
                f"all ranks: {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Leave them out of the model, or "
                "give DistributedDataParallel find_unused_parameters=True"
            )
        self._expects = averages

    def _ready(self, index: int, parameter: Tensor) -> None:
        """A gradient is there. Buckets are summed in their order, which all ranks share."""
        if not self._expects:
            return
        if not self._order:
            Variable._execution_engine.queue_callback(self._finish)
        self._order.append(index)
        self._bucket_of[index].pending -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            self._sum(self._buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _sum(self, bucket: Bucket) -> None:
        bucket.flat = torch.cat([self._parameters[i].grad.reshape(-1) for i in bucket.members])
        bucket.flat.mul_(1 / self._size)
        distributed.all_reduce(bucket.flat, group=self._group)

    @torch.no_grad()
    def _finish(self) -> None:
        """The backward is over."""
        if self._next < len(self._buckets):
            return  # which `begin` tells
        for bucket in self._buckets:
            grads = [self._parameters[i].grad for i in bucket.members]
            parts = bucket.flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)])
            bucket.flat, bucket.pending = None, len(bucket.members)
        self._expects, self._next = False, 0
        order, self._order = self._order, []
        if not self._planned:
            self._planned = True
            with hidden():
                self._rebuild(order)

    def _rebuild(self, order: list[int]) -> None:
        """Makes the buckets that stay, in the order in which the gradients came on the first rank."""
        told = [order]
        first = distributed.get_global_rank(self._group, 0)
        distributed.broadcast_object_list(told, first, group=self._group)
        order = told[0]
        tensors = [self._parameters[index] for index in order]
        buckets = distributed._compute_bucket_assignment_by_size(tensors, self._limits, [], order)[0]
        self._plan(buckets)
