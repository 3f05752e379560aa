"""What `TrainStep` may be told about its graphs."""

from dataclasses import dataclass, fields
from enum import Enum

from graphmod.config import CUDAGraphConfig, choice, names_settings, settings


class Scope(str, Enum):
    """How much of a training run one graph holds."""

    none = "none"
    per_layer = "per_layer"
    full_iteration = "full_iteration"


@names_settings
@dataclass
class TrainGraphConfig(CUDAGraphConfig):
    """The settings of `CUDAGraphConfig`, and what `TrainStep` captures with them.

    Attributes:
        scope: what is captured: each layer, the whole iteration (optimizer included), or nothing.
        optimizer: in `per_layer` scope, capture clipping and the optimizer step too. Not of a model of which
            each rank holds a part.
    """

    scope: Scope = Scope.per_layer
    optimizer: bool = True

    def __post_init__(self) -> None:
        self.scope = choice(Scope, self.scope, "scope")
        super().__post_init__()


def train_settings(given: object) -> TrainGraphConfig:
    """What was given as `config`, with the defaults for what it does not say.

    Raises:
        TypeError: it is no such thing.
    """
    if isinstance(given, TrainGraphConfig):
        return given
    plain = settings(given)
    return TrainGraphConfig(**{field.name: getattr(plain, field.name) for field in fields(plain)})
