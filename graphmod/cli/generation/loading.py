"""Loads the model that `generate.py` is to sample from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from graphmod.cli.generation.schema import ModelSource, Precision
from graphmod.errors import ConfigError, reason
from graphmod.train.lora import is_adapter
from graphmod.train.run.device import pick_device

_DTYPES = {Precision.saved: "auto", Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


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
