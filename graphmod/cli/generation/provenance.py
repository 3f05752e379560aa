"""Where a saved model comes from, in words."""

from pathlib import Path

from graphmod.train.checkpoints.manifest import EMA_FOLDER, DamagedCheckpoint, NewerCheckpoint, read_manifest
from graphmod.words import counted


def trained(folder: Path) -> str | None:
    """How many steps made the checkpoint in `folder`, or the averaged weights in its folder `ema`, and with which loss;
    None for what is no checkpoint of a run, or none that can be read."""
    checkpoint = folder.parent if folder.name == EMA_FOLDER else folder
    try:
        manifest = read_manifest(checkpoint)
        done, steps = manifest["steps_done"], manifest["settings"]["train.steps"]
    except (DamagedCheckpoint, NewerCheckpoint, OSError, KeyError, TypeError):
        return None
    loss = manifest.get("loss")
    return f"trained for {done:,} of {counted(steps, 'step')}" + ("" if loss is None else f", loss {loss:.3f}")
