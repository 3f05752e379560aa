"""A command that is configured by Hydra: `hydra.main`, with errors of one line and exit statuses.

Arguments, composition, jobs and folders are Hydra's own. What is added: a text or a path needs no quotes of Hydra's
grammar, a misspelt name is answered with the nearest one, and an error in a callback is an error. No PyTorch.
"""

import argparse
import logging
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra import version as hydra_version
from hydra._internal import utils as hydra_utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.plugins.completion_plugin import CompletionPlugin
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from graphmod.cli.errors import (
    conclude,
    end_quietly,
    explain,
    no_choice,
    of_command,
    schema,
    setting_names,
    unknown_flag,
    unknown_key,
    without_name,
)
from graphmod.cli.start import CONFIGS, show, shown, version
from graphmod.errors import ConfigError
from graphmod.train.folders import job_folder
from graphmod.train.settings import RunConfig, check

_LOGGING = ("hydra/job_logging", "hydra/hydra_logging")
_GROUPS_OF_HYDRA = ("hydra.launcher", "hydra.sweeper", "hydra.job_logging", "hydra.hydra_logging")
_NO_TEXT = re.compile(r"(?<![^,])(null|true|false|[-+]?(\d|\.\d|inf|nan)[\w.+-]*)(?![^,])", re.I)  # alone or in a list
_UNUSED = "${unused:"
# What Hydra's callbacks raise it only warns of; after a job, others may still have to run.
_CALLBACK_RAISED = r"Callback .*\.on_(run_start|run_end|multirun_start|multirun_end|job_start) raised "
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def quoted(text: str) -> str:
    """`text` so that Hydra and omegaconf, which resolves twice, read it as it is."""
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 4 + r"\\\${", text)
    text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


class _OwnConfigs(SearchPathPlugin):
    """Groups are found in `configs/` also where --config-path names another folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        path = f"file://{CONFIGS}"
        if all(one.path not in (path, str(CONFIGS)) for one in search_path.get_path()):
            search_path.append("graphmod", path)


class _Arguments(argparse.ArgumentParser):
    """Hydra's flags; what is wrong with them is a ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.replace("argument ", "", 1))


def _choices(command: str, *, _root_: DictConfig) -> str:
    """The groups of a command with their choices, for its help; those of the user's own folders are among them."""
    loader, lines = GlobalHydra.instance().config_loader(), []
    kind = RunConfig if command == "train" else object
    for group, default in sorted(_root_.hydra.runtime.choices.items()):
        names = of_command(group, loader.get_group_options(group), kind)
        if names and "/" not in group:
            lines.append(f"  {group}: {', '.join(name + ' (default)' * (name == default) for name in sorted(names))}")
    return "\n".join(lines)


def _job_folder(*, _root_: DictConfig) -> str:
    """The name of a job's folder in a multirun: see `job_folder`."""
    job, hydra_config = _root_.hydra.job, _root_.hydra
    left_out = set(job.config.override_dirname.exclude_keys)
    overrides = given_overrides(_root_, "task")
    keys = [key for one in overrides if (key := one.partition("=")[0]) not in left_out]
    name = job_folder(keys, overrides, str(hydra_config.runtime.choices.get("graph")))
    # Other sweepers may ask for the same values again.
    return name if hydra_config.sweeper["_target_"] == BASIC_SWEEPER else f"{job.num}_{name}"


Plugins.instance().register(_OwnConfigs)
OmegaConf.register_new_resolver("command", shown, replace=True)
OmegaConf.register_new_resolver("choices", _choices, replace=True)
OmegaConf.register_new_resolver("job_folder", _job_folder, replace=True)
OmegaConf.register_new_resolver("unused", lambda folder: folder, replace=True)


def given_overrides(config: DictConfig, kind: str) -> list[str]:
    """The overrides of the command line, `task` or `hydra`, as they were written."""
    overrides: Any = OmegaConf.to_container(config.hydra.overrides, resolve=False)
    return overrides[kind]


def default_folder(config: DictConfig, what: str) -> bool:
    """Whether `hydra.run.dir` (`what` is `run`) or `hydra.sweep.dir` is the default: a new folder for each run."""
    return _UNUSED in str(OmegaConf.to_container(config.hydra[what], resolve=False))


def require_own_folder(config: DictConfig, other: str, own: str) -> None:
    """Raises ConfigError where the folder is given that the other kind of run has, or none."""
    if any(one.lstrip("+").startswith(f"hydra.{other}.dir=") for one in given_overrides(config, "hydra")):
        what = "a multirun" if own == "sweep" else "a single run"
        raise ConfigError(f"hydra.{other}.dir does nothing in {what}; give hydra.{own}.dir=FOLDER")
    if not str(config.hydra[own].dir).strip():
        raise ConfigError(
            f"hydra.{own}.dir is empty; give the folder to write to, such as hydra.{own}.dir=runs/mine, or leave it out"
        )


class CommandCallback(Callback):
    """Refuses folders that do nothing."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Raises ConfigError for a folder that a single run does not have."""
        require_own_folder(config, "sweep", "run")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Raises ConfigError for a folder that a multirun does not have."""
        require_own_folder(config, "run", "sweep")


def _returned(job: JobReturn) -> Any:
    """What a job returned. Raises what it raised; Hydra prints all arguments before."""
    if job.status is JobStatus.FAILED:
        raise job._return_value
    return job._return_value


@dataclass
class App:
    """A command."""

    name: str  # of the command, and of the file with its defaults and its help
    kind: type
    texts: tuple[str, ...]  # settings that are taken as they are, unless they are quoted as Hydra's grammar wants it
    smaller: str  # the settings to lower where memory is short
    given: list[str] = field(default_factory=list)  # the arguments of the command line, as they were
    folder: Path | None = None  # where it writes to, once that is known

    def __post_init__(self) -> None:
        stored = OmegaConf.structured(self.kind)
        for node in (stored[name] for name in stored if OmegaConf.is_dict(stored[name])):
            # A part of the user's own (`_target_`) has arguments that no schema knows; `typed` refuses other strangers.
            for one in [node] * ("target" in node) + [
                node[name] for name in node if OmegaConf.get_type(node, name) is dict
            ]:
                OmegaConf.set_struct(one, False)
        ConfigStore.instance().store(f"{self.name}_schema", stored)

    def run(
        self,
        arguments: list[str],
        task: Callable[[DictConfig], Any],
        finish: Callable[[int], int] = lambda status: status,
    ) -> int:
        """Does what the arguments ask for; returns the exit status. What `task` makes of the composed settings a
        sweeper may minimize; `finish` is called after Hydra's part, with the exit status so far, and returns that of
        the command."""
        self.given, self.folder, status = list(arguments), None, 0
        try:
            if "--version" in arguments:
                show(version())
                return 0
            argv = self.arguments(arguments)
            if "--help" in argv:  # Hydra reads all files of all groups for it
                show(self._help)
                return 0
            with _as_main(argv, self.kind), _strict():
                main = hydra.main(config_path=str(CONFIGS), config_name=self.name, version_base="1.3")
                main(task)()
            show("", end="")  # what Hydra printed may not have been written
        except SystemExit as end:  # of Hydra, which has said why, or of a job that was stopped
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as error:
            status = self.conclude(error)
        try:
            return finish(status)
        except BaseException as error:
            return max(status, self.conclude(error))
        finally:
            end_quietly()

    def conclude(self, error: BaseException) -> int:
        """Says what ended the command; returns the exit status."""
        own = error.__context__ if isinstance(error, UserWarning) else None
        if isinstance(own, Exception) and re.match("Callback (Command|Train|Serve)Callback", str(error)):
            error = own
        return conclude(error, self.smaller, self.folder, self.kind)[0]

    def arguments(self, given: list[str]) -> list[str]:
        """The arguments as Hydra wants them: flags first, then overrides, whose texts and paths are quoted. Raises
        ConfigError for what is no flag, flags that exclude each other, a setting without a value."""
        parser = _Arguments(add_help=False, allow_abbrev=False, parents=[hydra_utils.get_args_parser()])
        found, strange = parser.parse_known_intermixed_args(given)
        if strange:
            known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
            raise ConfigError(unknown_flag(strange[0], known, self.kind))
        if found.config_path and not found.config_path.startswith("pkg://"):
            found.config_path = str(Path(found.config_path).absolute())  # Hydra looks beside this file otherwise
        for folder in filter(None, (found.config_dir, found.config_path)):
            if not folder.startswith("pkg://") and not Path(folder).is_dir():
                raise ConfigError(f"{folder} is not a folder; give --config-dir one with files GROUP/CHOICE.yaml")
        settings = found.overrides if found.shell_completion else self.readable(found.overrides)
        if found.config_name is None:  # whose own may choose others
            keys = {one.partition("=")[0] for one in settings}
            settings = [f"{one}=plain" for one in _LOGGING if one not in keys] + settings
        if found.package and not (found.cfg or found.info):
            raise ConfigError(f"--package {found.package} goes with --cfg; add --cfg job, or leave it out")
        if found.help or (found.cfg and found.cfg != "hydra" and not found.multirun):
            self._look(found, settings)
        flags = []
        for action in parser._actions:
            value = getattr(found, action.dest, None)
            if action.option_strings and value:
                flags += [action.option_strings[0]] + [value] * (value is not True)
        return [*flags, *settings]

    def readable(self, settings: list[str]) -> list[str]:
        """Overrides so that Hydra reads them as they are meant. Raises ConfigError for one that it cannot read."""
        chosen = {key for key, equals, _ in (one.partition("=") for one in settings) if equals}
        found = []
        for own in ("model", "data"):  # of which the built-in settings are not arguments
            if f"{own}._target_" in {key.lstrip("+") for key in chosen} and own not in chosen:
                found.append(f"{own}=custom")
        if nameless := [one for one in settings if "=" not in one and not one.startswith("~")]:
            raise ConfigError(without_name(nameless[0], self.kind))
        return [*found, *map(self._readable, settings)]

    def _readable(self, override: str) -> str:
        key, _, value = override.partition("=")
        bare = key.lstrip("+")
        if key.startswith("~"):
            if (name := key[1:]) in setting_names(self.kind):
                raise ConfigError(f"{override!r} takes away what each run has; write {name}=VALUE, or leave it out")
            return override
        if not bare:
            raise ConfigError(f"{override!r} names no setting; write key=value, such as train.steps=3")
        if not value and bare not in self.texts and not bare.startswith("hydra."):
            raise ConfigError(
                f"'{key}=' has no value; write {key}=VALUE, without spaces around '=', or leave it out for its default"
            )
        if bare in self.texts:
            return override if _is_quoted(override, value) else f"{key}={quoted(value)}"
        if bare in _GROUPS_OF_HYDRA and not value.startswith("{"):  # which Hydra finds no fault with in a single run
            raise ConfigError(f"{bare!r} is a group; its choices are written with a slash: hydra/{bare[6:]}={value}")
        if value.startswith("~/"):  # bash leaves it so, and Hydra takes it for a deletion
            value = str(Path(value).expanduser())
        try:
            OverridesParser.create().parse_overrides([f"{key}={value}"])
        except OverrideParseException:  # a path that Hydra's grammar cannot read; of a number, its kind is told later
            return f"{key}={quoted(value)}"
        choices = sorted(file.stem for file in (CONFIGS / bare).glob("*.yaml"))
        if other := {*value.split(",")} & {*choices} - {*of_command(bare, choices, self.kind)}:
            raise ConfigError(no_choice(bare, min(other), choices, self.kind))
        if choices:  # Hydra has no words for a choice that is no text
            value = re.sub(_NO_TEXT, lambda found: quoted(found[0]), value)
        return f"{key}={value}"

    def _look(self, found: argparse.Namespace, settings: list[str]) -> None:
        """Composes the help, and raises ConfigError for a setting that there is not: `--cfg` prints whatever was
        added."""
        with self._composed(settings, found.config_path, found.config_dir, found.config_name) as config:
            self._help = config.hydra.help.template if found.help else ""
        self.typed(without_hydra(config))

    def compose(self, overrides: list[str]) -> DictConfig:
        """The settings for these overrides, as Hydra composes them, without its own. Raises ConfigError for an unknown
        key, a choice that there is not, a value of the wrong kind, a file that is not YAML."""
        with self._composed(overrides) as config:
            return without_hydra(config)

    @contextmanager
    def _composed(
        self, overrides: list[str], path: str | None = None, more: str | None = None, name: str | None = None
    ) -> Iterator[DictConfig]:
        """As `hydra.main` composes with --config-path, --config-dir and --config-name."""
        hydra_version.setbase("1.3")
        search_path = hydra_utils.create_config_search_path(path or str(CONFIGS))
        if more is not None:
            before = SearchPathQuery(provider="schema")
            search_path.prepend(provider="command-line", path=f"file://{Path(more).absolute()}", anchor=before)
        try:
            GlobalHydra.instance().clear()
            Hydra.create_main_hydra2(self.name, search_path)
            config = hydra.compose(name or self.name, overrides, return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            yield config
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain(error, self.kind)) from error
        finally:
            GlobalHydra.instance().clear()

    def typed(self, settings: DictConfig | dict, resumed: bool = False) -> Any:
        """The settings, as Hydra composed them, as an object of their kind. Where they go over those of a run that is
        resumed, this may have a part of the user's own that takes what is unknown. Raises ConfigError for a key that
        there is not, which Hydra lets pass where it was added with `+`, or a value of the wrong kind."""
        try:
            plain: Any = OmegaConf.to_container(settings, resolve=True) if OmegaConf.is_config(settings) else settings
            merged = OmegaConf.merge(schema(self.kind), {k: self._folded(k, v, resumed) for k, v in plain.items()})
        except OmegaConfBaseException as error:
            raise ConfigError(explain(error, self.kind)) from error
        try:
            return OmegaConf.to_object(merged)
        except ConfigError as error:  # settings of graphs check themselves and do not know under which name they stand
            raise ConfigError(f"graph.{error}") from error

    def _folded(self, group: str, values: Any, resumed: bool) -> Any:
        """The settings of a group with those of a part of the user's own in `target`. Raises ConfigError for a key that
        there is not."""
        known = next((one.type for one in fields(self.kind) if one.name == group), None)
        names = {one.name for one in fields(known)} if is_dataclass(known) else set()
        if "target" not in names or not isinstance(values, dict):
            return values
        strange = {name: value for name, value in values.items() if name not in names}
        if "_target_" in strange and values.get("target") is not None:
            strange["target"] = values["target"]  # an argument of that name
        if strange and "_target_" not in strange and not resumed:
            name, value = next(iter(strange.items()))
            raise ConfigError(unknown_key(f"{group}.{name}", self.kind, str(value)))
        given = {name: value for name, value in values.items() if name in names}
        return {**given, "target": strange} if "_target_" in strange else given


def without_hydra(config: DictConfig) -> DictConfig:
    """The settings of a command, without those of Hydra."""
    return OmegaConf.masked_copy(config, [name for name in config if name != "hydra"])


def _is_quoted(override: str, value: str) -> bool:
    """Whether Hydra reads `value` as one text in quotes, or several."""
    if value[:1] not in ("'", '"'):
        return False
    try:
        OverridesParser.create().parse_overrides([override])
    except OverrideParseException:
        return False
    return True


@contextmanager
def _as_main(argv: list[str], kind: type) -> Iterator[None]:
    """Inside, Hydra finds these arguments, completes choices and values of the command with settings of this kind, and
    leaves errors, those of jobs too, to who called it. It has a variable of the environment for that, which processes
    that are started would find, too."""
    arguments, report, options = sys.argv, hydra_utils.run_and_report, ConfigLoaderImpl.get_group_options
    matches, return_value = CompletionPlugin._get_matches, vars(JobReturn)["return_value"]

    def of_this_command(loader: ConfigLoaderImpl, group_name: str, *args: Any, **settings: Any) -> list[str]:
        return of_command(group_name, options(loader, group_name, *args, **settings), kind)

    def _get_matches(config: Container, word: str) -> list[str]:
        """Hydra completes a setting with the value that it has; one with a few has all of these."""
        key, equals, begun = word.partition("=")
        known = type(OmegaConf.select(config, key)) if equals else str
        if issubclass(known, StrEnum):
            return [f"{key}={one}" for one in known if one.startswith(begun)]
        return matches(config, word)

    pass_on: Any = operator.call  # no frame of ours, by which errors of Hydra are told apart
    returned: Any = property(_returned, return_value.fset)
    sys.argv, hydra_utils.run_and_report = [arguments[0], *argv], pass_on
    ConfigLoaderImpl.get_group_options = of_this_command
    CompletionPlugin._get_matches = staticmethod(_get_matches)
    JobReturn.return_value = returned
    try:
        yield
    finally:
        sys.argv, hydra_utils.run_and_report = arguments, report
        ConfigLoaderImpl.get_group_options, CompletionPlugin._get_matches = options, staticmethod(matches)
        JobReturn.return_value = return_value


@contextmanager
def _strict() -> Iterator[None]:
    """Inside, what a callback raises is raised, and that Hydra cannot print; messages of a log that was set up are gone
    afterwards."""
    root, otherwise = logging.getLogger(), logging.Handler.handleError
    handlers, level = root.handlers[:], root.level

    def handle(self: logging.Handler, record: logging.LogRecord) -> None:
        if getattr(self, "stream", None) is sys.stdout and isinstance(sys.exception(), OSError):
            raise
        otherwise(self, record)

    logging.Handler.handleError = handle
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", _CALLBACK_RAISED, UserWarning)
            yield
    finally:
        logging.Handler.handleError = otherwise
        root.handlers[:] = handlers
        root.setLevel(level)


# -- the settings of a training run ------------------------------------------------------------------------------------

TRAIN = App(name="train", kind=RunConfig, texts=("train.sample_prompt",), smaller="data.batch_size or data.seq_len")


def parse(settings: DictConfig | dict) -> RunConfig:
    """The typed and checked settings of a run. Raises ConfigError for an unknown key, a value of the wrong kind, an
    impossible combination, a path that is not there."""
    config = TRAIN.typed(settings)
    check(config)
    from graphmod.train.device import check_device  # loads PyTorch

    check_device(config)
    return config
