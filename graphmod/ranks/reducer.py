"""Averages gradients over ranks while a backward still runs, in buckets.

The buckets are those of DistributedDataParallel: one at first, and from the second backward on as many as its limits
say, filled in the order in which gradients came (`dist._compute_bucket_assignment_by_size`, which it uses itself), so
that a sum over ranks is made in the same order. Unlike its own reducer this one hangs at parameters, whose
AccumulateGrad nodes a capture makes anew, and waits for nothing on the host, so that it can be captured. In a capture
collectives are a branch beside the backward; in an eager call they run on its stream, because kernels on a second one
would slow down every later graph.

Gradients of a bucket lie side by side in one piece of memory. A capture computes them straight into it where it can
(`Script.aims`). So that it does the operations of the call it was recorded from all the same, there are two operators
for what it may leave out: `bucket`, which makes the memory where no gradient is in it yet, and `gather_`, which copies
those that are not.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from graphmod.errors import Diverged
from graphmod.torch_private import bucket_assignment, foreach_copy_, queue_callback, storage_uses
from graphmod.trace.dispatch import beside_the_call, current, hidden

_operators = torch.library.Library("graphmod", "FRAGMENT")
_operators.define("bucket(Tensor[] gradients) -> Tensor")
_operators.define("gather_(Tensor(a!) bucket, Tensor[] gradients) -> ()")


def alone(gradient: Tensor, arriving: bool) -> bool:
    """Whether no other tensor shares its memory, as the gradient of a sum and of a view of one of its terms do: the
    backward would go on to read what has been summed by then.

    Args:
        arriving: it is the one whose hook runs, which autograd itself may still hold.
    """
    uses = uses_alone()[arriving]
    return uses is not None and storage_uses(gradient.untyped_storage()._cdata) <= uses


@functools.cache
def uses_alone() -> tuple[int | None, int | None]:
    """How many uses the memory of a gradient has if no other tensor shares it, later in the backward that made it and
    in its own hook; None where shared memory has no more, so that it cannot be told. Autograd changed what it holds
    between versions of torch, so a small backward shows it. To be asked first where no backward runs."""
    with beside_the_call(), torch.inference_mode(False), torch.enable_grad():
        apart, shared = (_uses_in_hooks(share) for share in (False, True))
    later, arriving = ((few if few < many else None) for few, many in zip(apart, shared, strict=True))
    return later, arriving


def _uses_in_hooks(share: bool) -> tuple[int, int]:
    """Uses of the memory of the first of two gradients in the hook of the second, and in its own."""
    first, second = (torch.ones(2, device="cpu", requires_grad=True) for _ in range(2))
    found: list[int] = []
    hold: list[Tensor] = []

    def look(_: Tensor) -> None:
        if first.grad is None:
            return
        if share and not hold:
            hold.append(first.grad.view(2))
        found.append(storage_uses(first.grad.untyped_storage()._cdata))

    for leaf in (first, second):
        leaf.register_post_accumulate_grad_hook(look)
    late = second * 2  # made first, so its backward comes last
    (late + first * 3).sum().backward()
    arriving, later = found
    return later, arriving


class Bucket:
    """Gradients that are summed in one collective.

    Attributes:
        members: the indices of their parameters.
        pending: how many are still to come in this backward.
        parts: where they lie, in one piece of memory, once they are being summed.
    """

    def __init__(self, members: list[int], parameters: list[Tensor]) -> None:
        self.members, self.pending = members, len(members)
        self.parts: list[Tensor] = []
        self._like = [parameters[index] for index in members]
        self._lasting: tuple[Tensor, Any, int] | None = None  # its storage, and its uses while nobody holds a part
        self._aimed: tuple[Tensor, list[Tensor]] | None = None
        self._made: set[int] = set()  # members that an operation was to compute into their parts

    def forget(self) -> None:
        """There is no backward any more that fills it."""
        self.parts, self.pending, self._aimed = [], len(self.members), None
        self._made.clear()

    def part_for(self, member: int) -> Tensor:
        """In a capture: where the gradient that is `member`-th among its members is to be computed."""
        if self._aimed is None:
            flat = _empty_for(self._like)
            self._aimed = flat, _parts_for(flat, self._like)
        self._made.add(member)
        return self._aimed[1][member]

    def place(self, gradients: list[Tensor], recorded: bool) -> Tensor:
        """The memory in which the gradients are to lie side by side, and `parts` of it for them.

        Args:
            recorded: the call is recorded, or captured.

        Raises:
            Diverged: something else was computed where a gradient was to be.
        """
        if not recorded:
            # The same memory as the last time, unless somebody still holds gradients there: an optimizer's graph reads
            # them at their address.
            if self._lasting is None or storage_uses(self._lasting[1]._cdata) > self._lasting[2]:
                flat = _empty_for(gradients)
                storage = flat.untyped_storage()
                self._lasting = flat, storage, storage_uses(storage._cdata)
            self.parts = _parts_for(self._lasting[0], gradients)
            return self._lasting[0]
        parts = [] if self._aimed is None else self._aimed[1]
        if any(gradients[i].data_ptr() != parts[i].data_ptr() for i in self._made):
            raise Diverged("a gradient was made by another operation than in the call before")
        global _aimed
        _aimed = self._aimed  # memory that some of the gradients already lie in
        try:
            flat = torch.ops.graphmod.bucket(gradients)
        finally:
            _aimed = None
        self.parts = _parts_for(flat, gradients)
        return flat


_aimed: tuple[Tensor, list[Tensor]] | None = None


def _bucket(gradients: list[Tensor]) -> Tensor:
    return _empty_for(gradients) if _aimed is None else _aimed[0]


def _gather(bucket: Tensor, gradients: list[Tensor]) -> None:
    parts = _parts_for(bucket, gradients)
    apart = [i for i, (part, one) in enumerate(zip(parts, gradients, strict=True)) if part.data_ptr() != one.data_ptr()]
    if apart:
        foreach_copy_([parts[i] for i in apart], [gradients[i] for i in apart])


_operators.impl("bucket", _bucket, "CompositeExplicitAutograd")
_operators.impl("gather_", _gather, "CompositeExplicitAutograd")


def _sizes_of(tensors: list[Tensor]) -> list[int]:
    """Elements for each. They begin at multiples of 16 bytes, as kernels need it to read several elements at once;
    others would add up a norm in another order."""
    step = 16 // tensors[0].element_size()
    return [-(-tensor.numel() // step) * step for tensor in tensors]


def _empty_for(tensors: list[Tensor]) -> Tensor:
    """New memory for tensors of one dtype side by side; the gaps between them are zero."""
    size = sum(_sizes_of(tensors))
    make = torch.empty if size == sum(tensor.numel() for tensor in tensors) else torch.zeros
    return make(size, dtype=tensors[0].dtype, device=tensors[0].device)


def _parts_for(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The part of each in such memory, contiguous."""
    parts = zip(flat.split(_sizes_of(tensors)), tensors, strict=True)
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in parts]


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
        self._plan(*bucket_assignment(self._parameters, [sys.maxsize])[:1])
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
            queue_callback(functools.partial(self._arrived, index, False))
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
                queue_callback(self._finish)

    @torch.no_grad()
    def _sum(self, bucket: Bucket, arriving: int) -> None:
        """Sums a bucket in the hook of the parameter `arriving`; -1 where that is over."""
        recorder = current()
        if recorder is not None:
            recorder.before_communicating()
        grads = [_gradient_of(self._parameters[i]) for i in bucket.members]
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
        if self._branch is not None and self._branched:
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
            grad = _gradient_of(parameter)
            if grad.data_ptr() == part.data_ptr() or _is_new(grad):
                parameter.grad = part
            else:
                old.append(grad)
                new.append(part)
        if old:
            foreach_copy_(old, new)

    def _rebuild(self, order: list[int]) -> None:
        """Makes the buckets that stay, in the order in which the gradients came on the first rank."""
        told = [order]
        first = distributed.get_global_rank(self._group, 0)
        distributed.broadcast_object_list(told, first, group=self._group)
        order = told[0]
        tensors = [self._parameters[index] for index in order]
        self.keep(bucket_assignment(tensors, self._limits, [], order)[0])


def _gradient_of(parameter: Tensor) -> Tensor:
    """The gradient of a parameter whose hook has run in this backward."""
    assert parameter.grad is not None
    return parameter.grad


def _is_new(gradient: Tensor) -> bool:
    """Whether the backward that runs has made it, so that nobody holds it yet."""
    return gradient._version == 0 and gradient.is_contiguous()
