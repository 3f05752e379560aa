"""What capture and replay mean on a device.

A backend offers `new_pool()`, `capture(...)`, the gradient accumulators of captures and the random state of its device;
a captured graph offers `replay()` and what the recorder saw. `capture` leaves the graph ready for its first `replay()`,
which produces the results of the very call that was captured.
"""

import torch

from graphmod.backend.cuda import CudaBackend
from graphmod.backend.emulated import EmulatedBackend
from graphmod.config import BackendName
from graphmod.errors import ConfigError

Backend = CudaBackend | EmulatedBackend


def default_device(name: BackendName) -> torch.device:
    """Where a callable that reaches no tensor is taken to work. A capture on a GPU refuses work on the host, so that a
    mistake costs the graph; one on the CPU would see nothing of what kernels on a GPU do.
    """
    if name is BackendName.emulated or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def make_backend(name: BackendName, device: torch.device) -> Backend:
    """The backend for tensors on `device`.

    Raises:
        ConfigError: `cuda` was asked for on another device, or `emulated` on a GPU.
    """
    if name is BackendName.auto:
        name = BackendName.cuda if device.type == "cuda" else BackendName.emulated
    if name is BackendName.cuda:
        if device.type != "cuda":
            raise ConfigError(
                f"backend=cuda needs a module and inputs on a GPU, got {device}; move them with .cuda(), "
                "or use backend=auto"
            )
        return CudaBackend(device)
    if device.type == "cuda":
        raise ConfigError("backend=emulated runs on the CPU, got a module on a GPU; use backend=auto or cuda")
    return EmulatedBackend()
