"""The device of a run, and which settings it or the libraries on it do not allow."""

import torch

from graphmod.config import BackendName
from graphmod.errors import ConfigError
from graphmod.train.architectures import check_architecture
from graphmod.train.settings import DeviceName, PackingAttention, RunConfig, Scope
from graphmod.train.step.optim import check_schedule
from graphmod.train.varlen import unavailable


def pick_device(name: DeviceName, setting: str = "train.device") -> torch.device:
    """The device a run uses, which `setting` names. Raises ConfigError when a GPU is asked for and there is none."""
    if name is DeviceName.cuda or (name is DeviceName.auto and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise ConfigError(f"{setting}=cuda, but PyTorch finds no GPU; use {setting}=auto or cpu")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def check_device(config: RunConfig) -> None:
    """Raises ConfigError for the first setting that the device of the run, or a library, does not allow."""
    check_schedule(config.optim)
    check_architecture(config.model)
    train, graph = config.train, config.graph
    device = pick_device(train.device)
    if config.data.packing_attention is PackingAttention.varlen:
        why = unavailable(device, train.precision)
        if why is not None:
            raise ConfigError(f"data.packing_attention=varlen cannot be used: {why}; use mask, or auto")
    if graph.backend is BackendName.cuda and device.type != "cuda" and graph.scope is not Scope.none:
        raise ConfigError("graph.backend=cuda needs a GPU and the run is on the CPU; use graph.backend=auto")
