"""Prefill in graphs: pieces of prompts lie one after the other, padded to one of a few sizes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from graphmod.attention import attention, takes
from graphmod.config import CUDAGraphConfig
from graphmod.decode.cache.cache import PagedCache
from graphmod.decode.prefill.attention import NAME, reads_by_length
from graphmod.decode.prefill.piece import Limits, Piece, Scores
from graphmod.decode.prefill.view import POSITION, TOKEN, Packed, PackedBuffer, PackedView
from graphmod.decode.results import BucketStats
from graphmod.decode.step.anatomy import step_arguments
from graphmod.decode.step.graphs import counters, free_memory
from graphmod.wrap.extension import Group
from graphmod.wrap.module import CUDAGraphModule

_LEAST_TOKENS = 128  # a GPU that computes with fewer waits for the weights as long
_BUSY_TOKENS = 512
_LEAST_COLUMNS = 256

Key = tuple[int, int | None, bool]  # tokens, columns, whether they are scored


def sizes(least: int, most: int, factor: int) -> list[int]:
    """From `least` on, each `factor` times the one before, up to `most`, which is the last."""
    found = []
    while least < most:
        found.append(least)
        least *= factor
    return [*found, most]


class PackedStep(nn.Module):
    """The callable that is captured."""

    def __init__(self, model: PreTrainedModel, memory: PagedCache) -> None:
        super().__init__()
        self.model, self.memory = model, memory
        self._keeps = takes(model, "logits_to_keep")

    def forward(self, packed: Packed) -> Tensor | tuple[Tensor, Scores]:
        """(pieces, vocabulary): the logits after the tokens `packed.ends`; with targets, also all scores."""
        tokens = packed.tokens
        given = step_arguments(
            self.model, tokens[TOKEN].unsqueeze(0), tokens[POSITION].unsqueeze(0), PackedView(self.memory, packed)
        )
        if packed.targets is not None:
            logits = self.model(**given).logits[0]
            return logits.index_select(0, packed.ends), Scores.of(logits, packed.targets)
        if self._keeps:
            return self.model(**given, logits_to_keep=packed.ends).logits[0]
        return self.model(**given).logits[0].index_select(0, packed.ends)


class PackedPrefill:
    """Prefills pieces of prompts.

    Args:
        limits: of pieces.
        settings: of the wrappers; None captures nothing.
        group: of the wrappers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: PagedCache,
        limits: Limits,
        settings: CUDAGraphConfig | None,
        group: Group,
    ) -> None:
        self._model, self._step, self._settings, self._group = model, PackedStep(model, memory), settings, group
        doubling = sizes(_LEAST_TOKENS, limits.tokens, 2)
        # Where a GPU is busy with them, tokens that are padding cost as much as others.
        between = [3 * size // 2 for size in doubling if size >= _BUSY_TOKENS and 3 * size // 2 < limits.tokens]
        self.tokens = sorted({*doubling, *between})
        # One size where any number of columns takes the time of those that there are.
        self._by_length = reads_by_length(memory)
        self.columns = [limits.columns] if self._by_length else sizes(_LEAST_COLUMNS, limits.columns, 4)
        self._buffer = PackedBuffer(memory, limits, by_length=self._by_length)
        self._device, self._released = memory.device, 0
        self.wrappers: dict[Key, CUDAGraphModule] = {}
        self._counts = BucketStats()

    def __call__(self, pieces: list[Piece]) -> Tensor:
        """Stores the keys and values of pieces, in their order; gives the logits after those that are `last`, (pieces
        that are last, vocabulary)."""
        return self._computed(pieces, scored=False)[: sum(piece.last for piece in pieces)]

    def scored(self, pieces: list[Piece]) -> tuple[Tensor, Scores]:
        """As a call, for pieces that have targets; gives the scores of all tokens too."""
        logits, scores = self._computed(pieces, scored=True)
        return logits[: sum(piece.last for piece in pieces)], scores

    def _computed(self, pieces: list[Piece], scored: bool) -> Any:
        size, columns = self._sizes(pieces)
        packed = self._buffer.fill(pieces, size, columns)
        with attention(self._model, NAME):
            found = (self._wrapper(size, columns, scored) if self._settings else self._step)(packed)
        self._counts.eager_steps += self._settings is None
        self._counts.row_steps += size
        self._counts.padding_row_steps += size - sum(len(piece.tokens) for piece in pieces)
        return found

    def nearest_size(self, tokens: int) -> int:
        """About as many tokens, of which none is padding when as many are prefilled."""
        return min(self.tokens, key=lambda size: abs(size - tokens))

    def uncounted(self, pieces: list[Piece]) -> Tensor:
        """The same without a graph, and without traces in the counters."""
        with attention(self._model, NAME):
            logits = self._step(self._buffer.fill(pieces, *self._sizes(pieces)))
        return logits[: sum(piece.last for piece in pieces)]

    def _sizes(self, pieces: list[Piece]) -> tuple[int, int | None]:
        used = sum(len(piece.tokens) for piece in pieces)
        size = next(size for size in self.tokens if size >= used)
        columns = None
        if self._by_length or any(piece.start for piece in pieces):
            columns = next(size for size in self.columns if size >= sum(piece.end for piece in pieces))
        return size, columns

    def _wrapper(self, size: int, columns: int | None, scored: bool = False) -> CUDAGraphModule:
        wrapper = self.wrappers.get((size, columns, scored))
        if wrapper is None:
            name = f"prefill of {size} tokens"
            wrapper = CUDAGraphModule(self._step, self._settings, name=name, group=self._group)
            self.wrappers[size, columns, scored] = wrapper
        return wrapper

    def capture(self, longest: int, progress: bool) -> None:
        """Captures ahead of time, with nothing but padding.

        Args:
            longest: tokens of the longest sequence.
            progress: show a bar, on a terminal.
        """
        if self._settings is None:
            return
        most = next((size for size in self.columns if size >= longest), self.columns[-1])
        columns = [None] * (not self._by_length) + [size for size in self.columns if size <= most]
        sizes = [(size, held) for size in self.tokens for held in columns if held is None or held >= size]
        with tqdm(sizes[::-1], desc="capturing prefill", unit="graph", disable=None if progress else True) as bar:
            for size, held in bar:
                for _ in range(self._settings.warmup_steps + 1):
                    with attention(self._model, NAME):
                        self._wrapper(size, held)(self._buffer.fill([], size, held))
                bar.set_postfix(tokens=size, **free_memory(self._device), refresh=False)

    def stats(self) -> tuple[BucketStats, float]:
        """Counters, and seconds spent capturing."""
        wrappers = list(self.wrappers.values())  # another thread may add some
        seconds = sum((wrapper.stats.capture_seconds for wrapper in wrappers), 0.0)
        return counters(wrappers, self._counts, self._released), seconds

    def reset(self) -> None:
        """Frees the graphs."""
        for wrapper in self.wrappers.values():
            self._released += wrapper.stats.state == "captured"
            wrapper.reset()

    def force_enable(self) -> None:
        """Lets sizes that failures disabled be captured again."""
        for wrapper in self.wrappers.values():
            wrapper.force_enable()
