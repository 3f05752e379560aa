"""What is done to a captured graph before it is instantiated: launches of one multi-tensor operation go side by side,
and memsets and copies become kernels. Each node writes the bytes that it would have written.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from graphmod.cuda_driver import bindings, call, edit, kernel_name, neighbours, node_type, nodes
from graphmod.torch_private import without_modes
from graphmod.trace.operations import extent

_LEAST = 3  # launches: for fewer, to part and to join costs what it brings
_LEAST_BYTES = 2**20  # of tensors; the step counters of an optimizer are many, and nothing
_SPLITS_ITS_TENSORS = "multi_tensor_apply"
_AHEAD, _BEHIND = "cuGraphNodeGetDependencies_v2", "cuGraphNodeGetDependentNodes_v2"


# -- launches of one multi-tensor operation, side by side --------------------------------------------------------------


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
                spans.append((tensor.data_ptr(), tensor.data_ptr() + extent(tensor), owner))
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


def spread(graph: int, operations: Iterable[tuple[int, int]]) -> int:
    """Puts the launches of one multi-tensor operation side by side, in a graph that is not instantiated yet. Leaves
    alone what plain edges do not tie to one chain.

    A norm, a scaling or a fused optimizer step over many tensors is several launches of one kernel, each for tensors of
    its own. One after the other, each leaves the GPU half empty while its last blocks finish; on two branches of the
    graph the next one fills it (three are no faster). Every kernel computes what it did, so the bits stay the same.

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
            parted += _part(graph, launches)
    return parted


def _runs(before: int, last: int) -> list[list[int]]:
    """The launches of one kernel that follow each other between two nodes of a chain."""
    chain = [last]
    while chain[-1] != before:
        ahead = [node for node, _ in neighbours(_AHEAD, chain[-1])]
        if before in ahead or not (before or ahead):
            break  # the operation before this one may have been parted, and end in two launches
        if len(ahead) != 1:
            return []
        chain.append(ahead[0])
    if chain[-1] == before:
        return []  # it launched nothing
    runs = [(name, list(same)) for name, same in itertools.groupby(reversed(chain), kernel_name)]
    return [launches for name, launches in runs if len(launches) >= _LEAST and _SPLITS_ITS_TENSORS in name]


def _part(graph: int, launches: list[int]) -> bool:
    """Lets every second launch follow the last but one; returns whether it did."""
    ahead, behind = neighbours(_AHEAD, launches[0]), neighbours(_BEHIND, launches[-1])
    inner = [neighbours(_BEHIND, node) for node in (*(node for node, _ in ahead), *launches[:-1])]
    if any(len(found) != 1 for found in inner) or any(odd for found in (ahead, behind, *inner) for _, odd in found):
        return False
    new = [(node, launches[1]) for node, _ in ahead] + list(zip(launches, launches[2:], strict=False))
    new += [(launches[-2], node) for node, _ in behind]
    # New edges first: with them alone nothing has changed.
    edit("cuGraphAddDependencies_v2", graph, new)
    edit("cuGraphRemoveDependencies_v2", graph, list(itertools.pairwise(launches)))
    return True


# -- kernels in place of memsets and copies ----------------------------------------------------------------------------

_MEMCPY, _MEMSET, _DEVICE = 1, 2, 2  # CUgraphNodeType, CUmemorytype
_INTEGERS = {1: "|u1", 2: "<i2", 4: "<i4"}  # of so many bytes, in the words of numpy's array interface
_MOST = 2**31 - 1  # bytes that one kernel of PyTorch's handles


def use_kernels(graph: int, stream: torch.cuda.Stream) -> int:
    """Puts kernels in the place of the memset and memcpy nodes of a graph that is not instantiated yet. What the driver
    does not let be changed stays as it was.

    In a chain of kernels such a node costs more than a kernel, and with enough of them the host no longer runs ahead of
    the GPU. Reductions bring memsets for their semaphores, `clone` and `contiguous` bring copies. The kernels are
    PyTorch's own, for the same addresses, captured on the side.

    Args:
        graph: address of a `cudaGraph_t`.
        stream: an idle stream of the graph's device, to capture the kernels on.

    Returns:
        How many nodes were replaced.
    """
    make = {_MEMSET: _fill, _MEMCPY: _copy}
    wanted = []
    for node in nodes("cuGraphGetNodes", graph):
        operation = None
        with contextlib.suppress(RuntimeError):  # an address that the driver does not know, say
            operation = make.get(node_type(node), lambda *_: None)(node, stream.device)
        if operation is not None and not any(odd for way in (_AHEAD, _BEHIND) for _, odd in neighbours(way, node)):
            wanted.append((node, operation))
    if not wanted:
        return 0
    driver = bindings()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    made = None
    try:
        with torch.cuda.stream(stream), torch.no_grad(), without_modes():
            call("cuStreamBeginCapture_v2", stream.cuda_stream, mode)
            try:
                for _, operation in wanted:
                    operation()
            finally:
                made = call("cuStreamEndCapture", stream.cuda_stream)
        kernels = _chain(int(made))
        if len(kernels) != len(wanted):
            raise RuntimeError(f"{len(wanted)} memsets and copies became {len(kernels)} kernels")
        for kernel, (node, _) in zip(kernels, wanted, strict=True):
            _replace(graph, node, kernel)
    finally:
        if made is not None:
            call("cuGraphDestroy", made)
    return len(wanted)


def _replace(graph: int, node: int, kernel: int) -> None:
    before = [bindings().CUgraphNode(ahead) for ahead, _ in neighbours(_AHEAD, node)]
    parameters = call("cuGraphKernelNodeGetParams_v2", kernel)
    new = int(call("cuGraphAddKernelNode_v2", graph, before, len(before), parameters))
    try:
        if behind := [(new, after) for after, _ in neighbours(_BEHIND, node)]:
            edit("cuGraphAddDependencies_v2", graph, behind)
    except BaseException:  # or it would write whenever it likes
        call("cuGraphDestroyNode", new)
        raise
    call("cuGraphDestroyNode", node)


def _chain(graph: int) -> list[int]:
    """The nodes of a graph that is one chain, in their order."""
    chain = nodes("cuGraphGetRootNodes", graph)
    while behind := neighbours(_BEHIND, chain[-1]):
        chain.append(behind[0][0])
    return chain


def _fill(node: int, device: torch.device) -> Callable[[], Any] | None:
    """What a memset node does, as an operation that launches one kernel; None where that is not plain."""
    found = call("cuGraphMemsetNodeGetParams", node)
    target, size, length = int(found.dst), found.elementSize, found.elementSize * found.width
    if size not in _INTEGERS or found.height != 1 or not 0 < length <= _MOST or not _is_on(device, target):
        return None
    value = found.value & ((1 << 8 * size) - 1)
    if not (target | length) % 4:
        value, size = int.from_bytes(value.to_bytes(size, "little") * (4 // size), "little"), 4
    if size > 1 and value >> (8 * size - 1):  # the integers of torch have a sign
        value -= 1 << 8 * size
    return functools.partial(_memory(target, length // size, size, device).fill_, value)


def _copy(node: int, device: torch.device) -> Callable[[], Any] | None:
    """What a copy node does, likewise; only copies of consecutive bytes from this device to it."""
    found = call("cuGraphMemcpyNodeGetParams", node)
    length, source, target = found.WidthInBytes, int(found.srcDevice), int(found.dstDevice)
    is_plain = found.Height == found.Depth == 1 and int(found.srcMemoryType) == int(found.dstMemoryType) == _DEVICE
    offsets = found.srcXInBytes, found.srcY, found.srcZ, found.dstXInBytes, found.dstY, found.dstZ
    if not is_plain or any(offsets) or not 0 < length <= _MOST or not _is_on(device, source, target):
        return None
    size = next(size for size in (4, 2, 1) if not (source | target | length) % size)
    given, taken = (_memory(address, length // size, size, device) for address in (source, target))
    return functools.partial(torch.bitwise_or, given, 0, out=taken)  # a kernel, where copy_ would make a copy node


def _is_on(device: torch.device, *addresses: int) -> bool:
    """Whether all of these lie in the memory of the device itself."""
    ordinal = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return all(int(call("cuPointerGetAttribute", ordinal, address)) == device.index for address in addresses)


class _Array:
    """Memory as numba's CUDA array interface describes it, version 3."""

    def __init__(self, address: int, count: int, size: int) -> None:
        described = {"shape": (count,), "typestr": _INTEGERS[size], "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = described


def _memory(address: int, count: int, size: int, device: torch.device) -> Tensor:
    """Integers of `size` bytes that lie at an address."""
    return torch.as_tensor(_Array(address, count, size), device=device)
