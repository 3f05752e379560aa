"""What a recorded call itself changed of what it read, so that a replay, in which no Python runs, would go wrong; and
what helps, there and where something changes from one call to the next.
"""

from __future__ import annotations

import inspect
import queue
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphmod.guards.notes import Note, Notes, geometry
from graphmod.guards.values import (
    BUFFERS,
    MISSING,
    STATE_OF_LOCK,
    Answer,
    Cached,
    Cell,
    Data,
    Subclasses,
    content_now,
    describe,
    is_plain,
    is_shown,
    kind_of,
    same_content,
)
from graphmod.trace.lines import Lines, location
from graphmod.trace.recorder import Recorder
from graphmod.trace.untraced import identity

NOT_REPLAYED = "which a replay would not do"
KEEP = "keep it in a tensor that is changed in place, or pass it as an argument"
KEEP_TENSORS = "bind tensors instead, detached, or a new list, dict or plain object of such"
DETACH = (
    "return it, bind it detached, or capture the whole step with its backward. Of weight_norm and spectral_norm, "
    "torch.nn.utils.parametrizations has some that bind nothing"
)
IN_PLACE = "change it in place (copy_, add_), or pass it as an argument"
KEEP_ITEMS = "do that after the call, with what the call returns"
KEEP_LOCK = "take it and release it inside the call, or outside"
REGISTER = "register classes before the call"
KEEP_COUNT = (
    f"{KEEP}. If it counts microbatches, capture forward and backward only, and call optimizer.step() outside, after "
    "the last of them"
)
KEEP_ITERATOR = "take them outside and pass them as an argument"
OUTSIDE = "keep the code that does outside of the captured call"
IN_THREAD = "run it in this thread"
DRAW = "draw them outside and pass them as an argument, or draw on the device with torch"
FILLED = "call it once before, or let the next call be captured, which finds it"
TWO_STEPS = (
    "make two steps of it, each captured on its own, and switch requires_grad between their calls; a network that "
    "only lends its gradient needs no switch at all (examples/gan.py)"
)
_CYCLED = ("betas", "momentum")  # which OneCycleLR and CyclicLR change along with the rate
_NO_CYCLE = "build the scheduler (OneCycleLR, CyclicLR) with cycle_momentum=False"
_SCHEDULER = "keep the scheduler's step() outside of the captured call"
_TENSOR = "pass it as a tensor argument, or keep it fixed"
_FIXED = "keep it fixed, or pass it as an argument"

SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
_LAZY = ("_scale", "_growth_tracker")  # which a GradScaler makes when it is first used


class Change(NamedTuple):
    """What a call did to something that was there before it, and that no replay would do.

    Attributes:
        effect: what it did.
        where: see `lines_of`.
        remedy: what to do about it.
        owner: the identity of the object that changed; 0 where there is none.
        place: which place of it; its identity, if all of it.
    """

    effect: str
    where: Lines
    remedy: str
    owner: int = 0
    place: Any = None

    def __str__(self) -> str:
        return f"{self.effect} ({self.where.location}), {NOT_REPLAYED}; {self.remedy}"


def lines_of(where: tuple | None) -> Lines:
    """The lines of the code that read something; None stands for code that nobody saw."""
    if where is None or not where[0]:
        return Lines("code inside" if where is None else "the call", None, backward=False)
    code, line, *user = where
    told = location(code, line)
    return Lines(location(*user[0]), told, backward=False) if user else Lines(told, None, backward=False)


def line_of(where: tuple) -> str:
    """These lines, in words."""
    return lines_of(where).location


def name_of(note: Note) -> str:
    """What a place is called in a message."""
    if isinstance(note.container, Cell):
        return "a variable it closes over"
    if isinstance(note.owner, list):
        return f"item {note.key}"
    if isinstance(note.key, Tensor):
        return f"the item of a {type(note.key).__name__} of shape {tuple(note.key.shape)}"
    if note.container is note.owner and isinstance(note.owner, dict) and type(note.key) is int:
        return f"an item of a {type(note.owner).__name__}"
    return repr(note.key)


def differs(name: str, key: Any, was: Any, now: Any, where: tuple, optimizer: Any = None) -> str:
    """A value that is another than in the recorded call, in words, and what helps.

    Args:
        name: of it in the message.
        key: its own.
        where: see `lines_of`.
        optimizer: whose setting it is; None where it is none.
    """
    remedy = between_calls(key, was, now, optimizer)
    told = f"was {describe(was)} when it was recorded and is {'gone' if now is MISSING else describe(now)}"
    if type(was) is type(now) and not (is_shown(was) or is_shown(now)):
        told = f"is another {type(was).__name__} than when it was recorded"
    return f"{name}{_of(optimizer)} {told} (read at {line_of(where)})" + (f"; {remedy}" if remedy else "")


def bound_anew(notes: Notes) -> list[Note]:
    """The places where a call put something else, and nobody looked at what was there, but for the values of a tensor,
    or went through all that is in the container; and the memory of tensors that were given other. Each once; `read`
    tells of such a tensor."""
    if notes.of_dynamo:  # whose code reads by itself
        return []
    found: dict[tuple, Note] = {}
    for note in notes.notes.values():
        if note.changed() and (note.read or note.place not in found):
            found[note.place] = note
    for note in notes.notes.values() if found else ():
        whole = identity(note.container) in notes.contents or isinstance(note.owner, threading.local)
        fixed = note.read and (note.form is None or not isinstance(note.now(), Tensor))
        if fixed or whole or is_plain(now := note.now()) or now is MISSING:
            found.pop(note.place, None)
    return [*found.values(), *(note for met in notes.tensors.values() if (note := met.data()) is not None)]


def what_changed(notes: Notes, bound: Collection[Note] = ()) -> str | None:
    """The first of what a call changed, in words; None if that is nothing. `bound`: see `all_changes`."""
    return next(map(str, all_changes(notes, bound)), None)


def imports(notes: Notes) -> bool:
    """Whether a call was the first to import a module, which later calls find."""
    return any(
        note.container is sys.modules and note.before() is MISSING and note.changed() for note in notes.notes.values()
    )


def all_changes(notes: Notes, bound: Collection[Note] = ()) -> Iterator[Change]:
    """All that a call changed of what it read, but for places that are bound anew at each replay."""
    known = {note.place for note in bound}
    if notes.unreadable is not None:
        error, where = notes.unreadable
        yield Change(f"reads an object that cannot be looked into without harm: {error}", lines_of(where), OUTSIDE)
    if notes.unseen:
        yield Change(f"runs where nobody can watch it: {notes.unseen}", lines_of(None), OUTSIDE)
    if notes.elsewhere is not None:
        yield Change("runs code in another thread, where nobody can watch it", lines_of(notes.elsewhere), IN_THREAD)
    for value, kind, where in notes.iterators:
        yield Change(f"takes items from a {kind}", lines_of(where), KEEP_ITERATOR, place=identity(value))
    for effect, where, generator in notes.chance.drawn():
        yield Change(effect, lines_of(where), DRAW, place=generator)
    kept_by = keepers(notes)
    told: set[int] = set()
    for note in sorted(notes.notes.values(), key=lambda note: not issubclass(type(note.owner), SCHEDULERS)):
        if known and note.place in known:
            continue
        if note.changed() and not issubclass(type(note.now()), Recorder):
            told.add(id(note.owner))
            yield _change_of(note, kept_by.get(id(note.owner)))
    yield from _changed_tensors(notes, {id(note.owner) for note in bound if isinstance(note.container, Data)})
    yield from _kept_locks(notes)
    for value, items, where in notes.contents.values():
        if id(value) not in told and not same_content(items, content_now(value)):
            keeper = kept_by.get(id(value))
            if isinstance(value, Answer):
                effect = _changes(value.of, items[0], content_now(value)[0])
            else:
                effect = f"changes the items of a {kind_of(value)}{_of(keeper)} as it runs"
            yield Change(
                effect, lines_of(where), against_change(value, None, items, keeper), id(value), identity(value)
            )
        elif isinstance(value, Cached) and (kept := value.came_to_hold()):
            effect = f"is the first to call {value.function!r}, which keeps its result (one {type(kept[0]).__name__})"
            yield Change(effect, lines_of(where), FILLED, id(value), identity(value))


def _change_of(note: Note, keeper: Any) -> Change:
    """The change of what is at one place, which `keeper` uses; see `keepers`."""
    was, now, name = note.before(), note.now(), name_of(note)
    effect = _changes(f"{name}{_of(keeper)}", was, now, note.gone)
    remedy = against_change(note.owner, note.key, was, keeper)
    if remedy == KEEP and isinstance(now, Tensor):
        remedy = IN_PLACE
        if now.requires_grad and not note.read:
            effect, remedy = f"binds {name} to a tensor with a history, whose backward may come", DETACH
    elif remedy == KEEP and not (note.read or is_plain(now)):
        remedy = KEEP_TENSORS
    return Change(effect, lines_of(note.where), remedy, id(note.owner), note.place)


def _changes(name: str, was: Any, now: Any, gone: bool = False) -> str:
    return f"changes {name} from {'what is gone' if gone else describe(was)} to {describe(now)} as it runs"


def _kept_locks(notes: Notes) -> Iterator[Change]:
    """Locks that the call took and has still."""
    for taken in notes.taken.values():
        was, now = taken.before, taken.answer.content()[0]
        if taken.times and was != now and identity(taken.answer) not in notes.contents:
            yield Change(_changes(STATE_OF_LOCK, was, now), lines_of(taken.where), KEEP_LOCK)


def _changed_tensors(notes: Notes, known: Collection[int]) -> Iterator[Change]:
    """Tensors that the call put elsewhere, or laid out otherwise, but for some (by identity)."""
    met_changed = [met for met in notes.tensors.values() if met.changed()]
    changed = [(met, tensor) for met in met_changed if (tensor := met.tensor) is not None and id(tensor) not in known]
    if not changed:
        return
    places = {id(note.before()): note for note in notes.notes.values() if isinstance(note.before(), Tensor)}
    for met, tensor in changed:
        place = places.get(id(tensor))
        name = "a tensor" if place is None else name_of(place)
        if geometry(tensor)[:-1] == met.geometry[:-1]:
            effect, remedy = f"switches requires_grad of {name} as it runs", TWO_STEPS
        else:
            effect = f"moves or reshapes {name} as it runs"
            remedy = KEEP if place is None else against_change(place.owner, place.key, tensor, None)
        yield Change(effect, lines_of(met.where), remedy, id(tensor), identity(tensor))


def _of(keeper: Any) -> str:
    return "" if keeper is None else f" of {type(keeper).__name__}"


# -- what helps -------------------------------------------------------------------------------------------------------
def keepers(notes: Notes) -> dict[int, Any]:
    """What an optimizer or a GradScaler keeps in dicts (by identity) -> the optimizer or GradScaler."""
    found: dict[int, Any] = {}
    for note in notes.notes.values():
        owner = note.owner
        if issubclass(type(owner), torch.optim.Optimizer):
            found.update((id(group), owner) for group in owner.param_groups)
            found.update((id(state), owner) for state in owner.state.values())
            found[id(owner.state)] = owner
        elif issubclass(type(owner), torch.amp.GradScaler):
            found[id(owner)] = owner
            if note.key == "_per_optimizer_states":
                found[id(note.before())] = owner
    return found


def against_change(owner: Any, key: Any, was: Any, keeper: Any) -> str:
    """What helps where the call itself changes something.

    Args:
        owner, key: where it is.
        was: what was there before.
        keeper: see `keepers`.
    """
    if isinstance(owner, SCHEDULERS):
        return _SCHEDULER
    if isinstance(keeper, torch.amp.GradScaler):
        if key in _LAZY and was is None:
            return "make it before the first call: scaler.scale(torch.ones((), device=...))"
        return "keep the GradScaler's unscale_(), step() and update() outside of the captured call"
    optimizer = owner if isinstance(owner, torch.optim.Optimizer) else keeper
    if optimizer is not None:
        if key in ("lr", "initial_lr", "_opt_called", *_CYCLED):
            return _SCHEDULER
        return f"keep the step() of this {type(optimizer).__name__} outside of the captured call"
    if key == "require_forward_param_sync" and isinstance(owner, nn.parallel.DistributedDataParallel):
        return "call what it holds where nothing is trained: ddp.module(...)"
    if isinstance(owner, nn.Module) and key == "training":
        return "call train() and eval() outside of the captured call"
    if isinstance(owner, Subclasses):
        return REGISTER
    if isinstance(owner, Answer):
        return KEEP_LOCK if owner.of == STATE_OF_LOCK else KEEP_ITEMS
    if isinstance(owner, BUFFERS) or (isinstance(owner, (list, deque, set, queue.SimpleQueue)) and key is None):
        return KEEP_ITEMS
    return KEEP_COUNT if type(was) is int else KEEP


def between_calls(key: Any, was: Any, now: Any, optimizer: torch.optim.Optimizer | None) -> str:
    """What helps where a value is another than in the call before.

    Args:
        optimizer: whose setting it is; None where it is none.
    """
    number = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (was, now))
    if optimizer is not None:
        if key == "lr" and number:
            return tensor_rate(optimizer)
        if key in _CYCLED:
            return f"{_NO_CYCLE}, or keep the step() of this {type(optimizer).__name__} outside of the captured call"
        return f"keep it fixed, or keep the step() of this {type(optimizer).__name__} outside of the captured call"
    if number:
        return _TENSOR
    if isinstance(was, Tensor) and isinstance(now, Tensor):
        return IN_PLACE
    return _FIXED if is_plain(was) and is_plain(now) else ""


def tensor_rate(optimizer: torch.optim.Optimizer) -> str:
    """How an optimizer gets a rate that may change under a graph."""
    name, known = type(optimizer).__name__, inspect.signature(type(optimizer).__init__).parameters
    flag = next((flag for flag in ("fused", "capturable") if flag in known), None)
    if flag is None:
        return f"keep the step() of {name} outside of the captured callable"
    ready = isinstance(optimizer.param_groups[0].get("lr"), Tensor) or all(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    flags = "" if ready else f"{flag}=True, "
    return (
        f"build {name} with {flags}lr=torch.tensor(...) on the device, and change that in place: lr.fill_(...), as "
        "schedulers do with a tensor"
    )
