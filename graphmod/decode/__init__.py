"""Token decode for transformers causal LMs: one step, everything included, is a replay of a CUDA graph.

Names are imported when they are first used: `generate.py` reads its settings before PyTorch is loaded.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphmod.decode.engine import DecodeEngine
    from graphmod.decode.streams import EngineLoop, Handle, TokenStream
    from graphmod.decode.types import (
        Completion,
        DecodeError,
        DecodeStats,
        EngineConfig,
        RequestError,
        Run,
        Sampling,
        TokenEvent,
    )

_HOMES = {
    "Completion": "graphmod.decode.types",
    "DecodeEngine": "graphmod.decode.engine",
    "DecodeError": "graphmod.decode.types",
    "DecodeStats": "graphmod.decode.types",
    "EngineConfig": "graphmod.decode.types",
    "EngineLoop": "graphmod.decode.streams",
    "Handle": "graphmod.decode.streams",
    "RequestError": "graphmod.decode.types",
    "Run": "graphmod.decode.types",
    "Sampling": "graphmod.decode.types",
    "TokenEvent": "graphmod.decode.types",
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
