"""What else uses the arguments and parameters of a call: the gradients of their several uses, apart.

Autograd adds them up one by one, as they come. Where code outside of a captured call uses one of its arguments too, the
sum of those inside, added as a whole, would be rounded otherwise than eager's.

Uses outside are learned from the backward of the recorded call: one that begins later, or gave no gradient then, is
missed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from graphmod.signature.call import Call
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.gradients import alike, part
from graphmod.torch_private import current_backward

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


def used_inside(results: Sequence[Tensor], nodes: Iterable[Node]) -> list[int]:
    """The places of those results of a call from which it has computed others; `nodes` are those that it made."""
    edges = {edge for node in nodes for edge in node.next_functions}
    return [place for place, result in enumerate(results) if (result.grad_fn, result.output_nr) in edges]


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
    if not outputs or torch.is_inference_mode_enabled():  # there no leaf has a node
        return
    # Those that are returned the caller may use as he likes, which `LayerGraph` sees to.
    parameters = [one for one in context.around.parameters if id(one) not in call.result.seen]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
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
        sums: what was added up already, in the backward that runs now, which is meant then.
    """

    def __init__(
        self, uses: Uses, edge: GradientEdge, otherwise: Callable[[], None], zeros_tell: bool = True, *sums: Tensor
    ) -> None:
        self._otherwise, self._number, self._zeros_tell = otherwise, edge.output_nr, zeros_tell
        self._parts, self._backward = list(sums), current_backward() if sums else -1
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
            or self._backward not in (-1, current_backward())
            or (self._backward >= 0 and total.data_ptr() == parts[0].data_ptr())
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
    ends = node.next_functions[1:]  # past the anchor
    for place in places:
        part, (end, number) = gradients[place], ends[place]
        if part is not None and end is not None:
            Sum({}, GradientEdge(end, number), functools.partial(_tell_of_others, graph, place), True, part)


def _tell_of_others(graph: Any, place: int) -> None:
    """Has a call captured anew, with the gradients of an argument's uses apart, where what autograd has for the
    argument is no longer the call's own sum, which it would hand on as it is."""
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
