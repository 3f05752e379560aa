"""Averages gradients over ranks while a backward still runs, in buckets.

The buckets are those of DistributedDataParallel: one at first, and from the second backward on as many as its limits
say, filled in the order in which gradients came (`dist._compute_bucket_assignment_by_size`, which it uses itself), so
that a sum over ranks is made in the same order. Unlike its own reducer this one hangs at parameters, whose
AccumulateGrad nodes a capture makes anew, and waits for nothing on the host, so that it can be captured. In a capture
collectives are a branch beside the backward; in an eager call they run on its stream, because kernels on a second one
would slow down every later graph.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Variable

from graphmod.ranks.buckets import Bucket, alone, uses_alone
from graphmod.trace.dispatch import current, hidden


class Reducer:
    """The gradients of some parameters, averaged in the backward that follows `begin`.

    Args:
        parameters: name -> parameter, all that require grad.
        group: the process group.
        limits: bytes of the first bucket, and of the others.
        times: how often each gets a gradient in one backward, where that is not once.
    """

    def __init__(
        self, parameters: dict[str, Tensor], group: Any, limits: list[int], times: Sequence[int] | None = None
    ) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._group, self._limits = group, limits
        self._size = distributed.get_world_size(group)
        # A power of two divides without rounding: it is the same before a sum and in it.
        self._averages = self._size & (self._size - 1) == 0 and "nccl" in distributed.get_backend_config(group)
        self._expects = False
        self._planned = False
        self._branch: torch.cuda.Stream | None = None
        self._branched = False
        self._order: list[int] = []
        self._times = times or [1] * len(parameters)
        self._left = list(self._times)  # in this backward
        uses_alone()
        self._plan(*distributed._compute_bucket_assignment_by_size(self._parameters, [sys.maxsize])[:1])
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def remove(self) -> None:
        """Averages nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def keep(self, buckets: list[list[int]]) -> None:
        """Takes these buckets from the first backward on."""
        self._planned = True
        self._plan(buckets)

    def _plan(self, buckets: list[list[int]]) -> None:
        self._buckets = [Bucket(list(members), self._parameters) for members in buckets]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.members}
        self._next = 0

    def begin(self, averages: bool) -> None:
        """A forward begins, whose backward is to average gradients, or only to add to them.

        Raises:
            RuntimeError: some parameters had no part in the backward before.
        """
        missing = [self._names[i] for bucket in self._buckets for i in bucket.members if i not in self._order]
        if self._order and missing and torch.is_grad_enabled():
            self.abandon()
            raise RuntimeError(
                f"{len(missing)} parameters got no gradient in the last backward, which was not averaged over all "
                f"ranks therefore: {', '.join(missing[:4] + ['...'] * (len(missing) > 4))}. Leave them out with "
                "requires_grad_(False) before the model is wrapped, or give DistributedDataParallel static_graph=True "
                "if they are the same in each step; with find_unused_parameters=True all steps are eager"
            )
        if not averages:
            return  # and the backward of a forward before it may still be to come
        self._expects = True
        self._come_last()
        recorder = current()
        if recorder is not None and self not in recorder.unfinished:
            recorder.unfinished.append(self)

    def _come_last(self) -> None:
        """Lets the hooks of the user, who may change a gradient, come before ours, as before the reducer's own."""
        for parameter, hook in zip(self._parameters, self._hooks, strict=True):
            hooks = parameter._post_accumulate_grad_hooks
            if next(reversed(hooks)) != hook.id:
                hooks[hook.id] = hooks.pop(hook.id)

    def abandon(self) -> None:
        """There is no backward any more that will come to its end."""
        self._expects, self._branched, self._order, self._left = False, False, [], list(self._times)
        for bucket in self._buckets:
            bucket.forget()
        self._next = 0

    def _ready(self, index: int, parameter: Tensor) -> None:
        """A gradient is there, and changed by those hooks that were called before this one."""
        if not self._expects:
            return
        if next(reversed(parameter._post_accumulate_grad_hooks)) != self._hooks[index].id:
            # Of hooks that were registered after the forward, this backward calls some after this one.
            Variable._execution_engine.queue_callback(functools.partial(self._arrived, index, False))
        else:
            self._arrived(index, True)

    def _arrived(self, index: int, in_hook: bool) -> None:
        """A gradient is as it will be. Buckets are summed in their order, which all ranks share.

        Raises:
            RuntimeError: for the second time in this backward.
        """
        self._left[index] -= 1
        if self._left[index]:
            if self._left[index] < 0:
                self.abandon()
                raise RuntimeError(
                    f"{self._names[index]} got a gradient twice in one backward, as in two reentrant checkpoints: give "
                    "checkpoint use_reentrant=False, or DistributedDataParallel static_graph=True"
                )
            return
        self._order.append(index)
        self._bucket_of[index].pending -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].pending:
            self._sum(self._buckets[self._next], index if in_hook else -1)
            self._next += 1
            if self._next == len(self._buckets):  # a callback belongs to the innermost backward, of a checkpoint's too
                Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _sum(self, bucket: Bucket, arriving: int) -> None:
        """Sums a bucket in the hook of the parameter `arriving`; -1 where that is over."""
        recorder = current()
        if recorder is not None:
            recorder.before_communicating()
        grads = [self._parameters[i].grad for i in bucket.members]
        if recorder is not None and recorder.watching:
            for index, grad in zip(bucket.members, grads, strict=True):
                if _is_new(grad) and alone(grad, index == arriving):
                    recorder.aim(grad, functools.partial(self._part_for, index))
        flat = bucket.place(grads, recorded=recorder is not None)
        operation = distributed.ReduceOp.SUM
        with self._beside(flat):
            torch.ops.graphmod.gather_(flat, grads)
            if self._averages and flat.is_cuda:
                operation = distributed.ReduceOp.AVG
            else:
                flat.mul_(1 / self._size)
            distributed.all_reduce(flat, operation, group=self._group)

    def _part_for(self, index: int) -> Tensor:
        bucket = self._bucket_of[index]
        return bucket.part_for(bucket.members.index(index))

    @contextlib.contextmanager
    def _beside(self, flat: Tensor) -> Iterator[None]:
        """In a capture, a branch of its own, which `_finish` joins."""
        if not (flat.is_cuda and torch.cuda.is_current_stream_capturing()):
            yield
            return
        if self._branch is None:
            self._branch = torch.cuda.Stream(flat.device)
        self._branch.wait_stream(torch.cuda.current_stream(flat.device))
        self._branched = True
        with torch.cuda.stream(self._branch):
            yield

    @torch.no_grad()
    def _finish(self) -> None:
        """All gradients are there, and the backward that gave the last is over."""
        if self._branched:
            torch.cuda.current_stream(self._branch.device).wait_stream(self._branch)
            self._branched = False
        for bucket in self._buckets:
            self._hand_out(bucket)
        order = self._order
        self.abandon()
        recorder = current()
        if recorder is not None and self in recorder.unfinished:
            recorder.unfinished.remove(self)
        if not self._planned:
            with hidden():
                self._rebuild(order)

    def _hand_out(self, bucket: Bucket) -> None:
        """Puts the averages where the gradients are. A gradient that this backward has made gives way to a part of the
        bucket; one that was there before, and that others may hold, is written."""
        parameters = [self._parameters[i] for i in bucket.members]
        old, new = [], []
        for parameter, part in zip(parameters, bucket.parts, strict=True):
            grad = parameter.grad
            if grad.data_ptr() == part.data_ptr() or _is_new(grad):
                parameter.grad = part
            else:
                old.append(grad)
                new.append(part)
        if old:
            torch._foreach_copy_(old, new)

    def _rebuild(self, order: list[int]) -> None:
        """Makes the buckets that stay, in the order in which the gradients came on the first rank."""
        told = [order]
        first = distributed.get_global_rank(self._group, 0)
        distributed.broadcast_object_list(told, first, group=self._group)
        order = told[0]
        tensors = [self._parameters[index] for index in order]
        self.keep(distributed._compute_bucket_assignment_by_size(tensors, self._limits, [], order)[0])


def _is_new(gradient: Tensor) -> bool:
    """Whether the backward that runs has made it, so that nobody holds it yet."""
    return gradient._version == 0 and gradient.is_contiguous()
