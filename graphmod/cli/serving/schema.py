"""The settings of `serve.py`: names, types, defaults and meaning.

The YAML files beside it, under `configs/`, fill these classes in.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path

from graphmod.cli.generation.schema import GraphScope, GraphSettings, ModelSource
from graphmod.decode.config import AttentionName, EngineConfig, OffloadName
from graphmod.errors import ConfigError
from graphmod.serve.settings import ServeSettings


@dataclass
class BatchSettings:
    """How much is decoded at a time: settings of `EngineConfig`. How tokens are chosen, each request says.

    Attributes:
        max_batch_size, max_seq_len, block_size, cache_tokens, offload, offload_buffers, offload_resident, attention,
            steps_per_sync, prefill_tokens: of `EngineConfig`. `attention` is `auto`, `fastest`, `sdpa`, `flex`,
            `flashinfer` or `triton`.
    """

    max_batch_size: int = 16
    max_seq_len: int | None = None
    block_size: int = 64
    cache_tokens: int | None = None
    offload: OffloadName = OffloadName.none
    offload_buffers: int = 2
    offload_resident: float = 0.0
    attention: AttentionName = AttentionName.auto
    steps_per_sync: int = 8
    prefill_tokens: int = 4096


@dataclass
class ServeConfig:
    """Everything one run of `serve.py` is told.

    Attributes:
        tokenizer: folder of a saved tokenizer, or `bytes`; null takes what the model was saved with.
    """

    tokenizer: str | None = None
    model: ModelSource = field(default_factory=ModelSource)
    serve: ServeSettings = field(default_factory=ServeSettings)
    decode: BatchSettings = field(default_factory=BatchSettings)
    graph: GraphSettings = field(default_factory=GraphSettings)

    @property
    def name(self) -> str:
        """What requests call the model."""
        return self.serve.model_name or Path(self.model.path or ".").absolute().name

    def engine(self) -> EngineConfig:
        """The settings of the engine. Raises ConfigError."""
        given = {**vars(self.decode), **vars(self.graph)}
        asked = {field.name: given[field.name] for field in fields(EngineConfig) if field.name in given}
        graphs = self.graph.scope is GraphScope.decode and not self.serve.enforce_eager
        return EngineConfig(**asked, graphs=graphs, keep_prefixes=True)

    def check(self) -> None:
        """Raises ConfigError for what is missing or out of range."""
        if self.model.path is None:
            raise ConfigError(
                "model.path=FOLDER is missing: a saved model, a checkpoint, or runs/train for the latest one"
            )
        self.serve.check()
        self.engine()
