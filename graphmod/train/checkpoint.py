"""Saves a run: the model as a folder `from_pretrained` loads, and beside it what resuming needs.

Imports torch and `train/model.py` (to keep transformers quiet). A checkpoint appears whole or not at all.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from graphmod.errors import GraphmodError
from graphmod.train.model import no_transformers_bars
from graphmod.train.step import TrainStep

STATE_FILE = "training_state.pt"


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the random generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def save_checkpoint(folder: Path, model: PreTrainedModel, step: TrainStep, steps_done: int, tokenizer: Any) -> Path:
    """Writes `folder`: safetensors and `config.json`, the tokenizer if there is one, and `training_state.pt`.

    The state file holds the optimizer, the position in the schedule, the random state and the number of steps done,
    which is also the position in the data. A folder of that name is replaced.

    Raises:
        GraphmodError: the disk is full, or may not be written to.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    uses_cache = model.config.use_cache
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        # Training has no use for a key-value cache; whoever loads the model to generate has.
        model.config.use_cache = True
        with no_transformers_bars():
            model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        state = {
            "steps_done": steps_done,
            "optimizer": step.optimizer.state_dict(),
            "step": step.state_dict(),
            "random": random_state(model.device),
        }
        torch.save(state, partial / STATE_FILE)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        reason = str(error).splitlines()[0]
        raise GraphmodError(f"cannot save the checkpoint {folder}: {reason}") from error
    finally:
        model.config.use_cache = uses_cache
    return folder


def load_training_state(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` put beside the model, on the CPU. Raises GraphmodError when it cannot be read."""
    try:
        return torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise GraphmodError(f"{folder / STATE_FILE} cannot be read: {error}") from error
