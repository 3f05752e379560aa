"""A recorded call: an eager call that is watched, so that its capture can be decided on before any is tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphmod.guards.changes import all_changes, imports, line_of, what_changed
from graphmod.guards.guards import Guards
from graphmod.guards.notes import Notes
from graphmod.guards.values import content, dict_of
from graphmod.reads.frames import noting
from graphmod.signature.call import Call, Flat, Given
from graphmod.step.eager_parts import RecordedPart, RecordedParts
from graphmod.step.found_parts import FoundParts
from graphmod.step.results import bind, not_to_be_made_again, outline, resolved
from graphmod.torch_private import (
    any_autocast,
    backward_threads,
    frames_compiled,
    next_sequence_number,
    set_backward_threads,
)
from graphmod.trace import dispatch
from graphmod.trace.garbage import no_garbage_collection
from graphmod.trace.hazards import Hazard
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.operations import address
from graphmod.trace.recorder import Recorder
from graphmod.trace.script import Script
from graphmod.trace.undo import Undo, undoing
from graphmod.trace.untraced import identity

BACKWARD_OUTSIDE = (
    "holds the forward of a DistributedDataParallel, whose backward averages gradients outside of the call; wrap the "
    "whole step, or the layers: graph_layers(model)"
)


RETURNED_AS_FOUND = (
    "returns a container of tensors that was there before the call, with others that have a backward; return a new one"
)


class keeping_none:
    """Inside, each use of a weight is cast for itself, and what autocast keeps stays as it is."""

    def __init__(self) -> None:
        self._before = torch.is_autocast_cache_enabled()

    def __enter__(self) -> None:
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self._before)


@dataclass(eq=False, repr=False)
class Recording:
    """What one recorded call showed.

    Attributes:
        script: its operations, and what it made of constants.
        host_draws: what it drew on the host, to be drawn again before each replay.
        generators: those it passed to random operations.
        backward, random: whether a backward ran inside; whether random numbers were drawn.
        communicates: whether other processes took part in it.
        guards: what its code read.
        returned: the outline of its result, and of what it bound anew.
        kept: containers in its result that were there before, and that each replay returns.
        differentiable: whether a tensor in its result may have a backward.
        refused: why it is not to be captured; None where it may be.
        seconds: that it took.
        settles: whether torch.compile compiled something in it, or its code was the first to import a module, so that
            what it showed is not what the next call does.
        its_backward: what is known of backwards of its result; None where nobody asks for them.
        captured: whether a capture of it was tried, which costs no attempt besides its own.
        parts: its eager parts.
        judged_again: whether another call is to be recorded, which may show how it can be captured after all.
        follow: whether that is to find out how what is read on the host comes about.
    """

    script: Script
    host_draws: HostDraws
    generators: list[torch.Generator]
    backward: bool
    random: bool
    communicates: bool
    guards: Guards
    returned: tuple
    kept: Sequence[Any]
    refused: str | None
    seconds: float
    settles: bool
    parts: list[RecordedPart]
    differentiable: bool
    its_backward: Any = None
    captured: bool = False
    judged_again: bool = False
    follow: bool = False


def record(
    call: Call, gpu: int | None, *roots: Any, found: FoundParts | None = None, follows: bool = False
) -> Recording:
    """Makes a call and watches it; returns what was seen.

    Args:
        gpu: index of the GPU that it works on; None on the CPU.
        roots: what it works on besides its arguments.
        found: the functions that are eager parts, or may become some.
        follows: see `Recorder`.
    """
    began, compiled = time.perf_counter(), frames_compiled()
    recorder, notes, given = record_reads(call, gpu, *roots, found=found, follows=follows)
    refused = str(recorder.hazards[0]) if recorder.hazards else None
    refused = refused or (BACKWARD_OUTSIDE if recorder.unfinished else None)
    of_arguments = given.changed() or given.returned(call.result) or _asks_for_an_argument(call, given, notes)
    refused = refused or of_arguments
    otherwise = keep_as_found(call, notes)
    refused = refused or otherwise
    bound, whole = bind(notes, call.result, recorder)
    returned = outline(whole)
    refused = refused or not_to_be_made_again(returned[0])
    refused = refused or what_changed(notes, bound)
    late = late_hazards(call, recorder, notes)
    refused = refused or (str(late[0]) if late else None)
    parts = recorder.parts
    assert isinstance(parts, RecordedParts)
    refused = refused or parts.finish(recorder, bool(call.result.differentiable))
    changes = [] if refused is None else list(all_changes(notes))  # while what was there is not gone
    guards = Guards(notes, recorder.backward, bound, _of_arguments(call, notes))
    guards.learn_arguments(call.leaves)
    assert recorder.script is not None and recorder.host_draws is not None, "whoever records has them"
    made = Recording(
        recorder.script,
        recorder.host_draws,
        recorder.generators,
        recorder.backward,
        recorder.random,
        recorder.collectives > 0,
        guards,
        returned,
        whole.kept,
        refused,
        seconds=time.perf_counter() - began,
        settles=recorder.compiles or frames_compiled() != compiled or imports(notes),
        parts=parts.made,
        differentiable=any(tensor.requires_grad for tensor in call.result.leaves),
    )
    if found is not None and made.settles:
        found.give_up()
    elif made.refused is not None and recorder.reads_on_host:
        made.follow = made.judged_again = True
    elif found is not None and made.refused is not None and not (made.differentiable or of_arguments):
        made.judged_again = found.learn(recorder, changes, bound, made.refused)
    elif found is not None and made.refused is None:
        found.succeeded()
    return made


def late_hazards(call: Call, recorder: Recorder, notes: Notes) -> list[Hazard]:
    """What of a recorded call turns out at its end to be nothing that a replay could stand for."""
    found = [] if recorder.mask_saved is None or not call.result.differentiable else [recorder.mask_saved]
    reads = None if recorder.host_draws is None else recorder.host_draws.given
    if reads:  # on the host, of memory that is an argument's; code may find that elsewhere, too, and mean it there
        others = (one for one in _found(notes, call.flat.seen) if isinstance(one, Tensor))
        hazards = (reads.read_given.get(address(one)) for one in others)
        found += [hazard for hazard in hazards if hazard is not None][:1]
    return found


def keep_as_found(call: Call, notes: Notes) -> str | None:
    """Has each replay return the containers in a call's result that can be changed, and were there before it, as they
    are. Returns why it could not."""
    parts = (part[1] for part in call.result.seen.values() if part.__class__ is tuple)
    containers = {identity(one) for one in parts if not isinstance(one, (tuple, frozenset))}
    kept = [one for one in _found(notes) if identity(one) in containers] if containers else []
    if call.result.differentiable and any(Flat(one).leaves for one in kept):
        return RETURNED_AS_FOUND
    if kept:
        call.result = Flat(call.result.value, kept=kept)
    return None


def _found(notes: Notes, given: Collection[int] = ()) -> Iterator[Any]:
    """What was there before the call in attributes, variables and containers that its code read, but for those of
    objects (by identity) that it was `given`."""
    yield from (note.before() for note in notes.notes.values() if id(note.owner) not in given)
    for value, items, _ in notes.contents.values():
        yield from () if id(value) in given else items


def _asks_for_an_argument(call: Call, given: Given, notes: Notes) -> str | None:
    """Of which argument the code asks what is another in each call, in words; None of none."""
    asked = next((one for one in notes.identified if one in call.flat.seen), None)
    if asked is None:
        return None
    what, where = notes.identified[asked]
    return (
        f"asks which {what} its argument {given.name(asked)!r} is ({line_of(where)}), and that is another in each "
        "call; compare what is in it"
    )


def _of_arguments(call: Call, notes: Notes) -> set[int]:
    """The identities of the containers in a call's arguments that its code has found nowhere else: what is in them is
    in the signature."""
    containers = {key for key, part in call.flat.seen.items() if part.__class__ is tuple}
    given = _containers([call.args, call.kwargs], containers)
    while shared := [one for one in _found(notes, given) if id(one) in given]:
        given -= _containers(shared, given)
    return given


def _containers(values: list[Any], known: Collection[int]) -> set[int]:
    """The identities of all tuples, and of the `known` containers, among values and inside of those."""
    found: set[int] = set()
    while values:
        one = values.pop()
        if (type(one) is tuple or id(one) in known) and id(one) not in found:
            found.add(id(one))
            values += [*(one if type(one) is tuple else content(one) or ()), *(dict_of(one) or {}).values()]
    return found


def record_reads(
    call: Call,
    gpu: int | None,
    *roots: Any,
    before_collective: Callable | None = None,
    found: FoundParts | None = None,
    follows: bool = False,
    earlier: tuple[Guards | None, list[RecordedPart]] = (None, []),
) -> tuple[Recorder, Notes, Given]:
    """Makes a call; returns all that recorded it, what its Python read too, before anything is made of that. See
    `record`, `Recorder` for `before_collective`, and `RecordedParts` for `earlier`."""
    found = FoundParts() if found is None else found
    given, draws = Given(call), HostDraws(gpu is not None)
    notes = noting(call.function, call.args, call.kwargs, *roots, host_draws=draws, places=found.wanted)
    in_place = found.in_place()
    parts = RecordedParts(call, notes, draws, in_place, earlier)
    recorder = Recorder(
        call.leaves, gpu=gpu, before_collective=before_collective, host_draws=draws, parts=parts, follows=follows
    )
    # In this order: notes must not see what the others do.
    entered = record_operations(call, recorder, in_place, given, notes)
    recorder.hazards += draws.finish(call.result.value)
    return recorder, entered[-1], given


def record_operations(call: Call, recorder: Recorder, *around: AbstractContextManager) -> list[Any]:
    """Makes a call that is recorded by a recorder, and by what is entered before that; returns what entering gave."""
    call.oldest = next_sequence_number()
    dispatch.has_key()  # which imports much when it is first asked: not while frames are watched
    # What a graph casts, it casts itself; the recorded call must do so too. With gradients, `layers.autocast` does.
    casts = any_autocast() and not torch.is_grad_enabled()
    threads = backward_threads()

    def run(undo: Undo) -> list[Any]:
        if casts:
            undo.enter(keeping_none())
        undo.enter(no_garbage_collection())
        undo.then(lambda _: set_backward_threads(threads))
        set_backward_threads(False)  # what a backward runs in Python has to be seen as well
        entered = [undo.enter(one) for one in around]
        undo.enter(recorder)
        undo.keep_modes()
        call.result = resolved(call())
        return entered

    return undoing(run)
