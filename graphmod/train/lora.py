"""Low-rank adapters (LoRA) of the `peft` library (the extra `lora`) on a saved model, whose own weights are frozen.

The model keeps its class and its layers: graphs, checkpoints and sampling see a transformers model as without adapters.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from graphmod.errors import ConfigError, reason
from graphmod.train.settings import ADAPTER_FILE, LoraSettings, require_library


def add_adapters(model: PreTrainedModel, settings: LoraSettings, base: str) -> PreTrainedModel:
    """Puts adapters into `model`, in place, freezes all else, and returns it. Draws from torch's random generators.

    Args:
        model: a transformers model, loaded from `base`.
        settings: with `r` set.
        base: the folder of the model, which adapters are saved with.

    Raises:
        ConfigError: `peft` is not installed, or the model has no such modules.
    """
    require_library("peft", "lora", f"model.lora.r={settings.r}")
    from peft import LoraConfig

    targets = settings.target_modules
    given: dict[str, Any] = {"r": settings.r, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout}
    config = LoraConfig(
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(base).resolve()),
        **given,
    )
    try:
        model.add_adapter(config)
    except ValueError as error:
        raise ConfigError(
            f"model.lora.target_modules={'null' if targets is None else list(targets)} cannot be used with "
            f"{type(model).__name__}: {reason(error)} Its linear layers are {', '.join(_linear_names(model))}"
        ) from error
    return model


def _linear_names(model: PreTrainedModel) -> list[str]:
    found = (name for name, module in model.named_modules() if "Linear" in type(module).__name__)
    return sorted({name.rpartition(".")[2] for name in found})


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether `model` was given adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds adapters and not a whole model. Raises ConfigError where `peft` is needed and missing."""
    found = (folder / ADAPTER_FILE).is_file()
    if found:
        require_library("peft", "lora", f"{folder}, which holds LoRA adapters,")
    return found


def save_merged(model: PreTrainedModel, adapters: Path, folder: Path) -> None:
    """Writes to `folder` the whole model that the adapters of `model`, saved in `adapters`, and their base make, with
    the special tokens of `model`."""
    from peft import PeftConfig, PeftModel

    base = AutoModelForCausalLM.from_pretrained(
        PeftConfig.from_pretrained(str(adapters)).base_model_name_or_path, dtype="auto", local_files_only=True
    )
    with torch.no_grad():
        merged = PeftModel.from_pretrained(base, adapters).merge_and_unload()
    for name in ("config", "generation_config"):
        of_merged, trained = getattr(merged, name), getattr(model, name)
        if of_merged is not None and trained is not None:
            of_merged.bos_token_id, of_merged.eos_token_id = trained.bos_token_id, trained.eos_token_id
    merged.save_pretrained(folder)
