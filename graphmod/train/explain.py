"""Words for errors of Hydra and omegaconf: what was got, what is allowed, what to type instead.

Imports their exception classes and the schema; changes nothing and raises nothing of its own.
"""

import dataclasses
import difflib

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from graphmod.train.schema import RunConfig


def setting_names(kind: type = RunConfig, prefix: str = "") -> list[str]:
    """Every key a run understands, such as `train.steps`, and the groups themselves, such as `train`."""
    names = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        names.append(name)
        if dataclasses.is_dataclass(field.type):
            names += setting_names(field.type, f"{name}.")
    return names


def nearest(word: str, allowed: list[str]) -> str | None:
    """The one of `allowed` most like `word`, or None when nothing is."""
    return next(iter(difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)), None)


def unknown_key(key: str, kind: type = RunConfig) -> str:
    """The error for a key no run understands."""
    names = setting_names(kind)
    group, _, last = key.rpartition(".")
    siblings = [name for name in names if name.rpartition(".")[0] == group]
    # Within a known group only the last part can be misspelt; otherwise anything may be, the group included.
    best = nearest(key, siblings) or nearest(key, names)
    if best is None:  # the right word in the wrong group, as in `steps=10`
        best = next((name for name in names if name.rpartition(".")[2] == last), None)
    message = f"there is no setting {key!r}"
    if best:
        message += f"; did you mean {best!r}?"
    if group and siblings:
        known = ", ".join(name.rpartition(".")[2] for name in siblings)
        return f"{message}\n  settings of {group!r}: {known}"
    return f"{message}\n  groups: {', '.join(name for name in names if '.' not in name)}"


def _choices(error: MissingConfigException) -> str:
    if not error.missing_cfg_file:
        return str(error).splitlines()[0]
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return f"the config {choice!r} was not found"
    options = sorted(error.options or [])
    begun = [option for option in options if choice and option.startswith(choice)]
    best = nearest(choice, options) or (begun[0] if len(begun) == 1 else None)
    hint = f"; did you mean {group}={best}?" if best else ""
    return f"there is no choice {choice!r} for {group!r}{hint}\n  choices of {group!r}: {', '.join(options)}"


def explain(error: BaseException, kind: type = RunConfig) -> str:
    """One to three lines that say what is wrong with the command line or a config file and how to mend it.

    Args:
        error: an exception of Hydra or omegaconf; its `__cause__` is looked at first, as Hydra wraps omegaconf's.
        kind: the settings that were to be read.
    """
    if isinstance(error, MissingConfigException):
        return _choices(error)
    if isinstance(error, OverrideParseException):
        example = "train.steps=100, or in quotes where it has special characters: 'data.path=\"my text.txt\"'"
        return f"cannot read {error.override!r} as key=value (for example {example})"
    inner = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if str(error).startswith("Ambiguous value for argument"):
        argument = str(error).split("'")[1]
        return f"{argument} gives several values: add --multirun to run each of them, or write a list as key=[a,b]"
    if not isinstance(inner, OmegaConfBaseException):
        return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    key = inner.full_key or "the config"
    if isinstance(inner, (ConfigKeyError, ConfigAttributeError)):
        return unknown_key(key, kind)
    reason = str(inner.msg or inner).splitlines()[0]
    if isinstance(inner, InterpolationResolutionError):
        return f"{key} refers to something that is not there: {reason}"
    if reason.endswith("is not Optional"):
        reason = "null is not allowed"
    elif "is not a ListConfig" in reason:
        reason = f"{inner.value!r} is not a list; write it as '{key}=[{inner.value}]'"
    elif "is not a subclass of" in reason:
        reason = f"{inner.value!r} is not a set of settings; {key!r} is a group: choose a file of configs/{key}/"
    return f"{key}: {reason}"
