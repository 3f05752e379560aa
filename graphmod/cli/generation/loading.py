"""Finds and loads the model that `generate.py` is to sample from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from graphmod.cli.generation.schema import ModelSource, Precision
from graphmod.errors import ConfigError, reason
from graphmod.train.checkpoints.loadable import checkpoint_of, require_whole
from graphmod.train.checkpoints.manifest import checkpoints
from graphmod.train.lora import is_adapter
from graphmod.train.run.device import pick_device
from graphmod.train.schema.model import ADAPTER_FILE

_CONFIGS = ("config.json", ADAPTER_FILE)
_RUNS = Path("runs/train"), Path("runs/compare")  # of train.py, and of its multiruns
_DTYPES = {Precision.saved: "auto", Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


def model_folder(path: str) -> Path:
    """The folder of the model that `path` means: itself, or the latest checkpoint below it.

    Raises:
        ConfigError: there is none, or it is a checkpoint that is damaged or newer than this version.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path={path} is not a folder; give that of a saved model, or train one: graphmod train{_elsewhere()}"
        )
    if any((folder / name).is_file() for name in _CONFIGS) or checkpoint_of(folder) is not None:
        return require_whole(folder)
    configs = [config for name in _CONFIGS for config in folder.glob(f"**/checkpoints/*/{name}")]
    found = [config for config in configs if config.parent.name[0] != "."]
    if not found:
        raise ConfigError(
            f"model.path={path} holds neither a saved model (there is no config.json) nor a checkpoint of a run; "
            f"train one: graphmod train{_elsewhere()}"
        )
    newest = max(found, key=lambda config: config.stat().st_mtime).parent
    return require_whole(next(iter(checkpoints(newest.parent)), newest))  # by their steps: copies may all be as new


def _elsewhere() -> str:
    """Where else commands in this folder have saved models; "" where they have not."""
    found = [folder for folder in _RUNS if any(folder.glob("**/checkpoints/*/config.json"))]
    return "".join(f". There are models in {folder}: model.path={folder}" for folder in found)


def load_model(folder: Path, source: ModelSource) -> PreTrainedModel:
    """The model in `folder`, in evaluation mode, on its device.

    Raises:
        ConfigError: transformers cannot read it, or weights are missing.
    """
    device = pick_device(source.device, "model.device")
    is_adapter(folder)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPES[source.precision], local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # whatever the readers of the many file formats raise
        raise ConfigError(f"model.path={folder} is not a model that transformers can read: {reason(error)}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"model.path={folder} lacks {len(info['missing_keys'])} weights of its model, such as {some}")
    return model.to(device).eval()
