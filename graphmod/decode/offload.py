"""Layers of the cache in the memory of the host: which blocks steps will read, what copies them, and the buffers near
the computation that they are copied into, in turn.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from graphmod.attention import Rule
from graphmod.cuda_driver import bindings, call, node_type, nodes
from graphmod.decode.types import DecodeError
from graphmod.wrap.extension import is_capturing, prepare_launches, stream_for


class Reader(NamedTuple):
    """Some steps of a sequence that are about to be launched.

    Attributes:
        blocks: of the sequence.
        first, last: tokens in the sequence at the first and the last of these steps, the one that a step adds included.
    """

    blocks: list[int]
    first: int
    last: int


class Portions(NamedTuple):
    """Blocks that are read, for two ways to copy them.

    Attributes:
        blocks: each once, those within extents first.
        within: how many these are.
        extents: first block and number of blocks of each. Blocks that nobody reads may lie in them.
    """

    blocks: list[int]
    within: int
    extents: list[tuple[int, int]]


def read_blocks(readers: list[Reader], rule: Rule, block_size: int) -> set[int]:
    """The blocks that hold what steps will see, their own tokens left out."""
    seen = rule.first_seen(torch.tensor([reader.first for reader in readers], device="cpu"))
    begins = [0] * len(readers) if seen is None else seen.tolist()
    return {
        block
        for reader, begin in zip(readers, begins, strict=True)
        for block in reader.blocks[begin // block_size : -(-(reader.last - 1) // block_size)]
    }


def portions(blocks: set[int], bridge: int, least: int, most: int) -> Portions:
    """Parts blocks into extents of consecutive ones, and single ones.

    Args:
        bridge: so many blocks that nobody reads may lie between two others of an extent.
        least: blocks of an extent, from its first to its last.
        most: extents; the longest ones.
    """
    ordered = sorted(blocks)
    ends = [at for at in range(1, len(ordered)) if ordered[at] - ordered[at - 1] > bridge + 1]
    runs = [ordered[at:end] for at, end in itertools.pairwise([0, *ends, len(ordered)]) if at < end]
    runs.sort(key=lambda run: run[0] - run[-1])
    long = [run for run in runs[:most] if run[-1] - run[0] + 1 >= least]
    within = sum(map(len, long))
    extents = [(run[0], run[-1] - run[0] + 1) for run in long]
    return Portions([block for run in runs for block in run], within, extents)


Pair = tuple[Tensor, Tensor]
"""Keys and values, (blocks, block_size, kv_heads, head_dim or value_dim), contiguous."""

HEADER = 2
"""Numbers in a list of blocks before its blocks: how many of these the copy engine brings, and how many there are."""


@library.custom_op("graphmod::fetch", mutates_args=("near_keys", "near_values"))
def fetch(keys: Tensor, values: Tensor, near_keys: Tensor, near_values: Tensor, listed: Tensor) -> None:
    """Copies blocks of a layer to the same places near by.

    On a GPU by a kernel, which in a captured graph leaves those to the copy engine that it brings.

    Args:
        listed: (2 + blocks there are,) int64: how many of the listed blocks the copy engine brings, how many are
            listed, and the blocks, first those that the copy engine brings. Each graph reads it at every launch.
    """
    if near_keys.is_cuda:
        from graphmod.decode import kernels

        with torch.cuda.device_of(near_keys):
            kernels.fetch(keys, values, near_keys, near_values, listed, beside_copy_nodes=is_capturing())
    else:
        blocks = listed[HEADER : HEADER + int(listed[1])]
        near_keys.index_copy_(0, blocks, keys.index_select(0, blocks))
        near_values.index_copy_(0, blocks, values.index_select(0, blocks))


@fetch.register_fake
def _(*given: Tensor) -> None:
    return None


class Branch:
    """Runs things beside the rest of a captured step. Outside of a capture everything runs in its order, on the
    caller's stream: what a process launches on a second one slows all graphs that it captures.

    What is launched beside must not allocate memory, and must be waited for before the step ends.

    Args:
        device: of what runs. On a CPU everything runs at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = stream_for(self, device) if device.type == "cuda" else None

    def here(self) -> Any:
        """The place that the step has reached, for `run` to come after."""
        if self._capturing() is None:
            return None
        place = torch.cuda.Event()
        place.record()
        return place

    def run(self, act: Callable[[], None], after: Any) -> Any:
        """Does it beside the step, after a place in it and what was given here before.

        Returns:
            Its end, for `wait`.
        """
        stream = self._capturing()
        if stream is None:
            act()
            return None
        stream.wait_event(after)
        end = torch.cuda.Event()
        with torch.cuda.stream(stream):
            act()
            end.record()
        return end

    def wait(self, end: Any) -> None:
        """Lets the step go on only after it."""
        if end is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(end)

    def _capturing(self) -> torch.cuda.Stream | None:
        return self._stream if self._stream is not None and is_capturing() else None


_MEMCPY = 1  # CU_GRAPH_NODE_TYPE_MEMCPY


class _Copy(NamedTuple):
    source: int
    target: int
    nbytes: int
    memory: int  # which memory there is at these addresses, counted


class CopyNodes:
    """Nodes in any number of graphs, and what they copy from the next launch of each on.

    The copy engine of a GPU reads pinned memory faster than kernels do, but a node that copies has its length from the
    capture. It can be changed in an instantiated graph, and so can whether the node does anything; what was launched
    before goes on as it was (CUDA Driver API, "Graph Management").

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
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for source, target in pairs:
            for number in range(self.count):
                mark = source.data_ptr() + number
                self.wanted.setdefault(mark, None)
                call("cuMemcpyHtoDAsync", target.data_ptr() + number, mark, 1, stream)

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
        for node in nodes("cuGraphGetNodes", graph.raw_cuda_graph()):
            if node_type(node) == _MEMCPY:
                with contextlib.suppress(RuntimeError):  # of a node of others
                    found = call("cuGraphMemcpyNodeGetParams", node)
                    from_host = found.srcMemoryType == bindings().CUmemorytype.CU_MEMORYTYPE_HOST
                    one_byte = found.WidthInBytes == found.Height == found.Depth == 1
                    if from_host and one_byte and found.srcHost in self.wanted:
                        marks[node] = found.srcHost
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
        graph, version = self._graph.raw_cuda_graph_exec(), self._copies.version
        kinds, context = bindings(), call("cuCtxGetCurrent")
        for node, mark in self._marks.items():
            copy = self._copies.wanted[mark]
            if node in self._done and self._done[node] == copy:
                continue
            self._done.pop(node, None)
            if copy is not None:
                given = kinds.CUDA_MEMCPY3D()
                given.srcMemoryType, given.srcHost = kinds.CUmemorytype.CU_MEMORYTYPE_HOST, copy.source
                given.dstMemoryType, given.dstDevice = kinds.CUmemorytype.CU_MEMORYTYPE_DEVICE, copy.target
                given.WidthInBytes, given.Height, given.Depth = copy.nbytes, 1, 1
                call("cuGraphExecMemcpyNodeSetParams", graph, node, given, context)
            call("cuGraphNodeSetEnabled", graph, node, copy is not None)
            self._done[node] = copy
        self._version = version


_EXTENTS = 8  # of a layer, for its keys and for its values: nodes that do nothing cost next to nothing
_LEAST_BYTES = 2**21  # of the keys of an extent: a node needs 3 us beside its copy, and a kernel copies 8 % slower
_BRIDGE_BYTES = 2**17  # the time that one more node takes


def far_layers(count: int, resident: float) -> list[int]:
    """Which of `count` layers are kept in the memory of the host, the others spread evenly among them. The last layer
    is far: nothing is copied while a step computes what comes after its last copy, so that is to be little.

    Args:
        resident: the share that stays on the device, 0 to 1.
    """
    return [
        number for number in range(count) if int((count - number) * resident) == int((count - number - 1) * resident)
    ]


def buffer_sizes(sizes: dict[int, tuple[torch.Size, torch.Size]], buffers: int) -> list[tuple[int]]:
    """The sizes of the tensors of a `Ring`: for each buffer that of its keys, then that of its values."""
    largest = [(max(size[part].numel() for size in sizes.values()),) for part in range(2)] if sizes else []
    return largest * min(buffers, len(sizes))


class Ring:
    """The far layer number k uses buffer k modulo their count.

    A step copies what it will see of as many far layers as there are buffers. When it reaches a layer, it has done with
    those before, and the next far layer is copied into the buffer of the last one. The copies are a branch of the
    step's graph, so that one launch does all. Its edges are the two that this needs: a copy comes after the computation
    that read the buffer before, and computation comes after the copy that it reads.

    What is copied the host says before it launches steps (`expect`): extents of blocks by the copy engine, the others
    by a kernel. One graph serves all lengths, and a block that several rows hold is copied once.

    Args:
        kept: keys and values of each far layer, by the number of the layer.
        rules: which tokens each of them sees.
        buffers: tensors of `buffer_sizes`.
        branches: where the kernels of copies run, and where the copy engine does.
    """

    def __init__(
        self, kept: dict[int, Pair], rules: dict[int, Rule], buffers: list[Pair], branches: tuple[Branch, Branch]
    ) -> None:
        self.far = list(kept)
        self.branch, self._nodes_branch = branches
        self._kept, self._rules = kept, rules
        self._buffers, self.count = buffers, len(buffers)
        self._near: dict[int, Pair] = {}
        for k, (layer, (keys, values)) in enumerate(kept.items()):
            first, second = buffers[k % self.count]
            self._near[layer] = (
                first[: keys.numel()].view(keys.shape),
                second[: values.numel()].view(values.shape),
            )
        blocks, device = len(next(iter(kept.values()))[0]), buffers[0][0].device
        self._listed = {
            rule: torch.zeros(HEADER + blocks, dtype=torch.int64, device=device)
            for rule in dict.fromkeys(rules.values())
        }
        self._portions: dict[Rule, Portions] = {}
        self._nodes = CopyNodes(_EXTENTS, device) if device.type == "cuda" else None

    def near(self, layer: int) -> Pair | None:
        """Keys and values of a layer as a step sees them; None for one that is not far."""
        return self._near.get(layer)

    def tensors(self) -> list[Tensor]:
        """All of its memory."""
        return [tensor for both in self._buffers for tensor in both]

    def clear(self) -> None:
        """Zeroes what may hold NaN; between steps nothing that is in the buffers is needed."""
        for tensor in self.tensors():
            tensor.zero_()

    def renew(self) -> None:
        """To be called when there is other memory at the addresses of the buffers."""
        if self._nodes is not None:
            self._nodes.renew()

    def expect(self, readers: list[Reader]) -> None:
        """Says what the steps that are launched next will read; what was launched before goes on as it was."""
        for rule, listed in self._listed.items():
            layers = [layer for layer in self.far if self._rules[layer] == rule]
            keys = self._kept[layers[0]][0]
            nbytes = keys[0].nbytes
            read = read_blocks(readers, rule, keys.shape[1])
            found = portions(read, _BRIDGE_BYTES // nbytes, -(-_LEAST_BYTES // nbytes), _EXTENTS)
            before = self._portions.get(rule)
            if found == before:
                continue
            self._portions.pop(rule, None)  # till all is done: who is interrupted leaves nothing that seems to be done
            new = torch.tensor([found.within, len(found.blocks), *found.blocks], device="cpu")
            listed[: len(new)].copy_(new.pin_memory() if listed.is_cuda else new, non_blocking=True)
            if self._nodes is not None and (before is None or before.extents != found.extents):
                for layer in layers:
                    for kept, near in zip(self._kept[layer], self._near[layer], strict=True):
                        size = kept[0].nbytes
                        self._nodes.set(kept, near, [(first * size, many * size) for first, many in found.extents])
            self._portions[rule] = found

    def bring(self, layer: int, after: Any) -> list[Callable[[], None]]:
        """Copies what is expected of a layer, after a place in the step; returns what waits for the copies.

        Kernel and copy engine have a branch each: those of one would only ever wait for those of the other.
        """
        kept, near = self._kept[layer], self._near[layer]
        acts = [(self.branch, partial(fetch, *kept, *near, self._listed[self._rules[layer]]))]
        if self._nodes is not None:
            acts.append((self._nodes_branch, partial(self._nodes.capture, list(zip(kept, near, strict=True)))))
        return [partial(branch.wait, branch.run(act, after)) for branch, act in acts]


class Passage:
    """One step's way along the layers, in a ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._reached = -1
        self._copied = 0  # far layers whose copies were launched
        self._waits: dict[int, list[Callable[[], None]]] = {}

    def reach(self, layer: int) -> None:
        """Goes on to a layer; its keys and values are near by after it.

        Raises:
            DecodeError: it does not come after the last one.
        """
        ring = self._ring
        if layer <= self._reached:
            raise DecodeError("this model does not store the keys of its layers in their order; use offload=none")
        self._reached = layer
        wanted = ring.far[self._copied : self._due(layer)]
        self._copied += len(wanted)
        after = ring.branch.here() if wanted else None
        for far in wanted:
            self._waits[far] = ring.bring(far, after)
        for wait in self._waits.pop(layer, ()):
            wait()

    def _due(self, layer: int) -> int:
        """How many far layers may have been copied when a step reaches a layer, and has done with those before."""
        return sum(far < layer for far in self._ring.far) + self._ring.count
