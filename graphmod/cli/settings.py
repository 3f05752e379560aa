"""The settings of `generate.py` and `serve.py`, and the model that they name. No torch.

The YAML files in `configs/` fill these classes in.
"""

import json
import logging
import re
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from graphmod.config import BackendName, CompileMode
from graphmod.decode.types import BatchSettings, EngineConfig, GenerationConfigName, Sampling, WeightsName
from graphmod.errors import ConfigError
from graphmod.serve.settings import ServeSettings
from graphmod.train.folders import (
    CHECKPOINTS,
    MANIFEST_FILE,
    checkpoint_of,
    first_whole,
    require_no_own_model,
    require_whole,
    saved_folder,
    whole_model,
)
from graphmod.train.settings import ADAPTER_FILE, DeviceName

# -- generate ----------------------------------------------------------------------------------------------------------


class GraphScope(StrEnum):
    """`decode`: each decode step is one graph; `none`: plain PyTorch."""

    none = "none"
    decode = "decode"


class Precision(StrEnum):
    """`saved` keeps the dtype of the saved weights."""

    saved = "saved"
    fp32 = "fp32"
    bf16 = "bf16"


@dataclass
class ModelSource:
    """Which model."""

    # A saved transformers model, a checkpoint of `train.py`, or a folder of its runs, of which the latest checkpoint is
    # taken.
    path: str | None = None
    precision: Precision = Precision.saved  # `saved`, `fp32` or `bf16`
    device: DeviceName = DeviceName.auto  # `auto`, `cpu` or `cuda`

    def check(self) -> None:
        """Raises ConfigError where none is named."""
        if self.path is None:
            raise ConfigError(
                "model.path=FOLDER is missing: a saved model, a checkpoint, or runs/train for the latest one"
            )


@dataclass
class WeightSettings(BatchSettings):
    """How much is decoded at a time, and from which weights."""

    # `saved`, or 8 bits for each number of linear layers, `int8` or `fp8`: for steps of few rows.
    weights: WeightsName = WeightsName.saved


@dataclass
class DecodeSettings(WeightSettings, Sampling):
    """How tokens are chosen, and how much is decoded at a time.

    Attributes:
        stop: as in `Sampling`; in texts \\n, \\r, \\t and \\\\ are read as in Python.
    """

    seed: int = 0  # pyrefly: ignore[bad-override-mutable-attribute] settings that lack one are refused
    n: int = 1  # samples of each prompt
    logprobs: bool = False  # write the log-probability of each token
    generation_config: GenerationConfigName = GenerationConfigName.auto  # of `EngineConfig`


@dataclass
class GraphSettings:
    """What is captured."""

    scope: GraphScope = GraphScope.decode  # `decode` or `none`
    # Capture all batch sizes before the first prompt, with a progress bar, instead of when they are needed.
    ahead: bool = False
    compile: CompileMode = CompileMode.none  # `none`, `default` or `max`; on a GPU only
    compile_in_background: bool = False  # go on uncompiled until it is done, instead of waiting
    warmup_steps: int = 1  # of `EngineConfig`
    max_failures: int = 3  # of `EngineConfig`
    backend: BackendName = BackendName.auto  # of `EngineConfig`


def _engine(decode: BatchSettings, graph: GraphSettings, **more: Any) -> EngineConfig:
    """The settings of an engine among those of two groups, and more. Raises ConfigError."""
    given: dict[str, Any] = {**vars(decode), **vars(graph), "graphs": graph.scope is GraphScope.decode, **more}
    return EngineConfig(**{field.name: given[field.name] for field in fields(EngineConfig) if field.name in given})


def _unescaped(text: str) -> str:
    """A shell passes a line break on as two characters."""
    return re.sub(r"\\([nrt\\])", lambda found: {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}[found[1]], text)


@dataclass
class GenerateConfig:
    """Everything one run of `generate.py` is told."""

    prompt: str | None = None  # the text to go on from
    # A text file with one prompt a line, or `.jsonl` with {"prompt": ...} or {"messages": [...]} a line; messages go
    # through the tokenizer's chat template.
    prompts_file: str | None = None
    chat: bool = False  # take each prompt for the message of a user, and put it through the tokenizer's chat template
    out: str | None = None  # where completions go with `prompts_file`; null puts `.out.jsonl` in place of its suffix
    overwrite: bool = False  # replace what `out` holds; otherwise a file that is not empty is refused
    tokenizer: str | None = None  # folder of a saved tokenizer, or `bytes`; null takes what the model was saved with
    model: ModelSource = field(default_factory=ModelSource)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    graph: GraphSettings = field(default_factory=GraphSettings)

    def engine(self, rows: int) -> EngineConfig:
        """The settings of the engine, for at most `rows` sequences at a time. Raises ConfigError."""
        most = self.decode.max_batch_size  # where that cannot be, the error names it
        return _engine(self.decode, self.graph, max_batch_size=max(1, min(rows, most)) if most > 0 else most)

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
        if self.prompts_file is None and (self.out is not None or self.overwrite):
            raise ConfigError("out=FILE and overwrite=true go with prompts_file=FILE; a single prompt is printed")
        if self.decode.adapter is not None:
            raise ConfigError("decode.adapter is for engines in Python; model.path=FOLDER takes an adapter")
        if self.decode.n < 1:
            raise ConfigError(f"decode.n must be at least 1, got {self.decode.n}")
        self.sampling()
        self.engine(1)


# -- serve -------------------------------------------------------------------------------------------------------------


@dataclass
class ServedBatchSettings(WeightSettings):
    """How much is decoded at a time, and how many adapters there is memory for."""

    max_adapters: int = 0  # of `EngineConfig`
    max_adapter_rank: int = 16  # of `EngineConfig`


@dataclass
class ServeConfig:
    """Everything one run of `serve.py` is told."""

    tokenizer: str | None = None  # folder of a saved tokenizer, or `bytes`; null takes what the model was saved with
    model: ModelSource = field(default_factory=ModelSource)
    serve: ServeSettings = field(default_factory=ServeSettings)
    decode: ServedBatchSettings = field(default_factory=ServedBatchSettings)
    graph: GraphSettings = field(default_factory=lambda: GraphSettings(compile_in_background=True))

    @property
    def name(self) -> str:
        """What requests call the model."""
        return self.serve.model_name or Path(self.model.path or ".").absolute().name

    def engine(self) -> EngineConfig:
        """The settings of the engine. Raises ConfigError."""
        eager = {"graphs": False} if self.serve.enforce_eager else {}
        more = {"generation_config": self.serve.generation_config, **eager}
        return _engine(self.decode, self.graph, keep_prefixes=True, frozen=True, **more)

    def check(self) -> None:
        """Raises ConfigError for what is missing or out of range."""
        self.model.check()
        self.serve.check()
        self.engine()
        if self.decode.max_adapters and not self.serve.manage:
            raise ConfigError(
                f"decode.max_adapters={self.decode.max_adapters} is for adapters that clients load, with "
                "serve.manage=true; add that, or leave it out"
            )


# -- the folder of the model -------------------------------------------------------------------------------------------

log = logging.getLogger("graphmod")

_CONFIGS = ("config.json", ADAPTER_FILE)
_DEPTH = 3  # folders between one that is given and a run's: runs/compare/DATE_TIME/JOB
_RUNS = Path("runs/train"), Path("runs/compare")  # of train.py, and of its multiruns


def model_folder(path: str) -> Path:
    """The folder of the model that `path` means: itself, one in the cache of Hugging Face, or the latest checkpoint
    below it that is whole. The log says which later ones are damaged. Raises ConfigError where there is none, or it is
    a checkpoint that is damaged, newer than this version, or of a model of somebody's own."""
    folder = saved_folder(path, f". Or train one: graphmod train{_elsewhere()}")
    if any((folder / name).is_file() for name in _CONFIGS) or checkpoint_of(folder) is not None:
        return require_no_own_model(require_whole(folder))
    found = _latest_first(folder)
    if not found:
        raise ConfigError(
            f"model.path={path} holds neither a saved model (there is no config.json) nor a checkpoint of a run; save "
            "one with save_pretrained (a GGUF file is loaded with from_pretrained(FOLDER, gguf_file=NAME) before), or "
            f"train one: graphmod train{_elsewhere()}"
        )
    whole, damage = first_whole(found, whole_model)
    if whole is None:
        raise ConfigError(
            f"model.path={path} holds no whole checkpoint: {'; '.join(damage)}; train again: graphmod train"
        )
    for what in damage:
        log.warning(f"{what}; it is skipped")
    return require_no_own_model(whole)


def require_positions(folder: Path, max_seq_len: int | None) -> None:
    """Raises ConfigError where sequences are to be longer than the model's config.json says they may be; what else may
    be wrong with that is told by who loads the model, which takes minutes where it is large."""
    try:
        config = json.loads((folder / "config.json").read_text())
        positions = (config.get("text_config") or config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return
    if isinstance(positions, int) and (max_seq_len or 0) > positions:
        raise ConfigError(f"decode.max_seq_len={max_seq_len} is more than the {positions} positions of the model")


def _latest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder of runs, those of the run that saved last first, and of each run the one with most
    steps; what has lost some of its files is among them."""
    runs: dict[Path, list[Path]] = {}
    if folder.name == CHECKPOINTS:  # that of a run
        folder = folder.parent
    for one in chain.from_iterable(folder.glob(f"{depth * '*/'}{CHECKPOINTS}/*") for depth in range(_DEPTH + 1)):
        if one.name[0] != "." and (checkpoint_of(one) or any((one / name).is_file() for name in _CONFIGS)):
            runs.setdefault(one.parent, []).append(one)
    ordered = sorted(runs.values(), key=lambda run: max(map(_saved_at, run)), reverse=True)
    return [one for run in ordered for one in sorted(run, key=_progress, reverse=True)]


def _saved_at(checkpoint: Path) -> float:
    files = [checkpoint / name for name in (*_CONFIGS, MANIFEST_FILE)]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def _progress(checkpoint: Path) -> tuple[int, float]:
    steps = checkpoint.name.removeprefix("step_")
    return int(steps) if steps.isdigit() else -1, _saved_at(checkpoint)


def _elsewhere() -> str:
    """Where else commands in this folder have saved models; "" where they have not."""
    found = [folder for folder in _RUNS if any(folder.glob("**/checkpoints/*/config.json"))]
    return "".join(f". There are models in {folder}: model.path={folder}" for folder in found)
