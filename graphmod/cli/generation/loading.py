"""Loads the model that is to generate, and says how it was trained and where its KV cache is."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from graphmod.cli.generation.schema import ModelSource, Precision
from graphmod.cli.stdout import say_plainly
from graphmod.decode.engine import DecodeEngine
from graphmod.decode.text.codec import Codec, TokenizerCodec
from graphmod.errors import ConfigError, reason
from graphmod.train.device import pick_device
from graphmod.train.folders import EMA_FOLDER, DamagedCheckpoint, NewerCheckpoint, read_manifest
from graphmod.train.model import is_adapter, no_transformers_bars, set_special_tokens
from graphmod.words import counted

_DTYPES = {Precision.saved: "auto", Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


def load_model(folder: Path, source: ModelSource, codec: Codec | None = None) -> PreTrainedModel:
    """The model in `folder`, in evaluation mode, on its device; says which it is.

    Args:
        codec: of its tokens; adapters get its special tokens, for the base they are loaded on has its own ends.

    Raises:
        ConfigError: transformers cannot read it, or weights are missing.
    """
    device = pick_device(source.device, "model.device")
    adapters = is_adapter(folder)
    try:
        with no_transformers_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=_DTYPES[source.precision], local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # whatever the readers of the many file formats raise
        raise ConfigError(f"model.path={folder} is not a model that transformers can read: {reason(error)}") from error
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"model.path={folder} lacks {len(info['missing_keys'])} weights of its model, such as {some}")
    if adapters and isinstance(codec, TokenizerCodec):
        set_special_tokens(model, codec.tokenizer)
    say_plainly(f"model: {folder}" + (f", {known}" if (known := trained(folder)) else ""))
    return model.to(device).eval()


def cache_of(engine: DecodeEngine) -> str:
    """Of an engine whose cache is in memory of the host: how much of it."""
    stats, ring = engine.stats, engine.memory.ring
    far = 0 if ring is None else len(ring.far)
    there, here = (f"{nbytes / 2**20:,.1f} MiB" for nbytes in (stats.host_cache_bytes, stats.cache_bytes))
    return f"cache: {there} in host memory ({counted(far, 'layer')}), {here} on the {engine.device.type}"


def trained(folder: Path) -> str | None:
    """How many steps made the checkpoint in `folder`, or the averaged weights in its folder `ema`, and with which loss;
    None for what is no checkpoint of a run, or none that can be read."""
    checkpoint = folder.parent if folder.name == EMA_FOLDER else folder
    try:
        manifest = read_manifest(checkpoint)
        done, steps = manifest["steps_done"], manifest["settings"]["train.steps"]
    except (DamagedCheckpoint, NewerCheckpoint, OSError, KeyError, TypeError):
        return None
    loss = manifest.get("loss")
    return f"trained for {done:,} of {counted(steps, 'step')}" + ("" if loss is None else f", loss {loss:.3f}")
