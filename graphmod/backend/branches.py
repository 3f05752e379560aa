"""Puts the launches of one multi-tensor operation side by side in a captured graph.

A norm, a scaling or a fused optimizer step over many tensors is several launches of one kernel, each for tensors of its
own. One after the other, each leaves the GPU half empty while its last blocks finish; on two branches of the graph the
next one fills it (three are no faster). Every kernel computes what it did, so the bits stay the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from ctypes import c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor

from graphmod.cuda_driver import call, kernel_name, neighbours

_LEAST = 3  # launches: for fewer, to part and to join costs what it brings
_LEAST_BYTES = 2**20  # of tensors; the step counters of an optimizer are many, and nothing
_SPLITS_ITS_TENSORS = "multi_tensor_apply"
_AHEAD, _BEHIND = "cuGraphNodeGetDependencies_v2", "cuGraphNodeGetDependentNodes_v2"


def divisible(args: Iterable[Any]) -> bool:
    """Whether the tensors at one place of an operation's lists share no memory with those at another place, and are
    enough for it to matter.

    Args:
        args: the arguments of an operation on lists of tensors.
    """
    spans = []
    for position, value in enumerate(args):
        listed = isinstance(value, (list, tuple))
        for place, tensor in enumerate(value if listed else (value,)):
            if not isinstance(tensor, Tensor):
                continue
            if tensor.layout is not torch.strided:
                return False
            if tensor.numel():
                owner = place if listed else -1 - position
                spans.append((tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), owner))
    if sum(end - start for start, end, _ in spans) < _LEAST_BYTES:
        return False
    spans.sort()
    # A tensor may stand in several lists at the same place. Anything else that overlaps is taken for a dependency.
    reach, last = 0, None
    for start, end, owner in spans:
        if start < reach and (start, end, owner) != last:
            return False
        reach, last = max(reach, end), (start, end, owner)
    return True


def _extent(tensor: Tensor) -> int:
    """The bytes from its first element to the end of its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def spread(graph: int, operations: Iterable[tuple[int, int]]) -> int:
    """Rearranges a graph that is not instantiated yet. Leaves alone what plain edges do not tie to one chain.

    Args:
        graph: address of a `cudaGraph_t`.
        operations: in their order, per operation whose lists are `divisible` the node captured before it, 0 if there
            was none, and its own last node.

    Returns:
        How many runs of launches were parted.
    """
    parted = 0
    for before, last in operations:
        for launches in _runs(before, last):
            parted += _part(c_void_p(graph), launches)
    return parted


def _runs(before: int, last: int) -> list[list[c_void_p]]:
    """The launches of one kernel that follow each other between two nodes of a chain."""
    chain = [c_void_p(last)]
    while chain[-1].value != before:
        ahead = [node for node, _ in neighbours(_AHEAD, chain[-1])]
        if before in [node.value for node in ahead] or not (before or ahead):
            break  # the operation before this one may have been parted, and end in two launches
        if len(ahead) != 1:
            return []
        chain.append(ahead[0])
    if chain[-1].value == before:
        return []  # it launched nothing
    runs = [(name, list(same)) for name, same in itertools.groupby(reversed(chain), kernel_name)]
    return [launches for name, launches in runs if len(launches) >= _LEAST and _SPLITS_ITS_TENSORS in name]


def _part(graph: c_void_p, launches: list[c_void_p]) -> bool:
    """Lets every second launch follow the last but one; returns whether it did."""
    ahead, behind = neighbours(_AHEAD, launches[0]), neighbours(_BEHIND, launches[-1])
    inner = [neighbours(_BEHIND, node) for node in (*(node for node, _ in ahead), *launches[:-1])]
    if any(len(found) != 1 for found in inner) or any(kind for found in (ahead, behind, *inner) for _, kind in found):
        return False
    new = [(node, launches[1]) for node, _ in ahead] + list(zip(launches, launches[2:], strict=False))
    new += [(launches[-2], node) for node, _ in behind]
    # New edges first: with them alone nothing has changed.
    _edit("cuGraphAddDependencies_v2", graph, new)
    _edit("cuGraphRemoveDependencies_v2", graph, list(itertools.pairwise(launches)))
    return True


def _edit(verb: str, graph: c_void_p, edges: list[tuple[c_void_p, c_void_p]]) -> None:
    kind = c_void_p * len(edges)
    sources, targets = kind(*(source for source, _ in edges)), kind(*(target for _, target in edges))
    call(verb, graph, sources, targets, None, c_size_t(len(edges)))
