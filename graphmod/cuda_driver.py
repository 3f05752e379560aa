"""The CUDA driver's C interface to graphs (CUDA Driver API, "Graph Management"), as far as captured graphs are edited:
PyTorch has no way to.
"""

import ctypes
import functools
from ctypes import Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

_KERNEL = 0  # CUgraphNodeType


class _Kernel(Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = [
        ("function", c_void_p),
        ("dimensions", c_uint * 7),
        ("parameters", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Raises: RuntimeError with the driver's error code, AttributeError where the driver has no such function."""
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} returned CUDA error {status}")


def nodes(query: str, of: c_void_p) -> list[c_void_p]:
    """The nodes of a graph, or the neighbours of a node."""
    count = c_size_t()
    call(query, of, None, byref(count))
    if not count.value:
        return []
    found = (c_void_p * count.value)()
    call(query, of, found, byref(count))
    return [c_void_p(node) for node in found]


def neighbours(query: str, of: c_void_p) -> list[tuple[c_void_p, int]]:
    """The neighbours of a node, each with the data of the edge to it, 0 for an ordinary one."""
    count = c_size_t()
    call(query, of, None, None, byref(count))
    if not count.value:
        return []
    found, data = (c_void_p * count.value)(), (c_uint64 * count.value)()
    call(query, of, found, data, byref(count))
    return [(c_void_p(node), kind) for node, kind in zip(found, data, strict=True)]


def node_type(node: c_void_p) -> int:
    kind = c_int()
    call("cuGraphNodeGetType", node, byref(kind))
    return kind.value


def kernel_name(node: c_void_p) -> str:
    """The name of a kernel node's function, mangled; empty for nodes of other types."""
    if node_type(node) != _KERNEL:
        return ""
    found, name = _Kernel(), c_char_p()
    call("cuGraphKernelNodeGetParams_v2", node, byref(found))
    if found.function:
        call("cuFuncGetName", byref(name), c_void_p(found.function))
    else:
        call("cuKernelGetName", byref(name), c_void_p(found.kernel))
    return (name.value or b"").decode()


def last_captured(stream: int) -> int:
    """The node that whatever is captured next on a stream will follow, one of them where branches meet; 0 if there is
    none."""
    status, count, following, data = c_int(), c_size_t(), c_void_p(), c_void_p()
    identity, graph = c_uint64(), c_void_p()
    call(
        "cuStreamGetCaptureInfo_v3",
        c_void_p(stream),
        byref(status),
        byref(identity),
        byref(graph),
        byref(following),
        byref(data),
        byref(count),
    )
    return (c_void_p.from_address(following.value).value or 0) if count.value and following.value else 0
