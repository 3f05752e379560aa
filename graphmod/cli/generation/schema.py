"""The settings of `generate.py`: names, types, defaults and meaning.

The YAML files in `configs/` fill these classes in.
"""

import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from graphmod.config import BackendName, CompileMode
from graphmod.decode.config import AttentionName, EngineConfig, GenerationConfigName, OffloadName, Sampling
from graphmod.errors import ConfigError
from graphmod.train.settings import DeviceName


class GraphScope(str, Enum):
    """`decode`: each decode step is one graph; `none`: plain PyTorch."""

    none = "none"
    decode = "decode"


class Precision(str, Enum):
    """`saved` keeps the dtype of the saved weights."""

    saved = "saved"
    fp32 = "fp32"
    bf16 = "bf16"


@dataclass
class ModelSource:
    """Which model.

    Attributes:
        path: a saved transformers model, a checkpoint of `train.py`, or a folder of its runs, of which the latest
            checkpoint is taken.
        precision: `saved`, `fp32` or `bf16`.
        device: `auto`, `cpu` or `cuda`.
    """

    path: str | None = None
    precision: Precision = Precision.saved
    device: DeviceName = DeviceName.auto

    def check(self) -> None:
        """Raises ConfigError where none is named."""
        if self.path is None:
            raise ConfigError(
                "model.path=FOLDER is missing: a saved model, a checkpoint, or runs/train for the latest one"
            )


@dataclass
class BatchSettings:
    """How much is decoded at a time: settings of `EngineConfig`.

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
class DecodeSettings(BatchSettings, Sampling):
    """How tokens are chosen, and how much is decoded at a time.

    Attributes:
        stop: as in `Sampling`; in texts \\n, \\r, \\t and \\\\ are read as in Python.
        n: samples of each prompt.
        generation_config: of `EngineConfig`.
        logprobs: write the log-probability of each token.
    """

    seed: int = 0  # pyrefly: ignore[bad-override-mutable-attribute] settings that lack one are refused
    n: int = 1
    logprobs: bool = False
    generation_config: GenerationConfigName = GenerationConfigName.auto


@dataclass
class GraphSettings:
    """What is captured.

    Attributes:
        scope: `decode` or `none`.
        ahead: capture all batch sizes before the first prompt, with a progress bar, instead of when they are needed.
        compile: `none`, `default` or `max`; on a GPU only.
        compile_in_background: go on uncompiled until it is done, instead of waiting.
        warmup_steps, max_failures, backend: of `EngineConfig`.
    """

    scope: GraphScope = GraphScope.decode
    ahead: bool = False
    compile: CompileMode = CompileMode.none
    compile_in_background: bool = False
    warmup_steps: int = 1
    max_failures: int = 3
    backend: BackendName = BackendName.auto


def _unescaped(text: str) -> str:
    """A shell passes a line break on as two characters."""
    return re.sub(r"\\([nrt\\])", lambda found: {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}[found[1]], text)


@dataclass
class GenerateConfig:
    """Everything one run of `generate.py` is told.

    Attributes:
        prompt: the text to go on from.
        prompts_file: a text file with one prompt a line, or `.jsonl` with {"prompt": ...} or {"messages": [...]} a
            line; messages go through the tokenizer's chat template.
        chat: take each prompt for the message of a user, and put it through the tokenizer's chat template.
        out: where completions go with `prompts_file`; null puts `.out.jsonl` in place of its suffix.
        overwrite: replace what `out` holds; otherwise a file that is not empty is refused.
        tokenizer: folder of a saved tokenizer, or `bytes`; null takes what the model was saved with.
    """

    prompt: str | None = None
    prompts_file: str | None = None
    chat: bool = False
    out: str | None = None
    overwrite: bool = False
    tokenizer: str | None = None
    model: ModelSource = field(default_factory=ModelSource)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    graph: GraphSettings = field(default_factory=GraphSettings)

    def engine(self, rows: int) -> EngineConfig:
        """The settings of the engine, for at most `rows` sequences at a time. Raises ConfigError."""
        given = {**vars(self.decode), **vars(self.graph)}
        asked = {field.name: given[field.name] for field in fields(EngineConfig) if field.name in given}
        asked["graphs"] = self.graph.scope is GraphScope.decode
        if self.decode.max_batch_size > 0:  # else the error names what was given
            asked["max_batch_size"] = max(1, min(rows, self.decode.max_batch_size))
        return EngineConfig(**asked)

    def sampling(self) -> Sampling:
        """The settings of each request. Raises RequestError."""
        stop = [_unescaped(one) if isinstance(one, str) else one for one in self.decode.stop]
        made = replace(self.decode, stop=stop)
        made.check()
        return made

    def check(self) -> None:
        """Raises ConfigError for what is missing or cannot be meant together."""
        if (self.prompt is None) == (self.prompts_file is None):
            raise ConfigError('give one of prompt="..." and prompts_file=FILE')
        self.model.check()
        if self.out is not None and self.prompts_file is None:
            raise ConfigError("out=FILE goes with prompts_file=FILE; a single prompt is printed")
        if self.overwrite and self.prompts_file is None:
            raise ConfigError("overwrite=true goes with prompts_file=FILE; a single prompt is printed")
        if self.decode.n < 1:
            raise ConfigError(f"decode.n must be at least 1, got {self.decode.n}")
        self.sampling()
        self.engine(1)
