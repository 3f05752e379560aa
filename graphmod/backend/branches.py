"""Puts the launches of one multi-tensor operation side by side in a captured graph.

A norm, a scaling or a fused optimizer step over many tensors is several launches of one kernel, each for tensors of its
own. One after the other, each leaves the GPU half empty while its last blocks finish; on two branches of the graph the
next one fills it (three are no faster). Every kernel computes what it did, so the bits stay the same. Imports `driver`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from ctypes import c_size_t, c_void_p
from typing import Any

import torch
from torch import Tensor

from graphmod.backend.driver import call, kernel_name, neighbours

_LEAST = 3  # launches: for fewer, to part and to join costs what it brings
_SPLITS_ITS_TENSORS = "multi_tensor_apply"


def independent(args: Iterable[Any]) -> bool:
    """Whether the tensors at one place of an operation's lists share no memory with those at another place.

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
    """Rearranges a graph that is not instantiated yet, and a chain where it matters.

    Args:
        graph: address of a `cudaGraph_t`.
        operations: per operation whose lists are `independent`, the node captured before it, 0 if there was none, and
            its own last node.

    Returns:
        How many runs of launches were parted.
    """
    parted = 0
    for before, last in operations:
        for run in _runs(before, last):
            _part(c_void_p(graph), *run)
            parted += 1
    return parted


def _runs(before: int, last: int) -> Iterator[tuple[c_void_p | None, list[c_void_p], c_void_p | None]]:
    """The launches of one kernel that follow each other between two nodes of a chain: the node ahead of them, they, and
    the node behind them; None where there is no such node. Only where plain edges tie all that."""
    chain, node = [], last
    while node != before:
        chain.append(c_void_p(node))
        ahead = neighbours("cuGraphNodeGetDependencies_v2", chain[-1])
        if len(ahead) > 1 or (before and not ahead):
            return
        node = ahead[0][0].value if ahead else 0
    chain.reverse()
    front = c_void_p(before) if before else None
    for name, same in itertools.groupby(chain, kernel_name):
        launches = list(same)
        if len(launches) >= _LEAST and _SPLITS_ITS_TENSORS in name:
            around = ([] if front is None else [front]) + launches
            ahead = neighbours("cuGraphNodeGetDependencies_v2", launches[0])  # two, if what is there was parted
            behind = [neighbours("cuGraphNodeGetDependentNodes_v2", node) for node in around]
            plain = all(kind == 0 for found in behind for _, kind in found)
            single = all(len(found) == 1 for found in behind[:-1]) and len(behind[-1]) < 2 and len(ahead) < 2
            if plain and single:
                yield front, launches, behind[-1][0][0] if behind[-1] else None
        front = launches[-1]


def _part(graph: c_void_p, ahead: c_void_p | None, launches: list[c_void_p], behind: c_void_p | None) -> None:
    """Lets every second launch follow the last but one. New edges first: with them alone nothing has changed."""
    new = list(zip(launches, launches[2:], strict=False))
    if ahead is not None:
        new.append((ahead, launches[1]))
    if behind is not None:
        new.append((launches[-2], behind))
    _edit("cuGraphAddDependencies_v2", graph, new)
    _edit("cuGraphRemoveDependencies_v2", graph, list(itertools.pairwise(launches)))


def _edit(verb: str, graph: c_void_p, edges: list[tuple[c_void_p, c_void_p]]) -> None:
    kind = c_void_p * len(edges)
    sources, targets = kind(*(source for source, _ in edges)), kind(*(target for _, target in edges))
    call(verb, graph, sources, targets, None, c_size_t(len(edges)))
