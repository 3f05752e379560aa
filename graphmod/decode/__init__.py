"""Token decode for transformers causal LMs: one step, everything included, is a replay of a CUDA graph.

Names are imported when they are first used: `generate.py` reads its settings before PyTorch is loaded.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphmod.decode.config import EngineConfig, Sampling
    from graphmod.decode.engine import DecodeEngine
    from graphmod.decode.errors import DecodeError, RequestError
    from graphmod.decode.results import Completion, DecodeStats, Run, TokenEvent
    from graphmod.decode.streams import EngineLoop, Handle, TokenStream

_HOMES = {
    "Completion": "graphmod.decode.results",
    "DecodeEngine": "graphmod.decode.engine",
    "DecodeError": "graphmod.decode.errors",
    "DecodeStats": "graphmod.decode.results",
    "EngineConfig": "graphmod.decode.config",
    "EngineLoop": "graphmod.decode.streams",
    "Handle": "graphmod.decode.streams",
    "RequestError": "graphmod.decode.errors",
    "Run": "graphmod.decode.results",
    "Sampling": "graphmod.decode.config",
    "TokenEvent": "graphmod.decode.results",
    "TokenStream": "graphmod.decode.streams",
}

__all__ = [
    "Completion",
    "DecodeEngine",
    "DecodeError",
    "DecodeStats",
    "EngineConfig",
    "EngineLoop",
    "Handle",
    "RequestError",
    "Run",
    "Sampling",
    "TokenEvent",
    "TokenStream",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
