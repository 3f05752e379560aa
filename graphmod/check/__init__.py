"""`graphmod.check(module_or_step, *args)`: what would keep a call out of a graph, told before any is captured.

The package itself can be called, so that its name serves as a function and as `python -m graphmod.check` alike. PyTorch
is loaded when it is.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from graphmod.check.order import Divergence, Stand
from graphmod.check.report import Finding, Guarded, Report

if TYPE_CHECKING:
    from graphmod.check.meeting import RanksMissing
    from graphmod.check.run import check_call, check_layers

_LATER = {"RanksMissing": "meeting", "check_call": "run", "check_layers": "run"}

__all__ = ["Divergence", "Finding", "Guarded", "RanksMissing", "Report", "Stand", "check_call", "check_layers"]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    return found


class _Callable(types.ModuleType):
    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> "Report":
        """What `check_call` does, with the same arguments: see `help(graphmod.check.check_call)`."""
        from graphmod.check.run import check_call

        return check_call(target, *args, **kwargs)


sys.modules[__name__].__class__ = _Callable
