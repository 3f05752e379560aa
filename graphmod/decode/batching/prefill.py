"""Prefill: prompts go through the model, with its own attention, in eager, batched chunks; keys and values land in the
paged cache. Prompts of a batch are padded on the right, where nobody looks back at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphmod.decode.cache.cache import NULL_BLOCK, GatheredView, PagedCache, slot_mapping
from graphmod.decode.step.anatomy import positions
from graphmod.models.exchange import takes

_MOST_ROWS = 16  # of one call: logits are made for every last position in it

ToDevice = Callable[[list, torch.dtype], Tensor]


def batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Indices of prompts that go together: of similar length, and padded no more than `budget` tokens."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and ((len(batch) + 1) * lengths[index] > budget or len(batch) == _MOST_ROWS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class Prefill:
    """Runs prompts through a model.

    Args:
        model: with its own attention.
        memory: where keys and values go.
        budget: tokens of one call.
        to_device: brings Python lists to the device.
    """

    def __init__(self, model: PreTrainedModel, memory: PagedCache, budget: int, to_device: ToDevice) -> None:
        self.model, self.memory, self.budget, self.to_device = model, memory, budget, to_device
        self._keeps = takes(model, "logits_to_keep")

    def __call__(self, prompts: list[list[int]], tables: list[list[int]]) -> Tensor:
        """(prompts, vocabulary): the logits after the last token of each prompt.

        Args:
            prompts: token ids, none empty.
            tables: the blocks of each.
        """
        rows: list[Tensor | None] = [None] * len(prompts)
        for batch in batches([len(prompt) for prompt in prompts], self.budget):
            chosen = [prompts[index] for index in batch]
            held = [tables[index] for index in batch]
            longest = max(map(len, chosen))
            for start in range(0, longest, self.budget):  # more than one chunk only where a batch is one prompt
                logits = self._chunk([prompt[start : start + self.budget] for prompt in chosen], held, start)
            for index, row in zip(batch, logits, strict=True):
                rows[index] = row
        return torch.stack(rows)

    def _chunk(self, pieces: list[list[int]], tables: list[list[int]], start: int) -> Tensor:
        memory, size = self.memory, self.memory.block_size
        longest, width = max(map(len, pieces)), max(map(len, tables))
        tokens = self.to_device([piece + [0] * (longest - len(piece)) for piece in pieces], torch.int64)
        lengths = self.to_device([len(piece) for piece in pieces], torch.int64)
        table = self.to_device([blocks + [NULL_BLOCK] * (width - len(blocks)) for blocks in tables], torch.int64)
        offset = torch.arange(longest, device=memory.device)
        position = (start + offset).repeat(len(pieces))
        real = (offset < lengths.unsqueeze(1)).reshape(-1)
        slots = slot_mapping(position, table.repeat_interleave(longest, 0), real, size)
        spare = memory.spare_slots[torch.arange(len(slots), device=memory.device) % len(memory.spare_slots)]
        view = GatheredView(
            memory, torch.where(slots < 0, spare, slots), table, start + lengths, start + longest, longest
        )
        last = sorted({len(piece) - 1 for piece in pieces})
        keep = self.to_device(last, torch.int64)
        out = self.model(
            input_ids=tokens,
            past_key_values=view,
            use_cache=True,
            **positions(self.model, position.view(len(pieces), longest)),
            **({"logits_to_keep": keep} if self._keeps else {}),
        )
        logits = out.logits if self._keeps else out.logits[:, keep]
        at = {index: place for place, index in enumerate(last)}
        return logits[list(range(len(pieces))), [at[len(piece) - 1] for piece in pieces]]
