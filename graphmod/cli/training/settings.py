"""The settings of a training run: what its command line may hold, and which settings cannot be meant."""

from omegaconf import DictConfig

from graphmod.cli.app import App
from graphmod.train.settings import RunConfig, check

TRAIN = App(
    name="train",
    kind=RunConfig,
    texts=("train.sample_prompt",),
    smaller="data.batch_size or data.seq_len",
)


def parse(settings: DictConfig | dict) -> RunConfig:
    """The typed and checked settings of a run.

    Raises:
        ConfigError: an unknown key, a value of the wrong kind, an impossible combination, a path that is not there.
    """
    config = TRAIN.typed(settings)
    check(config)
    from graphmod.train.device import check_device  # loads PyTorch

    check_device(config)
    return config
