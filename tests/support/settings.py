"""Settings of training runs small enough for two CPU cores, and commands' settings as they are given."""

import copy
import functools
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from graphmod.cli.app import TRAIN, parse
from graphmod.cli.errors import explain
from graphmod.errors import ConfigError

ROOT = Path(__file__).parents[2]
TINY = [
    "train.device=cpu",
    "data.cache=null",
    "train.steps=8",
    "train.log_every=3",
    "train.eval_every=0",
    "model.layers=2",
    "model.hidden_size=32",
    "model.heads=2",
    "model.intermediate_size=64",
    "data.seq_len=16",
    "data.batch_size=2",
]
DROPOUT = ["model=gpt2_tiny", "model.dropout=0.2"]


def composed(*overrides: str):
    """The composed, unparsed settings for these arguments."""
    try:
        readable = TRAIN.readable(list(overrides))
    except OverrideParseException as error:
        raise ConfigError(explain(error)) from error
    return TRAIN.compose(readable)


def typed(app, *arguments: str):
    """The typed settings of a command for these arguments."""
    return app.typed(app.compose(app.readable(list(arguments))))


@functools.cache
def chosen(*choices: str):
    return TRAIN.compose([*choices])


def filled(*overrides: str):
    """What `composed` gives. Hydra takes long to read the files of their choices, which it does once here; what
    arguments say of single settings is put in by the part of it that does so after that."""
    try:
        readable = TRAIN.readable(list(overrides))
        asked = {one.get_key_element(): one for one in OverridesParser.create().parse_overrides(readable)}
        ConfigLoaderImpl.validate_sweep_overrides_legal([*asked.values()], RunMode.RUN, from_shell=True)
        single = {key for key in asked if "." in key}
        config = copy.deepcopy(chosen(*(asked[key].input_line for key in asked if key not in single)))
        ConfigLoaderImpl._apply_overrides_to_config([asked[key] for key in asked if key in single], config)
    except (ConfigError, HydraException, OmegaConfBaseException):
        config = composed(*overrides)  # which says it in other words
    return config


def parsed(*overrides: str):
    """The checked settings for these arguments."""
    return parse(filled(*overrides))
