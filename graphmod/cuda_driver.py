"""The CUDA driver's functions (CUDA Driver API), for what PyTorch has no way to do: memory that is mapped at addresses
of its own, and captured graphs that are edited. By NVIDIA's bindings, which PyTorch for CUDA brings with it; they are
imported by the first call.
"""

import re
from typing import Any

import torch

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL


def bindings() -> Any:
    """The module with the driver's functions, structures and enumerations.

    Raises:
        ImportError: there is none; the message says what to install.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(f"cuda.bindings cannot be imported ({error}); {_install()}") from error
    return driver


def _install() -> str:
    version = "" if torch.version.cuda is None else f"=={torch.version.cuda.partition('.')[0]}.*"
    return f"install NVIDIA's bindings: pip install -U 'cuda-bindings{version}'"


def call(name: str, *arguments: Any) -> Any:
    """What a function gives besides its status: None, a value, or a list of several.

    Raises:
        ImportError: there are no bindings.
        torch.OutOfMemoryError: there is not enough memory.
        RuntimeError: anything else; the message has the driver's words. Also where there is no driver, or it or the
            bindings have no such function.
    """
    driver = bindings()
    # The bindings of CUDA 13 leave the number of a version out of names.
    function = getattr(driver, name, None) or getattr(driver, re.sub(r"_v\d+$", "", name), None)
    if function is None:
        raise RuntimeError(f"the cuda.bindings that are installed have no {name}; {_install()}")
    status, *found = function(*arguments)
    if status:
        failed, words = driver.cuGetErrorString(status)
        said = "unknown error" if failed or not words else words.decode(errors="replace")
        kind = torch.OutOfMemoryError if status == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"{name}: {said} (CUDA error {int(status)})")
    return found if len(found) > 1 else found[0] if found else None


# -- graphs, whose nodes are told by their addresses -------------------------------------------------------------------


def nodes(query: str, of: int) -> list[int]:
    """Nodes of a graph: all, or its roots."""
    *_, count = call(query, of)
    return [int(node) for node in call(query, of, count)[0]] if count else []


def neighbours(query: str, of: int) -> list[tuple[int, bool]]:
    """The neighbours of a node, each with whether the edge to it is no ordinary one."""
    *_, count = call(query, of)
    if not count:
        return []
    found, edges, _ = call(query, of, count)
    return [
        (int(node), bool(edge.from_port or edge.to_port or int(edge.type)))
        for node, edge in zip(found, edges, strict=True)
    ]


def node_type(node: int) -> int:
    return int(call("cuGraphNodeGetType", node))


def kernel_name(node: int) -> str:
    """The name of a kernel node's function, mangled; empty for nodes of other types."""
    if node_type(node) != _KERNEL:
        return ""
    found = call("cuGraphKernelNodeGetParams", node)
    name = call("cuFuncGetName", found.func) if int(found.func) else call("cuKernelGetName", found.kern)
    return (name or b"").decode()


def edit(verb: str, graph: int, edges: list[tuple[int, int]]) -> None:
    """Adds ordinary edges to a graph, or removes them."""
    sources, targets = ([bindings().CUgraphNode(node) for node in some] for some in zip(*edges, strict=True))
    call(verb, graph, sources, targets, None, len(edges))


def last_captured(stream: int) -> int:
    """The node that whatever is captured next on a stream will follow, one of them where branches meet; 0 if there is
    none."""
    *_, following, _, _ = call("cuStreamGetCaptureInfo_v3", stream)
    return int(following[0]) if following else 0
