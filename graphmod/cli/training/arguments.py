"""The command line of train.py as Hydra wants it, and what Hydra would not notice in it."""

import re
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from graphmod.cli.explain import refuse_nameless, setting_names, unknown_flag, unknown_key
from graphmod.errors import ConfigError
from graphmod.train.run.ownership import require_unused

NO_PROFILE = (
    "train.profile=true in a multirun would slow the graph launches of every later job, because a profiler stays "
    "attached to the process; drop it (the comparison shows how busy the GPU was), or run it alone"
)
NO_CHECK = "graph.check=true checks a single run; drop --multirun"
_ONE_FOR_ALL = (
    "train.resume={} in a multirun would make all its jobs resume one run; drop --multirun, or resume each "
    "job in its folder: hydra.sweep.dir=FOLDER train.resume=auto"
)
_SWEPT_ALREADY = (
    "hydra.sweep.dir={} holds runs of an earlier multirun, and new ones would mix with them; give another folder, or "
    "delete that one (train.resume=auto resumes runs that have checkpoints)"
)
_TEXTS = ("train.sample_prompt",)
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
_PATHS = ("data.path", "data.pattern", "data.tokenizer", "model.path", "train.resume", *_FOLDERS)
_ONE_TEXT = r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
_SEVERAL_TEXTS = re.compile(rf"{_ONE_TEXT}(\s*,\s*{_ONE_TEXT})+")
_FLAGS = (
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"),
    *("--shell-completion", "-sc", "--info", "-i"),
)
_FLAGS_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    "--experimental-rerun",
)


def flags_first(arguments: list[str]) -> list[str]:
    """The arguments, flags before settings: Hydra does not understand `graph=none --multirun train.steps=9`.

    Raises:
        ConfigError: a flag that Hydra does not have.
    """
    flags, settings, left = [], [], list(arguments)
    while left:
        argument = left.pop(0)
        name = argument.partition("=")[0]
        if not argument.startswith("-"):
            settings.append(argument)
        elif name in _FLAGS:
            flags.append(argument)
            if name in ("--info", "-i") and left and "=" not in left[0] and not left[0].startswith("-"):
                flags[-1] = f"--info={left.pop(0)}"
            elif argument in ("--info", "-i"):
                flags[-1] = "--info=all"  # it would take the first setting for its value
        elif name in _FLAGS_WITH_VALUE:
            flags.append(argument)
            if "=" not in argument and left:
                flags.append(left.pop(0))
        else:
            raise ConfigError(unknown_flag(argument, left[0] if left else "", [*_FLAGS, *_FLAGS_WITH_VALUE]))
    return [*flags, *settings]


def quoted(text: str) -> str:
    """`text` so that Hydra and omegaconf, which resolves twice, read it as it is."""
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 4 + r"\\\${", text)
    text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


def _path(value: str) -> bool:
    """Whether `value` is one path that Hydra's grammar would stumble over: with a space, an umlaut, a parenthesis."""
    grammar = re.match(r"['\"\[{]|(choice|glob|range|interval|shuffle|sort|tag)\(", value)
    several = "," in value or "${" in value
    return not grammar and not several and re.search(r"[^A-Za-z0-9_./:@%+*?-]", value) is not None


def for_hydra(arguments: list[str]) -> list[str]:
    """The arguments as Hydra wants them: flags first, and texts and paths in quotes, as generate.py takes them without.

    Raises:
        ConfigError: an unknown flag, a value without a name, a setting that is misspelt behind a plus, a folder
            without a name, a profile of several jobs, one run that all of them would resume, or a folder with the runs
            of another multirun.
        FolderInUse: another multirun is writing to the folder.
    """
    found, several = [], bool({"--multirun", "-m"} & set(arguments))
    lengths = {one.partition("=")[0]: one for one in arguments if re.match(r"train\.(steps|epochs)=(?!null$)", one)}
    if len(lengths) > 1:
        raise ConfigError(f"{' and '.join(lengths.values())} both say how long to train; give one of them")
    named = {one.partition("=")[0] for one in arguments}
    if not several and "parallel.gpus" in named and not {"parallel", "parallel.mode", "train.resume"} & named:
        raise ConfigError("parallel.gpus does nothing with parallel=none; add parallel=ddp, or leave it out")
    resumes = any(re.match(r"train\.resume=(?!none$)", argument) for argument in arguments)
    for argument in flags_first(arguments):
        refuse_nameless(argument)
        key, equals, value = argument.partition("=")
        if key.startswith("+") and _misspelt(key.lstrip("+")):  # Hydra would add it as a new one
            raise ConfigError(unknown_key(key.lstrip("+"), value=value))
        if key in _FOLDERS and value.strip("'\" ") == "" and equals:
            raise ConfigError(f"{key} is empty; give the folder to write to, such as {key}=runs/mine, or leave it out")
        if several and key == "hydra.sweep.dir":
            require_unused(Path(value.strip("'\" ")))
        # Said here, because the jobs, one by one, would compare what is new without what they may not touch.
        if several and not resumes and key == "hydra.sweep.dir" and Path(value.strip("'\" ")).is_dir():
            from graphmod.train.run.resume import holds_finished_runs  # loads PyTorch

            if holds_finished_runs(Path(value.strip("'\" "))):
                raise ConfigError(_SWEPT_ALREADY.format(value))
        if several and key == "train.resume" and value not in ("none", "auto") and "," not in value:
            raise ConfigError(_ONE_FOR_ALL.format(value))
        if several and key == "train.profile" and {"true", "yes", "on", "1"} & set(value.lower().split(",")):
            raise ConfigError(NO_PROFILE)
        if several and key == "graph.check" and {"true", "yes", "on", "1"} & set(value.lower().split(",")):
            raise ConfigError(NO_CHECK)
        at_home = value.startswith("~/") and "," not in value  # bash leaves it so, and Hydra takes it for a deletion
        if at_home:
            value = str(Path(value).expanduser())
        text = key in _TEXTS and value and not (several and _SEVERAL_TEXTS.fullmatch(value))
        to_quote = at_home or text or (key in _PATHS and _path(value))
        found.append(f"{key}={quoted(value)}" if to_quote else argument)
    return found


def _misspelt(key: str) -> bool:
    names, group = setting_names(), key.rpartition(".")[0]
    return key not in names and group != "" and group in {name.rpartition(".")[0] for name in names}


def groups(config_dir: Path) -> str:
    """The groups and their choices, a line each, with the default one marked; for --help."""
    defaults: dict[str, str] = {}
    for entry in OmegaConf.load(config_dir / "config.yaml").defaults:
        if isinstance(entry, DictConfig):
            defaults |= {str(group): str(choice) for group, choice in entry.items()}
    lines = []
    for folder in sorted(path for path in config_dir.iterdir() if path.is_dir() and path.name in defaults):
        names = sorted(path.stem for path in folder.glob("*.yaml"))
        marked = (f"{name} (default)" if name == defaults[folder.name] else name for name in names)
        lines.append(f"  {folder.name}: {', '.join(marked)}")
    return "\n".join(lines) + "\n"


def swept_keys(arguments: list[str]) -> list[str]:
    """The keys that a multirun gives several values to, such as `graph` in `graph=none,per_layer`."""
    parser, keys = OverridesParser.create(), []
    for argument in arguments:
        if argument.startswith("-"):
            continue
        try:
            override = parser.parse_override(argument)
        except HydraException:
            continue  # Hydra will say so itself, and better
        if override.is_sweep_override():
            keys.append(override.get_key_element())
    return keys
