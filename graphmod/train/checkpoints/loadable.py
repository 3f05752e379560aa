"""Whether the model in a checkpoint of a run can be loaded as it was saved. No torch."""

from contextlib import suppress
from pathlib import Path

from graphmod.errors import ConfigError
from graphmod.train.checkpoints.manifest import (
    EMA_FOLDER,
    FOLDER,
    MANIFEST_FILE,
    STATE_FILE,
    DamagedCheckpoint,
    checkpoints,
    verify,
)


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


def newest_whole_model(found: list[Path]) -> tuple[Path | None, list[str]]:
    """The first of these folders whose model can be loaded, or None; and what is wrong with each before it.

    Raises:
        NewerCheckpoint: see `read_manifest`.
    """
    damage = []
    for folder in found:
        try:
            if checkpoint_of(folder) is not None:
                _verify(folder, Path())
            return folder, damage
        except DamagedCheckpoint as error:
            damage.append(str(error))
    return None, damage


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
