"""Prefill with the model's own attention, for models that no attention of this package fits: eager, prompts padded on
the right, where nobody looks back at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphmod.attention import takes
from graphmod.decode.cache.cache import NULL_BLOCK, GatheredView, PagedCache, slot_mapping
from graphmod.decode.prefill.piece import Piece, Scores
from graphmod.decode.step.anatomy import positions

ToDevice = Callable[[list, torch.dtype], Tensor]


def batches(pieces: list[Piece], budget: int) -> Iterator[list[int]]:
    """Indices of pieces that go together, those that others may read from first.

    Beginnings of prompts are padded to about the same length, no more than `budget` tokens in all. What follows
    something must be of one length: the tokens before it stand right before it.
    """
    batch: list[int] = []
    order = sorted(range(len(pieces)), key=lambda index: (pieces[index].start, len(pieces[index].tokens)))
    for index in order:
        piece = pieces[index]
        if batch:
            first, length = pieces[batch[0]], len(piece.tokens)
            alike = piece.start == first.start and (not piece.start or length == len(first.tokens))
            if not alike or (len(batch) + 1) * length > budget:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


class PaddedPrefill:
    """As `packed.PackedPrefill`, without graphs.

    Args:
        model: with its own attention.
        memory: where keys and values go.
        budget: tokens of one call.
        to_device: brings Python lists to the device.
    """

    def __init__(self, model: PreTrainedModel, memory: PagedCache, budget: int, to_device: ToDevice) -> None:
        self.model, self.memory, self.budget, self.to_device = model, memory, budget, to_device
        self._keeps = takes(model, "logits_to_keep")

    def __call__(self, pieces: list[Piece]) -> Tensor:
        return self._computed(pieces)[0]

    def scored(self, pieces: list[Piece]) -> tuple[Tensor, Scores]:
        """As a call, for pieces that have targets; gives the scores of all tokens too."""
        logits, scores = self._computed(pieces)
        return logits, Scores(*map(torch.cat, zip(*(scores[index] for index in range(len(pieces))), strict=True)))

    def _computed(self, pieces: list[Piece]) -> tuple[Tensor, dict[int, Scores]]:
        found: dict[int, Tensor] = {}
        scores: dict[int, Scores] = {}
        for batch in batches(pieces, self.budget):
            logits = self._call([pieces[index] for index in batch])
            for index, own in zip(batch, logits, strict=True):
                targets = pieces[index].targets
                found[index] = own[-1] if targets is None else own[len(targets) - 1]
                if targets is not None:
                    scores[index] = Scores.of(own[: len(targets)], self.to_device(targets, torch.int64))
        rows = [found[index] for index, piece in enumerate(pieces) if piece.last]
        return torch.stack(rows) if rows else found[0].unsqueeze(0)[:0], scores

    def nearest_size(self, tokens: int) -> int:
        """As many: one piece alone has no padding, whatever its length."""
        return tokens

    def _call(self, pieces: list[Piece]) -> Tensor:
        """(pieces, tokens, vocabulary): the logits after all tokens if there are targets, else after each last one."""
        memory, size, start = self.memory, self.memory.block_size, pieces[0].start
        longest, width = max(len(piece.tokens) for piece in pieces), max(len(piece.blocks) for piece in pieces)
        tokens = [piece.tokens + [0] * (longest - len(piece.tokens)) for piece in pieces]
        lengths = self.to_device([len(piece.tokens) for piece in pieces], torch.int64)
        table = [piece.blocks + [NULL_BLOCK] * (width - len(piece.blocks)) for piece in pieces]
        table = self.to_device(table, torch.int64)
        offset = torch.arange(longest, device=memory.device)
        position = (start + offset).repeat(len(pieces))
        real = (offset < lengths.unsqueeze(1)).reshape(-1)
        slots = slot_mapping(position, table.repeat_interleave(longest, 0), real, size)
        spare = memory.spare_slots[torch.arange(len(slots), device=memory.device) % len(memory.spare_slots)]
        view = GatheredView(
            memory, torch.where(slots < 0, spare, slots), table, start + lengths, start + longest, longest
        )
        last = sorted({len(piece.tokens) - 1 for piece in pieces})
        scored = pieces[0].targets is not None
        keep = self.to_device(last, torch.int64)
        out = self.model(
            input_ids=self.to_device(tokens, torch.int64),
            past_key_values=view,
            use_cache=True,
            **positions(self.model, position.view(len(pieces), longest)),
            **({"logits_to_keep": keep} if self._keeps and not scored else {}),
        )
        if scored:
            return out.logits
        logits = out.logits if self._keeps else out.logits[:, keep]
        at = {index: place for place, index in enumerate(last)}
        return logits[list(range(len(pieces))), [at[len(piece.tokens) - 1] for piece in pieces]].unsqueeze(1)
