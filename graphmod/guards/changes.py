"""What a recorded call itself changed of what it read, so that a replay, in which no Python runs, would go wrong."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphmod.guards.contents import content, describe, same_content
from graphmod.guards.lookup import Cell
from graphmod.guards.note import Note
from graphmod.guards.notes import Notes

NOT_REPLAYED = "which a replay would not do"
KEEP = "keep it in a tensor that is changed in place, or pass it as an argument"

KEEP_ITERATOR = "take them outside and pass them as an argument"


class Change(NamedTuple):
    """What a call did to something that was there before it, and that no replay would do.

    Attributes:
        effect: what it did.
        where: see `lines_of`.
        remedy: what to do about it.
        owner: the identity of the object that changed; 0 where there is none.
    """

    effect: str
    where: tuple[str, str | None]
    remedy: str
    owner: int = 0

    def __str__(self) -> str:
        return f"{self.effect} ({_place(self.where)}), {NOT_REPLAYED}; {self.remedy}"


def lines_of(where: tuple) -> tuple[str, str | None]:
    """File, line and function of the user's code that read something, and of the library's that it had called."""
    code, line, user = where if len(where) == 3 else (*where, None)
    if not code:
        return "the call", None
    told = f"{code.co_filename}:{line} in {code.co_name}"
    return (told, None) if user is None else (f"{user[0].co_filename}:{user[1]} in {user[0].co_name}", told)


def _place(lines: tuple[str, str | None]) -> str:
    return lines[0] if lines[1] is None else f"{lines[0]}, by way of {lines[1]}"


def line_of(where: tuple) -> str:
    """The same, in words."""
    return _place(lines_of(where))


def name_of(note: Note) -> str:
    """What a place is called in a message."""
    if isinstance(note.container, Cell):
        return "a variable it closes over"
    if isinstance(note.owner, list):
        return f"item {note.key}"
    if isinstance(note.key, Tensor):
        return f"the item of a {type(note.key).__name__} of shape {tuple(note.key.shape)}"
    return repr(note.key)


def what_changed(notes: Notes) -> str | None:
    """The first of what a call changed, in words; None if that is nothing."""
    first = next(all_changes(notes), None)
    return None if first is None else str(first)


def all_changes(notes: Notes) -> Iterator[Change]:
    """All that a call changed of what it read."""
    if notes.unreadable is not None:
        error, where = notes.unreadable
        yield Change(f"reads an object that cannot be looked into without harm: {error}", lines_of(where), _OUTSIDE)
    if not notes.watched:
        effect = (
            "runs where nobody can watch it: this thread's trace functions are suspended, or other tools (a debugger, "
            "a profiler) hold all places of sys.monitoring"
        )
        yield Change(effect, ("code inside", None), _OUTSIDE)
    if notes.elsewhere is not None:
        yield Change("runs code in another thread, where nobody can watch it", lines_of(notes.elsewhere), _IN_THIS)
    for _, kind, where in notes.iterators:
        yield Change(f"takes items from a {kind}", lines_of(where), KEEP_ITERATOR)
    drawn = notes.chance.drawn()
    if drawn is not None:
        library, where = drawn
        yield Change(
            f"draws random numbers on the host ({library})",
            lines_of(where) if where else ("code inside", None),
            "draw them outside and pass them as an argument, or draw on the device with torch",
        )
    replaced = replacements(notes)
    optimizers = _optimizers_of(notes)
    told: set[int] = set()
    for note in sorted(notes.notes.values(), key=lambda note: not isinstance(note.owner, _SCHEDULERS)):
        if id(note.owner) not in replaced and note.changed():
            was, now = note.before(), note.now()
            told.add(id(note.owner))
            remedy = _remedy(note.owner, note.key, optimizers)
            if isinstance(now, Tensor) and was is now:
                effect = f"moves or reshapes {name_of(note)} as it runs"
            else:
                effect = f"changes {name_of(note)} from {describe(was)} to {describe(now)} as it runs"
            yield Change(effect, lines_of(note.where), remedy, id(note.owner))
    for value, items, where in notes.contents.values():
        if id(value) not in replaced and id(value) not in told and not same_content(items, content(value)):
            effect = f"changes the items of a {type(value).__name__} as it runs"
            yield Change(effect, lines_of(where), _remedy(value, None, optimizers), id(value))


_SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
_IN_THIS = "run it in this thread"
_OUTSIDE = "keep the code that does outside of the captured call"


def _optimizers_of(notes: Notes) -> dict[int, torch.optim.Optimizer]:
    """The settings of each parameter group, and the state of each optimizer (by identity) -> the optimizer."""
    found: dict[int, torch.optim.Optimizer] = {}
    for note in notes.notes.values():
        owner = note.owner
        if isinstance(owner, torch.optim.Optimizer):
            found.update((id(group), owner) for group in owner.param_groups)
            found.update((id(state), owner) for state in owner.state.values())
            found[id(owner.state)] = owner
    return found


def _remedy(owner: Any, key: Any, optimizers: dict[int, torch.optim.Optimizer]) -> str:
    """What helps against a change of an object of this kind."""
    scheduler = "keep the scheduler's step() outside of the captured call"
    if isinstance(owner, _SCHEDULERS):
        return scheduler
    if isinstance(owner, torch.amp.GradScaler):
        return "keep the GradScaler's step() and update() outside of the captured call"
    optimizer = owner if isinstance(owner, torch.optim.Optimizer) else optimizers.get(id(owner))
    if optimizer is not None:
        if key in ("lr", "initial_lr", "_opt_called"):
            return scheduler
        return f"keep the step() of this {type(optimizer).__name__} outside of the captured call"
    if isinstance(owner, nn.Module) and key == "training":
        return "call train() and eval() outside of the captured call"
    return KEEP


def replacements(notes: Notes) -> dict[int, Any]:
    """Containers (by identity) in whose place the call put another with the same content -> that other."""
    found = {}
    for note in notes.notes.values():
        if note.items is not None:
            before, now = note.before(), note.now()
            if before is not now and type(before) is type(now) and not note.changed():
                found[id(before)] = now
    return found
