"""What is wrong with a command, in one line, and the exit status that it ends with.

Exit status: 0 all went well, 1 something failed, 2 the command line, a config, the model or the data cannot be used,
128 + N stopped by signal N (130 is Ctrl-C, 141 nobody reads the standard output any more, 143 SIGTERM). No PyTorch.
"""

import atexit
import dataclasses
import errno
import functools
import os
import re
import signal
import traceback
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from graphmod.cli.start import complain, say_plainly, unwritten
from graphmod.errors import GraphmodError
from graphmod.train.settings import REFUSED_OPTIMIZERS, RunConfig
from graphmod.words import as_yaml, nearest

# What other programs call a setting -> its last name here, its full name, the full names of which a command has one as
# the first, or, with a value, what to write.
_ELSEWHERE = {
    **dict.fromkeys(("block_size", "context_length", "max_length", "max_seq_length", "sequence_length"), "seq_len"),
    **dict.fromkeys(("clip_grad", "grad_clip", "gradient_clip_val", "max_norm"), "max_grad_norm"),
    **dict.fromkeys(("dtype", "torch_dtype", "mixed_precision", "amp"), "train.precision or model.precision"),
    **dict.fromkeys(("max_iters", "max_steps", "num_steps"), "steps"),
    **dict.fromkeys(("max_epochs", "num_epochs", "num_train_epochs"), "epochs"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "batch_size"),
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"),
    **dict.fromkeys(("n_head", "num_attention_heads"), "heads"),
    **dict.fromkeys(("n_layer", "num_hidden_layers"), "layers"),
    **dict.fromkeys(("eval_interval", "eval_steps"), "eval_every"),
    **dict.fromkeys(("log_interval", "logging_steps"), "log_every"),
    **dict.fromkeys(("save_every", "save_interval", "save_steps"), "checkpoint_every"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler"), "schedule"),
    **dict.fromkeys(("dataset", "data_dir", "data_path", "file", "files", "folder", "train_file"), "data.path"),
    **dict.fromkeys(("ckpt", "checkpoint_path", "model_name_or_path", "model_path"), "model.path"),
    **dict.fromkeys(("devices", "nproc_per_node", "num_gpus", "world_size"), "parallel.gpus"),
    **dict.fromkeys(("log_dir", "logdir", "out_dir", "output_dir", "run_dir", "save_dir"), "hydra.run.dir"),
    **dict.fromkeys(("logger", "report_to"), "train.log"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps"), "optim.warmup_fraction=SHARE_OF_THE_STEPS"),
    **dict.fromkeys(("num_return_sequences", "num_samples"), "n"),
    "bf16": "train.precision=bf16_mixed",
    "do_sample": "decode=sample",
    "fp16": "train.precision=fp16_mixed",
    "gradient_accumulation_steps": "grad_accumulation",
    "lr": "learning_rate",
    "wd": "weight_decay",
    "gradient_checkpointing": "activation_checkpointing",
    "max_tokens": "max_new_tokens",
    "optimizer": "optim",
    "wandb": "train.log=wandb",
}
# Of a group, what other programs call its choice: `model.name=gpt2` is `model=gpt2`.
_CHOICE = ("kind", "name", "type")
# What a choice is called as well -> its name here.
_SCOPES = {
    **dict.fromkeys(("eager", "false", "no", "null", "off"), "none"),
    **dict.fromkeys(("on", "step", "true", "whole", "whole_step", "yes"), "full_iteration"),
}
# Choices of a group that several commands have, which training alone, or decoding alone, can use.
_OF_TRAINING = {"graph": {"auto", "full_iteration", "per_layer"}, "experiment": {"measure_124m"}}
_OF_DECODING = {"graph": {"decode"}}
# Those of Hydra that are installed apart.
_PLUGINS = {"hydra/launcher": ("joblib", "ray", "rq", "submitit"), "hydra/sweeper": ("ax", "nevergrad", "optuna")}
# Of a group whose settings take what is often given as its choice.
_PATHS = {
    "data": "files: data=text data.path=PATH, rows: data=hf data.path=PATH, your own: data._target_=my_package.Items",
    "model": "a saved one: model=local model.path=FOLDER (nothing is downloaded), your own: model._target_=my_pkg.Net",
}


@functools.cache
def schema(kind: type) -> DictConfig:
    """The settings of a kind with their types and defaults; nobody changes them, and `OmegaConf.merge` takes a copy."""
    return OmegaConf.structured(kind)


def setting_names(kind: type = RunConfig, prefix: str = "") -> list[str]:
    """Every key a run understands, such as `train.steps`, and the groups themselves, such as `train`."""
    names = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        names.append(name)
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            names += setting_names(field.type, f"{name}.")
    return names


def last_names(group: str, names: list[str]) -> list[str]:
    """Those of the settings of a group, or, with an empty name, of what is in no group, and the groups."""
    return [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == group]


def _from_elsewhere(last: str, siblings: dict[str, str], anywhere: dict[str, str], names: list[str]) -> str | None:
    """What `last` of another program is here; None where it is nothing, or of a command without that setting."""
    here, *others = _ELSEWHERE.get(last, "").split(" or ")
    if others:
        return next((one for one in (here, *others) if one in names), None)
    if not here or here.startswith("hydra."):
        return here if here and "train" in names else None
    key = here.partition("=")[0]
    found = here if key in names else siblings.get(here) or anywhere.get(here)
    # Of `model.file` only that of the same group can be meant, if it has one.
    same = siblings.get(key.rpartition(".")[2]) if "." in key and "=" not in here else None
    return same or found


def meant(key: str, names: list[str]) -> str | None:
    """The setting that was probably meant, with `=` and a value where that is known, or None: a bad guess that is
    followed trains something else."""
    if key in names:
        return key
    group, _, last = key.rpartition(".")
    if group in names and last in _CHOICE and group != "model.lora":
        return group
    # Last names, of which the first setting that has one gets it; a setting of a group is not meant to be a group.
    anywhere = {name.rpartition(".")[2]: name for name in reversed(names) if "." in name or not group}
    siblings = {word: f"{group}.{word}".lstrip(".") for word in last_names(group, names)}
    known = _from_elsewhere(last, siblings, anywhere, names) or anywhere.get(last)
    if group and siblings:
        return known or siblings.get(nearest(last, siblings, cutoff=0.65) or "")
    return known or nearest(key, names, cutoff=0.65) or anywhere.get(nearest(last, anywhere, cutoff=0.8) or "")


def most_like(word: str, options: Iterable[str]) -> list[str]:
    """Those of `options` that begin with `word`, else the one most like it; none where nothing is."""
    options = [*options]
    if (scope := _SCOPES.get(word.lower())) in options:
        return [scope]
    begun = [option for option in options if word and option.startswith(word)]
    return begun or [best for best in [nearest(word, options, cutoff=0.6)] if best]


_SEVERAL = re.compile(r"(?:Sweep parameters|Ambiguous value for argument) '(.*?)'(?: requires|$)", re.M)


def unknown_flag(argument: str, flags: list[str], kind: type) -> str:
    """The error for an argument with dashes that is none of the flags, such as `--steps=3`."""
    name, _, value = argument.partition("=")
    if best := nearest(name, flags, cutoff=0.8):
        return f"there is no flag {name!r}; did you mean {best!r}? Settings are written without dashes: key=value"
    setting = meant(name.lstrip("-").replace("-", "_"), setting_names(kind)) or "key"
    write = setting if "=" in setting else f"{setting}={value or 'VALUE'}"
    return f"there is no flag {name!r}; settings are written without dashes: {write}"


def _advice(name: str, value: str | None, kind: type) -> str:
    """What to write to set `name`; where `value` cannot be meant, the values that can."""
    if "=" in name:
        return f" Write {name}"
    known = str if name.startswith("hydra.") else type(OmegaConf.select(schema(kind), name))
    if issubclass(known, StrEnum) and value not in [*known]:
        return f" Write {name}=VALUE with one of: {', '.join(known)}"
    return f" Write {name}={value}"


def unknown_key(key: str, kind: type, value: str | None = None) -> str:
    """The error for a key no run understands; `value` is what was to be set, where that is known."""
    names = setting_names(kind)
    group = key.rpartition(".")[0]
    best = meant(key, names)
    message = f"there is no setting {key!r}"
    if key.startswith("hydra."):
        return f"{message}; --cfg hydra prints those of Hydra. What is new there is added: +{key}={value or 'VALUE'}"
    if key.rpartition(".")[2].strip("_") == "target":
        write = f"{group}._target_"
        return f"{message}; did you mean {write!r}? Write {write}={value or 'my_package.Name'}"
    if best == key:
        return f"the config that was chosen lacks {key!r}; let its defaults begin with: [train, _self_]"
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


def of_command(group: str, choices: Iterable[str], kind: type) -> list[str]:
    """Those of the choices of a group that the command with settings of that kind can use, in order."""
    others = _OF_DECODING if kind is RunConfig else _OF_TRAINING
    return sorted({*choices} - others.get(group, set()))


def _missing(error: MissingConfigException, kind: type) -> str:
    file = str(error.missing_cfg_file or "")
    group, _, choice = file.rpartition("/") if file.startswith("hydra/") else file.partition("/")
    if not choice:
        group, choice = "", group
    if not group:
        said = str(error).splitlines()[0]
        return f"{said} The files of your own are looked for in --config-dir FOLDER" if choice else said
    return no_choice(group, choice, error.options or (), kind)


def no_choice(group: str, choice: str, options: Iterable[str], kind: type) -> str:
    """The error for a choice of a group that there is not, or not for the command with settings of that kind; `options`
    are also those of other commands."""
    options = of_command(group, options, kind)
    listed = f"\n  choices of {group!r}: {', '.join(options)}" if options else ""
    if group == "optim" and choice.lower() in REFUSED_OPTIMIZERS:
        return f"optim={choice} cannot be used: {REFUSED_OPTIMIZERS[choice.lower()]}{listed}"
    if (plugin := choice.partition("_")[0]) in _PLUGINS.get(group, ()):
        plugin = f"hydra-{plugin}-{group.rpartition('/')[2]}"
        return f"there is no choice {choice!r} for {group!r}; a plugin may bring it: pip install {plugin}{listed}"
    best = " or ".join(f"{group}={one}" for one in most_like(choice, options))
    hint = f"; did you mean {best}?" if best else ""
    paths = f"\n  {_PATHS[group]}" if kind is RunConfig and group in _PATHS else ""
    return f"there is no choice {choice!r} for {group!r}{hint}{paths}{listed}"


def explain(error: BaseException, kind: type = RunConfig) -> str:
    """One to three lines that say what is wrong with the command line or a config file and how to mend it, from an
    exception of Hydra, omegaconf or yaml; what it wraps is looked at first."""
    if isinstance(error, MarkedYAMLError) and (place := error.problem_mark) is not None:
        return f"{place.name}:{place.line + 1} is not YAML: {error.problem}"
    if isinstance(error, YAMLError):
        return f"a config file is not YAML: {error}".splitlines()[0]
    message, in_file = _reason(error, kind), re.match(r"In '((?!hydra/)[^']+/[^']+)': ", str(error))
    return f"{in_file[1]}.yaml: {message}" if in_file else message  # else what the command line asked for, mostly


def _reason(error: BaseException, kind: type) -> str:
    if isinstance(error, MissingConfigException):
        return _missing(error, kind)
    if several := _SEVERAL.match(str(error)):
        key, _, value = several[1].partition("=")
        return f"{several[1]} gives several values: add --multirun to run each, or write one list as '{key}=[{value}]'"
    if twice := re.match(r"(\S+) appears more than once in the final defaults list", str(error)):
        group = twice[1]
        return f"{group!r} is chosen twice; write {group}=CHOICE without '+', or in a file 'override /{group}: CHOICE'"
    if none := re.match(r"Could not override '(\w+)'\. No match in the defaults list", str(error)):
        group, settings = none[1], last_names(none[1], setting_names(kind))
        if settings and kind is not RunConfig:  # how tokens are drawn, which each request to a server says itself
            return f"{group!r} has no choices here; write {group}.KEY=VALUE with one of: {', '.join(settings)}"
        return unknown_key(group, kind)
    if located := re.match(r"Error locating target '(.*?)'(?:.*\nfull_key: (\S+))?", str(error), re.S):
        why = " ".join(str(error.__cause__ or "").split())
        return f"{located[2] or 'hydra'}._target_={located[1]} cannot be imported: {why}"
    if isinstance(error, OverrideParseException):
        example = "'data.path=\"my text.txt\"'; a list is [a,b]"
        return f"cannot read {error.override!r}; put a value with special characters in quotes: {example}"
    found = [one for one in (error.__cause__, error, error.__context__) if isinstance(one, OmegaConfBaseException)]
    if not found:
        return re.sub(r"[.;]?\s*\n\s*", "; ", str(error).strip())
    inner = next((one for one in found if one.full_key), found[0])
    if not inner.full_key and "is not a subclass of" in str(inner.msg):
        return "the file is a list; write settings without '-', one a line, such as steps: 100"
    key = inner.full_key or "the config"
    if isinstance(inner, (ConfigKeyError, ConfigAttributeError)):
        typed = re.search(r"use \+(\S+?)=(.*)$", str(error))  # Hydra's own advice, which would let a typo pass
        return unknown_key(typed[1], kind, typed[2]) if typed else unknown_key(key, kind)
    reason = str(inner.msg or inner).splitlines()[0]
    if reason.endswith("is not Optional") or (inner.value is None and "is not a subclass of" in reason):
        return f"{key} must not be null; leave it out for its default"
    if "is not a ListConfig" in reason:
        like = as_yaml([*(OmegaConf.select(schema(kind), key) or [inner.value])]).replace(" ", "")
        reason = f"{inner.value!r} is not a list; write it as '{key}={like}'"
    elif "is not a subclass of" in reason:
        reason = f"{inner.value!r} is not a set of settings; {key!r} is a group: write {key}=CHOICE"
    return f"{key}: {reason}"


def without_name(argument: str, kind: type) -> str:
    """The error for an argument without an equals sign."""
    if name := (meant(argument, setting_names(kind)) or "").partition("=")[0]:
        return f"{argument!r} has no value; write {name}=VALUE, without spaces around '='"
    example = "train.steps=100, graph=none or data.path=FOLDER" if kind is RunConfig else "model.path=FOLDER"
    return (
        f"{argument!r} has no name; settings are written key=value, such as {example}. If it belongs to what is before "
        'it, put both in quotes: key="two words"'
    )


def _of_system(error: OSError, folder: Path | None) -> str:
    """An error of the operating system; a full disk is reported without a name."""
    full = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full and folder is not None:
        return f"cannot write to {folder}: {error.strerror}; what was saved before is kept"
    return str(error)


def end_quietly() -> None:
    """From when Python begins to exit, Ctrl-C ends the process without a word: the exit takes a moment, in which
    impatient people press it again, and a KeyboardInterrupt would be shown as an error of some library."""
    # What is registered last is called first, so before the libraries that a command has loaded.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def _of_hydra(error: Exception) -> bool:
    """Whether Hydra or a plugin of it raised it, and no job: what they say of arguments may be an error of any kind."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = names[names.index("hydra.main") :] if "hydra.main" in names else ["graphmod"]
    return not any(name.startswith("graphmod") for name in inside)


class JobFailed(GraphmodError):
    """A job failed, and has said why; a process with this job alone has that exit status."""

    def __init__(self, reason: str, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status


def _with_group(said: str, kind: type) -> str:
    """A message that begins with a setting of the library, with the setting's name on the command line."""
    word = re.match(r"\w+(?==| must )", said)
    groups = [one for one in ("decode", "graph") if word and f"{one}.{word[0]}" in setting_names(kind)]
    return f"{groups[0]}.{said}" if groups else said


def conclude(error: BaseException, smaller: str, folder: Path | None = None, kind: type = RunConfig) -> tuple[int, str]:
    """Says what ended a command, or one job of several, that wrote to `folder`; returns the exit status, and why it
    ended. Where memory is short, the settings to lower are the `smaller`.

    With HYDRA_FULL_ERROR=1 in the environment of the command, where Hydra's users look for it, the traceback comes
    before.
    """
    if isinstance(error, JobFailed):
        return error.status, str(error)
    if isinstance(error, KeyboardInterrupt):
        say_plainly("interrupted")
        return 128 + signal.SIGINT, "interrupted"
    if isinstance(error, BrokenPipeError):  # as with `| head`, where nothing is wrong
        unwritten()
        return 128 + signal.SIGPIPE, "nobody reads the standard output any more"
    if not isinstance(error, Exception):
        raise error
    first, status = str(error).partition("\n")[0], 1
    if isinstance(error, GraphmodError):
        reason, status = _with_group(str(error), kind), 2 if isinstance(error, ValueError) else 1
    elif isinstance(error, (HydraException, OmegaConfBaseException, YAMLError)):
        reason, status = explain(error, kind), 2
    elif isinstance(error, OSError):
        reason = unwritten() or _of_system(error, folder)
    elif type(error).__name__ == "OutOfMemoryError":  # PyTorch's, which may not be loaded
        reason = f"out of GPU memory; lower {smaller}. {first}"
    elif isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)):
        reason = f"out of memory; lower {smaller}. {first}"
    elif isinstance(error, UserWarning) and error.__context__ is not None:
        reason = first  # a callback of the user's
    elif _of_hydra(error):
        reason, status = explain(error, kind), 2
    else:  # all of it is shown, but the other jobs of a multirun go on
        traceback.print_exception(error)
        complain("this is a bug in graphmod or in a library it uses; the lines above show where")
        return 1, f"{type(error).__name__}: {error}"
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    complain(reason)
    return status, reason
