"""The names of folders that runs write to. Standard library only."""

import functools
import os
from pathlib import Path


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
    """The name of a job's folder: `none` for graph=none; keys that are no group keep their name, as in `train.seed=1`.

    Args:
        keys: the swept ones.
        overrides: all of the job's.
        otherwise: its name when nothing is swept.
    """
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
