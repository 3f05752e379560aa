"""From a composed Hydra config to a checked `RunConfig`; every way this can fail ends in one ConfigError."""

from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from graphmod.cli.explain import explain
from graphmod.errors import ConfigError
from graphmod.train.schema.run import RunConfig, check

CONFIGS = Path(__file__).parent.resolve() / "configs"


def register() -> None:
    """Makes the schema known to Hydra, as `run_schema`; `configs/config.yaml` lists it first."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)


def _typed(cfg: DictConfig | dict) -> RunConfig:
    """Merging into a fresh schema catches what Hydra lets pass: a misspelt key that was added with `+`."""
    try:
        plain = OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), plain)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    except ConfigError as error:  # GraphConfig checks itself and does not know under which name it stands here
        raise ConfigError(f"graph.{error}") from error


def parse_early(cfg: DictConfig | dict) -> None:
    """Checks what takes no PyTorch to check. A run that is resumed from a folder is not looked at: it has settings that
    are not in `cfg`.

    Raises:
        ConfigError: as `parse`.
    """
    config = _typed(cfg)
    if config.train.resume in ("none", "auto"):
        check(config)


def parse(cfg: DictConfig | dict) -> RunConfig:
    """The typed and checked settings of a composed config.

    Raises:
        ConfigError: an unknown key, a value of the wrong kind, an impossible combination, a path that is not there.
    """
    config = _typed(cfg)
    check(config)
    from graphmod.train.run.device import check_device  # loads PyTorch

    check_device(config)
    return config
