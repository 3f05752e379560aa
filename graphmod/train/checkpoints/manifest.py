"""What a checkpoint says of itself, and whether it still is what was written. No torch.

`checkpoint.json`, written last, lists every file with its size and checksum, by which damage is noticed, also where a
model is to be loaded as it was saved.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.saved import MANIFEST_FILE

STATE_FILE = "training_state.pt"
FOLDER = "checkpoints"
EMA_FOLDER = "ema"
FORMAT = 3
PARTS = ("steps_done", "config", "settings", "data", "ranks", "processes", "arrangement", "seen")  # of `Progress`
_CHUNK = 1 << 22
T = TypeVar("T")


class DamagedCheckpoint(GraphmodError):
    """A checkpoint that is not what was written; the message names the file and what is wrong with it."""


class NewerCheckpoint(ConfigError):
    """A checkpoint in a format that came after this version; it is whole, so nothing else is taken in its place."""


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `checkpoint.json` says.

    Raises:
        DamagedCheckpoint: there is none that can be read.
        NewerCheckpoint: this version cannot know what it means.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise ValueError(f"it holds a {type(manifest).__name__}, and not what was written")
        if (number := manifest.get("format", 0)) > FORMAT:
            raise NewerCheckpoint(
                f"{folder} has checkpoint format {number}, of graphmod {manifest.get('graphmod', '(unknown)')}, and "
                f"this version reads formats up to {FORMAT}; install that one, or a later one"
            )
        if not set(manifest) >= {"format", "files", *PARTS}:
            raise ValueError("it lacks some of its parts")
        return manifest
    except (OSError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, NewerCheckpoint):  # a ValueError too
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST_FILE}: {reason}") from error


def verify(folder: Path, which: Callable[[Path], bool] = lambda path: True) -> dict[str, Any]:
    """The manifest, after the files it lists were found to be as they were written.

    Args:
        which: told the path of a file inside the folder, whether to look at it.

    Raises:
        DamagedCheckpoint: one is not.
        NewerCheckpoint: see `read_manifest`.
    """
    manifest = read_manifest(folder)
    for name, (size, expected) in manifest["files"].items():
        path = folder / name
        if not which(Path(name)):
            continue
        try:
            found = path.stat().st_size
            if found != size:
                raise DamagedCheckpoint(f"{folder} is damaged: {name} has {found} bytes, {size} were written")
            if checksum(path) != expected:
                raise DamagedCheckpoint(f"{folder} is damaged: the content of {name} is not what was written")
        except OSError as error:
            raise DamagedCheckpoint(f"{folder} is damaged: {name}: {error.strerror}") from error
    return manifest


def checkpoint_of(folder: Path) -> Path | None:
    """The checkpoint of a run that `folder` is, or whose averaged weights it holds; None where it is neither."""
    for one in (folder, *([folder.parent] if folder.name == EMA_FOLDER else ())):
        of_a_run = one.absolute().parent.name == FOLDER and one in checkpoints(one.parent)
        if of_a_run or (one / MANIFEST_FILE).is_file():
            return one
    return None


def _verify(checkpoint: Path, inside: Path) -> None:
    """Looks at the files that loading a model reads: in the folder `inside` of a checkpoint, and not in others."""
    verify(checkpoint, lambda file: file.parent == inside and file.name != STATE_FILE)


def first_whole(folders: list[Path], look: Callable[[Path], T]) -> tuple[T | None, list[str]]:
    """What `look` finds in the first of these folders that is not damaged, or None; and what is wrong with each before
    it.

    Raises:
        NewerCheckpoint: see `read_manifest`.
    """
    damage = []
    for folder in folders:
        try:
            return look(folder), damage
        except DamagedCheckpoint as error:
            damage.append(str(error))
    return None, damage


def whole_model(folder: Path) -> Path:
    """`folder`, if it is no checkpoint, or the model in it can be loaded. Raises DamagedCheckpoint."""
    if checkpoint_of(folder) is not None:
        _verify(folder, Path())
    return folder


def require_whole(folder: Path) -> Path:
    """`folder`, whose model is to be loaded; also where it is no checkpoint of a run, and says nothing of its files.

    Raises:
        ConfigError: it is one, and damaged; another one of that run is named, if it is whole.
        NewerCheckpoint: see `read_manifest`.
    """
    checkpoint = checkpoint_of(folder)
    if checkpoint is None:
        return folder
    inside = folder.relative_to(checkpoint)
    try:
        _verify(checkpoint, inside)
        return folder
    except DamagedCheckpoint as error:
        for other in checkpoints(checkpoint.parent):
            with suppress(DamagedCheckpoint):
                _verify(other, inside)
                raise ConfigError(f"{error}; another one of that run is whole: model.path={other / inside}") from error
        raise ConfigError(
            f"{error}, and no other one of that run is whole; put that file back, or train again: python train.py"
        ) from error


def checkpoint_name(steps_done: int) -> str:
    """The folder name of the checkpoint after that many steps."""
    return f"step_{steps_done:08d}"


def checkpoints(parent: Path) -> list[Path]:
    """The checkpoint folders in `parent`, the one with most steps first; damaged ones are among them."""
    found = [path for path in parent.glob("step_*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]), reverse=True)


def being_written(folder: Path) -> Path:
    """Where the checkpoint `folder` is until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def being_replaced(folder: Path) -> Path:
    """Where an earlier checkpoint of the same name is until the new one has taken its place."""
    return folder.with_name(f".{folder.name}.replaced")


def clear_leftovers(parent: Path) -> None:
    """Removes what a run that was ended while it saved left half-written, and puts back what it was about to replace.
    Only for the process that owns the run."""
    for path in parent.glob(".step_*.replaced"):
        folder = parent / path.name[1:].removesuffix(".replaced")
        if not folder.exists():
            with suppress(OSError):
                os.replace(path, folder)
        shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(".step_*.partial"):
        shutil.rmtree(path, ignore_errors=True)
