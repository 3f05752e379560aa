"""What else uses the arguments, parameters and casts of a call: the gradients of their several uses, apart.

Autograd adds them up one by one, as they come. Where code outside of a captured call uses one of its arguments too, the
sum of those inside, added as a whole, would be rounded otherwise than eager's.

Within one `with torch.autocast(...)` a weight is cast once, and the gradients of all its uses are added up in 16 bits
before they are cast back. A graph casts what it uses itself, so its gradient would be added up in 32 bits, and differ
in the last bits. A layer whose weights have other uses in the same block therefore stays eager, and so do its
neighbours, whose captures may make autocast forget all casts: that of a call which uses one cast several times does, of
other code too, this once. The capture of any other call keeps none, and forgets none.

A second call in a block is seen whenever it comes (`block_of_now`). Where the first was a replay, the log says that its
last bits may differ. Uses outside are learned from the backward of the recorded call: one that begins later, or gave no
gradient then, is missed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from graphmod.signature.call import Call
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.gradients import alike, part
from graphmod.step.recording import keeping_none
from graphmod.torch_private import any_autocast, current_backward

Uses = dict[Node, list[int]]  # a node -> which of its gradients are for one tensor


def nodes_behind(
    tensors: Iterable[Tensor], ends: Collection[Node | None] = (), passes: Callable[[Node], bool] = lambda node: True
) -> Iterator[Node]:
    """The nodes of autograd's graph that some tensors lead to, each once.

    Args:
        ends: nodes that are left out, with what only they lead to.
        passes: whether to go on behind a node.
    """
    seen = set(ends)
    queue = [node for node in dict.fromkeys(tensor.grad_fn for tensor in tensors) if node and node not in seen]
    seen.update(queue)
    while queue:
        node = queue.pop()
        yield node
        for following, _ in node.next_functions if passes(node) else ():
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


def uses_of(edges: Mapping[int, GradientEdge], outputs: Sequence[Tensor]) -> dict[int, Uses]:
    """Where the gradients of some tensors come from, in the autograd graph of `outputs`.

    Args:
        edges: key -> where the autograd graph goes on, or ends, for a tensor.
    """
    keys: dict[Any, int] = {(edge.node, edge.output_nr): key for key, edge in edges.items()}
    ends = {edge.node for edge in edges.values()}
    found: dict[int, Uses] = {key: {} for key in edges}
    for node in nodes_behind(outputs, ends):
        for position, following in enumerate(node.next_functions):
            key = keys.get(following)
            if key is not None:
                found[key].setdefault(node, []).append(position)
    return found


def times(uses: Uses) -> int:
    """How often a tensor is used."""
    return sum(map(len, uses.values()))


def learn_uses(context: Context, entry: Entry, call: Call) -> None:
    """Shows, in the backward of an eager call, which arguments and parameters code outside uses too: those for which
    autograd has more, or something else, than the sum of what the call gives, or nothing but zeros, which tell nothing.
    Parameters as arguments are taken to be used outside: mostly they are, and always by the next call."""
    leaves, outputs = call.leaves, call.result.differentiable
    # Those that are returned the caller may use as he likes, which `LayerGraph` sees to.
    parameters = [one for one in context.around.parameters if id(one) not in call.result.seen]
    trained = [parameter for parameter in parameters if parameter.requires_grad] if outputs else []
    with torch.enable_grad():
        ends = {place: get_gradient_edge(parameter) for place, parameter in enumerate(trained)}
    for place, uses in uses_of(ends, outputs).items():
        if uses:
            Sum(uses, ends[place], functools.partial(context.group.share, [trained[place]]))
    edges = {
        index: get_gradient_edge(leaf)
        for index, leaf in enumerate(leaves)
        if leaf.requires_grad and index not in entry.used_outside
    }
    if len({(edge.node, edge.output_nr) for edge in edges.values()}) < len(edges):
        return  # the same tensor twice: nobody could tell the arguments apart
    for index, uses in uses_of(edges, outputs).items():
        if times(uses) > 1 and leaves[index].is_leaf:
            entry.used_outside.add(index)
        elif times(uses) > 1:
            Sum(uses, edges[index], functools.partial(entry.used_outside.add, index), zeros_tell=False)


class Sum:
    """Compares the gradient that a node gets in the next backward with the sum of what some uses give.

    Args:
        uses: those; edge: where they come together.
        otherwise: called if it is another.
        zeros_tell: whether zeros on both sides count as equal, or as something that tells nothing.
    """

    def __init__(self, uses: Uses, edge: GradientEdge, otherwise: Callable[[], None], zeros_tell: bool = True) -> None:
        self._otherwise, self._number, self._zeros_tell = otherwise, edge.output_nr, zeros_tell
        self._parts: list[Tensor] = []
        self._handles = [node.register_hook(self._collector(positions)) for node, positions in uses.items()]
        self._handles.append(edge.node.register_prehook(self._compare))

    def _collector(self, positions: list[int]) -> Any:
        def collect(gradients: Sequence[Tensor | None], _: Any) -> None:
            self._parts += [one for one in map(gradients.__getitem__, positions) if one is not None]

        return collect

    def _compare(self, totals: Sequence[Tensor | None]) -> None:
        for handle in self._handles:
            handle.remove()
        parts, total = self._parts, totals[self._number]
        self._parts = []
        if (
            total is None
            or not parts
            or total.layout is not torch.strided
            or (total.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return
        if not all(alike(total, one) for one in parts):
            self._otherwise()
            return
        # Of what ranks hold parts of, each looks at its own: to compare the whole, all would have to come here.
        parts, total = list(map(part, parts)), part(total)
        with torch.no_grad():
            whole = parts[0]
            for one in parts[1:]:
                whole = whole + one
            if whole.shape != total.shape or not _equal(whole, total, self._zeros_tell):
                self._otherwise()


def compare_sums(graph: Any, node: Any, places: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
    """Tells in the backward that runs now where autograd adds more to a sum that a call made of its argument's uses:
    code outside has begun to use that argument, too.

    Args:
        graph: of the call; node: its autograd node.
        places: the sums among `gradients`, which go to where the node leads.
    """
    task = current_backward()

    def compare_when_there(place: int, part: Tensor, end: Node, number: int) -> None:
        def compare(totals: Sequence[Tensor | None]) -> None:
            handle.remove()
            total = totals[number]
            if total is not None and current_backward() == task:
                _tell_of_others(graph, place, part, total)

        handle = end.register_prehook(compare)

    ends = node.next_functions[1:]  # past the anchor
    for place in places:
        part, (end, number) = gradients[place], ends[place]
        if part is not None and end is not None:
            compare_when_there(place, part, end, number)


def _tell_of_others(graph: Any, place: int, part: Tensor, total: Tensor) -> None:
    """Has a call captured anew, with the gradients of an argument's uses apart, where what autograd has for the
    argument is no longer the call's own sum, which it would hand on as it is."""
    if total.layout is not torch.strided or total.data_ptr() == part.data_ptr():
        return
    if total.shape == part.shape and _equal(total, part, zeros_tell=True):
        return
    index, context = graph.differentiable[place], graph.context
    graph.entry.used_outside.add(index)
    context.drop(graph.tape, why="code outside uses its arguments, too")
    context.log_once(
        f"{context.name!r} had added up what its uses of {graph.inputs[index].name!r} give when code outside, which "
        "had not used that before, added more. The last bits of this gradient may differ from eager's, this once",
        key="uses, once",
    )


def _equal(one: Tensor, other: Tensor, zeros_tell: bool) -> bool:
    """Whether two tensors are the same. Waits for the GPU, which a warm-up step may do, also in a program that has
    torch forbid it (`torch.cuda.set_sync_debug_mode`)."""
    with _waiting() if one.is_cuda else contextlib.nullcontext():
        if not zeros_tell and not (one.isfinite() & (one != 0)).any():
            return False
        return torch.equal(one.nan_to_num(), other.nan_to_num())  # a loss scale may be too large at first


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    forbidden = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(forbidden)


@contextlib.contextmanager
def separate_uses(edges: Mapping[int, GradientEdge], outputs: Sequence[Tensor]) -> Iterator[dict[int, list[Tensor]]]:
    """Keeps autograd from adding up the gradients of some tensors' uses, while it differentiates `outputs`.

    Args:
        edges: key -> where the autograd graph ends for a tensor.

    Yields:
        key -> the gradients of its uses, in the order in which they came.
    """
    parts: dict[int, list[Tensor]] = {key: [] for key in edges}
    handles = []

    def taker(found: list[tuple[int, int]]) -> Any:
        def take(gradients: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
            left = list(gradients)
            for position, key in sorted(found):
                one, left[position] = left[position], None
                if one is not None:
                    parts[key].append(one)
            return tuple(left)

        return take

    by_node: dict[Node, list[tuple[int, int]]] = {}
    for key, uses in uses_of(edges, outputs).items():
        for node, positions in uses.items():
            by_node.setdefault(node, []).extend((position, key) for position in positions)
    try:
        handles = [node.register_hook(taker(found)) for node, found in by_node.items()]
        yield parts
    finally:
        for handle in handles:
            handle.remove()


# -- casts that autocast keeps -----------------------------------------------------------------------------------------


_REMEDY = "Keep that as it is, or pass cache_enabled=False to torch.autocast, where each use is cast for itself"


class Block:
    """Stands for an autocast block, as long as autocast keeps its casts."""

    __slots__ = ("__weakref__",)


_open: dict[torch.device, weakref.ref[Block]] = {}


def block_of_now(device: torch.device) -> Block:
    """The autocast block that the program is in, which keeps casts."""
    block = open_block(device)
    if block is None:
        block = Block()
        keep_open(device, block)
        _open[device] = weakref.ref(block)
    return block


def keep_open(device: torch.device, block: Block | None) -> None:
    """Lets a block last as long as the casts that autocast keeps from here on. Nothing but the cast of the probe holds
    its node, and nothing but that node the block."""
    if block is None:
        return
    probe = _probe(device)
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):  # of which a checkpoint around must not know
        cast: Any = torch.nn.functional.linear(probe, probe).grad_fn
        node = cast.next_functions[0][0]
    node.metadata["graphmod"] = block


def open_block(device: torch.device) -> Block | None:
    """The last block that was asked for, if it is still open."""
    known = _open.get(device)
    return None if known is None else known()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@cache
def _probe(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, 1, device=device, requires_grad=True)


def shares_casts(context: Context, entry: Entry, again: bool) -> bool:
    """Whether a call, whose signature keeps casts, shares some with others. Then the signature stays eager from now on.

    Args:
        again: the wrapper was called before in this autocast block.
    """
    context.group.shares_casts = context.group.shares_casts or again
    if again and entry.graphs:
        context.log_once(
            f"{context.name!r} was replayed before in this autocast block. The last bits of its gradients may differ "
            "from eager's, this once",
            key="casts, once",
        )
    if context.group.shares_casts:
        _stay_eager(context, entry)
    return context.group.shares_casts


def _stay_eager(context: Context, entry: Entry) -> None:
    context.group.shares_casts = True
    context.keep_eager(
        entry,
        "its weights, or those of layers captured with it, have other uses in the same autocast block, for all of "
        "which autocast casts a weight once, and adds their gradients up in 16 bits",
    )
    context.drop(*{graph.tape for graph in entry.graphs}, why=entry.reason)
    context.log_once(f"{context.name!r} stays eager: {entry.reason}. {_REMEDY}", key="casts")


def learn_casts(context: Context, entry: Entry, call: Call) -> None:
    """Lets an entry stay eager if an eager call used casts that were there before it, or if, in its backward, the casts
    of its weights get more gradients than those that the call gives."""
    outputs = call.result.differentiable
    edges = dict(enumerate(_casts_in(call.leaves, outputs)))
    if any(edge.node._sequence_nr() < call.oldest for edge in edges.values()):
        _stay_eager(context, entry)
        return
    found = uses_of(edges, outputs)
    entry.cast_apart(once=all(times(uses) == 1 for uses in found.values()))
    for uses, edge in zip(found.values(), edges.values(), strict=True):
        Sum(uses, edge, lambda: _stay_eager(context, entry))


@contextlib.contextmanager
def casts_of_its_own(context: Context, entry: Entry) -> Iterator[None]:
    """For a capture, which casts what it uses itself.

    Where each weight has one use, or none has a gradient, autocast keeps nothing meanwhile, and what it kept of others
    stays. Else it forgets all casts, before and after: nobody can tell it to forget some.
    """
    if entry.casts_once or (any_autocast() and not torch.is_grad_enabled()):
        with keeping_none():
            yield
        return
    device = context.group.backend.device
    block = open_block(device) if entry.keeps_casts else None
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        keep_open(device, block)


def _casts_in(given: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[GradientEdge]:
    """The casts of leaf tensors in the autograd graph between some tensors."""

    def is_cast(node: Node) -> bool:
        return node.name().startswith("ToCopyBackward") and any(
            hasattr(following, "variable") for following, _ in node.next_functions
        )

    nodes = nodes_behind(outputs, {tensor.grad_fn for tensor in given}, lambda node: not is_cast(node))
    return [GradientEdge(node, 0) for node in nodes if is_cast(node)]
