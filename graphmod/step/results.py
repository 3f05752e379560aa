"""What a captured call returns: structure and constants as captured, around the tensors of each replay.

Results may share memory: with an argument, with something outside, or with each other. In eager code, what is written
into one is seen in the other, and so it must be after a replay.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.guards.changes import bound_anew
from graphmod.guards.guards import put
from graphmod.guards.notes import Note, Notes
from graphmod.guards.values import Data
from graphmod.signature.call import Flat
from graphmod.signature.flattening import Content, Leaf, Opaque, Unrepeatable, parts, rebuild
from graphmod.signature.signature import attributes_of, unusual
from graphmod.step.entry import Entry
from graphmod.step.static_outputs import StaticOutput
from graphmod.torch_private import top_saved_tensors_hooks, without_modes
from graphmod.trace.operations import address, extent
from graphmod.trace.recorder import Follower, Recorder
from graphmod.trace.untraced import identity


def part_of(whole: Tensor, part: Tensor) -> Callable[[Tensor], Tensor]:
    """What makes of a tensor that stands for `whole` in a replay the view that `part` is in the capture, without a
    history of its own.

    Raises:
        CaptureRefused: it is no view that can be made of `whole` alone.
    """
    if part.dtype is not whole.dtype:
        raise CaptureRefused("returns two tensors of other dtypes over the same memory; return copies")
    size, stride, offset = part.size(), part.stride(), part.storage_offset() - whole.storage_offset()

    def of(whole: Tensor) -> Tensor:
        whole = whole.detach() if whole.requires_grad else whole
        return whole.as_strided(size, stride, whole.storage_offset() + offset)

    return of


def shared_parts(tensors: list[Tensor | None]) -> dict[int, int]:
    """Which of some tensors lie wholly inside another one of them: place -> place of the other.

    Raises:
        CaptureRefused: two share some of their elements only.
    """
    by_storage: dict[int, list[tuple[int, Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None and address(tensor):
            by_storage.setdefault(address(tensor), []).append((place, tensor))
    found: dict[int, int] = {}
    for placed in by_storage.values():
        owners: list[tuple[int, Tensor]] = []
        for place, tensor in sorted(placed, key=lambda one: (-one[1].numel(), not one[1].requires_grad, one[0])):
            owner = next((index for index, other in owners if _within(tensor, other)), None)
            if owner is None:
                owners.append((place, tensor))
            else:
                found[place] = owner
    return found


def _span(tensor: Any) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies."""
    first = tensor.storage_offset() * tensor.element_size()
    return first, first + extent(tensor)


def _within(part: Any, whole: Any) -> bool:
    """Whether all elements of a tensor are elements of another; False where none is."""
    (start, end), (from_, to) = _span(part), _span(whole)
    if end <= from_ or to <= start:
        return False
    if part.dtype is not whole.dtype:
        raise CaptureRefused("returns two tensors of other dtypes over the same memory; return copies")
    with without_modes(), torch.inference_mode(False):
        last = max(end, to) // part.element_size()
        taken = torch.zeros(last, dtype=torch.bool)
        taken.as_strided(whole.size(), whole.stride(), whole.storage_offset()).fill_(True)
        inside = taken.as_strided(part.size(), part.stride(), part.storage_offset())
        every, none = bool(inside.all()), not bool(inside.any())
    if not every and not none:
        raise CaptureRefused("returns two tensors that overlap in part; return copies")
    return every


def outline(result: Flat) -> tuple:
    """What is the same of two results unless something in Python changed: structure and constants, and what their
    tensors look like."""
    return result.structure, tuple(map(_kind, result.leaves))


def _kind(tensor: Tensor) -> tuple:
    shape = None if tensor.is_nested else tensor.shape
    return (shape, tensor.dtype, tensor.requires_grad, tensor.layout, tensor.__class__)


def not_to_be_made_again(structure: Any) -> str | None:
    """Which part of a result no replay could return, and why; None where there is none."""
    for part in parts(structure):
        if part.__class__ in (Opaque, Content, Unrepeatable):
            return (
                f"returns a {type(part.value).__name__}, which cannot be taken apart into tensors; return tensors, "
                "numbers, strings or containers of them (for a transformers model in training: use_cache=False)"
            )
    return None


def bind(notes: Notes, result: Flat, recorder: Recorder) -> tuple[list[Note], Flat]:
    """The places that a recorded call bound anew (`self.last = y.detach()`) in a way that each replay can: with tensors
    of its own, as it hands out results. With these, its result together with what is there now.

    A place may have been read before (`self.mean = 0.9 * self.mean + x.mean()`): then what is there is an argument more
    of each replay. Not so where the call asked which object it is, or found it elsewhere as well, a backward may come
    that needs it, or a value that is read on the host depends on it.
    """
    if top_saved_tensors_hooks(True) is not None:  # a checkpoint that makes the call again binds once more
        return [], result
    returned = set(map(id, result.leaves))
    reads = None if recorder.host_draws is None else recorder.host_draws.given
    needed = reads.depends_on if reads else set()
    keys = {address(note.key) for note in notes.notes.values() if isinstance(note.key, Tensor)}
    places_at: defaultdict[int, set[tuple]] = defaultdict(set)
    for note in notes.notes.values():
        places_at[note.where_it_lay].add(note.place)

    def is_fixed(note: Note) -> bool:
        where = note.where_it_lay
        shared = where in notes.told_apart | keys or recorder.was_given(where) or len(places_at[where]) > 1
        shared = shared and not isinstance(note.container, Data)
        return note.read and (bool(result.differentiable) or where in needed or shared)

    can = functools.partial(_can_be_bound, notes=notes, returned=returned, backward=recorder.backward)
    places = [note for note in bound_anew(notes) if not is_fixed(note) and can(note.now())]
    return places, Flat(result.value, [note.now() for note in places], result.kept) if places else result


def _can_be_bound(value: Any, notes: Notes, returned: set[int], backward: bool) -> bool:
    """Whether a value can be made again, its containers are the call's own, and no backward of it may come."""
    flat = Flat(None, [value])
    containers = [part[1] for part in flat.seen.values() if part.__class__ is tuple]
    made = [tensor for tensor in flat.leaves if identity(tensor) in notes.ages.made]
    histories = [tensor for tensor in flat.leaves if tensor.requires_grad and not tensor.is_leaf]
    return (
        not_to_be_made_again(flat.structure) is None
        and all(not_returned(tensor) is None for tensor in made)
        and all(identity(container) in notes.ages.made for container in containers)
        and all(backward and id(tensor) not in returned and is_spent(tensor) for tensor in histories)
    )


def is_spent(tensor: Tensor) -> bool:
    """Whether the backward of a tensor has run and freed what it needs, so that to ask for another is an error."""
    node = tensor.grad_fn
    while node is not None:
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    getattr(node, name)
                except RuntimeError:
                    return True
        following = [one for one, _ in node.next_functions if one is not None]
        node = following[0] if len(following) == 1 else None  # else a backward may go another way
    return False


def of_argument(tensor: Tensor, given: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """What finds a tensor of a capture among those that a replay is given: one of them, or a view of one; None of
    others."""
    for index, static in enumerate(given):
        if tensor is static:
            return operator.itemgetter(index)
    for index, static in enumerate(given):
        if address(tensor) and address(tensor) == address(static):
            view = part_of(static, tensor)
            return lambda given: view(given[index])
    return None


def _gradient(tensor: Tensor, parameters: list[Tensor]) -> Callable[..., Tensor] | None:
    """What makes a result again that is the gradient of a parameter, or a view of it; None of others."""
    for parameter in parameters if not tensor.requires_grad else ():
        grad: Any = parameter.grad
        if tensor is grad or (address(tensor) and address(tensor) == address(grad) and _within(tensor, grad)):
            return of_gradient(parameter, tensor)
    return None


def of_gradient(parameter: Any, tensor: Tensor | None = None) -> Callable[..., Tensor]:
    """Gives the gradient of a parameter, or the part of it that `tensor` is."""
    if tensor is None or tensor is parameter.grad:
        return lambda *_: parameter.grad
    view = part_of(parameter.grad, tensor)
    return lambda *_: view(parameter.grad)


class Spent(torch.autograd.Function):
    """Gives a tensor a history whose backward has been run, as a captured call leaves it behind."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time: the captured call has run the backward of this "
            "tensor, which freed what it needs"
        )


class Results:
    """The results of one captured call, and what it binds anew.

    Args:
        graph: the `StepGraph` whose they are.
        result: what the captured code returned.
        given: the static tensors it was given.
        held: the identities of the tensors that what is called holds as they are.
        owned: parameters, which have the gradients that the code left to them.

    Attributes:
        with_grad: those that require grad, in the order in which autograd sees them.
        sharing: those of them that share memory with another tensor of the call.
        handed_out: all that lie in memory of the graph.
        passed_on: tensors from outside that the code returns as they are.
        retained: the captured ones of `with_grad` with their autograd graph, until the backward is captured from it.

    Raises:
        CaptureRefused: something among them cannot be made again around other tensors.
    """

    _anchor = torch.zeros(0, requires_grad=True)

    def __init__(
        self,
        graph: Any,
        result: Flat,
        given: list[Tensor],
        recorder: Follower,
        held: Collection[int],
        owned: Sequence[Tensor],
    ) -> None:
        entry: Entry = graph.entry
        self._structure, self._bound = result.structure, graph.recording.guards.bound
        # Of the result itself; those that follow are in what it binds, and have no backward that is to come.
        own = len(Flat(result.value[0], kept=result.kept).leaves) if self._bound else len(result.leaves)
        reason = not_to_be_made_again(self._structure)
        if reason is not None:
            raise CaptureRefused(reason)
        if outline(result) != graph.recording.returned:
            raise CaptureRefused(
                "returns or binds other values, or tensors of other kinds, than in the call before, which a graph "
                "would freeze; return them as tensors"
            )
        self.with_grad: list[StaticOutput] = []
        self.sharing: list[StaticOutput] = []
        self.passed_on: list[Tensor] = []
        self.retained: list[Tensor] = []
        # None for the next of `with_grad`, the place of another result and the part of it, or what makes it.
        self._parts: list[Any] = []
        self._with_grad_at: list[int] = []
        self._spent: list[int] = []
        of_copies: set[int] = set()
        places = {id(static): index for index, static in enumerate(given)}
        given_at = set(map(address, given)) - {0}
        originals = {id(view): view._base for view in graph.stand_ins.values() if view._base is not None}
        tensors = [originals.get(id(leaf), leaf) for leaf in result.leaves]
        of_none = [address(tensor) not in given_at for tensor in tensors]
        outside = [none and self._is_outside(tensor, recorder) for none, tensor in zip(of_none, tensors, strict=True)]
        free = [none and not out for none, out in zip(of_none, outside, strict=True)]
        shared = shared_parts([tensor if is_free else None for tensor, is_free in zip(tensors, free, strict=True)])
        with_gradients = [parameter for parameter in owned if parameter.grad is not None]
        for place, tensor in enumerate(tensors):
            where = address(tensor)
            if id(tensor) in places:
                self._parts.append(operator.itemgetter(places[id(tensor)]))
            elif (gradient := _gradient(tensor, with_gradients)) is not None:
                self._parts.append(gradient)
            elif outside[place]:
                self._pass_on(tensor, recorder, id(tensor) in held)
            else:
                if (why := not_returned(tensor)) is not None:
                    raise CaptureRefused(why)
                spent = tensor.requires_grad and place >= own
                if spent:
                    self._spent.append(place)
                if tensor.requires_grad and not spent:
                    # Through the node also if it shares memory, so that gradients are summed up in eager's order.
                    self._parts.append(None)
                    self._with_grad_at.append(place)
                    self.with_grad.append(StaticOutput(tensor.detach(), entry, counted=True))
                    self.retained.append(tensor)
                    if where in given_at or place in shared or place in shared.values():
                        self.sharing.append(self.with_grad[-1])
                    of_copies |= {len(self.with_grad) - 1} if where in given_at else set()
                elif where in given_at:
                    self._parts.append(of_argument(tensor, given))
                elif place in shared:
                    whole = tensors[shared[place]]
                    self._parts.append((shared[place], part_of(whole, tensor)))
                    if torch.empty_like(whole, device="meta").stride() != whole.stride():
                        gaps = "returns tensors that are parts of a tensor with gaps; return copies of them"
                        raise CaptureRefused(gaps)
                else:
                    self._parts.append(StaticOutput(tensor.detach(), entry))
        plain = [part for part in self._parts if isinstance(part, StaticOutput)]
        self.handed_out = self.with_grad + plain
        for index, output in enumerate(self.with_grad):
            # As a rule they are held for a moment only; but an argument's buffer is written in the next call.
            output.copied = index in of_copies
        for output in self.handed_out:  # what the graph holds for all its replays is not the caller's to change
            output.copied = output.copied or address(output.tensor) in recorder.kept_at
        # What is bound stays until the next call, so that it would have to be moved out of the way each time.
        self._clone = graph.context.config.clone_outputs or entry.copies_out or bool(self._bound)
        # The usual case of a layer: one tensor, handed out as it is.
        self._sole = self._structure.__class__ is Leaf and len(self.handed_out) == 1 and not self._clone
        self._sole = self._sole and not self.handed_out[0].copied

    def _is_outside(self, tensor: Tensor, recorder: Follower) -> bool:
        where = address(tensor)
        if where in recorder.kept_at:
            return False
        if not tensor.is_leaf:
            return recorder.is_host(tensor)
        untouched = bool(where) and not recorder.made(where)
        return where in recorder.outside or recorder.is_host(tensor) or untouched

    def _pass_on(self, tensor: Tensor, recorder: Follower, held: bool) -> None:
        where = address(tensor)
        if where not in recorder.outside and not recorder.is_host(tensor):
            if not held:
                raise CaptureRefused(
                    "returns a tensor that was found neither among its arguments nor in an attribute of what it holds, "
                    "so that nobody would notice another in its place; pass it as an argument"
                )
            recorder.outside[where] = tensor.detach()  # so that it is watched, although no operation reads it
        self.passed_on.append(tensor)
        # Else another object over the same memory in each call, as the code makes it.
        self._parts.append(lambda _: tensor if held or tensor.requires_grad else tensor.detach())

    def of_node(self, result: Any) -> list[Tensor]:
        """The tensors in the result of an eager call that stand where `with_grad` do."""
        leaves = Flat(result).leaves
        return [leaves[place] for place in self._with_grad_at]

    def make(self, leaves: list[Tensor], differentiable: tuple[Tensor, ...]) -> Any:
        """The result of the replay that was just launched.

        Args:
            leaves: the call's tensor arguments.
            differentiable: `with_grad` as they came out of the autograd node.
        """
        if self._sole:
            return differentiable[0] if differentiable else self._parts[0].hand_out()
        grads = iter(zip(differentiable, self.with_grad, strict=True))
        made: list[Any] = []
        for part in self._parts:
            if part is None:
                tensor, output = next(grads)
                made.append(tensor.clone() if self._clone or output.copied else tensor)
            elif part.__class__ is StaticOutput:
                made.append(part.tensor.clone() if self._clone or part.copied else part.hand_out())
            else:
                made.append(part if part.__class__ is tuple else part(leaves))
        for index, part in enumerate(self._parts):
            if part.__class__ is tuple:
                made[index] = part[1](made[part[0]])
        for index in self._spent:
            with torch.enable_grad():
                made[index] = Spent.apply(self._anchor, made[index])
        result = rebuild(self._structure, made)
        if self._bound:
            result, *values = result
            for place, value in zip(self._bound, values, strict=True):
                put(place.container, place.note, value)
        return result


def resolved(result: Any, bound: Sequence[Any] = (), kept: Sequence[Any] = ()) -> Flat:
    """The result, and what the call bound anew, with lazy conjugates, negations and zeros carried out, for which no
    plain memory stands. See `Flat` for `kept`."""
    flat = Flat(result, bound, kept)
    if not any(t.is_conj() or t.is_neg() or t._is_zerotensor() for t in flat.leaves if t.layout is torch.strided):
        return flat
    made = rebuild(flat.structure, [_in_memory(tensor) for tensor in flat.leaves])
    return Flat(made[0], made[1:], kept) if bound else Flat(made, kept=kept)


def _in_memory(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.clone() if tensor._is_zerotensor() else tensor


def not_returned(tensor: Tensor) -> str | None:
    """Why no replay would return such a tensor, which the call made; None where it would."""
    why = unusual(tensor)
    if why is None and attributes_of(tensor):
        why = f"a tensor with the attribute {next(iter(attributes_of(tensor)))!r}"
    if why is None and tensor.requires_grad and tensor.is_leaf:
        why = "a tensor made to require grad inside"
    return None if why is None else f"returns {why}, which no replay would return"
