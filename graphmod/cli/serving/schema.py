"""The settings of `serve.py`: names, types, defaults and meaning.

The YAML files in `configs/` fill these classes in.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path

from graphmod.cli.generation.schema import BatchSettings, GraphScope, GraphSettings, ModelSource
from graphmod.decode.config import EngineConfig
from graphmod.serve.settings import ServeSettings


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
    graph: GraphSettings = field(default_factory=lambda: GraphSettings(compile_in_background=True))

    @property
    def name(self) -> str:
        """What requests call the model."""
        return self.serve.model_name or Path(self.model.path or ".").absolute().name

    def engine(self) -> EngineConfig:
        """The settings of the engine. Raises ConfigError."""
        given = {**vars(self.decode), **vars(self.graph)}
        asked = {field.name: given[field.name] for field in fields(EngineConfig) if field.name in given}
        graphs = self.graph.scope is GraphScope.decode and not self.serve.enforce_eager
        source = self.serve.generation_config
        return EngineConfig(**asked, graphs=graphs, keep_prefixes=True, frozen=True, generation_config=source)

    def check(self) -> None:
        """Raises ConfigError for what is missing or out of range."""
        self.model.check()
        self.serve.check()
        self.engine()
