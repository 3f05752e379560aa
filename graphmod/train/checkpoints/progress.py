"""How far a run is, and the random state of its generators: what a checkpoint holds beside model and optimizer."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Progress:
    """How far a run is and what it was told; the part of a checkpoint that is not tensors of the model.

    Attributes:
        steps_done: optimizer steps; also the position in the data.
        config: all settings, as plain values, by group.
        settings: those that decide the numbers (see `train/run/decisive.py`), by their full name.
        data: fingerprint of the training tokens.
        losses: one a step so far.
        eval_losses: (steps done, loss).
        ranks: how many trained together on different batches.
        processes: how many there were in all.
        arrangement: how all ranks shared the model, in words.
        seen: how much of the data they had seen, and how much an epoch has (`Place`).
        random: the random state of each rank; empty where that of this process is meant.
    """

    steps_done: int
    config: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    losses: list[float] = field(default_factory=list)
    eval_losses: list[tuple[int, float]] = field(default_factory=list)
    ranks: int = 1
    processes: int = 1
    arrangement: str = ""
    seen: tuple[int, int] | None = None
    random: list[dict[str, torch.Tensor]] = field(default_factory=list)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of the random generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Puts the generators back to what `random_state` found."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
