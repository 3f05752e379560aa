"""What a run was made with: versions of the libraries, and the commit of a clone."""

import platform
from pathlib import Path

import torch
import transformers

import graphmod


def versions() -> dict[str, str]:
    """The versions of graphmod, torch, transformers and Python, by name."""
    return {
        "graphmod": graphmod.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def commit(clone: Path | None = None) -> str | None:
    """The commit that a clone is at, 40 or 64 hexadecimal digits, read from `.git`; None where there is none.

    Args:
        clone: its root folder; None means that of graphmod.
    """
    git = (clone or Path(graphmod.__file__).parent.parent) / ".git"
    if git.is_file():  # of a worktree, or of a submodule
        git = (git.parent / _read(git).removeprefix("gitdir:").strip()).resolve()
    head = _read(git / "HEAD")
    if not head.startswith("ref:"):
        return head or None
    name = head.removeprefix("ref:").strip()
    shared = (git / _read(git / "commondir")).resolve()
    for folder in (git, shared):
        if found := _read(folder / name):
            return found
    packed = (line.split() for line in _read(shared / "packed-refs").splitlines())
    return next((words[0] for words in packed if len(words) == 2 and words[1] == name), None)
