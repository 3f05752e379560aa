"""Where a saved model comes from, in words."""

import time
from pathlib import Path

from graphmod.train.checkpoint import EMA_FOLDER, MANIFEST_FILE, DamagedCheckpoint, read_manifest
from graphmod.train.words import counted

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


def ago(seconds: float) -> str:
    """How long ago that is, in the largest unit of which it has one: `3 minutes ago`."""
    unit, length = next(((name, length) for name, length in _UNITS if seconds >= length), ("second", 1))
    return f"{counted(max(0, int(seconds // length)), unit)} ago"


def trained(folder: Path) -> str | None:
    """How many steps made the checkpoint in `folder`, or the averaged weights in its folder `ema`, with which loss and
    when; None for what is no checkpoint of a run, or none that can be read."""
    checkpoint = folder.parent if folder.name == EMA_FOLDER else folder
    try:
        manifest = read_manifest(checkpoint)
        written = (checkpoint / MANIFEST_FILE).stat().st_mtime
        done, steps = manifest["steps_done"], manifest["settings"]["train.steps"]
    except (DamagedCheckpoint, OSError, KeyError, TypeError):
        return None
    loss = manifest.get("loss")
    said = f"trained for {done:,} of {counted(steps, 'step')}" + ("" if loss is None else f", loss {loss:.3f}")
    return f"{said}, {ago(time.time() - written)}"
