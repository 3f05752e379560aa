"""CUDA graphs for PyTorch training and decode."""

from graphmod.buffers import mark_static
from graphmod.config import BackendName, CUDAGraphConfig, Scope
from graphmod.errors import BackwardUnavailable, CaptureRefused, ConfigError, GraphmodError
from graphmod.layers import graph_layers, ungraph
from graphmod.lifecycle import GraphStats
from graphmod.module import CUDAGraphModule

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
    "Scope",
    "graph_layers",
    "mark_static",
    "ungraph",
]
