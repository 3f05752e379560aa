"""Rewrites nodes of a captured CUDA graph: fills and copies of device memory become kernels.

In a chain of kernels a memset or memcpy node costs about a microsecond more than a kernel does, and reductions bring
memsets for their semaphores, `clone` brings copies. The kernels are PyTorch's own, captured for the same addresses on
the side, so the bytes written are the same. What the driver does not let be changed stays as it was.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from ctypes import Structure, byref, c_int, c_size_t, c_uint, c_void_p
from typing import Any

import torch
from torch import Tensor

from graphmod.backend.driver import DEVICE, MEMCPY, MEMSET, Kernel, Memcpy, call, node_type, nodes

_THREAD_LOCAL = 1  # CUstreamCaptureMode
_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MOST = 2**31 - 1  # bytes that one kernel of PyTorch's handles


class _Memset(Structure):  # CUDA_MEMSET_NODE_PARAMS
    _fields_ = [
        ("dst", c_void_p),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    ]


def _is_on(device: torch.device, *addresses: int) -> bool:
    """Whether all of these lie in the memory of the device itself."""
    for address in addresses:
        ordinal = c_int(-1)
        call("cuPointerGetAttribute", byref(ordinal), c_int(_ORDINAL), c_size_t(address))
        if ordinal.value != device.index:
            return False
    return True


def _memory(address: int, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    storage = torch._C._construct_storage_from_data_pointer(address, device, elements * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (elements,))


def _fill(node: c_void_p, device: torch.device) -> Callable[[], Any] | None:
    """What a memset node does, as an operation that launches one kernel; None where that is not plain."""
    found = _Memset()
    call("cuGraphMemsetNodeGetParams", node, byref(found))
    size, length = found.element, found.element * found.width
    if size not in _INTEGERS or found.height != 1 or not 0 < length <= _MOST or not _is_on(device, found.dst):
        return None
    value = found.value & ((1 << 8 * size) - 1)
    if not (found.dst | length) % 4:
        value, size = int.from_bytes(value.to_bytes(size, "little") * (4 // size), "little"), 4
    if size > 1 and value >> (8 * size - 1):  # the integers of torch have a sign
        value -= 1 << 8 * size
    return functools.partial(_memory(found.dst, length // size, _INTEGERS[size], device).fill_, value)


def _copy(node: c_void_p, device: torch.device) -> Callable[[], Any] | None:
    """What a copy node does, likewise; only copies of consecutive bytes from this device to it."""
    found = Memcpy()
    call("cuGraphMemcpyNodeGetParams", node, byref(found))
    plain = found.height == found.depth == 1 and found.src_type == found.dst_type == DEVICE
    offsets = (found.src_x, found.src_y, found.src_z, found.dst_x, found.dst_y, found.dst_z)
    if not plain or any(offsets) or not 0 < found.width <= _MOST:
        return None
    if not _is_on(device, found.src_device, found.dst_device):
        return None
    element = next(size for size in (4, 2, 1) if not (found.src_device | found.dst_device | found.width) % size)
    dtype, count = _INTEGERS[element], found.width // element
    source = _memory(found.src_device, count, dtype, device)
    target = _memory(found.dst_device, count, dtype, device)
    return functools.partial(torch.bitwise_or, source, 0, out=target)  # a kernel, where copy_ would make a copy node


_AS_OPERATION = {MEMSET: _fill, MEMCPY: _copy}


def _captured_kernels(operations: list[Callable[[], Any]], stream: torch.cuda.Stream) -> tuple[c_void_p, list[Kernel]]:
    """A graph of these operations, and the kernel of each."""
    graph, handle = c_void_p(), c_void_p(stream.cuda_stream)
    try:
        with torch.cuda.stream(stream):
            call("cuStreamBeginCapture_v2", handle, c_int(_THREAD_LOCAL))
            try:
                for operation in operations:
                    operation()
            finally:
                call("cuStreamEndCapture", handle, byref(graph))
        kernels = []
        following = nodes("cuGraphGetRootNodes", graph)
        while following:  # a chain, in the order of the operations
            found = Kernel()
            call("cuGraphKernelNodeGetParams_v2", following[0], byref(found))
            kernels.append(found)
            following = nodes("cuGraphNodeGetDependentNodes", following[0])
        if len(kernels) != len(operations):
            raise RuntimeError(f"{len(operations)} operations became {len(kernels)} kernels")
        return graph, kernels
    except BaseException:
        if graph:
            call("cuGraphDestroy", graph)
        raise


def _replace(graph: c_void_p, node: c_void_p, kernel: Kernel) -> None:
    before = nodes("cuGraphNodeGetDependencies", node)
    after = nodes("cuGraphNodeGetDependentNodes", node)
    made = c_void_p()
    given = (c_void_p * len(before))(*before)
    call("cuGraphAddKernelNode_v2", byref(made), graph, given, c_size_t(len(before)), byref(kernel))
    try:
        if after:
            sources, targets = (c_void_p * len(after))(*[made] * len(after)), (c_void_p * len(after))(*after)
            call("cuGraphAddDependencies", graph, sources, targets, c_size_t(len(after)))
    except RuntimeError:
        call("cuGraphDestroyNode", made)
        raise
    call("cuGraphDestroyNode", node)


def use_kernels(graph: int, device: torch.device, stream: torch.cuda.Stream) -> int:
    """Replaces the memset and memcpy nodes of a graph that is not instantiated yet by kernels.

    Args:
        graph: address of a `cudaGraph_t`.
        device: the CUDA device whose memory they touch.
        stream: an idle stream to capture the kernels on.

    Returns:
        How many nodes were replaced.
    """
    wanted = []
    for node in nodes("cuGraphGetNodes", c_void_p(graph)):
        make = _AS_OPERATION.get(node_type(node))
        operation = make(node, device) if make is not None else None
        if operation is not None:
            wanted.append((node, operation))
    if not wanted:
        return 0
    made, kernels = _captured_kernels([operation for _, operation in wanted], stream)
    replaced = 0
    try:
        for (node, _), kernel in zip(wanted, kernels, strict=True):
            with contextlib.suppress(RuntimeError):  # what the driver refuses stays as it was
                _replace(c_void_p(graph), node, kernel)
                replaced += 1
    finally:
        call("cuGraphDestroy", made)
    return replaced
