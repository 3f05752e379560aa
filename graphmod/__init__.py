"""CUDA graphs for PyTorch training and decode.

Names are imported when they are first used, so that the command line can answer before PyTorch is loaded.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphmod import check as check
    from graphmod.config import BackendName, CUDAGraphConfig
    from graphmod.decode.engine import DecodeEngine
    from graphmod.errors import BackwardUnavailable, CaptureRefused, ConfigError, GraphmodError
    from graphmod.step.eager_parts import eager
    from graphmod.step.entry import GraphStats
    from graphmod.step.static_inputs import mark_static
    from graphmod.train.compile import compiled_update
    from graphmod.train.settings import Scope
    from graphmod.train.step import TrainStep
    from graphmod.wrap.layers import graph_layers, ungraph
    from graphmod.wrap.module import CUDAGraphModule

__version__ = "0.1.0"

_HOMES = {
    "BackendName": "graphmod.config",
    "BackwardUnavailable": "graphmod.errors",
    "CUDAGraphConfig": "graphmod.config",
    "CUDAGraphModule": "graphmod.wrap.module",
    "CaptureRefused": "graphmod.errors",
    "ConfigError": "graphmod.errors",
    "DecodeEngine": "graphmod.decode.engine",
    "GraphStats": "graphmod.step.entry",
    "GraphmodError": "graphmod.errors",
    "Scope": "graphmod.train.settings",
    "TrainStep": "graphmod.train.step",
    "compiled_update": "graphmod.train.compile",
    "eager": "graphmod.step.eager_parts",
    "graph_layers": "graphmod.wrap.layers",
    "mark_static": "graphmod.step.static_inputs",
    "ungraph": "graphmod.wrap.layers",
}

__all__ = [
    "BackendName",
    "BackwardUnavailable",
    "CUDAGraphConfig",
    "CUDAGraphModule",
    "CaptureRefused",
    "ConfigError",
    "DecodeEngine",
    "GraphStats",
    "GraphmodError",
    "Scope",
    "TrainStep",
    "check",
    "compiled_update",
    "eager",
    "graph_layers",
    "mark_static",
    "ungraph",
]


def __getattr__(name: str) -> object:
    if name == "check":  # a package that can be called
        return importlib.import_module("graphmod.check")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
