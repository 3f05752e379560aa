"""The static tensors that prefill in graphs reads, and what a model sees of them as its cache."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from graphmod.decode.cache.cache import NULL_BLOCK, PagedCache
from graphmod.decode.errors import DecodeError
from graphmod.decode.prefill.piece import Limits, Piece
from graphmod.wrap.extension import mark_static

NOBODY = -1
"""Stands for the number of a piece where there is none: padding."""
TOKEN, POSITION, SLOT, PIECE = range(4)
"""Rows of `tokens`: the token, its position in its sequence, where its keys and values go, and of which piece it is."""
HELD, AT, OF = range(3)
"""Rows of `columns`: the slot that a key lies in, its position, and the piece that it is for."""


class Packed(NamedTuple):
    """Pieces one after the other, padded to fixed sizes. This is what a graph is given.

    Attributes:
        tokens: (4, T) int64, rows above.
        columns: (3, C) int64, rows above: all that the pieces attend to; None if that is their own tokens.
        starts: (2, pieces + 2) int32: where the tokens of each piece begin, and its columns. The padding is a last
            piece, to which none of the columns belong.
        ends: (pieces,) int64: which tokens are the last of their prompts; the rest is 0.
        targets: (T,) int64: whose log-probability is asked for after each token; None where none is.
    """

    tokens: Tensor
    columns: Tensor | None
    starts: Tensor
    ends: Tensor
    targets: Tensor | None = None


class PackedBuffer:
    """Owns the tensors.

    Args:
        limits: of pieces.
        by_length: whether nobody reads columns that are not there, nor more of a column than its slot.
    """

    def __init__(self, memory: PagedCache, limits: Limits, by_length: bool = False) -> None:
        self._memory, self._limits, self._by_length = memory, limits, by_length
        numbers = {"dtype": torch.int64, "device": memory.device}
        self._tokens = torch.zeros(4 * limits.tokens, **numbers)
        self._columns = torch.zeros(3 * limits.columns, **numbers)
        self._starts = torch.zeros((2, limits.pieces + 2), dtype=torch.int32, device=memory.device)
        self._ends = torch.zeros(limits.pieces, **numbers)
        self._targets = torch.zeros(limits.tokens, **numbers)
        self._given: dict[tuple[int, int | None, bool], Packed] = {}

    def packed(self, tokens: int, columns: int | None, scored: bool = False) -> Packed:
        """The tensors for so many tokens and columns, with targets if they are `scored`; the same ones each time."""
        key = tokens, columns, scored
        if key not in self._given:
            self._given[key] = Packed(
                mark_static(self._tokens[: 4 * tokens].view(4, tokens)),
                None if columns is None else mark_static(self._columns[: 3 * columns].view(3, columns)),
                mark_static(self._starts[:]),
                mark_static(self._ends[:]),
                mark_static(self._targets[:tokens]) if scored else None,
            )
        return self._given[key]

    def fill(self, pieces: list[Piece], tokens: int, columns: int | None) -> Packed:
        """Writes pieces, which must fit; all of them have targets, or none has."""
        scored = any(piece.targets is not None for piece in pieces)
        into, size = self.packed(tokens, columns, scored), self._memory.block_size
        rows = numpy.zeros((4, tokens), dtype=numpy.int64)
        rows[PIECE] = NOBODY
        rows[SLOT] = size + numpy.arange(tokens) % self._memory.rows  # the spare slots
        room = sum(piece.end for piece in pieces) if self._by_length else columns
        held = None if columns is None else numpy.full((3, room), NOBODY, dtype=numpy.int64)
        if held is not None:
            held[HELD] = NULL_BLOCK * size
        at = place = 0
        for number, piece in enumerate(pieces):
            slots = (numpy.array(piece.blocks)[:, None] * size + numpy.arange(size)).reshape(-1)
            new = slice(at, at + len(piece.tokens))
            rows[TOKEN, new] = piece.tokens
            rows[POSITION, new] = numpy.arange(piece.start, piece.end)
            rows[SLOT, new] = slots[piece.start : piece.end]
            rows[PIECE, new] = number
            at = new.stop
            if held is not None:
                seen = slice(place, place + piece.end)
                held[HELD, seen] = slots[: piece.end]
                held[AT, seen] = numpy.arange(piece.end)
                held[OF, seen] = number
                place = seen.stop
        # Pieces that are not there are empty, and the padding is the last one.
        starts = numpy.array([self._starts_of([len(piece.tokens) for piece in pieces], tokens)] * 2, dtype=numpy.int32)
        if columns is not None:
            starts[1] = self._starts_of([piece.end for piece in pieces], place)
        ends = numpy.zeros(self._limits.pieces, dtype=numpy.int64)
        whole = accumulate(len(piece.tokens) for piece in pieces)
        last = [end - 1 for end, piece in zip(whole, pieces, strict=True) if piece.last]
        ends[: len(last)] = last
        for tensor, values in ((into.tokens, rows), (into.starts, starts), (into.ends, ends)):
            self._bring(tensor, values)
        if scored:
            targets = numpy.array([one for piece in pieces for one in piece.targets], dtype=numpy.int64)
            self._bring(into.targets[: len(targets)], targets)
        if held is not None and self._by_length:
            self._bring(into.columns[HELD, :room], held[HELD])
        elif held is not None:
            self._bring(into.columns, held)
        return into

    def _starts_of(self, lengths: list[int], whole: int) -> list[int]:
        found = [0, *accumulate(lengths)]
        return found + [found[-1]] * (self._limits.pieces + 1 - len(found)) + [whole]

    def _bring(self, tensor: Tensor, values: numpy.ndarray) -> None:
        host = torch.from_numpy(values)
        tensor.copy_(host.pin_memory() if tensor.is_cuda else host, non_blocking=True)


class PackedView(Cache):
    """What a model sees of the cache: `update` only stores, and the attention reads through `packed`.

    Args:
        memory: the cache.
        packed: where what is.
    """

    def __init__(self, memory: PagedCache, packed: Packed) -> None:
        super().__init__(layers=[])
        self.memory, self.packed = memory, packed
        slots = packed.tokens[SLOT]
        self.places = slots // memory.block_size, slots % memory.block_size
        self.shared: dict[Any, Any] = {}  # what the attention computes once for all layers of one rule

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        """Stores the new keys and values; returns them as they are."""
        self.memory.write(layer_idx, self.places, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise DecodeError("this model asks how many tokens are in the cache instead of taking position_ids")
