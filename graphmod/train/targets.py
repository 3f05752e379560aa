"""Parts of one's own that settings name by `_target_`: found, and made by Hydra. What is wrong with them is said here.

Hydra is loaded with the first part; checks of settings do without it, and without PyTorch.
"""

import functools
import inspect
import os
import pydoc
import sys
import traceback
from collections.abc import Callable
from typing import Any

from graphmod.errors import ConfigError, reason

TARGET = "_target_"
_OF_HYDRA = {TARGET, "_args_", "_convert_", "_partial_", "_recursive_"}


def check_target(setting: str, target: Any) -> None:
    """Raises ConfigError unless settings under `setting` name something: no code of it is loaded."""
    named = target.get(TARGET) if isinstance(target, dict) else None
    if not isinstance(named, str) or not all(part.isidentifier() for part in named.split(".")) or "." not in named:
        raise ConfigError(
            f"{setting}.{TARGET} must be the full name of something in a module, such as {setting}.{TARGET}="
            f"my_package.Name, got {named!r}"
        )


def named(setting: str, target: dict[str, Any]) -> str:
    """The part as the command line names it: `model._target_=my_package.Net`."""
    return f"{setting}.{TARGET}={target[TARGET]}"


def located(setting: str, target: dict[str, Any]) -> Callable:
    """What `target` names: a class or a function. Modules in the present folder are found. Raises ConfigError where
    there is no such module, nothing of that name in it, or it cannot be called."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    said = named(setting, target)
    try:
        found = pydoc.locate(target[TARGET])
    except pydoc.ErrorDuringImport as error:  # of a module's own code: anything
        cause: Any = error.value
        raise ConfigError(f"{said} cannot be imported: {in_words(cause)}") from cause
    if found is None:
        raise ConfigError(
            f"{said}: there is nothing of that name; its module must lie in the present folder ({os.getcwd()}), be "
            "installed, or be on PYTHONPATH"
        )
    if not callable(found):
        raise ConfigError(f"{said} is a {type(found).__name__}, which cannot be called; name a class or a function")
    return found


def own_lines(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines that an exception came by of code that is neither a library's nor of this package."""
    from graphmod.trace.lines import is_users  # loads PyTorch; whoever runs such code has done so

    lines = traceback.extract_tb(error.__traceback__)
    return [one for one in lines if not one.filename.startswith("<") and is_users(one.filename)]


def in_words(error: BaseException) -> str:
    """What an exception of somebody's own code says, and the line of that code that it came from."""
    said = f"{type(error).__name__}: {reason(error)}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{said.partition(' (')[0]} ({error.filename}:{error.lineno})"
    own = own_lines(error)
    return f"{said} ({own[-1].filename}:{own[-1].lineno})" if own else said


def passes_on(error: BaseException) -> bool:
    """Whether an exception in a part of one's own says something of the machine and not of that part."""
    return isinstance(error, (MemoryError, ConfigError)) or type(error).__name__ == "OutOfMemoryError"


def taken_by(called: Callable) -> dict[str, inspect.Parameter]:
    """The parameters that may be given by name; none where nobody can tell."""
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in parameters.items() if one.kind in by_name}


def made(setting: str, target: dict[str, Any], *, bound_to: tuple[str, ...] = (), **more: Any) -> Any:
    """What `target` makes, by `hydra.utils.instantiate`: parts within it are made too, lists and dicts are plain ones.

    Args:
        setting: under which it stands, for errors, such as `model`.
        bound_to: what else it will be called with, in words; its arguments are bound to it then, and it is not called.
        more: arguments that `target` need not name.

    Raises:
        ConfigError: as `located`; it does not take these arguments, or making it fails.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from omegaconf.errors import OmegaConfBaseException

    called = located(setting, target)
    if bound_to and "_args_" in target:
        raise ConfigError(f"{setting}._args_ cannot be given: it is called with {' and '.join(bound_to)}; use names")
    arguments = {name: value for name, value in {**more, **target}.items() if name not in _OF_HYDRA}
    said = named(setting, target)
    try:
        if bound_to:
            return functools.partial(called, **instantiate({"_convert_": "all", **arguments}))
        return instantiate({"_convert_": "all", **more, **target})
    except (InstantiationException, OmegaConfBaseException) as error:
        cause = error.__cause__
        if cause is not None and passes_on(cause):
            raise cause from None
        got = ", ".join(f"{name}={value!r:.60}" for name, value in arguments.items()) or "no arguments"
        raise ConfigError(f"{said} cannot be made with {got}: {in_words(error if cause is None else cause)}") from error
