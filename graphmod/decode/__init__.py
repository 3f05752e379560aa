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
    from graphmod.decode.invariant import batch_invariant
    from graphmod.decode.rollouts import Rollouts, use_decode_engine
    from graphmod.decode.streams import EngineLoop, Handle, TokenStream
    from graphmod.decode.weights import quantize_weights

_LATER = {"DecodeEngine": "engine", "EngineLoop": "streams", "Handle": "streams", "TokenStream": "streams"}
_LATER |= {"Rollouts": "rollouts", "use_decode_engine": "rollouts", "quantize_weights": "weights"}
_LATER |= {"batch_invariant": "invariant"}

__all__ = [
    "Completion",
    "DecodeEngine",
    "DecodeError",
    "DecodeStats",
    "EngineConfig",
    "EngineLoop",
    "Handle",
    "RequestError",
    "Rollouts",
    "Run",
    "Sampling",
    "TokenEvent",
    "TokenStream",
    "batch_invariant",
    "quantize_weights",
    "use_decode_engine",
]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
