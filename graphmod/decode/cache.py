"""The KV cache: where keys and values are, how they are stored and read, and what a model that is called sees of it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graphmod.attention import Rule
from graphmod.decode.memory import Ordinary, Pages, host_zeros, zeros
from graphmod.decode.offload import Branch, Passage, Reader, Ring, buffer_sizes, far_layers
from graphmod.decode.types import DecodeError


class Layer(NamedTuple):
    """One attention layer.

    Attributes:
        heads: of queries; kv_heads: of keys and values.
        head_dim: of queries and keys; value_dim: of values.
        rule: which tokens a token sees.
        softcap: whether scores are capped by a tanh; sinks: whether each head has a logit that takes probability away.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    rule: Rule = Rule()
    softcap: bool = False
    sinks: bool = False


NULL_BLOCK = 0
"""Pads block tables. It is never written, so that reading it adds finite numbers that the mask takes out again."""


class Offload(NamedTuple):
    """What is kept in the memory of the host.

    Attributes:
        buffers: on the device, which the layers take in turn.
        resident: share of the layers that stay on the device, 0 to 1.
    """

    buffers: int
    resident: float


class PagedCache:
    """Keys and values of all layers at fixed addresses.

    `keys[i]` and `values[i]` are (blocks, block_size, kv_heads, head_dim) tensors of layer i, whose sizes
    are its own. The first blocks are not for sequences: `NULL_BLOCK`, and then those that padded rows write to, one
    slot for each row, which nobody reads. Those of far layers are in the memory of the host (`Offload`), where anything
    can read them, and slowly; `near` has what a decode step reads.
    `scratch` is what attentions write to beside their results, by their names, for as long as the cache lives.
    `pages` is the memory below keys and values.

    Args:
        layers: what each layer keeps.
        blocks: blocks for sequences.
        rows: the most rows in a batch.
        block_size: tokens of a block.
        offload: which layers are far; None keeps all on the device.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        blocks: int,
        block_size: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        offload: Offload | None = None,
    ) -> None:
        self.layers, self.rows, self.block_size = layers, rows, block_size
        self.first_block = 1 + -(-rows // block_size)
        self.blocks = blocks + self.first_block
        self.dtype, self.device = dtype, device
        self.spare_slots = torch.arange(block_size, block_size + rows, device=device)
        self.pages: Pages | Ordinary | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.scratch: dict[str, tuple[Tensor, ...]] = {}
        self._buffers = offload.buffers if offload else 0
        self._far = far_layers(len(layers), offload.resident) if offload else []
        self._branches = (Branch(device), Branch(device)) if self._far else None
        self.ring: Ring | None = None
        self.allocate()

    @property
    def allocated(self) -> bool:
        """Whether it has addresses, be there memory behind them or not."""
        return self.pages is not None

    @property
    def mapped(self) -> bool:
        """Whether there is memory; without it keys and values may not be touched."""
        return self.pages is not None and self.pages.mapped

    @property
    def nbytes(self) -> int:
        """On the device."""
        ring = [] if self.ring is None else self.ring.tensors()
        return sum(tensor.nbytes for tensor in (*self._here(), *ring)) if self.mapped else 0

    @property
    def host_nbytes(self) -> int:
        """In the memory of the host, beside it."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values)) - sum(one.nbytes for one in self._here())

    def _here(self) -> list[Tensor]:
        far = {*self._far}
        return [one for kept in (self.keys, self.values) for number, one in enumerate(kept) if number not in far]

    def allocate(self) -> None:
        """Takes the memory, zeroed: what is not written yet must be finite, since masks multiply by zero."""
        self.release()
        shapes = []
        for layer in self.layers:
            size = self.blocks, self.block_size, layer.kv_heads
            shapes.append((torch.Size((*size, layer.head_dim)), torch.Size((*size, layer.value_dim))))
        far = {number: shapes[number] for number in self._far}
        here = [shape for number, both in enumerate(shapes) if number not in far for shape in both]
        tensors, pages = zeros([*here, *buffer_sizes(far, self._buffers)], self.dtype, self.device)
        found, pairs = iter(tensors), []
        for number, both in enumerate(shapes):
            pairs.append([host_zeros(s, self.dtype, self.device) if number in far else next(found) for s in both])
        self.keys += [key for key, _ in pairs]
        self.values += [value for _, value in pairs]
        if self._branches is not None:
            kept = {number: (self.keys[number], self.values[number]) for number in far}
            rules = {number: self.layers[number].rule for number in far}
            self.ring = Ring(kept, rules, list(zip(found, found, strict=True)), self._branches)
        self.pages = pages  # last: `mapped` says that all is there

    def unmap(self) -> None:
        """Gives the memory on the device back and keeps its addresses. Waits until nothing uses it.

        Raises:
            DecodeError: that cannot be done with this memory.
        """
        assert self.pages is not None
        self.pages.unmap()

    def map(self) -> None:
        """Takes memory again, all zeros: at the addresses there are, or at others if these were given back too.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        if self.pages is None:
            self.allocate()
        else:
            self.pages.map()
            if self.ring is not None:
                self.ring.renew()

    def release(self) -> None:
        """Gives the memory back, and the addresses."""
        self.pages = None
        self.keys.clear()
        self.values.clear()
        self.ring = None

    def near(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as attention in a decode step reads them, on the device."""
        found = None if self.ring is None else self.ring.near(layer)
        return (self.keys[layer], self.values[layer]) if found is None else found

    def clear(self, blocks: list[int]) -> None:
        """Zeroes blocks that may hold NaN, before another sequence gets them."""
        if not self.mapped:
            return  # then nobody has held any
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)  # which may be none
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0)
        if self.ring is not None and blocks:
            self.ring.clear()

    def write(self, layer: int, places: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """Stores `key` and `value`, (B, kv_heads, S, head_dim), at `places`: block and offset in it, each (B * S,)."""
        _store((self.keys[layer], self.values[layer]), places, key, value)

    def write_near(self, layer: int, places: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """Stores them in the place that decode steps read, too, where that is another one; arguments as of `write`."""
        if self.ring is not None and (near := self.ring.near(layer)) is not None:
            _store(near, places, key, value)

    def expect(self, readers: list[Reader]) -> None:
        """Says what the decode steps that are launched next will read. Without it they find nothing in far layers."""
        if self.ring is not None:
            self.ring.expect(readers)

    def read(self, layer: int, block_table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` keys and values of each row near by, two (B, kv_heads, tokens, head_dim) tensors.

        Args:
            block_table: (B, blocks of a sequence).
            tokens: at most one block, or a multiple of the block size.
        """
        found = []
        rows, count = len(block_table), max(1, tokens // self.block_size)
        index = block_table[:, :count].reshape(-1)
        for memory in self.near(layer):
            part = memory[:, :tokens] if tokens < self.block_size else memory
            taken = part.index_select(0, index).view(rows, tokens, *memory.shape[2:])
            found.append(taken.transpose(1, 2))
        return found[0], found[1]


def _store(into: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
    for memory, new in zip(into, (key, value), strict=True):
        # Straight into the tensor and not into a view of it, so that a compiler can see that no copy is needed.
        memory.index_put_(places, new.transpose(1, 2).reshape(-1, *memory.shape[2:]).to(memory.dtype))


def slot_mapping(position: Tensor, block_table: Tensor, active: Tensor, spare: Tensor, block_size: int) -> Tensor:
    """Where each row's token goes, (B,) int64 counted over all blocks.

    Args:
        position: (B,) int64, of the token in its sequence.
        block_table: (B, blocks of a sequence) integers.
        active: (B,) bool.
        spare: (B,) int64, for rows that are not.
    """
    block = block_table.gather(1, (position // block_size).unsqueeze(1)).squeeze(1)
    return torch.where(active, block * block_size + position % block_size, spare)


class Attends(Protocol):
    """A module that attends, of a model of transformers."""

    layer_idx: int


class StoringView(Cache):
    """What a model sees of the cache whose attention reads it by itself: `update` only stores. The model is called with
    it twice: as `past_key_values`, and as the keyword `cache_view`, which transformers hands on to attention functions.

    Args:
        memory: the cache.
        slots: (tokens of this call,) int64, where they are stored.

    Attributes:
        shared: what an attention function computes once for all layers of one rule.
    """

    def __init__(self, memory: PagedCache, slots: Tensor) -> None:
        super().__init__(layers=[])
        self.memory = memory
        self.places = slots // memory.block_size, slots % memory.block_size
        self.shared: dict[Any, Any] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Stores the new keys and values; returns them as they are."""
        self.memory.write(layer_idx, self.places, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise DecodeError("this model asks how many tokens are in the cache instead of taking position_ids")


class CacheView(StoringView):
    """What a decode step with an attention of this package sees of the cache, which that reads through the block table.

    Args:
        memory: the cache.
        slots: (B,) int64, where the tokens of this call are stored.
        block_table: (B, blocks of a sequence).
        context: (B,) int64, tokens of each row that its last token may see, itself included.
        visited: how many tokens attention looks at, masked by `context`; None lets it stop at the context itself.
    """

    def __init__(
        self, memory: PagedCache, slots: Tensor, block_table: Tensor, context: Tensor, visited: int | None
    ) -> None:
        super().__init__(memory, slots)
        self.block_table, self.context, self.visited = block_table, context, visited
        self._passage = None if memory.ring is None else Passage(memory.ring)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Stores the new keys and values, near by too; returns them as they are."""
        if self._passage is not None:
            self._passage.reach(layer_idx)
            self.memory.write_near(layer_idx, self.places, key_states, value_states)
        return super().update(key_states, value_states, layer_idx)


class GatheredView(StoringView):
    """What a model's own attention sees of the cache: every row's keys and values, ending in the last column.

    That is how a batch padded on the left lies in the cache of `model.generate`, so that any model that generates from
    such batches computes with it what it computes there: masks, positions and biases come from its own code.

    Args:
        memory, block_table: the cache, and (B, blocks of a sequence).
        slots: (B * S,) int64, where the tokens of this call are stored.
        context: (B,) int64, tokens of each row, those of this call included.
        columns: how many tokens attention is given, at least the longest context; with S of them new.
        new: S.
    """

    is_compileable = True  # a single token's mask is always made, and no tensor read on the host to save it

    def __init__(
        self, memory: PagedCache, slots: Tensor, block_table: Tensor, context: Tensor, columns: int, new: int
    ) -> None:
        super().__init__(memory, slots)
        self.block_table, self.context, self.columns = block_table, context, columns
        self._before = columns - new
        self._index: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """(B, columns) int64: 1 where a column holds a token of the row, as transformers' `attention_mask`."""
        column = torch.arange(self.columns, device=self.context.device)
        return (column >= self.columns - self.context.unsqueeze(1)).to(torch.int64)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Stores the new keys and values; returns all, (B, kv_heads, columns, head_dim)."""
        super().update(key_states, value_states, layer_idx)
        if not self._before:
            return key_states, value_states
        if self._index is None:
            size = self.memory.block_size
            token = torch.arange(self.columns, device=self.context.device) - (self.columns - self.context.unsqueeze(1))
            held = token.clamp(min=0)
            block = self.block_table.gather(1, held // size)
            self._index = torch.where(token < 0, NULL_BLOCK, block * size + held % size).reshape(-1)
        rows, found = len(key_states), []
        for memory in (self.memory.keys[layer_idx], self.memory.values[layer_idx]):
            taken = memory.flatten(0, 1).index_select(0, self._index)
            found.append(
                taken.view(rows, self.columns, *memory.shape[2:]).transpose(1, 2).to(key_states.dtype).contiguous()
            )
        return found[0], found[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._before

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns, 0
