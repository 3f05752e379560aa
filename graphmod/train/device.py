"""The device of a run: which one, what it and the libraries do not allow, and runs that leave each other alone."""

import gc
import os
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from graphmod.config import BackendName
from graphmod.errors import ConfigError
from graphmod.train.attention import choose_attention
from graphmod.train.model import transformers_config
from graphmod.train.optim import learning_rates
from graphmod.train.settings import CUSTOM, LOCAL, DeviceName, ModelPrecision, PackingAttention, RunConfig, Scope
from graphmod.words import counted

# -- which one ---------------------------------------------------------------------------------------------------------


def pick_device(name: DeviceName, setting: str = "train.device") -> torch.device:
    """The device a run uses, which `setting` names. Raises ConfigError when a GPU is asked for and there is none."""
    if name is DeviceName.cuda or (name is DeviceName.auto and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise ConfigError(f"{setting}=cuda, but PyTorch finds no GPU; use {setting}=auto or cpu")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The name of a device, for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'thread')}"


def check_device(config: RunConfig) -> None:
    """Raises ConfigError for the first setting that the device of the run, or a library, does not allow."""
    model, train, graph = config.model, config.train, config.graph
    learning_rates(config.optim, 10)
    if model.architecture not in (LOCAL, CUSTOM):
        transformers_config(model, model.vocab_size or 1)
    device = pick_device(train.device)
    if model.precision is not ModelPrecision.none:
        from graphmod.train.float8 import check_float8  # which no other run loads

        check_float8(model.precision, device)
    if config.data.packing_attention is PackingAttention.varlen:
        choose_attention(PackingAttention.varlen, device, train.precision, None)
    if graph.backend is BackendName.cuda and device.type != "cuda" and graph.scope is not Scope.none:
        raise ConfigError("graph.backend=cuda needs a GPU and the run is on the CPU; use graph.backend=auto")


# -- runs of one process that leave each other alone: seeds, deterministic flags, GPU memory ---------------------------

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Uses kernels whose result does not vary from run to run, if wanted, and puts the flags back at the end."""
    if not wanted:
        yield
        return
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill, workspace = memory.fill_uninitialized_memory, os.environ.get(_CUBLAS)
    try:
        os.environ[_CUBLAS] = workspace or ":4096:8"
        torch.use_deterministic_algorithms(True)
        # Filling memory nobody reads would add a kernel to each allocation, and change what is measured.
        memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
        memory.fill_uninitialized_memory = fill
        if workspace is None:
            os.environ.pop(_CUBLAS, None)
        else:
            os.environ[_CUBLAS] = workspace


def release_memory(device: torch.device) -> None:
    """Gives memory that nothing refers to back to a GPU and forgets the peaks. A CPU's is left to the collector's own
    pace: to look through all that there is takes longer than many a run."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def isolated(device: torch.device, seed: int, deterministic: bool) -> Iterator[None]:
    """Seeds a run and, when it ends in whatever way, restores the random state and the flags and frees the memory.

    What the body made must be local to functions that it calls: a name in the frame of the `with` lives longer.
    """
    release_memory(device)
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), deterministic_kernels(deterministic):
        torch.manual_seed(seed)
        # Code of the user's own may draw from these.
        states = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        except BaseException as error:
            # The traceback holds the frames, they hold the model, and so the next run would find less memory.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            release_memory(device)
