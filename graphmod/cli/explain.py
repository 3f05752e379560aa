"""Words for errors of Hydra and omegaconf: what was got, what is allowed, what to type instead."""

import dataclasses
import re
from enum import Enum

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

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
# What omegaconf says of a value of another kind, and how users call that kind.
_WRONG_KIND = re.compile(r"Value '(.*)' (?:of type .* could not be converted to |is not a valid )(Integer|Float|bool)")
_KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
_OWN_FILES = ("--config", "--config-name", "--config-path", "-cn", "-cp", "--config-file", "--yaml")


def setting_names(kind: type = RunConfig, prefix: str = "") -> list[str]:
    """Every key a run understands, such as `train.steps`, and the groups themselves, such as `train`."""
    names = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        names.append(name)
        if dataclasses.is_dataclass(field.type):
            names += setting_names(field.type, f"{name}.")
    return names


def _shortened(short: str, words: dict[str, str]) -> str | None:
    """What the only word that `short` begins, or has the initials of, stands for; None where there are more or none."""
    found = [
        name
        for word, name in words.items()
        if word.startswith(short) or "".join(part[0] for part in word.split("_") if part) == short
    ]
    return found[0] if len(found) == 1 and len(short) > 1 else None


def meant(key: str, names: list[str]) -> str | None:
    """The setting that was probably meant, or None: a bad guess that is followed trains something else."""
    if key in names:
        return key
    group, _, last = key.rpartition(".")
    # Last names, of which the first setting that has one gets it; a setting of a group is not meant to be a group.
    anywhere = {name.rpartition(".")[2]: name for name in reversed(names) if "." in name or not group}
    siblings = {word: f"{group}.{word}".lstrip(".") for word in _last_names(group, names)}
    known = anywhere.get(last) or anywhere.get(_ELSEWHERE.get(last))
    if group and siblings:
        close = siblings.get(nearest(last, siblings, cutoff=0.65))
        return known or _shortened(last, siblings) or close or _shortened(last, anywhere)
    return known or _shortened(last, siblings) or _shortened(last, anywhere) or nearest(key, names, cutoff=0.65)


def _last_names(group: str, names: list[str]) -> list[str]:
    """Those of the settings of a group, or, with an empty name, the groups."""
    return [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == group]


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
    setting = meant(word, setting_names(kind))
    return f"{said}; settings are written without dashes: {f'{setting}={value}' if setting else 'key=value'}"


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


def _unknown_key(key: str, kind: type, value: str | None = None) -> str:
    """The error for a key no run understands; `value` is what was to be set, where that is known."""
    names = setting_names(kind)
    group = key.rpartition(".")[0]
    best = meant(key, names)
    message = f"there is no setting {key!r}"
    if key.startswith("hydra."):
        return f"{message}; those of Hydra that count here are hydra.run.dir=FOLDER and hydra.sweep.dir=FOLDER"
    if best:
        message += f"; did you mean {best!r}?" + ("" if value is None else _advice(best, value, kind))
    siblings = _last_names(group, names)
    if group and siblings:
        return f"{message}\n  settings of {group!r}: {', '.join(siblings)}"
    return f"{message}\n  groups: {', '.join(_last_names('', names))}"


def _most_like(word: str, options: list[str]) -> str | None:
    """The one of `options` most like `word`, or the only one that begins with it; None when nothing is."""
    begun = [option for option in options if word and option.startswith(word)]
    return nearest(word, options) or (begun[0] if len(begun) == 1 else None)


def _choices(error: MissingConfigException) -> str:
    group, _, choice = str(error.missing_cfg_file or "").rpartition("/")
    if not group:
        return str(error).splitlines()[0]
    options = sorted(error.options or [])
    listed = f"\n  choices of {group!r}: {', '.join(options)}"
    if group == "optim" and choice.lower() in REFUSED_OPTIMIZERS:
        return f"optim={choice} cannot be used: {REFUSED_OPTIMIZERS[choice.lower()]}{listed}"
    best = _most_like(choice, options)
    hint = f"; did you mean {group}={best}?" if best else ""
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
        return f"{key} must be {_KINDS[wrong[2]]}, got {wrong[1]!r}"
    elif "is not a ListConfig" in reason:
        reason = f"{inner.value!r} is not a list; write it as '{key}=[{inner.value}]'"
    elif "is not a subclass of" in reason:
        saved = kind is not RunConfig and key == "model"  # a group without choices
        write = "model.path=FOLDER" if saved else f"{key}=CHOICE"
        reason = f"{inner.value!r} is not a set of settings; {key!r} is a group: write {write}"
    elif key == "graph.scope" and (allowed := re.search(r"expected one of \[(.*)\]", reason)):
        scopes = [*allowed[1].split(", "), *(["auto"] if kind is RunConfig else [])]
        reason += f"; write graph={_most_like(str(inner.value), scopes) or 'SCOPE'}"
    return f"{key}: {reason}"
