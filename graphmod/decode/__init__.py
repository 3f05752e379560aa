"""Token decode for transformers causal LMs: one step, everything included, is a replay of a CUDA graph.

What needs PyTorch is imported when it is first used: `generate.py` reads its settings before that is loaded.
"""

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from graphmod.decode.engine import DecodeEngine
    from graphmod.decode.streams import EngineLoop, Handle, TokenStream

_LATER = {"DecodeEngine": "engine", "EngineLoop": "streams", "Handle": "streams", "TokenStream": "streams"}

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
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
