"""The settings of a training run: what its command line may hold, and which settings cannot be meant."""

from pathlib import Path

from omegaconf import DictConfig

from graphmod.cli.settings import Program
from graphmod.train.schema.run import RunConfig, check

CONFIGS = Path(__file__).parent.resolve() / "configs"
TRAIN = Program(
    name="train",
    kind=RunConfig,
    configs=CONFIGS,
    texts=("train.sample_prompt",),
    paths=(
        *("data.path", "data.pattern", "data.tokenizer", "model.path", "train.resume"),
        *("hydra.run.dir", "hydra.sweep.dir"),
    ),
    smaller="data.batch_size or data.seq_len",
    multirun=True,
)


def parse(settings: DictConfig | dict) -> RunConfig:
    """The typed and checked settings of a run.

    Raises:
        ConfigError: an unknown key, a value of the wrong kind, an impossible combination, a path that is not there.
    """
    config = TRAIN.typed(settings)
    check(config)
    from graphmod.train.run.device import check_device  # loads PyTorch

    check_device(config)
    return config
