"""The settings of `generate.py`: names, types, defaults and meaning.

The YAML files beside it, under `configs/`, fill these classes in.
"""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from graphmod.config import BackendName, CompileMode
from graphmod.decode.config import AttentionName, EngineConfig, Sampling
from graphmod.errors import ConfigError


class GraphScope(str, Enum):
    """`decode`: each decode step is one graph; `none`: plain PyTorch."""

    none = "none"
    decode = "decode"


class Precision(str, Enum):
    """`saved` keeps the dtype of the saved weights."""

    saved = "saved"
    fp32 = "fp32"
    bf16 = "bf16"


class DeviceName(str, Enum):
    """`auto` takes the GPU when there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


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


@dataclass
class DecodeSettings:
    """How tokens are chosen, and how much is decoded at a time. See `Sampling` and `EngineConfig` for each.

    Attributes:
        n: samples of each prompt.
        logprobs: write the log-probability of each token.
        max_batch_size, max_seq_len, block_size, cache_tokens, attention, steps_per_sync, prefill_tokens: of
            `EngineConfig`. `attention` is `auto`, `fastest`, `sdpa`, `flex` or `flashinfer`.
        temperature, top_k, top_p, seed, max_new_tokens, stop, ignore_eos: of `Sampling`. In the texts of `stop`, \\n,
            \\r, \\t and \\\\ are read as in Python.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 128
    stop: list[Any] = field(default_factory=list)
    ignore_eos: bool = False
    n: int = 1
    logprobs: bool = False
    max_batch_size: int = 16
    max_seq_len: int | None = None
    block_size: int = 64
    cache_tokens: int | None = None
    attention: AttentionName = AttentionName.auto
    steps_per_sync: int = 8
    prefill_tokens: int = 4096


@dataclass
class GraphSettings:
    """What is captured.

    Attributes:
        scope: `decode` or `none`.
        ahead: capture all batch sizes before the first prompt, with a progress bar, instead of when they are needed.
        compile: `none`, `default` or `max`; on a GPU only.
        warmup_steps, max_failures, backend: of `EngineConfig`.
    """

    scope: GraphScope = GraphScope.decode
    ahead: bool = False
    compile: CompileMode = CompileMode.none
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
        decode, graph = self.decode, self.graph
        return EngineConfig(
            max_batch_size=max(1, min(rows, decode.max_batch_size)) if decode.max_batch_size > 0 else 0,
            max_seq_len=decode.max_seq_len,
            block_size=decode.block_size,
            cache_tokens=decode.cache_tokens,
            attention=decode.attention,
            steps_per_sync=decode.steps_per_sync,
            prefill_tokens=decode.prefill_tokens,
            graphs=graph.scope is GraphScope.decode,
            compile=graph.compile,
            warmup_steps=graph.warmup_steps,
            max_failures=graph.max_failures,
            backend=graph.backend,
        )

    def sampling(self) -> Sampling:
        """The settings of each request. Raises RequestError."""
        decode = self.decode
        made = Sampling(
            temperature=decode.temperature,
            top_k=decode.top_k,
            top_p=decode.top_p,
            seed=decode.seed,
            max_new_tokens=decode.max_new_tokens,
            stop=[_unescaped(stop) if isinstance(stop, str) else stop for stop in decode.stop],
            ignore_eos=decode.ignore_eos,
        )
        made.check()
        return made

    def check(self) -> None:
        """Raises ConfigError for what is missing or cannot be meant together."""
        if (self.prompt is None) == (self.prompts_file is None):
            raise ConfigError('give one of prompt="..." and prompts_file=FILE')
        if self.model.path is None:
            raise ConfigError(
                "model.path=FOLDER is missing: a saved model, a checkpoint, or runs/train for the latest one"
            )
        if self.out is not None and self.prompts_file is None:
            raise ConfigError("out=FILE goes with prompts_file=FILE; a single prompt is printed")
        if self.overwrite and self.prompts_file is None:
            raise ConfigError("overwrite=true goes with prompts_file=FILE; a single prompt is printed")
        if self.decode.n < 1:
            raise ConfigError(f"decode.n must be at least 1, got {self.decode.n}")
        self.sampling()
        self.engine(1)
