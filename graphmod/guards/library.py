"""Which files and modules belong to installed libraries."""

import os
import sys
import sysconfig
import types
from functools import cache
from pathlib import Path

import torch

CORE = str(Path(__file__).parent.parent) + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
STDLIB = sysconfig.get_path("stdlib") + os.sep


@cache
def is_library(filename: str) -> bool:
    """Whether a file belongs to an installed library."""
    filename = os.path.normpath(filename)
    return filename.startswith((TORCH, STDLIB, "<frozen")) or f"{os.sep}site-packages{os.sep}" in filename


@cache
def is_users(filename: str) -> bool:
    """Whether a file is neither a library's nor part of this package."""
    return not is_library(filename) and not os.path.normpath(filename).startswith(CORE)


def is_library_module(module: types.ModuleType | None) -> bool:
    """Whether a module belongs to an installed library, or to Python."""
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return is_library(file) if isinstance(file, str) else module.__name__ in sys.builtin_module_names
