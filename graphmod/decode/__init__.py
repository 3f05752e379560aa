"""Token decode for transformers causal LMs: one step, everything included, is a replay of a CUDA graph."""

from graphmod.decode.config import EngineConfig, Sampling
from graphmod.decode.engine import DecodeEngine
from graphmod.decode.errors import DecodeError, RequestError
from graphmod.decode.results import Completion, DecodeStats, TokenEvent

__all__ = [
    "Completion",
    "DecodeEngine",
    "DecodeError",
    "DecodeStats",
    "EngineConfig",
    "RequestError",
    "Sampling",
    "TokenEvent",
]
