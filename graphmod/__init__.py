"""CUDA graphs for PyTorch training and decode."""

from graphmod.config import BackendName, CUDAGraphConfig
from graphmod.errors import BackwardUnavailable, CaptureRefused, ConfigError, GraphmodError
from graphmod.graph.buffers import mark_static
from graphmod.state.entry import GraphStats
from graphmod.wrap.layers import graph_layers, ungraph
from graphmod.wrap.module import CUDAGraphModule

__version__ = "0.1.0"

__all__ = [
    "BackendName",
    "BackwardUnavailable",
    "CUDAGraphConfig",
    "CUDAGraphModule",
    "CaptureRefused",
    "ConfigError",
    "GraphStats",
    "GraphmodError",
    "check",
    "graph_layers",
    "mark_static",
    "ungraph",
]


def __getattr__(name: str) -> object:
    if name == "check":  # a package, and callable; most programs never ask for it
        import importlib

        return importlib.import_module("graphmod.check")
    if name == "Scope":  # where it was before it moved to the settings of training
        from graphmod.train.settings import Scope

        return Scope
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
