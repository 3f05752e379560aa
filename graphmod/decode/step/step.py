"""One decode step, from the tokens of a batch to the next ones: the static tensors that it reads and writes, and what a
graph holds of it.

Numbers of one kind share a tensor with a column each, so that a row is written, moved or cleared with one copy. Beside
these tensors a step reads and writes those of `cache` and the model's weights only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graphmod.decode.cache.cache import NULL_BLOCK, CacheView, GatheredView, PagedCache, slot_mapping
from graphmod.decode.config import MOST_TOP
from graphmod.decode.step.anatomy import positions, step_arguments
from graphmod.decode.step.sampling import Top, sample
from graphmod.wrap.extension import mark_static

TOKEN, POSITION, ACTIVE, LIMIT, SEED, TOP_K = range(6)
"""Columns of `integers`: the token to be fed, its position, whether the row decodes (1) or is padding or done (0), the
length at which the sequence ends, the seed, top-k."""
TEMPERATURE, TOP_P = range(2)
"""Columns of `floats`."""
RUNNING, STOPPED, FULL, BAD = range(4)
"""What a step says of a row: goes on, met a stop, reached its length, had logits that are no numbers."""
NOTHING = -1
"""Stands for a token where a row was not active."""
MOST_STOPS = 8


class Rows(NamedTuple):
    """The state of the first rows of a batch, slices of one set of maximum size. This is what a graph is given.

    Attributes:
        integers: (B, 6) int64, columns above.
        floats: (B, 2) float32.
        block_table: (B, blocks of a sequence) int64.
        stops: (B, MOST_STOPS) int64, tokens that end the row; -1 where unused.
        results: (steps kept, 2, B) int64: token, or NOTHING, and status.
        logprobs: (steps kept, B) float32.
        cursor: (1,) int64, the step of `results` that is written next.
        top: (steps kept, B, MOST_TOP) each, for a batch of which somebody asks for the most likely tokens; else None.
    """

    integers: Tensor
    floats: Tensor
    block_table: Tensor
    stops: Tensor
    results: Tensor
    logprobs: Tensor
    cursor: Tensor
    top: Top | None = None


class RowValues(NamedTuple):
    """What one row starts with, as Python numbers."""

    integers: list[int]
    floats: list[float]
    blocks: list[int]
    stops: list[int]


class BatchState:
    """Owns the tensors and their pinned mirrors on the host.

    Args:
        rows: the most rows.
        blocks: the most blocks of a sequence.
        steps: decode steps whose results are kept until the host has read them.
        vocabulary: number of tokens.
    """

    def __init__(self, rows: int, blocks: int, steps: int, device: torch.device, vocabulary: int) -> None:
        self.device, self.steps, self.blocks = device, steps, blocks
        self._most_top = min(MOST_TOP, vocabulary)
        self.pin = device.type == "cuda"
        self.whole = Rows(
            integers=torch.zeros(rows, 6, dtype=torch.int64, device=device),
            floats=torch.zeros(rows, 2, dtype=torch.float32, device=device),
            block_table=torch.full((rows, blocks), NULL_BLOCK, dtype=torch.int64, device=device),
            stops=torch.full((rows, MOST_STOPS), -1, dtype=torch.int64, device=device),
            results=torch.full((steps, 2, rows), NOTHING, dtype=torch.int64, device=device),
            logprobs=torch.zeros(steps, rows, dtype=torch.float32, device=device),
            cursor=torch.zeros(1, dtype=torch.int64, device=device),
        )
        self._host_results = torch.empty((steps, 2, rows), dtype=torch.int64, pin_memory=self.pin)
        self._host_logprobs = torch.empty((steps, rows), dtype=torch.float32, pin_memory=self.pin)
        self._top: tuple[Top, Top] | None = None  # on the device and on the host, from when somebody asks for it
        self._slices: dict[tuple[int, bool], Rows] = {}

    def rows(self, count: int, top: bool = False) -> Rows:
        """The state of the first `count` rows, for the most likely tokens too if `top`; the same tensors each time."""
        if (count, top) not in self._slices:
            part = self.part(0, count, top)._replace(cursor=self.whole.cursor[:])
            for tensor in (*part[:-1], *(part.top or ())):
                mark_static(tensor)
            self._slices[count, top] = part
        return self._slices[count, top]

    def _tops(self) -> tuple[Top, Top]:
        if self._top is None:
            size = (self.steps, len(self.whole.integers), self._most_top)
            kinds = (torch.int64, torch.float32)
            self._top = (
                Top(*(torch.zeros(size, dtype=kind, device=self.device) for kind in kinds)),
                Top(*(torch.empty(size, dtype=kind, pin_memory=self.pin) for kind in kinds)),
            )
        return self._top

    def part(self, first: int, count: int, top: bool = False) -> Rows:
        """The state of `count` rows from `first` on, for what no graph reads."""
        whole, part = self.whole, slice(first, first + count)
        return Rows(
            whole.integers[part],
            whole.floats[part],
            whole.block_table[part],
            whole.stops[part],
            whole.results[:, :, part],
            whole.logprobs[:, part],
            whole.cursor,
            Top(*(one[:, part] for one in self._tops()[0])) if top else None,
        )

    def to_device(self, values: list, dtype: torch.dtype) -> Tensor:
        """`values` as a tensor on the device, copied from pinned memory without waiting."""
        host = torch.tensor(values, dtype=dtype)
        return host.pin_memory().to(self.device, non_blocking=True) if self.pin else host

    def set_rows(self, first: int, values: list[RowValues]) -> None:
        """Writes consecutive rows, beginning with `first`."""
        part = slice(first, first + len(values))
        tables = [v.blocks + [NULL_BLOCK] * (self.blocks - len(v.blocks)) for v in values]
        stops = [v.stops + [-1] * (MOST_STOPS - len(v.stops)) for v in values]
        self.whole.integers[part].copy_(self.to_device([v.integers for v in values], torch.int64))
        self.whole.floats[part].copy_(self.to_device([v.floats for v in values], torch.float32))
        self.whole.block_table[part].copy_(self.to_device(tables, torch.int64))
        self.whole.stops[part].copy_(self.to_device(stops, torch.int64))

    def move_row(self, source: int, target: int) -> None:
        """Copies a row to another place, as it is on the device at that point of the stream."""
        for tensor in (self.whole.integers, self.whole.floats, self.whole.block_table, self.whole.stops):
            tensor[target].copy_(tensor[source])

    def clear_row(self, row: int) -> None:
        """Makes a row padding: it writes nowhere and attends to nothing."""
        self.whole.integers[row].zero_()
        self.whole.block_table[row].fill_(NULL_BLOCK)

    def read_back(self, first: int, count: int, top: bool) -> tuple[list[int], torch.cuda.Event | None]:
        """Starts copying the results of `count` steps, from step `first` (modulo `steps`), to the host; with `top`, the
        most likely tokens too.

        Returns:
            The indices of those steps for `results_at`, and what to wait for before reading them.
        """
        kept = [(first + step) % self.steps for step in range(count)]
        pieces = (
            [slice(kept[0], kept[-1] + 1)] if kept[0] <= kept[-1] else [slice(kept[0], None), slice(0, kept[-1] + 1)]
        )
        for piece in pieces:
            self._host_results[piece].copy_(self.whole.results[piece], non_blocking=True)
            self._host_logprobs[piece].copy_(self.whole.logprobs[piece], non_blocking=True)
            for here, there in zip(*self._tops(), strict=True) if top else ():
                there[piece].copy_(here[piece], non_blocking=True)
        event = None
        if self.pin:
            event = torch.cuda.Event()
            event.record()
        return kept, event

    def results_at(self, kept: list[int], rows: slice) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
        """Tokens, log-probabilities and statuses, each (rows, steps), of steps that have been read back."""
        results, logprobs = self._host_results.numpy(), self._host_logprobs.numpy()  # whose lists are made faster
        tokens, statuses = results[kept, :, rows].transpose(1, 2, 0).tolist()
        return tokens, logprobs[kept, rows].T.tolist(), statuses

    def top_at(self, kept: list[int], row: int, count: int) -> list[list[tuple[int, float]]]:
        """The `count` most likely tokens of a row after each of those steps, with their log-probabilities."""
        tokens, logprobs = (one.numpy()[kept, row, :count].tolist() for one in self._tops()[1])
        return [list(zip(*both, strict=True)) for both in zip(tokens, logprobs, strict=True)]

    def restart(self) -> None:
        """Back to the first step of `results`, and to nothing but padding."""
        self.whole.cursor.zero_()
        self.whole.integers.zero_()
        self.whole.block_table.fill_(NULL_BLOCK)


def next_logits(model: PreTrainedModel, memory: PagedCache, rows: Rows, visited: int | None, own: bool) -> Tensor:
    """(B, vocabulary): the model's logits after each row's token, whose keys and values are stored on the way.

    Args:
        own: whether the model attends by itself; else with the attention function that it is set to.
    """
    token, position, active = rows.integers[:, TOKEN], rows.integers[:, POSITION], rows.integers[:, ACTIVE] > 0
    slots = slot_mapping(position, rows.block_table, active, memory.block_size)
    slots = torch.where(slots < 0, memory.spare_slots[: len(slots)], slots)
    context = torch.where(active, position + 1, 0)
    position = position.unsqueeze(1)
    if own:
        assert visited is not None
        # A padded row sees the token that it stores, for rows that see nothing make NaN in some models' attention.
        view = GatheredView(memory, slots, rows.block_table, context.clamp(min=1), visited, 1)
        given = {"input_ids": token.unsqueeze(1), "attention_mask": view.mask, **positions(model, position)}
        given |= {"past_key_values": view, "use_cache": True}
    else:
        view = CacheView(memory, slots, rows.block_table, context, visited)
        given = step_arguments(model, token.unsqueeze(1), position, view)
    return model(**given).logits[:, -1]


def take_token(logits: Tensor, rows: Rows, kind: int) -> None:
    """Samples, notes the result for the host, and makes the rows ready for their next step, or ends them."""
    integers = rows.integers
    position, active = integers[:, POSITION], integers[:, ACTIVE] > 0
    following = position + 1
    choice = sample(
        logits,
        rows.floats[:, TEMPERATURE],
        integers[:, TOP_K],
        rows.floats[:, TOP_P],
        integers[:, SEED],
        following,
        kind,
    )
    stopped = (choice.tokens.unsqueeze(1) == rows.stops).any(dim=1)
    status = torch.where(following + 1 >= integers[:, LIMIT], FULL, RUNNING)
    status = torch.where(stopped, STOPPED, status)
    status = torch.where(choice.bad, BAD, status)
    result = torch.stack((torch.where(active, choice.tokens, NOTHING), status))
    rows.results.index_copy_(0, rows.cursor, result.unsqueeze(0))
    rows.logprobs.index_copy_(0, rows.cursor, choice.logprobs.unsqueeze(0))
    if choice.top is not None and rows.top is not None:
        rows.top.tokens.index_copy_(0, rows.cursor, choice.top.tokens.unsqueeze(0))
        rows.top.logprobs.index_copy_(0, rows.cursor, choice.top.logprobs.unsqueeze(0))
    rows.cursor.copy_((rows.cursor + 1) % len(rows.results))
    going = active & (status == RUNNING)
    advanced = torch.stack((choice.tokens, following, going.to(torch.int64)), dim=1)
    held = torch.stack((integers[:, TOKEN], position, going.to(torch.int64)), dim=1)
    integers[:, TOKEN : ACTIVE + 1].copy_(torch.where(going.unsqueeze(1), advanced, held))


class DecodeStep(nn.Module):
    """The callable that `CUDAGraphModule` wraps.

    Args:
        model: a transformers causal LM; used as it is, with the attention it is set to at that moment.
        memory: the KV cache.
        own: whether the model attends by itself.
    """

    def __init__(self, model: PreTrainedModel, memory: PagedCache, own: bool) -> None:
        super().__init__()
        self.model, self.memory, self.own = model, memory, own

    def forward(self, rows: Rows, visited: int | None, kind: int) -> None:
        """One step for all rows.

        Args:
            rows: their state; what the step finds is left in it.
            visited: see `CacheView`.
            kind: see `sampling.sample`.
        """
        take_token(next_logits(self.model, self.memory, rows, visited, self.own), rows, kind)
