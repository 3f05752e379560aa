"""Words for errors of Hydra and omegaconf: what was got, what is allowed, what to type instead."""

import dataclasses
import errno
import re
from enum import Enum
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from graphmod.errors import ConfigError
from graphmod.train.schema.optim import REFUSED_OPTIMIZERS
from graphmod.train.schema.run import RunConfig
from graphmod.words import nearest

# What other programs call a setting -> its last name here.
_ELSEWHERE = {
    **dict.fromkeys(("block_size", "context_length", "max_length", "max_seq_length", "sequence_length"), "seq_len"),
    **dict.fromkeys(("clip_grad", "grad_clip", "gradient_clip_val", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("dtype", "torch_dtype", "mixed_precision", "amp"), "precision"),
    **dict.fromkeys(("max_iters", "max_steps", "num_steps"), "steps"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"),
    **dict.fromkeys(("n_head", "num_attention_heads"), "heads"),
    **dict.fromkeys(("n_layer", "num_hidden_layers"), "layers"),
    "gradient_accumulation_steps": "grad_accumulation",
    "gradient_checkpointing": "activation_checkpointing",
    "max_tokens": "max_new_tokens",
}


def setting_names(kind: type = RunConfig, prefix: str = "") -> list[str]:
    """Every key a run understands, such as `train.steps`, and the groups themselves, such as `train`."""
    names = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        names.append(name)
        if dataclasses.is_dataclass(field.type):
            names += setting_names(field.type, f"{name}.")
    return names


def meant_by(word: str, kind: type = RunConfig) -> str | None:
    """The setting of that name, with or without its group; None when there is none."""
    names = setting_names(kind)
    return word if word in names else next((name for name in names if name.rpartition(".")[2] == word), None)


def unknown_flag(argument: str, following: str, flags: list[str], kind: type = RunConfig) -> str:
    """The error for an argument with dashes that is no flag: `--steps=3`, or `--steps` with `3` after it.

    Args:
        following: the argument after it; empty when it is the last one.
        flags: those there are.
    """
    name, equals, value = argument.partition("=")
    word = name.lstrip("-").replace("-", "_")
    word = word if meant_by(word, kind) else _ELSEWHERE.get(word, word)
    if not equals:
        value = following if following and "=" not in following and not following.startswith("-") else "VALUE"
    bare = {flag.lstrip("-"): flag for flag in flags if flag.startswith("--")}
    lasts = [setting.rpartition(".")[2] for setting in setting_names(kind)]
    best = word if meant_by(word, kind) else nearest(word, [*bare, *lasts], cutoff=0.7)
    if best in bare:
        return f"there is no flag {name!r}; did you mean {bare[best]!r}? Settings are written without dashes: key=value"
    if best is None:
        return f"there is no flag {name!r}; settings are written without dashes: key=value"
    return f"there is no flag {name!r}; settings are written without dashes: {meant_by(best, kind)}={value}"


def refuse_nameless(argument: str) -> None:
    """Raises ConfigError for `=3` and its like, which Hydra does not notice."""
    if re.match(r"[+~]*=", argument):
        raise ConfigError(f"{argument!r} names no setting; write key=value, such as train.steps=3")


def _advice(name: str, value: str, kind: type) -> str:
    """What to write to set `name`; where `value` cannot be meant, the values that can."""
    if "." in name:
        settings = OmegaConf.structured(kind)
        try:
            OmegaConf.merge(settings, OmegaConf.from_dotlist([f"{name}={value}"]))
        except (OmegaConfBaseException, YAMLError):
            known = type(OmegaConf.select(settings, name))
            if not issubclass(known, Enum):
                return ""
            return f" Write {name}=VALUE with one of: {', '.join(member.value for member in known)}"
    return f" Write {name}={value}"


def unknown_key(key: str, kind: type = RunConfig, value: str | None = None) -> str:
    """The error for a key no run understands; `value` is what was to be set, where that is known."""
    names = setting_names(kind)
    group = key.rpartition(".")[0]
    siblings = [name for name in names if name.rpartition(".")[0] == group]
    best = _setting_like(key, siblings, names)
    message = f"there is no setting {key!r}"
    if best:
        message += f"; did you mean {best!r}?" + ("" if value is None else _advice(best, value, kind))
    if group and siblings:
        known = ", ".join(name.rpartition(".")[2] for name in siblings)
        return f"{message}\n  settings of {group!r}: {known}"
    return f"{message}\n  groups: {', '.join(name for name in names if '.' not in name)}"


def _setting_like(key: str, siblings: list[str], names: list[str]) -> str | None:
    """The setting that was probably meant, or None: a bad guess that is followed trains something else.

    Args:
        siblings: those of the group that `key` names, if it names one.
    """
    group, _, last = key.rpartition(".")

    def lasts(among: list[str]) -> dict[str, str]:
        return {name.rpartition(".")[2]: name for name in reversed(among)}

    def begun_or_initials(among: list[str]) -> str | None:
        found = [name for word, name in lasts(among).items() if len(last) > 1 and _shortened(last, word)]
        return found[0] if len(found) == 1 else None

    elsewhere = lasts([name for name in names if "." in name or not group])
    if last not in elsewhere and _ELSEWHERE.get(last) in elsewhere:
        return elsewhere[_ELSEWHERE[last]]
    if not group:
        whole = elsewhere.get(last) or nearest(key, names, cutoff=0.65)
        return begun_or_initials(siblings) or whole or begun_or_initials(names)
    close = nearest(last, list(lasts(siblings)), cutoff=0.65) if siblings else nearest(key, names, cutoff=0.65)
    if close is not None and siblings:
        close = lasts(siblings)[close]
    return begun_or_initials(siblings) or close or elsewhere.get(last) or begun_or_initials(names)


def _shortened(short: str, word: str) -> bool:
    return word.startswith(short) or "".join(part[0] for part in word.split("_") if part) == short


def _most_like(word: str, options: list[str]) -> str | None:
    """The one of `options` most like `word`, or the only one that begins with it; None when nothing is."""
    begun = [option for option in options if word and option.startswith(word)]
    return nearest(word, options) or (begun[0] if len(begun) == 1 else None)


def _choices(error: MissingConfigException) -> str:
    if not error.missing_cfg_file:
        return str(error).splitlines()[0]
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return f"the config {choice!r} was not found"
    options = sorted(error.options or [])
    if group == "optim" and choice.lower() in REFUSED_OPTIMIZERS:
        why = REFUSED_OPTIMIZERS[choice.lower()]
        return f"optim={choice} cannot be used: {why}\n  choices of 'optim': {', '.join(options)}"
    best = _most_like(choice, options)
    hint = f"; did you mean {group}={best}?" if best else ""
    return f"there is no choice {choice!r} for {group!r}{hint}\n  choices of {group!r}: {', '.join(options)}"


def system_error(error: OSError, folder: Path) -> str:
    """An error of the operating system in a run that writes into `folder`. A full disk is reported without a name."""
    full = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"cannot write to {folder}: {error.strerror}; what was saved before is kept" if full else str(error)


def explain(error: BaseException, kind: type = RunConfig) -> str:
    """One to three lines that say what is wrong with the command line or a config file and how to mend it.

    Args:
        error: an exception of Hydra, omegaconf or yaml; what it wraps is looked at first.
        kind: the settings that were to be read.
    """
    if isinstance(error, YAMLError):
        return _not_yaml(error)
    in_file = re.match(r"In '([^']+)': ", str(error))
    message = _reason(error, kind)
    if in_file is None or in_file[1] == "config":  # what the command line asked for, most of the time
        return message
    first, *rest = message.splitlines()
    return "\n".join([f"{in_file[1]}.yaml: {first}", *rest])


def _not_yaml(error: YAMLError) -> str:
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return f"a config file is not YAML: {error}".splitlines()[0]
    place = error.problem_mark
    return f"{place.name}:{place.line + 1} is not YAML: {error.problem}"


def _reason(error: BaseException, kind: type) -> str:
    if isinstance(error, MissingConfigException):
        return _choices(error)
    if isinstance(error, OverrideParseException):
        word = error.override.lstrip("-").partition("=")[0]
        if error.override.startswith("-"):
            return unknown_flag(error.override, "", [], kind)
        if "=" not in error.override and meant_by(word, kind):
            return f"{error.override!r} has no value; write {meant_by(word, kind)}=VALUE"
        example = "train.steps=100, or in quotes where it has special characters: 'data.path=\"my text.txt\"'"
        return f"cannot read {error.override!r} as key=value (for example {example})"
    found = [one for one in (error.__cause__, error, error.__context__) if isinstance(one, OmegaConfBaseException)]
    inner = next((one for one in found if one.full_key), found[0] if found else error)
    if str(error).startswith("Ambiguous value for argument"):
        argument = str(error).split("'")[1]
        return f"{argument} gives several values: add --multirun to run each of them, or write a list as key=[a,b]"
    if not isinstance(inner, OmegaConfBaseException):
        return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    key = inner.full_key or "the config"
    if isinstance(inner, (ConfigKeyError, ConfigAttributeError)):
        typed = re.search(r"use \+(\S+?)=(.*)$", str(error))  # Hydra's own advice, which would let a typo pass
        return unknown_key(typed[1], kind, typed[2]) if typed else unknown_key(key, kind)
    reason = str(inner.msg or inner).splitlines()[0]
    if isinstance(inner, InterpolationResolutionError):
        return f"{key} refers to something that is not there: {reason}"
    if reason.endswith("is not Optional"):
        reason = "null is not allowed"
    elif "is not a ListConfig" in reason:
        reason = f"{inner.value!r} is not a list; write it as '{key}=[{inner.value}]'"
    elif "is not a subclass of" in reason:
        reason = f"{inner.value!r} is not a set of settings; {key!r} is a group: write {key}=CHOICE"
    elif key == "graph.scope" and (allowed := re.search(r"expected one of \[(.*)\]", reason)):
        scopes = [*allowed[1].split(", "), *(["auto"] if kind is RunConfig else [])]
        best = _most_like(str(inner.value), scopes)
        reason += f"; write graph={best}" if best else "; write graph=SCOPE"
    return f"{key}: {reason}"
