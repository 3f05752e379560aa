"""Copies from memory of the host in captured graphs, whose lengths follow what the host knows at each launch.

The copy engine of a GPU reads pinned memory faster than kernels do, but a node that copies has its length from the
capture. It can be changed in an instantiated graph, and so can whether the node does anything; what was launched before
goes on as it was (CUDA Driver API, "Graph Management").
"""

from __future__ import annotations

import contextlib
from ctypes import Structure, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.cuda_driver import call, node_type, nodes
from graphmod.wrap.extension import is_capturing, prepare_launches

_MEMCPY = 1  # CUgraphNodeType
_HOST, _DEVICE = 1, 2  # CUmemorytype


def _side(name: str) -> list[tuple[str, Any]]:
    return [
        (f"{name}_x", c_size_t),
        (f"{name}_y", c_size_t),
        (f"{name}_z", c_size_t),
        (f"{name}_lod", c_size_t),
        (f"{name}_type", c_int),
        (f"{name}_host", c_void_p),
        (f"{name}_device", c_void_p),
        (f"{name}_array", c_void_p),
        (f"{name}_reserved", c_void_p),
        (f"{name}_pitch", c_size_t),
        (f"{name}_rows", c_size_t),
    ]


class _Memcpy(Structure):  # CUDA_MEMCPY3D
    _fields_ = [*_side("src"), *_side("dst"), ("width", c_size_t), ("height", c_size_t), ("depth", c_size_t)]


class _Copy(NamedTuple):
    source: int
    target: int
    nbytes: int
    memory: int  # which memory there is at these addresses, counted


class CopyNodes:
    """Nodes in any number of graphs, and what they copy from the next launch of each on.

    Args:
        count: nodes for each pair of source and target.
        device: of all graphs and targets.

    Attributes:
        wanted: what a node copies, by its mark: the address of the one byte that it copies when it is captured. None is
            nothing.
        version: how often that was changed.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.wanted: dict[int, _Copy | None] = {}
        self.version = self._memory = 0

    def capture(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Adds the nodes of pairs to the graph that the current stream captures; does nothing where none does.

        Args:
            pairs: of pinned memory, which is in no other pair, and memory of the device that is as large.
        """
        if not is_capturing():
            return
        prepare_launches(self._prepare)
        stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        for source, target in pairs:
            for number in range(self.count):
                mark = source.data_ptr() + number
                self.wanted.setdefault(mark, None)
                call("cuMemcpyHtoDAsync_v2", c_uint64(target.data_ptr() + number), c_void_p(mark), c_size_t(1), stream)

    def set(self, source: Tensor, target: Tensor, spans: list[tuple[int, int]]) -> None:
        """Says what the nodes of a pair copy.

        Args:
            spans: offset and number of bytes, at most `count` of them; the other nodes copy nothing.
        """
        self.version += 1  # first: who is interrupted leaves nothing that seems to be done
        begin, into = source.data_ptr(), target.data_ptr()
        found = [_Copy(begin + offset, into + offset, nbytes, self._memory) for offset, nbytes in spans]
        for number, copy in enumerate([*found, *[None] * (self.count - len(found))]):
            self.wanted[begin + number] = copy

    def renew(self) -> None:
        """Has nodes told again what they copy, for there is other memory at their addresses."""
        self.version += 1
        self._memory += 1
        for mark, copy in self.wanted.items():
            self.wanted[mark] = copy and copy._replace(memory=self._memory)

    def _prepare(self, graph: torch.cuda.CUDAGraph) -> _Adjustment | None:
        """What tells a graph, before each launch, what to copy; None for one without such nodes."""
        marks: dict[int, int] = {}
        for node in nodes("cuGraphGetNodes", c_void_p(graph.raw_cuda_graph())):
            if node_type(node) == _MEMCPY:
                found = _Memcpy()
                with contextlib.suppress(RuntimeError):  # of a node of others
                    call("cuGraphMemcpyNodeGetParams", node, byref(found))
                    one_byte = found.src_type == _HOST and found.width == found.height == found.depth == 1
                    if one_byte and found.src_host in self.wanted:
                        marks[node.value] = found.src_host
        return _Adjustment(graph, self, marks) if marks else None


class _Adjustment:
    """Tells the nodes of a graph what to copy, before it is launched."""

    def __init__(self, graph: torch.cuda.CUDAGraph, copies: CopyNodes, marks: dict[int, int]) -> None:
        self._graph, self._copies, self._marks = graph, copies, marks
        self._done: dict[int, _Copy | None] = {}
        self._version: int | None = None

    def __call__(self) -> None:
        if self._version != self._copies.version:
            with torch.cuda.device(self._copies.device):
                self._adjust()

    def _adjust(self) -> None:
        graph, context, version = c_void_p(self._graph.raw_cuda_graph_exec()), c_void_p(), self._copies.version
        call("cuCtxGetCurrent", byref(context))
        for node, mark in self._marks.items():
            copy = self._copies.wanted[mark]
            if node in self._done and self._done[node] == copy:
                continue
            self._done.pop(node, None)
            if copy is not None:
                given = _Memcpy(src_type=_HOST, src_host=copy.source, dst_type=_DEVICE, dst_device=copy.target)
                given.width, given.height, given.depth = copy.nbytes, 1, 1
                call("cuGraphExecMemcpyNodeSetParams", graph, c_void_p(node), byref(given), context)
            call("cuGraphNodeSetEnabled", graph, c_void_p(node), c_uint(copy is not None))
            self._done[node] = copy
        self._version = version
