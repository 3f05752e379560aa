"""What a recorded call leaves for the captures of the same call.

A capture takes over from the recorded call its operations, to be compared with, and what was made from constants alone.
An eager call may read that on the host, or copy a list to the device: each such call gets the same. A capture can do
neither, and takes what the recorded call got.
"""

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from graphmod.trace.hazards import Hazard
from graphmod.trace.lines import Lines
from graphmod.trace.operations import Step, address, each_tensor, facts, tensors_in


class Kept:
    """What is kept of one operation on constants.

    Args:
        kind: `result`, to be used in place of the operation; `arguments`, in place of its host tensors; or `masks`, the
            indices in place of masks.
        constants: the arguments of which that depends.
        compared: whether its arguments are no constants, but what it reads of them is compared before each replay.
    """

    def __init__(self, kind: str, constants: list[Tensor], compared: bool = False) -> None:
        self.kind, self.compared = kind, compared
        self._constants = [] if kind == "result" else constants
        self._value: Any = None
        self.where: set[int] = set()  # the addresses of what stands in for arguments
        self._made_at: set[int] = set()
        self._written = False

    def keep(self, result: Any) -> None:
        """Takes in the operation's result, of the recorded call."""
        if self.kind == "result":
            self._made_at = {address(tensor) for tensor in tensors_in((result,))} - {0}
            self._value = each_tensor(result, lambda tensor: tensor.detach().clone())
            return
        masks = self.kind == "masks"
        device = next((tensor.device for tensor in tensors_in((result,)) if masks or tensor.is_cuda), None)
        parts = [one.nonzero().unbind(1) if masks else (one,) for one in self._constants]
        self._value = [[part.to(device) for part in own] for own in parts]  # in the place of each constant
        self.where = set(map(address, tensors_in(self._value)))
        self._constants = []

    def note_write(self, where: int) -> None:
        """Takes in that the recorded call changed what lies at an address."""
        self._written = self._written or where in self._made_at

    def result(self) -> Any:
        """The result for a capture: a copy, made anew in each replay, where the code goes on to change it."""
        return each_tensor(self._value, torch.clone if self._written else torch.Tensor.detach)

    def in_place_of(self, constants: list[Tensor], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of a capture, with these host tensors replaced by those on the device."""
        other = {id(tensor): kept for tensor, kept in zip(constants, self._value, strict=True)}

        def swap(value: Any) -> Any:
            if self.kind == "masks":
                indices = isinstance(value, (list, tuple))
                return [one for part in value for one in other.get(id(part), [part])] if indices else value
            return each_tensor(value, lambda tensor: other.get(id(tensor), (tensor,))[0])

        return tuple(map(swap, args)), {key: swap(value) for key, value in kwargs.items()}


class Script:
    """The record of an eager call, for the captures of the same call.

    Attributes:
        kept: index of an operation -> what is kept of it.
        read_at: how many operations come before what reads on the host, is none itself, and is compared before replays.
        late: index of an operation -> of one that reads a truth value on the host, which a replay has to compute first.
        aims: index of an operation -> makes the memory that its result is to be computed into.

    Args:
        trace: its operations.
        lifted: those of them apart that show a tensor made of Python values: when they come, nobody may care.
        numbers: the indices of those that read a number which is drawn on the host.
    """

    def __init__(self, trace: list[Step], lifted: list[Step], numbers: Container[int]) -> None:
        self.trace, self.lifted = trace, lifted
        self.numbers = numbers
        self.kept: dict[int, Kept] = {}
        self.read_at: set[int] = set()
        self.late: dict[int, Hazard] = {}
        self.aims: dict[int, Callable[[], Tensor]] = {}
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # index in `lifted` -> what was made, on the host and there

    def note_write(self, where: int) -> None:
        """Takes in that the call changed what lies at an address."""
        for kept in self.kept.values():
            kept.note_write(where)

    def note_made(self, index: int, tensor: Tensor) -> None:
        """Takes in the tensor of Python values that a step of `lifted` shows."""
        kept = tensor.detach().clone()
        self._made[index] = kept.cpu(), kept

    def shows(self, index: int) -> bool:
        """Whether the recorded call showed a tensor of Python values there."""
        return index in self._made

    def shows_list(self, index: int) -> bool:
        """Whether the recorded call showed a tensor of several values there."""
        return index in self._made and self._made[index][0].dim() > 0

    def made(self, index: int, now: Tensor) -> Tensor | None:
        """A copy of that tensor; None where it had other values than `now`, on the host."""
        if index not in self._made:
            return None
        then, kept = self._made[index]
        same = now.dtype is then.dtype and torch.equal(now.nan_to_num(), then.nan_to_num())
        return kept.clone() if same else None

    def differs(self, index: int, step: Step, where: Callable[[], Lines]) -> str | None:
        """Why an operation of a capture is not the one of the recorded call; `where` tells its lines."""
        known = self.lifted if facts(step.op).lifts else self.trace
        if index >= len(known):
            return f"{where().location} does more operations than the call before, which did {len(known)}"
        return None if _same(known[index], step) else _differs(known[index], step, where().location)

    def has(self, index: int, step: Step) -> bool:
        """Whether the recorded call did the same operation there, with the same scalars."""
        return index < len(self.trace) and _same(self.trace[index], step)

    def reads_otherwise(self, trace: list[Step], truths: dict[int, bool]) -> bool:
        """Whether a later call, which did these operations, read another truth value where a replay would have looked.

        Args:
            truths: what the call read, by index of the operation.
        """
        other = next((at for at in self.late if at in truths and truths[at] != self.kept[at].result()), None)
        return other is not None and self.begins_with(trace[:other])

    def begins_with(self, trace: list[Step]) -> bool:
        """Whether the recorded call began with these operations."""
        return all(self.has(at, step) for at, step in enumerate(trace))

    def compare(self, trace: list[Step], lifted: list[Step]) -> str | None:
        """Why these operations of a later call are not those of the recorded one; None where they are.

        A difference means that the code has state in Python (a counter, a learning rate, a branch) that a graph would
        freeze at its present value.
        """
        for old, new in (*zip(self.trace, trace, strict=False), *zip(self.lifted, lifted, strict=False)):
            if not _same(old, new):
                return _differs(old, new, new.location)
        return self.ends_otherwise(trace, lifted)

    def ends_otherwise(self, trace: list[Step], lifted: list[Step]) -> str | None:
        """Why a call that did these operations, and no others so far, is not all of the recorded call."""
        for before, now in ((self.trace, trace), (self.lifted, lifted)):
            if len(before) != len(now):
                extra = max(before, now, key=len)[min(len(before), len(now))]
                return (
                    f"the call before did {len(before)} operations, this one {len(now)}; the first that differs is "
                    f"{facts(extra.op).short} at {extra.location}"
                )
        return None


def _same(old: Step, new: Step) -> bool:
    return old.op is new.op and old.scalars == new.scalars


def _differs(old: Step, new: Step, where: str) -> str:
    """Why an operation is another than that of the same index in the record of an earlier call."""
    name = facts(new.op).short
    if old.op is not new.op:
        return (
            f"{where} does {name} where the call before did {facts(old.op).short}: a graph would "
            "freeze one side of a branch in Python"
        )
    if facts(new.op).lifts:
        return f"{where} makes a tensor of other values than in the call before: a graph would freeze them"
    values = [(a, b) for a, b in zip(old.scalars, new.scalars, strict=False) if a != b]
    was, now_is = values[0] if values else (old.scalars, new.scalars)
    return (
        f"{where} passes {now_is!r} to {name} where the call before passed {was!r}: a graph would freeze a Python "
        "number; make it a tensor and fill_ it"
    )
