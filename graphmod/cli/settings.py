"""A command whose settings Hydra composes: what it is given, what its settings then are, and what it answers by itself.

Hydra is used through its Compose API, which parses overrides, finds the files of groups, and merges them into a schema.
No PyTorch.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphmod.cli.endings import conclude, end_quietly
from graphmod.cli.explain import explain, unknown_flag
from graphmod.cli.meant import setting_names
from graphmod.cli.start import shown, version
from graphmod.cli.stdout import show
from graphmod.cli.unnamed import without_name, without_value
from graphmod.errors import ConfigError
from graphmod.train.run.folders import unused

_SHORT = {"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-cd": "--config-dir"}
_FLAGS = ("--help", "--version", "--multirun", "--cfg", "--config-dir")
_WITH_VALUE = ("--cfg", "--config-dir")


def quoted(text: str) -> str:
    """`text` so that Hydra and omegaconf, which resolves twice, read it as it is."""
    text = re.sub(r"(\\*)\$\{", lambda found: found[1] * 4 + r"\\\${", text)
    text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{text}'"


@dataclass
class Asked:
    """What a command line asks for.

    Attributes:
        arguments: as they were given.
        flags: those among them, by their long name, with their values.
        overrides: the settings among them.
    """

    arguments: list[str]
    flags: dict[str, str]
    overrides: list[Override]

    @property
    def swept(self) -> list[str]:
        """The keys that have several values, such as `graph` in `graph=none,per_layer`."""
        return [one.get_key_element() for one in self.overrides if one.is_sweep_override()]

    def jobs(self) -> list[list[str]]:
        """The overrides of each job: every combination of what has several values."""
        lines = {}
        for one in self.overrides:
            key, swept = one.get_key_element(), one.is_sweep_override()
            lines[key] = [f"{key}={value}" for value in one.sweep_string_iterator()] if swept else [one.input_line]
        return [list(job) for job in itertools.product(*lines.values())]


@dataclass(frozen=True)
class Program:
    """A command.

    Attributes:
        name: of the command, and of the file with its defaults and its help.
        kind: its settings, a dataclass.
        configs: the folder with that file, and with those of the groups.
        texts: settings that are taken as they are, whatever Hydra's grammar would make of them.
        paths: settings that are taken as they are where Hydra's grammar cannot read them, or without multiruns.
        smaller: the settings to lower where memory is short.
        multirun: whether it may run several jobs.
    """

    name: str
    kind: type
    configs: Path
    texts: tuple[str, ...]
    paths: tuple[str, ...]
    smaller: str
    multirun: bool = False

    def run(self, arguments: list[str], act: Callable[[Asked], int]) -> int:
        """Does what the arguments ask for, by `act` unless they only ask a question; returns the exit status."""
        try:
            if "--version" in arguments:
                show(version())
                return 0
            if {"--help", "-h"} & set(arguments):
                show(self._help())
                return 0
            asked = self.read(arguments)
            if "--cfg" in asked.flags:
                show(OmegaConf.to_yaml(self.compose(asked.jobs()[0])[0]), end="")
                return 0
            return act(asked)
        except BaseException as error:
            return conclude(error, self.smaller)[0]
        finally:
            end_quietly()

    def read(self, arguments: list[str]) -> Asked:
        """What the arguments ask for. Raises ConfigError for what is no flag and no setting with a value."""
        flags, given, left = {}, [], iter(arguments)
        known = [flag for flag in _FLAGS if self.multirun or flag != "--multirun"]
        for argument in left:
            name, equals, value = argument.partition("=")
            name = _SHORT.get(name, name)
            if not argument.startswith("-"):
                given.append(argument)
            elif name not in known:
                raise ConfigError(unknown_flag(argument, next(left, ""), known, self.kind))
            else:
                flags[name] = value if equals or name not in _WITH_VALUE else next(left, "")
        if (folder := flags.get("--config-dir")) is not None:
            if not Path(folder).is_dir():
                raise ConfigError(f"--config-dir {folder} is not a folder; give one with files GROUP/CHOICE.yaml")
            given.insert(0, f"hydra.searchpath=[{quoted(f'file://{Path(folder).absolute()}')}]")
        with self._hydra():
            parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        for before, one in zip(["", *given], given, strict=False):
            if "=" not in one or one.startswith("~"):
                raise ConfigError(without_name(one, before, self.kind, self.configs, self.texts))
        return Asked(arguments, flags, [self._override(parser, one, "--multirun" in flags) for one in given])

    def _override(self, parser: OverridesParser, argument: str, several: bool) -> Override:
        key, _, value = argument.partition("=")
        if key and not value and key not in self.texts and not key.startswith("hydra."):
            raise ConfigError(without_value(key))
        key = self._added(key)
        if value.startswith("~/") and key not in self.texts:  # bash leaves it so, and Hydra takes it for a deletion
            value = str(Path(value).expanduser())
        # Several texts of a multirun are quoted already. Without multiruns a path is like a text.
        text = key in self.texts or (key in self.paths and not self.multirun and value != "null")
        to_quote = text and not (several and value[:1] in ("'", '"'))
        try:
            (found,) = parser.parse_overrides([f"{key}={quoted(value) if to_quote else value}"])
        except OverrideParseException as error:
            if key not in self.paths:
                raise ConfigError(explain(error, self.kind)) from error
            (found,) = parser.parse_overrides([f"{key}={quoted(value)}"])
        if not found.key_or_group:
            raise ConfigError(f"{argument!r} names no setting; write key=value, such as train.steps=3")
        if found.is_interval_sweep():
            raise ConfigError(f"{argument} has no end of values; give some of them: {key}=choice(a,b)")
        if found.is_sweep_override() and not several:
            raise ConfigError(self._several_values(argument, key, value))
        return found

    def _several_values(self, argument: str, key: str, value: str) -> str:
        way_out = "add --multirun to run each of them" if self.multirun else "give one of them"
        settings = OmegaConf.structured(self.kind)
        try:  # whether the setting may be a list
            OmegaConf.update(settings, key, [item.strip() for item in value.split(",")])
            kept = OmegaConf.select(settings, key)
        except OmegaConfBaseException:
            kept = None
        listed = f", or write a list as '{key}=[{value}]'" if OmegaConf.is_list(kept) else ""
        return f"{argument} gives several values: {way_out}{listed}"

    def _added(self, key: str) -> str:
        """`key` as Hydra wants it: what is new in a setting of many keys (`optim.schedule_options`) is added, what is
        there already is not. A misspelt key is found by `typed`."""
        known, bare = setting_names(self.kind), key.lstrip("+")
        above = bare.rpartition(".")[0]
        if above in known and bare not in known:
            holder = OmegaConf.select(OmegaConf.structured(self.kind), above)
            return f"++{bare}" if OmegaConf.get_type(holder) is dict else key
        return bare if bare in known else key

    def _hydra(self) -> initialize_config_dir:
        store, schema = ConfigStore.instance(), f"{self.name}_schema"
        if f"{schema}.yaml" not in store.repo:  # to store it is to copy it, which takes as long as to read a file
            store.store(schema, self.kind)
        OmegaConf.register_new_resolver("unused", unused, replace=True)
        return initialize_config_dir(str(self.configs), version_base="1.3")

    def compose(self, overrides: list[str]) -> tuple[DictConfig, DictConfig]:
        """The settings for these overrides, and Hydra's own, which say where a run writes.

        Raises:
            ConfigError: an unknown key, a choice that there is not, a value of the wrong kind, a file that is not YAML.
        """
        try:
            with self._hydra():
                config = compose(self.name, [self._choice(one) for one in overrides], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(explain(error, self.kind)) from error
        return OmegaConf.masked_copy(config, [name for name in config if name != "hydra"]), config.hydra

    def _choice(self, override: str) -> str:
        """`override` with the choice of a group as a text: Hydra has no words for `graph=true` or `optim=1e-3`."""
        key, _, value = override.partition("=")
        plain = (self.configs / key).is_dir() and value[:1] not in ("'", '"')
        return f"{key}={quoted(value)}" if plain else override

    def typed(self, settings: DictConfig | dict) -> Any:
        """The settings as an object of their kind.

        Raises:
            ConfigError: as `compose`; merging into a fresh schema catches what Hydra lets pass: a misspelt key that was
                added with `+`.
        """
        try:
            plain = OmegaConf.to_container(settings, resolve=True) if OmegaConf.is_config(settings) else settings
            return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(self.kind), plain))
        except OmegaConfBaseException as error:
            raise ConfigError(explain(error, self.kind)) from error
        except ConfigError as error:  # settings of graphs check themselves and do not know under which name they stand
            raise ConfigError(f"graph.{error}") from error

    def _help(self) -> str:
        """The help in the file of defaults: COMMAND is what was typed, GROUPS the groups with their choices."""
        file = yaml.safe_load((self.configs / f"{self.name}.yaml").read_text(encoding="utf-8"))
        lines = []
        for group, default in sorted(item for one in file["defaults"] if isinstance(one, dict) for item in one.items()):
            names = sorted(path.stem for path in (self.configs / group).glob("*.yaml"))
            lines.append(f"  {group}: {', '.join(name + ' (default)' * (name == default) for name in names)}")
        text = file["hydra"]["help"]["template"].replace("GROUPS", "\n".join(lines))
        return text.replace("COMMAND", shown(self.name))
