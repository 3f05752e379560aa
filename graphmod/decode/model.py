"""What decode knows of a model: how it attends and what it keeps, seen by calling it on a few tokens when an engine is
made, and whether it has changed since.

Nothing is taken from its config: what a layer stores, which tokens it sees and what its attention is asked for are seen
as the model's own code hands them over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from graphmod.attention import BESIDE, PROBE, Rule, Unclear, asker, attention, takes
from graphmod.config import CUDAGraphConfig, Verify
from graphmod.decode.cache import Layer
from graphmod.decode.types import DecodeError
from graphmod.errors import ConfigError, reason
from graphmod.wrap.extension import HOOKS, Reads, with_memory
from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")


_TOKENS = 4
# What attention functions of this package compute with.
_UNDERSTOOD = {"scaling", "softcap", "s_aux", "cache_view"}


class Anatomy(NamedTuple):
    """What there is to know of a model for decoding.

    Attributes:
        layers: that keep keys and values, in order.
        own_reason: why only the model's own attention can be used; "" if an attention of this package can.
    """

    layers: tuple[Layer, ...]
    own_reason: str


class _Nothing(list):
    def __getitem__(self, _: Any) -> Any:
        raise DecodeError("it keeps a state of its own in the layers of its cache")


class _Notes(Cache):
    """A cache that holds nothing and notes what a model stores.

    Args:
        counts: whether it says how many tokens it holds.
    """

    def __init__(self, counts: bool = True) -> None:
        super().__init__(layers=_Nothing())
        self._counts = counts
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if layer_idx in self.kept:
            raise DecodeError(f"layer {layer_idx} stores keys and values twice")
        self.kept[layer_idx] = key_states, value_states
        return key_states, value_states

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("update_"):
            raise DecodeError(f"it keeps a state of another kind ({name.removeprefix('update_').replace('_', ' ')})")
        return super().__getattribute__(name)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if not self._counts:
            raise Unclear("it asks how many tokens are in the cache")
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


@dataclass
class _Probe:
    """What is seen in one forward call with the attention exchanged."""

    notes: _Notes
    layers: dict[int, Layer] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *more: Any,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """In the place of an attention function."""
        index: Any = getattr(module, "layer_idx", None)
        kept = self.notes.kept.get(index)
        if more or kept is None or kept[0] is not key or kept[1] is not value or index in self.layers:
            raise Unclear("it attends to something other than the keys and values that a layer stores")
        if not isinstance(attention_mask, Rule):
            raise Unclear("it makes a mask of its own")
        if given.get("cache_view") is not self.notes:
            raise Unclear("it passes no keywords to its attention")
        asked = {name for name, value in given.items() if value is not None}
        strange = sorted(asked - _UNDERSTOOD - BESIDE)
        if strange:
            raise Unclear(f"it asks its attention for {', '.join(strange)}")
        rows, heads, tokens, width = query.shape
        if width != key.shape[-1] or heads % key.shape[1] or given.get("is_causal") is False:
            raise Unclear("it attends with other heads than it stores, or not causally")
        sizes = heads, key.shape[1], width, value.shape[-1]
        self.layers[index] = Layer(*sizes, attention_mask, "softcap" in asked, "s_aux" in asked)
        return value.new_zeros((rows, tokens, heads, value.shape[-1])), None


def require_causal_lm(model: Any) -> None:
    """Raises ConfigError for what is no causal LM of transformers, with what is needed in its place."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ConfigError(
            f"model must be a transformers causal LM, got {name}, which has no config of transformers; load one with "
            "AutoModelForCausalLM, or give the model inside a wrapper"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model must be a transformers causal LM, got {name}, whose decoder reads what an encoder makes of the "
            "input; that is not decoded here. Use model.generate"
        )
    if not model.can_generate():
        raise ConfigError(
            f"model must be a transformers causal LM, got {name}, which does not predict the next token; load one with "
            "AutoModelForCausalLM"
        )


def look_at(model: PreTrainedModel, reach: int) -> Anatomy:
    """Calls the model on a few tokens, once as it is and once with its attention exchanged.

    Call it in inference and evaluation mode.

    Args:
        reach: how many tokens a sequence may have.

    Raises:
        DecodeError: it keeps something else than keys and values, or cannot be called with a cache.
    """
    tokens = torch.arange(_TOKENS, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    plain = _Notes()
    try:
        model(input_ids=tokens, past_key_values=plain, use_cache=True, **positions(model, tokens))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a model's own code: anything
        raise DecodeError(
            refusal(model, f"it cannot be called with a cache of keys and values: {reason(error)}")
        ) from error
    layers = _stored(model, plain)
    notes = _Notes(counts=False)
    probe = _Probe(notes)
    try:
        with attention(model, PROBE, probe.attend, asker(reach)):
            model(**step_arguments(model, tokens, tokens, notes))
        if sorted(probe.layers) != list(range(len(layers))):
            raise Unclear("not all of its layers go through transformers' attention interface")
    except Exception as error:  # whatever a model's code raises that meets what it does not know
        why = str(error) if isinstance(error, Unclear) else f"with a replaced attention, it fails: {reason(error)}"
        return Anatomy(layers, why)
    return Anatomy(tuple(probe.layers[number] for number in range(len(layers))), "")


def _stored(model: PreTrainedModel, notes: _Notes) -> tuple[Layer, ...]:
    if sorted(notes.kept) != list(range(len(notes.kept))) or not notes.kept:
        found = f"layers {sorted(notes.kept)} do" if notes.kept else "no layer does"
        raise DecodeError(refusal(model, f"not every layer stores keys and values in the cache it is given: {found}"))
    layers = []
    for number, (key, value) in sorted(notes.kept.items()):
        if key.dim() != 4 or key.shape[:3] != value.shape[:3] or key.shape[2] != _TOKENS:
            shapes = f"{tuple(key.shape)} and {tuple(value.shape)}"
            raise DecodeError(refusal(model, f"layer {number} stores keys and values of shapes {shapes}"))
        layers.append(Layer(key.shape[1], key.shape[1], key.shape[3], value.shape[3]))
    return tuple(layers)


def refusal(model: PreTrainedModel, why: str) -> str:
    """The message of a model that cannot be decoded."""
    return f"{type(model).__name__} cannot be decoded here, because {why}. Use model.generate"


def step_arguments(model: PreTrainedModel, tokens: Tensor, position: Tensor, view: Cache) -> dict[str, Any]:
    """What a model is called with where its attention is exchanged.

    Args:
        tokens, position: (B, S) int64.
    """
    config = model.config.get_text_config()
    if config is not model.config or getattr(config, "hidden_size_per_layer_input", None):
        # Something else stands for tokens of pictures and sounds; embeddings of layers are looked up by token, too.
        given = {"input_ids": tokens}
    else:  # with tokens some models look for padding on the host
        given = {"inputs_embeds": model.get_input_embeddings()(tokens)}
    return {**given, "position_ids": position, "cache_view": view, "past_key_values": view, "use_cache": True}


def positions(model: PreTrainedModel, position: Tensor) -> dict[str, Tensor]:
    """`position_ids` for a model that takes them; a model that does not counts what is in the mask and the cache."""
    return {"position_ids": position} if takes(model, "position_ids") else {}


_SWITCHES = ("_active_adapter", "_disable_adapters", "scaling")  # of a layer with adapters


class WeightsWatch:
    """Tells at a glance whether weights, or who is called, are others than when it looked last. An operation of PyTorch
    that changes them, an exchange, hooks and a switch of adapters of peft are seen; what writes to memory past PyTorch,
    or into `data`, is not: `ModelWatch` sees that."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._storages: list[StorageWeakRef] = []

    def changed(self, modules: list[nn.Module]) -> bool:
        """Looks again.

        Args:
            modules: as in `decoding`.
        """
        now = _state(modules)
        # Memory of weights that are gone may have been given to those that came in their place.
        if now == self._seen and not any(storage.expired() for storage in self._storages):
            return False
        self._seen = now
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors(modules)]
        return True


def _tensors(modules: list[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        own = vars(module)
        for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
            if tensor is not None:
                yield tensor


def _state(modules: list[nn.Module]) -> int:
    seen: list = []
    for module in modules:
        own = vars(module)
        seen += map(id, own["_modules"].values())
        seen += [id(hook) for kind in HOOKS if own[kind] for hook in own[kind].values()]
        if "_active_adapter" in own:
            seen += [str(own.get(name)) for name in _SWITCHES]
    for tensor in _tensors(modules):
        seen += tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    return hash(tuple(seen))


class ModelWatch:
    """Tells whether a model computes something else than it did: by the guards of graphs, which compare what its code
    reads, and by the contents of its tensors, which no count of changes tells where something writes to their memory.

    Its methods are called in the state for decoding.

    Args:
        model: to watch. Its forward is called on two tokens, to see what it reads.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._reads: Reads | None = None
        self._tensors: list[Tensor] = []
        self._together: list[Tensor] = []  # those of one device, of which numbers are to be computed
        self._contents: list[Tensor] = []
        self._unknown = False
        self._numbers: Callable[[Tensor], Tensor] = self._compute
        if model.device.type == "cuda":  # some ten launches a tensor, and a request waits for them
            settings = CUDAGraphConfig(warmup_steps=1, verify=Verify.off)
            self._numbers = CUDAGraphModule(self._compute, settings, name="contents of weights")

    def take(self, modules: list[nn.Module]) -> None:
        """What it computes now is what `changed` compares with. Does not wait for the device."""
        if self._reads is None or self._reads.changed() is not None:
            self._read()
        if self._reads is None:  # `changed` will say so whatever the tensors hold
            return
        found = {id(one): one for one in (*_tensors(modules), *self._reads.tensors)}
        self._tensors = with_memory(found.values())
        self._contents = self._now()

    def changed(self) -> bool:
        """Whether it computes something else, or that cannot be known."""
        if self._reads is None or self._reads.changed() is not None:
            return True
        now = self._now()
        return not now or not all(map(torch.equal, now, self._contents))

    def _read(self) -> None:
        """Looks at what the forward reads."""
        self._reads = None
        if self._unknown:
            return
        model = self._model
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)

        def forward(tokens: Tensor) -> Tensor:
            return model(input_ids=tokens, use_cache=False).logits

        try:
            self._reads = Reads(forward, (tokens,), model.device, model)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a model's own code: anything
            self._unknown = True
            log.info("beginnings of prompts are forgotten when a request comes, for the model's forward %s", error)

    def _now(self) -> list[Tensor]:
        """A number for the contents of each tensor, those of one device together; none where there is a kind of tensor
        whose bytes cannot be read."""
        found: dict[torch.device, list[Tensor]] = {}
        for tensor in self._tensors:
            found.setdefault(tensor.device, []).append(tensor)
        numbers = []
        try:
            for self._together in found.values():
                start = torch.zeros((), dtype=torch.int64, device=self._together[0].device)
                compute = self._numbers if len(found) == 1 else self._compute
                numbers.append(compute(start).clone())
        except RuntimeError:
            return []
        return numbers

    def _compute(self, start: Tensor) -> Tensor:
        return torch.stack([number_of(tensor) for tensor in self._together]) + start


_ODD = 0x9E3779B97F4A7C15 - 2**64


def number_of(tensor: Tensor) -> Tensor:
    """() int64: of the bytes of a tensor, by the sums of its rows and of its columns, so that an exchange of either is
    seen. Reads the memory twice."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = len(raw) // 8 * 8
    words = raw[:whole].view(torch.int64)  # another type would be copied to be summed up
    size = (tensor.shape[-1] if tensor.dim() > 1 else 0) * tensor.element_size()
    columns = size // 8 if size and size % 8 == 0 else max(1, math.isqrt(len(words)))
    rows = len(words) // columns
    table, rest = words[: rows * columns].view(rows, columns), words[rows * columns :]
    sums = torch.cat((table.sum(1), table.sum(0), rest))
    places = (2 * torch.arange(len(sums), device=raw.device) + 1) * _ODD
    return (sums * places).sum() + raw[whole:].sum()
