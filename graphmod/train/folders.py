"""The folders that runs write to and that saved models lie in: their names, which process owns them, and whether what
they hold is still what was written. No torch.
"""

import functools
import json
import os
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from graphmod.errors import ConfigError, GraphmodError

# -- names -------------------------------------------------------------------------------------------------------------


@functools.cache
def unused(folder: str) -> str:
    """`folder`, made for this process alone: where there is one already, as of a run that was started in the same
    second, its name gets a number."""
    name, number = folder, 1
    while True:
        try:
            Path(name).mkdir(parents=True)
        except OSError:
            if Path(name).is_dir():
                number += 1
                name = f"{folder}_{number}"
                continue
        return name  # where it cannot be made, whoever writes to it says so


def job_folder(keys: list[str], overrides: list[str], otherwise: str) -> str:
    """The name of a job's folder, from those of its overrides that have the swept keys: `none` for graph=none; keys
    that are no group keep their name, as in `train.seed=1`; `otherwise` when nothing is swept."""
    parts = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in keys:
            parts.append(override if "." in key else value)
    return "_".join(parts).replace(os.sep, "-")[:200] or otherwise


def from_here(path: str | Path, here: str | Path | None = None) -> str:
    """`path` as one would type it in the folder `here`; None is the present one."""
    full, here = Path(path).absolute(), Path(here or Path.cwd())
    return str(full.relative_to(here)) if full.is_relative_to(here) else str(full)


def write_whole(path: Path, text: str) -> Path:
    """Writes a text into a file, whole or not at all; returns its path."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def link_latest(folder: Path) -> Path:
    """Makes the link `latest` beside `folder` point to it, in place of what it pointed to; returns the link.

    Where no link can be made, or something else has the name, `folder` itself is returned.
    """
    link, new = folder.parent / "latest", folder.parent / f".latest.{os.getpid()}"
    if link.exists() and not link.is_symlink():
        return folder
    try:
        new.symlink_to(folder.name, target_is_directory=True)
        os.replace(new, link)
    except OSError:
        new.unlink(missing_ok=True)
        return folder
    return link


# -- who may write -----------------------------------------------------------------------------------------------------
# The lock is the operating system's, so that it ends with the process, however that ends. What the file says only
# names the process for others; nobody relies on it.

LOCK_FILE, _HYDRA_FOLDER = ".lock", ".hydra"
# Another process may hold it for a moment to look what the folder holds, and one that was killed is not gone at once.
_PATIENCE_S = 2.0


class FolderInUse(ConfigError):
    """Another process writes into the folder; the message says which one, since when, and what to do."""


def _holder(folder: Path) -> str:
    try:
        told = json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))
        return f"process {told['pid']} on {told['host']} has been writing to it since {told['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process is writing to it"  # which has not said yet who it is


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Inside, this process alone owns `folder`, which is made if need be, and removed if nothing is written to it but
    what Hydra says of a run that never began.

    Raises:
        FolderInUse: another process owns it, or another owner in this one.
        GraphmodError: it cannot be written to, or its file system has no locks.
    """
    # Without flock the library would take a file's existence for the lock, which outlives a process that is killed.
    lock = FileLock(folder / LOCK_FILE, timeout=_PATIENCE_S, fallback_to_soft=False)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
        lock.acquire()
    except Timeout:
        raise FolderInUse(
            f"{folder} is in use: {_holder(folder)}. Wait until it has ended, or stop it; or write elsewhere "
            "(hydra.run.dir=FOLDER; in a multirun hydra.sweep.dir=FOLDER)"
        ) from None
    except OSError as error:
        raise GraphmodError(
            f"cannot write to {folder}: {error.strerror or error}; choose another folder with hydra.run.dir=FOLDER "
            "(of a multirun: hydra.sweep.dir=FOLDER), in a file system that has locks"
        ) from error
    try:
        since = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
        told = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        with suppress(OSError):  # of a full disk; the lock holds all the same
            (folder / LOCK_FILE).write_text(told, encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            if {*os.listdir(folder)} <= {LOCK_FILE, *([_HYDRA_FOLDER] if empty else ())}:
                shutil.rmtree(folder / _HYDRA_FOLDER, ignore_errors=True)
                (folder / LOCK_FILE).unlink()
            else:  # it stays where there is something to own: on some file systems its removal would let two in
                (folder / LOCK_FILE).write_text("")
        lock.release()
        if made:
            with suppress(OSError):  # it holds something
                folder.rmdir()


# -- saved models ------------------------------------------------------------------------------------------------------

NO_DOWNLOAD = "give that of a saved model (save_pretrained of model and tokenizer); nothing is downloaded"
MANIFEST_FILE = "checkpoint.json"  # of a checkpoint of a run
WEIGHTS_FILE = "model.safetensors"
# As names on the hub are: `owner/model`, or `model`.
_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")


def saved_folder(path: str, otherwise: str = "") -> Path:
    """The folder that `model.path=path` means: itself, or, where there is none, what `hf download` left of the model of
    that name in the cache. Raises ConfigError where there is neither, which says what may be done `otherwise`."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    like_a_name = _NAME.fullmatch(path) is not None and not folder.exists()
    if like_a_name and (found := _in_cache(path)) is not None:
        return found
    hub = f"; `hf download {path}` brings the model of that name on the Hugging Face hub" if like_a_name else ""
    raise ConfigError(f"model.path={path} is not a folder; {NO_DOWNLOAD}{hub}{otherwise}")


def _in_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def require_no_own_model(folder: Path) -> Path:
    """`folder`. Raises ConfigError where it is a checkpoint of one's own model, which transformers cannot build."""
    for checkpoint in (folder, folder.parent):  # averaged weights lie in a folder of the checkpoint
        try:
            target = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))["config"]["model"]["target"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if target is not None and not (folder / "config.json").is_file():
            name = target["_target_"]
            raise ConfigError(
                f"model.path={folder} is a checkpoint of a model of your own, {name}, and only models of transformers "
                f"can be loaded here. To train on: train.resume={checkpoint.parent.parent}. In Python: model = "
                f"{name.rpartition('.')[2]}(...); safetensors.torch.load_model(model, '{folder / WEIGHTS_FILE}')"
            )
    return folder


# -- checkpoints -------------------------------------------------------------------------------------------------------
# `checkpoint.json`, written last, lists every file with its size and checksum, by which damage is noticed, also where
# a model is to be loaded as it was saved.

STATE_FILE = "training_state.pt"
CHECKPOINTS = "checkpoints"
EMA_FOLDER, MERGED_FOLDER = "ema", "merged"  # in a checkpoint: averaged weights, and what adapters make of a model
FORMAT = 5
PARTS = ("steps_done", "config", "settings", "data", "ranks", "processes", "arrangement", "seen")  # of `Progress`
_CHUNK = 1 << 22
T = TypeVar("T")


class DamagedCheckpoint(GraphmodError):
    """A checkpoint that is not what was written; the message names the file and what is wrong with it."""


class OtherFormat(ConfigError):
    """A checkpoint in a format that this version does not read; it is whole, so nothing else is taken in its place."""


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `checkpoint.json` says. Raises DamagedCheckpoint where there is none that can be read, and OtherFormat where
    this version cannot know what it means."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise ValueError(f"it holds a {type(manifest).__name__}, and not what was written")
        if (number := manifest.get("format", 0)) != FORMAT:
            raise OtherFormat(
                f"{folder} has checkpoint format {number}, of graphmod {manifest.get('graphmod', '(unknown)')}, and "
                f"this version reads format {FORMAT}; train on with that version"
            )
        if not set(manifest) >= {"format", "files", *PARTS}:
            raise ValueError("it lacks some of its parts")
        return manifest
    except (OSError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, OtherFormat):  # a ValueError too
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise DamagedCheckpoint(f"{folder} is damaged: {MANIFEST_FILE}: {reason}") from error


def verify(folder: Path, which: Callable[[Path], bool] = lambda path: True) -> dict[str, Any]:
    """The manifest, after the files it lists, or those of them that `which` is true of, were found to be as they were
    written. Raises DamagedCheckpoint where one is not, or OtherFormat."""
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
    """The checkpoint of a run that `folder` is, or whose averaged or merged weights it holds; None where it is none."""
    around = [folder]
    while around[-1].name in (EMA_FOLDER, MERGED_FOLDER):
        around.append(around[-1].parent)
    for one in around:
        of_a_run = one.absolute().parent.name == CHECKPOINTS and one in checkpoints(one.parent)
        if of_a_run or (one / MANIFEST_FILE).is_file():
            return one
    return None


def _verify_model(checkpoint: Path, inside: Path) -> None:
    """Looks at the files that loading a model reads: in the folder `inside` of a checkpoint, and not in others."""
    verify(checkpoint, lambda file: file.parent == inside and file.name != STATE_FILE)


def first_whole(folders: list[Path], look: Callable[[Path], T]) -> tuple[T | None, list[str]]:
    """What `look` finds in the first of these folders that is not damaged, or None; and what is wrong with each before
    it. Raises OtherFormat."""
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
        _verify_model(folder, Path())
    return folder


def require_whole(folder: Path) -> Path:
    """`folder`, whose model is to be loaded; also where it is no checkpoint of a run, and says nothing of its files.
    Raises ConfigError where it is one, and damaged; another one of that run is named, if it is whole."""
    checkpoint = checkpoint_of(folder)
    if checkpoint is None:
        return folder
    inside = folder.relative_to(checkpoint)
    try:
        _verify_model(checkpoint, inside)
        return folder
    except DamagedCheckpoint as error:
        for other in checkpoints(checkpoint.parent):
            with suppress(DamagedCheckpoint):
                _verify_model(other, inside)
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


def meanwhile(folder: Path, state: str) -> Path:
    """Where the checkpoint `folder` is until it is whole (`partial`), or an earlier one of the same name until the new
    one has taken its place (`replaced`)."""
    return folder.with_name(f".{folder.name}.{state}")


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
