"""CUDA graphs for PyTorch training and decode."""

from graphmod.config import BackendName, CUDAGraphConfig, Scope
from graphmod.errors import BackwardUnavailable, CaptureRefused, ConfigError, GraphmodError

__version__ = "0.1.0"

__all__ = [
    "BackendName",
    "BackwardUnavailable",
    "CUDAGraphConfig",
    "CaptureRefused",
    "ConfigError",
    "GraphmodError",
    "Scope",
]
