"""LoRA adapters by name, for rows of which each has one or none: their weights in static memory, and what they add to
the model's linear layers while such rows run.

All adapters are stacked: a layer multiplies every row by each, and a mask keeps of the small results between the two
products what is of the row's own. So a graph serves any mix of rows, and one that is loaded changes memory alone.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from graphmod.decode.types import DecodeError, RequestError
from graphmod.decode.weights import ScaledLinear
from graphmod.errors import ConfigError, reason
from graphmod.torch_private import is_compiled

_TOKENS = 8  # of a first look
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Fields of peft's config that are read here, or say nothing about what an adapter computes.
_KNOWN = {
    *("peft_type", "r", "lora_alpha", "alpha_pattern", "use_rslora", "init_lora_weights", "lora_dropout"),
    *("rank_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *("base_model_name_or_path", "revision", "auto_mapping", "task_type", "inference_mode", "peft_version"),
    *("ensure_weight_tying", "loftq_config", "eva_config", "megatron_core", "qalora_group_size", "runtime_config"),
}
_NOTHING = (None, False, "none", [], {})  # what other fields may say
_OF_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the model's own weights


@dataclass(eq=False)
class Adapter:
    """One that is, or was, loaded.

    Attributes:
        slot: its place in the stacks, from 1 on.
        number: another one each time, so that beginnings of prompts are not taken for those of another adapter.
        sequences: that were read for it, by any thread.
    """

    slot: int
    number: int
    sequences: WeakKeyDictionary[Any, None] = field(default_factory=WeakKeyDictionary)

    @property
    def is_used(self) -> bool:
        """Whether something of it may still run."""
        held = [one for ref in self.sequences.keyrefs() if (one := ref()) is not None]
        return any(one.handle is None or not one.handle.done for one in held)


NO_ADAPTER = Adapter(0, 0)
"""Stands for none: the model itself."""


class _Layer:
    """What adapters add to one linear layer.

    Attributes:
        down: (slots * rank, features): one matrix below the other.
        up: (out features, slots * rank): one beside the other, times their scaling.
    """

    def __init__(self, adapters: Adapters, module: nn.Module, given: Tensor, result: Tensor) -> None:
        self._adapters, self.module = adapters, module
        width, like = adapters.count * adapters.rank, {"dtype": given.dtype, "device": given.device}
        self.down = torch.zeros(width, given.shape[-1], **like)
        self.up = torch.zeros(result.shape[-1], width, **like)

    def add(self, module: nn.Module, given: tuple[Tensor], result: Tensor) -> Tensor:
        """A forward hook."""
        inner, mask = linear(given[0], self.down), self._adapters.mask
        assert mask is not None
        # Not by a product: what overflows in the adapters of others would become NaN.
        inner = inner.where(mask if len(mask) == 1 else mask.view(inner.shape), 0)
        return result + linear(inner, self.up)

    def put(self, slot: int, matrices: dict[str, Tensor]) -> None:
        """Writes those of a slot; none stands for zeros."""
        rank = self._adapters.rank
        down, up = self.down[(slot - 1) * rank : slot * rank], self.up[:, (slot - 1) * rank : slot * rank]
        down.zero_()
        up.zero_()
        if matrices:
            own = len(matrices["A"])
            down[:own].copy_(matrices["A"])
            up[:, :own].copy_(matrices["B"])


Shown = dict[str, tuple[nn.Module, Tensor, Tensor]]
"""Linear layers by name, each with what it was given and what it made of it."""


def adaptable(model: PreTrainedModel) -> Shown:
    """The layers that adapters can be for: those that get all tokens, in their order, each time they are called. Calls
    the model on a few tokens; call it in the state for decoding.

    Raises:
        ConfigError: there are none, or it cannot be known.
    """
    if any(map(is_compiled, model.modules())):
        raise ConfigError(
            "max_adapters cannot be used with code of torch.compile, which may not see them; leave it out"
        )
    kinds, logits = (nn.Linear, Conv1D, ScaledLinear), model.get_output_embeddings()
    named = {name: one for name, one in model.named_modules() if isinstance(one, kinds) and one is not logits}
    layers: dict[nn.Module, str] = {one: name for name, one in named.items()}
    seen: Shown = {}
    partly: set[str] = set()

    def note(module: nn.Module, given: tuple, result: Tensor) -> None:
        name = layers[module]
        if given and given[0].shape[:-1].numel() == _TOKENS:
            seen[name] = module, given[0], result
        else:
            partly.add(name)

    handles = [one.register_forward_hook(note) for one in layers]
    try:
        tokens = torch.arange(_TOKENS, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
        model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if not (found := {name: seen[name] for name in seen if name not in partly}):
        raise ConfigError(
            f"max_adapters: no linear layer of this {type(model).__name__} can have adapters; leave it out"
        )
    return found


class Adapters:
    """Those of an engine.

    Args:
        model: that they are for.
        shown: from `adaptable`; of no importance without any.
        count: the most that are loaded at a time; 0 costs nothing.
        rank: the largest they may have.

    Attributes:
        mask: (tokens, count * rank) bool, of the tokens that the model is called on now: see `chosen`. One row stands
            for all tokens.
    """

    def __init__(self, model: PreTrainedModel, shown: Shown, count: int, rank: int) -> None:
        self._model, self.count, self.rank = model, count, rank
        self.mask: Tensor | None = None
        self._owner = torch.arange(1, count + 1, device=model.device).repeat_interleave(rank)
        self._key = RemovableHandle(OrderedDict()).id  # which no other hook has
        self._layers = {name: _Layer(self, *one) for name, one in shown.items()}
        self._loaded: dict[str, Adapter] = {}
        self._unloaded: list[Adapter] = []
        self._numbers = 0

    # -- loading: one thread at a time, in its turn, but for `read` ----------------------------------------------

    def read(self, folder: Path) -> dict[str, dict[str, Tensor]]:
        """The matrices in a folder, by layer. Raises ConfigError."""
        if not self.count:
            raise ConfigError("there is no memory for adapters; set max_adapters, to how many are loaded at a time")
        try:
            config = {**json.loads((folder / _CONFIG).read_text(encoding="utf-8"))}
            from safetensors.torch import load_file

            weights = load_file(folder / _WEIGHTS)
        except Exception as error:  # of files: anything
            raise ConfigError(
                f"{folder} holds no LoRA adapter that can be read, {_CONFIG} and {_WEIGHTS}: {reason(error)}"
            ) from error
        _require_plain(folder, config)
        found: dict[str, dict[str, Tensor]] = {}
        for key, matrix in weights.items():
            if (names := _KEY.fullmatch(key)) is None:
                raise ConfigError(f"{folder} holds {key}, which is no matrix of LoRA on a linear layer")
            found.setdefault(names[1], {})[names[2]] = matrix.float()
        for name, matrices in found.items():
            self._require_fitting(folder, name, matrices)
            matrices["B"] = matrices["B"] * _scaling(config, name, len(matrices["A"]))
        return found

    def _require_fitting(self, folder: Path, name: str, matrices: dict[str, Tensor]) -> None:
        if (layer := self._layers.get(name)) is None:
            raise ConfigError(
                f"{folder} adapts {name}, which cannot have adapters here: it must be a linear layer that the model "
                "calls with all tokens, and not the one that makes the logits"
            )
        shapes = {letter: tuple(matrix.shape) for letter, matrix in matrices.items()}
        rank = (*shapes.get("A", ()), 0)[0]
        wanted = {"A": (rank, layer.down.shape[1]), "B": (layer.up.shape[0], rank)}
        if shapes != wanted or not rank:
            raise ConfigError(f"{folder} has matrices of shapes {shapes} for {name}, and it takes {wanted}")
        if rank > self.rank:
            raise ConfigError(f"{folder} has rank {rank}, and max_adapter_rank={self.rank}; raise that")
        if not all(bool(matrix.isfinite().all()) for matrix in matrices.values()):
            raise ConfigError(f"{folder} has numbers that are not finite, for {name}")

    def put(self, name: str, found: dict[str, dict[str, Tensor]]) -> None:
        """Takes in what `read` gave. Raises ConfigError."""
        if name in self._loaded:
            raise ConfigError(f"an adapter {name!r} is loaded already; unload it, or give another name")
        self._unloaded = [one for one in self._unloaded if one.is_used]
        taken = {one.slot for one in (*self._loaded.values(), *self._unloaded)}
        slot = next((slot for slot in range(1, self.count + 1) if slot not in taken), None)
        if slot is None:
            raise ConfigError(
                f"there is room for {self.count} adapters, and {len(self._loaded)} are loaded "
                f"({', '.join(self._loaded)}), or unloaded and still in use; unload one, or raise max_adapters"
            )
        with torch.no_grad():
            for path, layer in self._layers.items():
                layer.put(slot, found.get(path, {}))
        if self._owner.is_cuda:  # whatever stream steps run on
            torch.cuda.current_stream(self._owner.device).synchronize()
        self._numbers += 1
        self._loaded[name] = Adapter(slot, self._numbers)

    def unload(self, name: str) -> None:
        """Takes no more requests for it; those that run go on with it. Raises ConfigError."""
        if name not in self._loaded:
            raise ConfigError(f"adapter {name!r} is not loaded; {self._said}")
        self._unloaded.append(self._loaded.pop(name))

    @property
    def _said(self) -> str:
        names = [*self._loaded]
        return f"loaded are {', '.join(names)}" if names else "none is loaded; load_adapter() does that"

    # -- for requests --------------------------------------------------------------------------------------------

    def take(self, name: str | None, sequences: list[Any]) -> None:
        """Lets sequences have the adapter of a name. Any thread may call it.

        Raises:
            RequestError: there is none.
            DecodeError: the model has other layers than when the engine was made.
        """
        if name is None:
            return
        if not {*self._model.modules()}.issuperset(layer.module for layer in self._layers.values()):
            raise DecodeError(
                "layers of the model were exchanged, and adapters would not reach them; make a new engine"
            )
        # No lock, which Ctrl-C could leave taken. Who unloads it meanwhile either finds the sequences, or is found.
        if (found := self._loaded.get(name)) is not None:
            found.sequences.update(dict.fromkeys(sequences))
        if found is None or self._loaded.get(name) is not found:
            raise RequestError(f"adapter {name!r} is not loaded; {self._said}")
        for sequence in sequences:
            sequence.adapter = found

    def chosen(self, slots: Tensor) -> Tensor:
        """(tokens, count * rank) bool: which of the stacked rows are of each token's own adapter.

        Args:
            slots: (tokens,) int64.
        """
        return slots.unsqueeze(1) == self._owner

    def applied(self, mask: Tensor | None) -> Applied:
        """For `with`: the model's layers add what adapters do; nothing for None."""
        return Applied(self, mask)

    def alone(self, adapter: Adapter) -> Applied:
        """For `with`: all that the model is called on has this adapter."""
        return self.applied((self._owner == adapter.slot).unsqueeze(0) if adapter.slot else None)

    def enter(self, mask: Tensor) -> None:
        """Begins to add."""
        self.mask = mask
        for layer in self._layers.values():
            hooks: Any = layer.module._forward_hooks
            hooks[self._key] = layer.add
            hooks.move_to_end(self._key, last=False)  # others see what the layer and its adapter compute together

    def leave(self) -> None:
        """Ends it, unless it has ended."""
        if self.mask is not None:
            for layer in self._layers.values():
                layer.module._forward_hooks.pop(self._key, None)
            self.mask = None


class Applied:
    """See `Adapters.applied`. No generator, for the reason that `attention` has. Where Ctrl-C meets its end,
    `Traffic.decoding` ends it."""

    def __init__(self, adapters: Adapters, mask: Tensor | None) -> None:
        self._adapters, self._mask = adapters, mask

    def __enter__(self) -> None:
        if self._mask is not None:
            try:
                self._adapters.enter(self._mask)
            except BaseException:
                self._adapters.leave()
                raise

    def __exit__(self, *_: object) -> None:
        if self._mask is not None:
            self._adapters.leave()


def _require_plain(folder: Path, config: dict[str, Any]) -> None:
    """Raises ConfigError for what asks for more than two matrices beside a linear layer."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ConfigError(f"{folder} holds an adapter of kind {kind}; only LORA can be used")
    asked = {name: value for name, value in config.items() if name not in _KNOWN and value not in _NOTHING}
    begin = config.get("init_lora_weights")
    if isinstance(begin, str) and begin.startswith(_OF_OTHER_BASES):
        asked["init_lora_weights"] = begin
    if asked:
        said = ", ".join(f"{name}={value!r:.60}" for name, value in asked.items())
        raise ConfigError(f"{folder} holds an adapter with {said}, which is not supported; merge it into its model")


def _scaling(config: dict[str, Any], name: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    matching = (alpha for pattern, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", name))
    return next(matching, config.get("lora_alpha", 8)) / (math.sqrt(rank) if config.get("use_rslora") else rank)
