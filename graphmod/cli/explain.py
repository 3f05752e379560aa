"""Words for errors of Hydra and omegaconf: what was got, what is allowed, what to type instead."""

import re
from enum import Enum

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from graphmod.cli.meant import choice_to_write, last_names, meant, most_like, setting_names
from graphmod.train.schema.optim import REFUSED_OPTIMIZERS
from graphmod.train.schema.run import RunConfig
from graphmod.words import nearest

# What omegaconf says of a value of another kind, and how users call that kind.
_WRONG_KIND = re.compile(r"Value '(.*)' (?:of type .* could not be converted to |is not a valid )(Integer|Float|bool)")
_KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
_OWN_FILES = ("--config", "--config-name", "--config-path", "-cn", "-cp", "--config-file", "--yaml")


def unknown_flag(argument: str, following: str, flags: list[str], kind: type) -> str:
    """The error for an argument with dashes that is no flag: `--steps=3`, or `--steps` with `3` after it.

    Args:
        following: the argument after it; empty when it is the last one.
        flags: those there are.
    """
    name, equals, value = argument.partition("=")
    word = name.lstrip("-").replace("-", "_")
    if not equals:
        value = following if following and "=" not in following and not following.startswith("-") else "VALUE"
    said = f"there is no flag {name!r}"
    if name in _OWN_FILES:
        return f"{said}; settings in a file: --config-dir FOLDER GROUP=CHOICE reads FOLDER/GROUP/CHOICE.yaml"
    if flag := nearest(name, flags, cutoff=0.8):
        return f"{said}; did you mean {flag!r}? Settings are written without dashes: key=value"
    setting = meant(word, setting_names(kind)) or "key=value"
    return f"{said}; settings are written without dashes: {setting if '=' in setting else f'{setting}={value}'}"


def _advice(name: str, value: str, kind: type) -> str:
    """What to write to set `name`; where `value` cannot be meant, the values that can."""
    if "=" in name:
        return f" Write {name}"
    if "." in name and not name.startswith("hydra."):
        settings = OmegaConf.structured(kind)
        try:
            OmegaConf.merge(settings, OmegaConf.from_dotlist([f"{name}={value}"]))
        except (OmegaConfBaseException, YAMLError):
            known = type(OmegaConf.select(settings, name))
            if not issubclass(known, Enum):
                return ""
            return f" Write {name}=VALUE with one of: {', '.join(member.value for member in known)}"
    return f" Write {name}={value}"


def _unknown_key(key: str, kind: type, value: str | None = None) -> str:
    """The error for a key no run understands; `value` is what was to be set, where that is known."""
    names = setting_names(kind)
    group = key.rpartition(".")[0]
    best = meant(key, names)
    message = f"there is no setting {key!r}"
    if key.startswith("hydra."):
        return f"{message}; those of Hydra that count here are hydra.run.dir=FOLDER and hydra.sweep.dir=FOLDER"
    if best:
        # In a file of settings there is no command line to write on, but a value may be the answer.
        write = "" if value is None and "=" not in best else _advice(best, value, kind)
        message += f"; did you mean {best.partition('=')[0]!r}?{write}"
    siblings = last_names(group, names)
    if group and siblings:
        return f"{message}\n  settings of {group!r}: {', '.join(siblings)}"
    alone = [name for name in last_names("", names) if not last_names(name, names)]
    groups = [name for name in last_names("", names) if name not in alone]
    return f"{message}\n  groups: {', '.join(groups)}" + (f"; other settings: {', '.join(alone)}" if alone else "")


def _choices(error: MissingConfigException) -> str:
    group, _, choice = str(error.missing_cfg_file or "").partition("/")
    if not choice:
        return str(error).splitlines()[0]
    options = sorted(error.options or [])
    listed = f"\n  choices of {group!r}: {', '.join(options)}"
    if group == "optim" and choice.lower() in REFUSED_OPTIMIZERS:
        return f"optim={choice} cannot be used: {REFUSED_OPTIMIZERS[choice.lower()]}{listed}"
    best = choice_to_write(group, choice, options)
    hint = f"; did you mean {best}?" if best else ""
    return f"there is no choice {choice!r} for {group!r}{hint}{listed}"


def explain(error: BaseException, kind: type = RunConfig) -> str:
    """One to three lines that say what is wrong with the command line or a config file and how to mend it.

    Args:
        error: an exception of Hydra, omegaconf or yaml; what it wraps is looked at first.
        kind: the settings that were to be read.
    """
    if isinstance(error, MarkedYAMLError) and (place := error.problem_mark) is not None:
        return f"{place.name}:{place.line + 1} is not YAML: {error.problem}"
    if isinstance(error, YAMLError):
        return f"a config file is not YAML: {error}".splitlines()[0]
    message, in_file = _reason(error, kind), re.match(r"In '([^']+/[^']+)': ", str(error))
    return f"{in_file[1]}.yaml: {message}" if in_file else message  # else what the command line asked for, mostly


def _reason(error: BaseException, kind: type) -> str:
    if isinstance(error, MissingConfigException):
        return _choices(error)
    if isinstance(error, OverrideParseException):
        example = "'data.path=\"my text.txt\"'; a list is [a,b]"
        return f"cannot read {error.override!r}; put a value with special characters in quotes: {example}"
    found = [one for one in (error.__cause__, error, error.__context__) if isinstance(one, OmegaConfBaseException)]
    if not found:
        return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    inner = next((one for one in found if one.full_key), found[0])
    if not inner.full_key and "is not a subclass of" in str(inner.msg):
        return "the file is a list; write settings without '-', one a line, such as steps: 100"
    key = inner.full_key or "the config"
    if isinstance(inner, (ConfigKeyError, ConfigAttributeError)):
        typed = re.search(r"use \+(\S+?)=(.*)$", str(error))  # Hydra's own advice, which would let a typo pass
        return _unknown_key(typed[1], kind, typed[2]) if typed else _unknown_key(key, kind)
    reason = str(inner.msg or inner).splitlines()[0]
    if isinstance(inner, InterpolationResolutionError):
        return f"{key} refers to something that is not there: {reason}"
    if reason.endswith("is not Optional"):
        reason = "null is not allowed"
    elif wrong := _WRONG_KIND.match(reason):
        whole = re.fullmatch(r"(-?\d+)\.0", wrong[1]) if wrong[2] == "Integer" else None  # 1e3, as Hydra read it
        return f"{key} must be {_KINDS[wrong[2]]}, " + (f"such as {whole[1]}" if whole else f"got {wrong[1]!r}")
    elif "is not a ListConfig" in reason:
        reason = f"{inner.value!r} is not a list; write it as '{key}=[{inner.value}]'"
    elif "is not a subclass of" in reason:
        saved = kind is not RunConfig and key == "model"  # a group without choices
        write = "model.path=FOLDER" if saved else f"{key}=CHOICE"
        reason = f"{inner.value!r} is not a set of settings; {key!r} is a group: write {write}"
    elif key == "graph.scope" and (allowed := re.search(r"expected one of \[(.*)\]", reason)):
        scopes = [*allowed[1].split(", "), *(["auto"] if kind is RunConfig else [])]
        reason += f"; write graph={(*most_like(str(inner.value), scopes), 'SCOPE')[0]}"
    return f"{key}: {reason}"
