"""The views of the KV cache that a transformers model is called with."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graphmod.decode.cache.cache import NULL_BLOCK, PagedCache
from graphmod.decode.errors import DecodeError


def slot_mapping(position: Tensor, block_table: Tensor, active: Tensor, block_size: int) -> Tensor:
    """Where each row's token goes, (B,) int64 counted over all blocks; -1 for rows that are not active.

    Args:
        position: (B,) int64, of the token in its sequence.
        block_table: (B, blocks of a sequence) integers.
        active: (B,) bool.
    """
    block = block_table.gather(1, (position // block_size).unsqueeze(1)).squeeze(1)
    return torch.where(active, block * block_size + position % block_size, -1)


class CacheView(Cache):
    """What a decode step with an attention of this package sees of the cache.

    Its `update` only stores; the attention functions read the cache through the block table. The model is called with
    it twice: as `past_key_values`, and as the keyword `cache_view`, which transformers hands on to them.

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
        super().__init__(layers=[])
        self.memory, self.block_table = memory, block_table
        self.places = slots // memory.block_size, slots % memory.block_size
        self.context, self.visited = context, visited
        self.shared: dict[Any, Any] = {}  # what an attention function computes once for all layers of one rule
        self._passage = memory.passage()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Stores the new keys and values; returns them as they are."""
        if self._passage is not None:
            self._passage.reach(layer_idx)
            self.memory.write_near(layer_idx, self.places, key_states, value_states)
        self.memory.write(layer_idx, self.places, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise DecodeError("this model asks how many tokens are in the cache instead of taking position_ids")


class GatheredView(Cache):
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
        super().__init__(layers=[])
        self.memory, self.block_table, self.context, self.columns = memory, block_table, context, columns
        self.places = slots // memory.block_size, slots % memory.block_size
        self._before = columns - new
        self._index: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """(B, columns) int64: 1 where a column holds a token of the row, as transformers' `attention_mask`."""
        column = torch.arange(self.columns, device=self.context.device)
        return (column >= self.columns - self.context.unsqueeze(1)).to(torch.int64)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Stores the new keys and values; returns all, (B, kv_heads, columns, head_dim)."""
        self.memory.write(layer_idx, self.places, key_states, value_states)
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
