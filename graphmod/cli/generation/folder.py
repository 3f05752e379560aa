"""Finds the folder of the model that `generate.py` is to sample from. No torch."""

import json
import logging
from itertools import chain
from pathlib import Path

from graphmod.errors import ConfigError
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
from graphmod.train.settings import ADAPTER_FILE

log = logging.getLogger("graphmod")

_CONFIGS = ("config.json", ADAPTER_FILE)
_WEIGHTS = ("*.safetensors", "*.bin")
_GGUF = ".gguf"
_DEPTH = 3  # folders between one that is given and a run's: runs/compare/DATE_TIME/JOB
_RUNS = Path("runs/train"), Path("runs/compare")  # of train.py, and of its multiruns


def model_folder(path: str) -> Path:
    """The folder of the model that `path` means: itself, one in the cache of Hugging Face, or the latest checkpoint
    below it that is whole. The log says which later ones are damaged.

    Raises:
        ConfigError: there is none, or it is a checkpoint that is damaged, newer than this version, or of a model of
            somebody's own.
    """
    found = _whole(path)
    require_no_own_model(found)
    return found


def _whole(path: str) -> Path:
    if path.endswith(_GGUF) and Path(path).is_file():
        raise _of_llama_cpp(path, Path(path))
    folder = saved_folder(path, f". Or train one: graphmod train{_elsewhere()}")
    if (file := next(folder.glob(f"*{_GGUF}"), None)) is not None and not any(
        [*folder.glob(weights)] for weights in _WEIGHTS
    ):
        raise _of_llama_cpp(path, file)
    if any((folder / name).is_file() for name in _CONFIGS) or checkpoint_of(folder) is not None:
        return require_whole(folder)
    found = _latest_first(folder)
    if not found:
        raise ConfigError(
            f"model.path={path} holds neither a saved model (there is no config.json) nor a checkpoint of a run; "
            f"train one: graphmod train{_elsewhere()}"
        )
    whole, damage = first_whole(found, whole_model)
    if whole is None:
        raise ConfigError(
            f"model.path={path} holds no whole checkpoint: {'; '.join(damage)}; train again: graphmod train"
        )
    for what in damage:
        log.warning(f"{what}; it is skipped")
    return whole


def _of_llama_cpp(path: str, file: Path) -> ConfigError:
    return ConfigError(
        f"model.path={path}: {file.name} is a model of llama.cpp (GGUF), whose quantized weights are not decoded here. "
        "Give the folder of the model it was made from, or convert it (pip install gguf): AutoModelForCausalLM"
        f".from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}).save_pretrained(FOLDER), and its tokenizer so"
    )


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
