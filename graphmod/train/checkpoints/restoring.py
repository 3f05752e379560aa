"""Puts a run back to where it was when a checkpoint was written: by these ranks, or others that share the model in
another way."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.train.checkpoints.plain import load_plain
from graphmod.train.checkpoints.progress import Progress, set_random_state
from graphmod.train.checkpoints.shards import FOLDER as SHARDS
from graphmod.train.checkpoints.shards import by_name, load_shards, put_state, put_weights
from graphmod.train.folders import STATE_FILE, WEIGHTS_FILE, DamagedCheckpoint
from graphmod.train.model import dims_of, load_weights
from graphmod.train.parallel import is_split, shards
from graphmod.train.step import TrainStep


def load_training_state(folder: Path) -> dict[str, Any]:
    """What `save_checkpoint` put beside the model, on the CPU. Raises DamagedCheckpoint when it cannot be read."""
    try:
        return torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise DamagedCheckpoint(f"{folder / STATE_FILE} cannot be read: {error}") from error


def saved_weights(folder: Path, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of `model` that a checkpoint holds, by name, on the CPU. Raises ConfigError where they cannot be
    read."""
    dims = dims_of(model)
    if dims is None:
        return load_plain(folder / WEIGHTS_FILE)
    kind = type(model).__mro__[2] if shards(model) else type(model)  # of one that is sharded, what it was
    return load_weights(folder, dims, dtype, kind).state_dict()


def restore(
    folder: Path,
    model: nn.Module,
    step: TrainStep,
    weights: dict[str, Tensor],
    rank: int = 0,
    ranks: int = 1,
    seed: int = 0,
) -> Progress:
    """Puts a run back to where it was when `folder` was saved, in place: addresses stay.

    Args:
        folder: a verified checkpoint.
        model, step: built as they were for that run.
        weights: of the model that `folder` holds.
        rank, ranks: which one this is, of how many. Where there were as many, each gets its random state back; else the
            first gets its own.
        seed: of the random numbers of a rank that has no random state from before.
    """
    state = load_training_state(folder)
    rates = [group["lr"] for group in step.optimizer.param_groups]
    # Into the model built as before: buffers that are in no file, such as rotary frequencies, stay as they were then.
    if is_split(model):
        put_weights(model, weights.items())
    else:
        model.load_state_dict(weights)
    if "optimizer" not in state:
        load_shards(folder / SHARDS, step)
    elif is_split(model):
        put_state(step, *by_name(step, state))
        state["step"].pop("ema", None)
    else:
        step.optimizer.load_state_dict(state["optimizer"])
    for group, rate in zip(step.optimizer.param_groups, rates, strict=True):
        rate.copy_(torch.as_tensor(state.get("learning_rate", group["lr"])))
        group["lr"] = rate
    step.load_state_dict(state["step"])
    states = [state["random"], *state.get("random_of_others", ())]
    if rank == 0 or len(states) == ranks:
        set_random_state(states[rank], step.device)
    else:
        torch.manual_seed(seed)
    evaluated = [(done, loss) for done, loss in state["eval_losses"]]
    return Progress(state["steps_done"], losses=state["losses"].tolist(), eval_losses=evaluated)
