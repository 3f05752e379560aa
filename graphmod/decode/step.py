"""One decode step, from the tokens of a batch to the next ones: the static tensors that a step reads and writes, what a
graph holds of it, and the graphs: a wrapper for each batch size, context and kind of sampling.

Numbers of one kind share a tensor with a column each, so that a row is written, moved or cleared with one copy. Beside
these tensors a step reads and writes those of `cache` and the model's weights only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from graphmod.config import CompileMode, CUDAGraphConfig, Verify
from graphmod.decode.adapters import Adapters
from graphmod.decode.cache import NULL_BLOCK, CacheView, GatheredView, PagedCache, slot_mapping
from graphmod.decode.model import positions, step_arguments
from graphmod.decode.sampling import (
    ADAPTED,
    ADJUSTED,
    FORWARD,
    LONGEST_WORD,
    MASKED,
    MOST_WORDS,
    TOP,
    Adjustment,
    Adjustments,
    Masks,
    Top,
    masked,
    penalized,
    ruled_out,
    sample,
)
from graphmod.decode.structured import Matcher, fill_masks, mask_words
from graphmod.decode.types import MOST_TOP, BucketStats, DecodeError, EngineConfig
from graphmod.fuse.compiler import StepCompiler
from graphmod.wrap.extension import Group, mark_static
from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")


# -- the rows of a batch, and one step for them ------------------------------------------------------------------------

TOKEN, POSITION, ACTIVE, LIMIT, SEED, TOP_K, FIRST, EARLIEST, CHAIN = range(9)
"""Columns of `integers`: the token to be fed, its position, whether the row decodes (1) or is padding or done (0), the
length at which the sequence ends, the seed, top-k, where the completion begins, where a stop may first stand, the chain
of logits processors (0 is none)."""
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
"""Columns of `floats`."""
RUNNING, STOPPED, FULL, BAD, NONE_LEFT = range(5)
"""What a step says of a row: goes on, met a stop, reached its length, had logits that are no numbers, has no token left
to choose."""
NOTHING = -1
"""Stands for a token where a row was not active."""
MOST_STOPS = 8


class Rows(NamedTuple):
    """The state of the first rows of a batch, slices of one set of maximum size. This is what a graph is given.

    Attributes:
        integers: (B, 9) int64, columns above.
        floats: (B, 6) float32.
        block_table: (B, blocks of a sequence) int64.
        stops: (B, MOST_STOPS) int64, tokens that end the row; -1 where unused.
        results: (steps kept, 2, B) int64: token, or NOTHING, and status.
        logprobs: (steps kept, B) float32.
        cursor: (1,) int64, the step of `results` that is written next.
        top: (steps kept, B, MOST_TOP) each, for a batch of which somebody asks for the most likely tokens; else None.
        adjustments: for a batch of which some row's logits are changed; else None.
        masks: for a batch of which some row may not choose every token; else None.
        adapters: `Adapters.chosen` of each row, for a batch of which some row has one; else None.
    """

    integers: Tensor
    floats: Tensor
    block_table: Tensor
    stops: Tensor
    results: Tensor
    logprobs: Tensor
    cursor: Tensor
    top: Top | None = None
    adjustments: Adjustments | None = None
    masks: Masks | None = None
    adapters: Tensor | None = None


class RowValues(NamedTuple):
    """What one row starts with, as Python numbers."""

    integers: list[int]
    floats: list[float]
    blocks: list[int]
    stops: list[int]
    prompt: list[int]
    adjustment: Adjustment | None = None
    slot: int = 0  # of its adapter


class BatchState:
    """Owns the tensors and their pinned mirrors on the host.

    Args:
        rows: the most rows.
        blocks: the most blocks of a sequence.
        steps: decode steps whose results are kept until the host has read them.
        vocabulary: number of tokens.
        length: of the longest sequence.
        adapters: that rows may have.
    """

    def __init__(
        self,
        rows: int,
        blocks: int,
        steps: int,
        device: torch.device,
        vocabulary: int,
        length: int,
        adapters: Adapters,
    ) -> None:
        self.device, self.steps, self.blocks = device, steps, blocks
        self._vocabulary, self._length = vocabulary, length
        self.pin = device.type == "cuda"
        self.whole = Rows(
            integers=torch.zeros(rows, 9, dtype=torch.int64, device=device),
            floats=torch.zeros(rows, 6, dtype=torch.float32, device=device),
            block_table=torch.full((rows, blocks), NULL_BLOCK, dtype=torch.int64, device=device),
            stops=torch.full((rows, MOST_STOPS), -1, dtype=torch.int64, device=device),
            results=torch.full((steps, 2, rows), NOTHING, dtype=torch.int64, device=device),
            logprobs=torch.zeros(steps, rows, dtype=torch.float32, device=device),
            cursor=torch.zeros(1, dtype=torch.int64, device=device),
        )
        self._host_results = torch.empty((steps, 2, rows), dtype=torch.int64, pin_memory=self.pin)
        self._host_logprobs = torch.empty((steps, rows), dtype=torch.float32, pin_memory=self.pin)
        self._chosen = adapters.chosen
        self._adapters = self._chosen(torch.zeros(rows, dtype=torch.int64, device=device))
        self._slices: dict[tuple[int, int], Rows] = {}

    def rows(self, count: int, kind: int = 0) -> Rows:
        """The state of the first `count` rows, with what a kind of sampling needs; the same tensors each time."""
        key = count, kind & (TOP | MASKED | ADAPTED | ADJUSTED)
        if key not in self._slices:
            part = self.part(0, count, kind)._replace(cursor=self.whole.cursor[:])
            for tensor in (*part[:7], *(part.top or ()), *(part.adjustments or ()), *(part.masks or ())):
                mark_static(tensor)
            if part.adapters is not None:
                mark_static(part.adapters)
            self._slices[key] = part
        return self._slices[key]

    # There from when somebody needs them.

    @cached_property
    def _top(self) -> tuple[Top, Top]:
        """On the device and on the host."""
        size = (self.steps, len(self.whole.integers), min(MOST_TOP, self._vocabulary))
        kinds = (torch.int64, torch.float32)
        return (
            Top(*(torch.zeros(size, dtype=kind, device=self.device) for kind in kinds)),
            Top(*(torch.empty(size, dtype=kind, pin_memory=self.pin) for kind in kinds)),
        )

    @cached_property
    def _adjustments(self) -> Adjustments:
        rows, device = len(self.whole.integers), self.device
        return Adjustments(
            torch.full((rows, self._length), NOTHING, dtype=torch.int64, device=device),
            torch.zeros((rows, self._vocabulary), dtype=torch.float32, device=device),
            torch.full((rows, MOST_WORDS, LONGEST_WORD), NOTHING, dtype=torch.int32, device=device),
        )

    @cached_property
    def _masks(self) -> Masks:
        rows, words = len(self.whole.integers), mask_words(self._vocabulary)
        return Masks(
            torch.zeros((rows, self._vocabulary), dtype=torch.float32, device=self.device),
            torch.full((rows, words), -1, dtype=torch.int32, device=self.device),
        )

    def part(self, first: int, count: int, kind: int = 0) -> Rows:
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
            Top(*(one[:, part] for one in self._top[0])) if kind & TOP else None,
            Adjustments(*(one[part] for one in self._adjustments)) if kind & ADJUSTED else None,
            Masks(*(one[part] for one in self._masks)) if kind & MASKED else None,
            self._adapters[part] if kind & ADAPTED else None,
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
        if self._adapters.numel():
            self._adapters[part].copy_(self._chosen(self.to_device([v.slot for v in values], torch.int64)))
        if "_adjustments" in vars(self) or any(v.adjustment for v in values):
            self._adjust(part, values)

    def _adjust(self, part: slice, values: list[RowValues]) -> None:
        """Writes what changes the logits of rows, and clears what changed those of who had these rows before."""
        tokens, bias, words = (one[part] for one in self._adjustments)
        tokens.fill_(NOTHING)
        bias.zero_()
        words.fill_(NOTHING)
        for row, one in enumerate(values):
            if one.adjustment is None:
                continue
            tokens[row, : len(one.prompt)].copy_(self.to_device(one.prompt, torch.int64))
            base, biased, bad, _ = one.adjustment
            if base:
                bias[row].fill_(base)
            if biased:
                ids = self.to_device([*biased], torch.int64)
                bias[row].index_copy_(0, ids, self.to_device([*biased.values()], torch.float32))
            if bad:
                filled = [[NOTHING] * (LONGEST_WORD - len(word)) + word for word in bad]
                words[row, : len(bad)].copy_(self.to_device(filled, torch.int32))

    def set_masks(self, first: int, matchers: list[Matcher | None]) -> None:
        """Says which token consecutive rows may choose next; call it once the host has read all that they chose.

        Args:
            first: of the rows.
            matchers: of each; None allows all tokens.
        """
        part = slice(first, first + len(matchers))
        allowed = self._masks.allowed[part]
        # Memory of its own, since the copy of the one before may still be to come.
        host = torch.full(allowed.shape, -1, dtype=torch.int32, pin_memory=self.pin)
        fill_masks(matchers, host)
        allowed.copy_(host, non_blocking=True)

    def move_row(self, source: int, target: int) -> None:
        """Copies a row to another place, as it is on the device at that point of the stream."""
        for tensor in (*self.whole[:4], self._adapters, *vars(self).get("_adjustments", ())):
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
            for here, there in zip(*self._top, strict=True) if top else ():
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
        tokens, logprobs = (one.numpy()[kept, row, :count].tolist() for one in self._top[1])
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
    spare = memory.spare_slots[: len(active)]
    slots = slot_mapping(position, rows.block_table, active, spare, memory.block_size)
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


Chain = tuple[Callable[[Tensor, Tensor], Tensor], ...]
"""Logits processors, one after the other."""


def adjusted_logits(logits: Tensor, rows: Rows, chains: tuple[tuple[int, Chain], ...]) -> Tensor | None:
    """What to choose by in the place of the model's logits: bias, penalties, what is ruled out, logits processors and
    masks, in this order; None for the logits themselves.

    Args:
        chains: with the numbers that rows know them by.

    Raises:
        DecodeError: a logits processor returns something else than logits.
    """
    if rows.adjustments is None:
        return None if rows.masks is None else masked(logits.float(), rows.masks.allowed)
    (tokens, bias, words), integers, floats = rows.adjustments, rows.integers, rows.floats
    following = integers[:, POSITION] + 1
    penalties = floats[:, REPETITION], floats[:, PRESENCE], floats[:, FREQUENCY]
    found = penalized(logits.float() + bias, tokens, integers[:, FIRST], *penalties)
    early = following < integers[:, EARLIEST]
    out = ruled_out(tokens, words, following, rows.stops, early, found.shape[1])
    found = found.masked_fill(out, float("-inf"))
    for number, chain in chains:
        changed = found.clone()  # other rows must not see what is written into it
        for process in chain:
            changed = process(tokens, changed)
            if not isinstance(changed, Tensor) or changed.shape != found.shape:
                got = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
                raise DecodeError(
                    f"the logits processor {getattr(process, '__qualname__', type(process).__qualname__)} returned "
                    f"{got}; it must return the logits it was given, {tuple(found.shape)}, or others of that shape"
                )
        found = torch.where((integers[:, CHAIN] == number).unsqueeze(1), changed.to(found), found)
    return found if rows.masks is None else masked(found, rows.masks.allowed)


def take_token(logits: Tensor, rows: Rows, kind: int, chains: tuple[tuple[int, Chain], ...]) -> None:
    """Samples, notes the result for the host, and makes the rows ready for their next step, or ends them."""
    integers = rows.integers
    position, active = integers[:, POSITION], integers[:, ACTIVE] > 0
    following = position + 1
    choice = sample(
        logits,
        rows.floats[:, TEMPERATURE],
        integers[:, TOP_K],
        rows.floats[:, TOP_P],
        rows.floats[:, MIN_P],
        integers[:, SEED],
        following,
        kind,
        adjusted_logits(logits, rows, chains),
    )
    stopped = (choice.tokens.unsqueeze(1) == rows.stops).any(dim=1)
    status = torch.where(following + 1 >= integers[:, LIMIT], FULL, RUNNING)
    status = torch.where(stopped, STOPPED, status)
    if choice.left is not None:
        status = torch.where(choice.left, status, NONE_LEFT)
    status = torch.where(choice.bad, BAD, status)
    result = torch.stack((torch.where(active, choice.tokens, NOTHING), status))
    if rows.adjustments is not None:
        rows.adjustments.tokens.scatter_(1, following.unsqueeze(1), result[0].unsqueeze(1))
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
        mode: makes the context in which it computes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: PagedCache,
        own: bool,
        mode: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        super().__init__()
        self.model, self.memory, self.own, self._mode = model, memory, own, mode

    def forward(self, rows: Rows, visited: int | None, kind: int, chains: tuple[tuple[int, Chain], ...]) -> None:
        """One step for all rows; of a kind with masks its second half, and of kind FORWARD the first.

        Args:
            rows: their state; what the step finds is left in it.
            visited: see `CacheView`.
            kind: see `sample`.
            chains: of logits processors, see `adjusted_logits`.
        """
        if rows.masks is not None and kind & FORWARD != FORWARD:
            return self.take(rows.masks.logits, rows, kind, chains)
        with self._mode():
            logits = next_logits(self.model, self.memory, rows, visited, self.own)
        if rows.masks is not None:
            rows.masks.logits.copy_(logits)
        else:
            self.take(logits, rows, kind, chains)

    def take(self, logits: Tensor, rows: Rows, kind: int, chains: tuple[tuple[int, Chain], ...]) -> None:
        """`take_token`, also of the logits of prefill."""
        with self._mode():
            take_token(logits, rows, kind, chains)


# -- the graphs of the step --------------------------------------------------------------------------------------------

_LEAST_VISITED = 256  # below it attention costs no time to speak of

Key = tuple[int, int | None, int]  # batch size, visited tokens, kind of sampling


def sizes(least: int, most: int, factor: int) -> list[int]:
    """From `least` on, each `factor` times the one before, up to `most`, which is the last."""
    found = []
    while least < most:
        found.append(least)
        least *= factor
    return [*found, most]


def context_sizes(block_size: int, most: int, stops_at_context: bool) -> list[int | None]:
    """Numbers of visited tokens that have graphs of their own, ascending: doubling, the last one `most`.

    Args:
        block_size: they are multiples of it, or less than one block.
        most: tokens of a block table.
        stops_at_context: then there is one graph for all, which None stands for.
    """
    if stops_at_context:
        return [None]
    least = _LEAST_VISITED if block_size >= _LEAST_VISITED else -(-_LEAST_VISITED // block_size) * block_size
    found = [size if size <= block_size else -(-size // block_size) * block_size for size in sizes(least, most, 2)]
    return [*sorted({*(size for size in found if size < most), most})]


def _state(states: list[str]) -> str:
    if "captured" in states:
        return "valid"
    return "disabled" if "disabled" in states else "invalid"


def counters(wrappers: Iterable[CUDAGraphModule], own: BucketStats, released: int) -> BucketStats:
    """The counters of some wrappers together.

    Args:
        own: what they do not count: steps without a wrapper, and rows.
        released: captures whose graphs were freed by a `reset`.
    """
    graphs = [wrapper.stats for wrapper in wrappers]
    captures = sum(graph.captures for graph in graphs)
    return BucketStats(
        state=_state([graph.state for graph in graphs]),
        launches=sum(graph.replays for graph in graphs),
        captures=captures,
        recaptures=max(0, captures - released - sum(graph.captures > 0 for graph in graphs)),
        eager_steps=own.eager_steps + sum(graph.eager_calls for graph in graphs),
        failures=sum(graph.failures for graph in graphs),
        row_steps=own.row_steps,
        padding_row_steps=own.padding_row_steps,
    )


def free_memory(device: torch.device) -> dict[str, Any]:
    """For a bar: the free memory of a GPU."""
    if device.type != "cuda":
        return {}
    return {"free": f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB"}


class BucketGraphs:
    """Launches decode steps in the smallest bucket that holds the batch.

    Args:
        step: what is captured.
        state: whose rows it works on.
        config: buckets, warm-up, failures, backend, and whether there are graphs at all.
        contexts: from `context_sizes`.
        adapters: that rows may have.

    Attributes:
        chains: number -> logits processors; requests add to it.
    """

    def __init__(
        self,
        step: DecodeStep,
        state: BatchState,
        config: EngineConfig,
        contexts: list[int | None],
        adapters: Adapters,
    ) -> None:
        self.step, self.state, self.config, self.contexts = step, state, config, contexts
        self._adapters = adapters
        self.sizes = config.bucket_sizes()
        self.chains: dict[int, Chain] = {}
        self.settings = CUDAGraphConfig(
            warmup_steps=config.warmup_steps,
            max_failures=config.max_failures,
            backend=config.backend,
            max_graphs=1,
            verify=Verify.off,  # a token would come late
        )
        self.group = Group()
        self.wrappers: dict[Key, CUDAGraphModule] = {}
        self._counts = {size: BucketStats() for size in self.sizes}
        self._released = dict.fromkeys(self.sizes, 0)  # captures whose graphs `reset` freed
        self.capturing: int | None = None
        self.compiler: StepCompiler | None = None
        if config.compile is not CompileMode.none and state.device.type == "cuda":
            self.compiler = StepCompiler(config.compile is CompileMode.max, config.compile_in_background)
        elif config.compile is not CompileMode.none:
            log.warning("compile=%s is for a GPU and is ignored on this %s", config.compile, state.device.type)

    def bucket(self, rows: int) -> int:
        """The smallest batch size with a graph that holds `rows` rows."""
        return next(size for size in self.sizes if size >= rows)

    def visited(self, context: int) -> int | None:
        """The smallest number of visited tokens that holds `context`."""
        return next(size for size in self.contexts if size is None or size >= context)

    def chains_of(self, kind: int) -> tuple[tuple[int, Chain], ...]:
        """The chains of logits processors that a kind of sampling tells of."""
        return tuple(one for one in [*self.chains.items()] if kind & ADJUSTED << one[0])

    def launch(self, rows: int, context: int, kind: int, steps: int = 1) -> int:
        """Launches steps, or of a kind with masks the second half of one; returns the bucket they run in. Call it in
        inference mode, with the model's attention set."""
        size = self.bucket(rows)
        self._run((size, None, kind & ~ADAPTED) if kind & MASKED else (size, self.visited(context), kind), steps)
        return size

    def launch_forward(self, rows: int, context: int, kind: int) -> None:
        """Launches the first half of a step of a kind with masks: what needs none yet."""
        self._run((self.bucket(rows), self.visited(context), FORWARD | kind & ADAPTED), 1)

    def _run(self, key: Key, steps: int) -> None:
        size, visited, kind = key
        rows = self.state.rows(size, kind)
        with self._adapters.applied(rows.adapters):
            self._launch(key, steps, (rows, visited, kind, self.chains_of(kind)))

    def _launch(self, key: Key, steps: int, given: tuple) -> None:
        size, _, kind = key
        if not self.config.graphs:
            self._counts[size].eager_steps += steps * (kind & FORWARD != FORWARD)
            for _ in range(steps):
                self.step(*given)
            return
        wrapper = self.wrappers.get(key)
        if wrapper is None:
            name = f"decode step of {size} row{'s' if size != 1 else ''}"
            wrapper = self.wrappers[key] = CUDAGraphModule(self.step, self.settings, name=name, group=self.group)
        while steps > 0:
            if self.compiler is None:
                wrapper(*given)
            else:
                self.compiler.call(wrapper, *given)
            steps -= 1 + wrapper.replay(steps - 1)

    def count(self, size: int, row_steps: int, tokens: int) -> None:
        """Adds the row steps of a chunk and how many of them made a token."""
        self._counts[size].row_steps += row_steps
        self._counts[size].padding_row_steps += row_steps - tokens

    def capture(
        self, sizes: Iterable[int], contexts: Iterable[int | None], kinds: Iterable[int], progress: bool
    ) -> None:
        """Captures ahead of time, largest first, with rows that are all padding: such a step changes nothing."""
        wanted = [
            (size, visited, kind)
            for size in sorted(sizes, reverse=True)
            for visited in sorted(contexts, key=lambda c: c or 0, reverse=True)
            for kind in sorted(kinds, reverse=True)
        ]
        # None: a bar on a terminal only.
        with tqdm(wanted, desc="capturing", unit="graph", disable=None if progress else True) as bar:
            for size, visited, kind in bar:
                self.capturing = size
                try:
                    # Compiled code runs once before it is captured.
                    for _ in range(self.settings.warmup_steps + (1 if self.compiler is None else 3)):
                        if kind & MASKED:
                            self.launch_forward(size, visited or 1, kind)
                        self.launch(size, visited or 1, kind)
                finally:
                    self.capturing = None
                bar.set_postfix(rows=size, **free_memory(self.state.device), refresh=False)

    def stats(self) -> tuple[dict[int, BucketStats], float, int]:
        """Counters of each bucket, seconds spent capturing, and bytes of the pool."""
        buckets, wrappers = {}, list(self.wrappers.items())  # another thread may add some
        for size in self.sizes:
            graphs = [wrapper for (rows, _, _), wrapper in wrappers if rows == size]
            buckets[size] = counters(graphs, self._counts[size], self._released[size])
            halves = (wrapper for (rows, _, kind), wrapper in wrappers if rows == size and kind & FORWARD == FORWARD)
            for half in (wrapper.stats for wrapper in halves):
                buckets[size].launches -= half.replays  # a step counts with its second half
                buckets[size].eager_steps -= half.eager_calls
            if size == self.capturing:
                buckets[size].state = "capturing"
        every = [wrapper.stats for _, wrapper in wrappers]
        seconds = sum((graph.capture_seconds for graph in every), 0.0)
        return buckets, seconds, max((graph.pool_bytes for graph in every), default=0)

    def reset(self) -> None:
        """Frees the graphs; what was disabled stays so, and what is captured next is no recapture."""
        for (size, _, _), wrapper in self.wrappers.items():
            self._released[size] += wrapper.stats.state == "captured"
            wrapper.reset()
        if self.compiler is not None:
            self.compiler.forget()

    def force_enable(self) -> None:
        """Lets buckets that failures disabled be captured again."""
        for wrapper in self.wrappers.values():
            wrapper.force_enable()
