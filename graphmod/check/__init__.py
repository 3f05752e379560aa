"""`graphmod.check(module_or_step, *args)`: what would keep a call out of a graph, told before any is captured.

The package itself can be called, so that its name serves as a function and as `python -m graphmod.check` alike.
"""

import sys
import types
from typing import Any

from graphmod.check.report import Finding, Guarded, Report
from graphmod.check.run import check_call, check_layers

__all__ = ["Finding", "Guarded", "Report", "check_call", "check_layers"]


class _Callable(types.ModuleType):
    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Report:
        return check_call(target, *args, **kwargs)


_Callable.__call__.__doc__ = check_call.__doc__
sys.modules[__name__].__class__ = _Callable
