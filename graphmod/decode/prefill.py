"""Prefill: pieces of prompts on their way into the KV cache.

In graphs, where an attention of this package fits the model: pieces lie one after the other, padded to one of a few
sizes, and each token sees its own prompt, up to itself. Elsewhere eager, with the model's own attention and prompts
padded on the right, where nobody looks back at.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, library, nn
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.attention import attention, takes
from graphmod.config import CUDAGraphConfig
from graphmod.decode.adapters import Adapters
from graphmod.decode.cache import NULL_BLOCK, Attends, GatheredView, Layer, PagedCache, StoringView, slot_mapping
from graphmod.decode.model import positions, step_arguments
from graphmod.decode.sampling import most_likely
from graphmod.decode.step import counters, free_memory, sizes
from graphmod.decode.types import BucketStats
from graphmod.torch_private import flash_attention
from graphmod.wrap.extension import Group, mark_static
from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")


class Piece(NamedTuple):
    """Part of a prompt, whose tokens before it are in the cache.

    Attributes:
        tokens: of this part.
        start: how many come before it.
        blocks: of the cache, for the whole sequence.
        last: whether the prompt ends with it, so that the logits after its last token are needed.
        targets: the token that comes after each of its tokens, whose log-probability is asked for (after the last of
            the prompt, any); None where none is.
        slot: of its adapter; 0 for none.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    last: bool
    targets: list[int] | None = None
    slot: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Limits(NamedTuple):
    """Of what is prefilled at once.

    Attributes:
        tokens: of all pieces together.
        pieces: how many.
        columns: tokens that they attend to, all together; at least those of one whole sequence.
        scored: tokens of all pieces with targets together: logits are made for each of them.
    """

    tokens: int
    pieces: int
    columns: int
    scored: int = 0


class Scores(NamedTuple):
    """Of the tokens of pieces, one after the other.

    Attributes:
        logprobs: (T,) float32, of their targets.
        top_tokens, top_logprobs: (T, MOST_TOP), int64 and float32: the most likely ones.
    """

    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor

    @staticmethod
    def of(logits: Tensor, targets: Tensor) -> Scores:
        """Those of logits, (T, vocabulary), and targets, (T,) int64."""
        logits = logits.float()
        total = logits.logsumexp(1)
        return Scores(logits.gather(1, targets.unsqueeze(1)).squeeze(1) - total, *most_likely(logits, total))

    def part(self, begin: int, count: int) -> Scores:
        """Those of some tokens."""
        return Scores(*(one[begin : begin + count] for one in self))

    def on_host(self) -> Scores:
        """Where they will be once what was launched has run."""
        if not self.logprobs.is_cuda:
            return Scores(*(one.clone() for one in self))
        found = Scores(*(torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in self))
        for there, here in zip(found, self, strict=True):
            there.copy_(here, non_blocking=True)
        return found

    def most_likely(self, count: int) -> list[list[tuple[int, float]]]:
        """So many tokens of each place, with their log-probabilities."""
        tokens, logprobs = (one[:, :count].tolist() for one in self[1:])
        return [list(zip(*both, strict=True)) for both in zip(tokens, logprobs, strict=True)]


# -- pieces one after the other, and attention over them ---------------------------------------------------------------

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
        adapters: `Adapters.chosen` of each token; None where no piece has one.
    """

    tokens: Tensor
    columns: Tensor | None
    starts: Tensor
    ends: Tensor
    targets: Tensor | None = None
    adapters: Tensor | None = None


class PackedBuffer:
    """Owns the tensors.

    Args:
        limits: of pieces.
        by_length: whether nobody reads columns that are not there, nor more of a column than its slot.
        adapters: that pieces may have.
    """

    def __init__(self, memory: PagedCache, limits: Limits, by_length: bool, adapters: Adapters) -> None:
        self._memory, self._limits, self._by_length = memory, limits, by_length
        self._chosen = adapters.chosen
        numbers = {"dtype": torch.int64, "device": memory.device}
        self._tokens = torch.zeros(4 * limits.tokens, **numbers)
        self._columns = torch.zeros(3 * limits.columns, **numbers)
        self._starts = torch.zeros((2, limits.pieces + 2), dtype=torch.int32, device=memory.device)
        self._ends = torch.zeros(limits.pieces, **numbers)
        self._targets = torch.zeros(limits.tokens, **numbers)
        self._slots = torch.zeros(limits.tokens, **numbers)
        self._adapters = self._chosen(self._slots)
        self._given: dict[Key, Packed] = {}

    def packed(self, key: Key) -> Packed:
        """The tensors for so many tokens and columns, with targets if they are scored; the same ones each time."""
        tokens, columns, scored, adapted = key
        if key not in self._given:
            self._given[key] = Packed(
                mark_static(self._tokens[: 4 * tokens].view(4, tokens)),
                None if columns is None else mark_static(self._columns[: 3 * columns].view(3, columns)),
                mark_static(self._starts[:]),
                mark_static(self._ends[:]),
                mark_static(self._targets[:tokens]) if scored else None,
                mark_static(self._adapters[:tokens]) if adapted else None,
            )
        return self._given[key]

    def fill(self, pieces: list[Piece], key: Key) -> Packed:
        """Writes pieces, which must fit; all of them have targets, or none has."""
        tokens, columns, _, _ = key
        into, size = self.packed(key), self._memory.block_size
        rows = numpy.zeros((4, tokens), dtype=numpy.int64)
        rows[PIECE] = NOBODY
        rows[SLOT] = size + numpy.arange(tokens) % self._memory.rows  # the spare slots
        room = sum(piece.end for piece in pieces) if self._by_length else columns or 0
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
        if into.targets is not None:
            targets = numpy.array([one for piece in pieces for one in piece.targets or ()], dtype=numpy.int64)
            self._bring(into.targets[: len(targets)], targets)
        if into.adapters is not None:
            own = numpy.array([0] + [piece.slot for piece in pieces])  # NOBODY is -1, so that each is found one further
            self._bring(self._slots[:tokens], own[rows[PIECE] + 1])
            into.adapters.copy_(self._chosen(self._slots[:tokens]))
        if held is not None and into.columns is not None:
            if self._by_length:
                self._bring(into.columns[HELD, :room], held[HELD])
            else:
                self._bring(into.columns, held)
        return into

    def _starts_of(self, lengths: list[int], whole: int) -> list[int]:
        found = [0, *accumulate(lengths)]
        return found + [found[-1]] * (self._limits.pieces + 1 - len(found)) + [whole]

    def _bring(self, tensor: Tensor, values: numpy.ndarray) -> None:
        host = torch.from_numpy(values)
        tensor.copy_(host.pin_memory() if tensor.is_cuda else host, non_blocking=True)


class PackedView(StoringView):
    """What a model sees of the cache, whose attention reads through `packed`.

    Args:
        memory: the cache.
        packed: where what is.
    """

    def __init__(self, memory: PagedCache, packed: Packed) -> None:
        super().__init__(memory, packed.tokens[SLOT])
        self.packed = packed


@functools.cache
def copies_by_length(device: torch.device) -> bool:
    """Whether no more is copied than there is: by a kernel, which Triton may be unable to make (no C compiler)."""
    if device.type != "cuda":
        return False
    try:
        from graphmod.decode.kernels import gather

        with torch.cuda.device(device):
            kept = torch.zeros(1, 16, 1, 16, device=device, dtype=torch.bfloat16)
            gather(kept, kept, torch.zeros(1, dtype=torch.int64, device=device), kept.new_ones(1, dtype=torch.int32))
    except Exception as error:  # of compilers and drivers: anything
        log.debug("prefill gathers without a kernel", exc_info=error)
        return False
    return True


@library.custom_op("graphmod::gather_columns", mutates_args=())
def gather_columns(keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values one after the other, (C, kv_heads, head_dim or value_dim) each. What comes after those that there
    are is undefined.

    Args:
        keys, values: (blocks, block_size, kv_heads, head_dim or value_dim), contiguous.
        slots: (C,) int64: where each lies.
        starts: (pieces + 2,) int32, of `Packed`: the last but one is how many there are.
    """
    if copies_by_length(keys.device):
        from graphmod.decode.kernels import gather

        with torch.cuda.device_of(keys):
            return gather(keys, values, slots, starts[-2:])
    return keys.flatten(0, 1).index_select(0, slots), values.flatten(0, 1).index_select(0, slots)


NAME = "graphmod_packed"
_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256  # heads that flash attention takes


def unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None: then it is registered with transformers."""
    if any(layer.softcap or layer.sinks for layer in memory.layers):
        return "it has neither capped scores nor attention sinks"
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    return None


def packed_attention(
    module: Attends,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    cache_view: PackedView,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it. On a GPU in half precision by PyTorch's flash attention for sequences of different
    lengths, elsewhere by SDPA with a mask.

    Args:
        query: (1, heads, T, head_dim).
        key, value: (1, kv_heads, T, head_dim), of the same tokens; they are in the cache already.

    Returns:
        (1, T, heads, value_dim).
    """
    view, memory = cache_view, cache_view.memory
    if _is_flash(memory, memory.layers[module.layer_idx]):
        return _flash(query, key, value, scaling, view, module.layer_idx), None
    columns = view.packed.columns
    if columns is not None:  # (1, kv_heads, C, head_dim)
        kept = memory.keys[module.layer_idx], memory.values[module.layer_idx]
        key, value = (
            held.flatten(0, 1).index_select(0, columns[HELD]).transpose(0, 1).unsqueeze(0).to(query.dtype)
            for held in kept
        )
    return _masked(query, key, value, scaling, view, memory.layers[module.layer_idx]), None


def reads_by_length(memory: PagedCache) -> bool:
    """Whether all that pieces see is read from the cache, and no more, so that room for any number costs no time. Not
    where a part of the cache is far: new keys would come back over the bus."""
    near = memory.ring is None and all(_is_flash(memory, layer) for layer in memory.layers)
    return near and copies_by_length(memory.device)


def _is_flash(memory: PagedCache, layer: Layer) -> bool:
    half = memory.device.type == "cuda" and memory.dtype in _HALF
    return half and layer.rule.chunk is None and layer.head_dim == layer.value_dim <= _WIDEST and not layer.head_dim % 8


def _flash(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, view: PackedView, number: int) -> Tensor:
    packed, memory, rule = view.packed, view.memory, view.memory.layers[number].rule
    wanted, key, value = (one[0].transpose(0, 1).to(memory.dtype) for one in (query, key, value))
    starts = packed.starts
    if packed.columns is not None:
        key, value = gather_columns(memory.keys[number], memory.values[number], packed.columns[HELD], starts[1])
    window = {} if rule.window is None else {"window_size_left": rule.window - 1, "window_size_right": 0}
    out = flash_attention(
        wanted, key, value, starts[0], starts[1], len(wanted), len(key), 0.0, True, False, scale=scaling, **window
    )
    return out[0].unsqueeze(0).to(query.dtype)


def _masked(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, view: PackedView, layer: Layer) -> Tensor:
    seen = view.shared.get(layer.rule)
    if seen is None:
        tokens, columns = view.packed.tokens, view.packed.columns
        piece, position = tokens[PIECE].unsqueeze(1), tokens[POSITION].unsqueeze(1)
        of, at = (tokens[PIECE], tokens[POSITION]) if columns is None else (columns[OF], columns[AT])
        # Padding sees everything: who sees nothing computes NaN.
        seen = view.shared[layer.rule] = ((piece == of) & layer.rule.sees(position, at)) | (piece == NOBODY)
    # A mask multiplies by zero, so what is not finite would reach the other prompts. It is taken out, and put back
    # into the tokens that see it.
    finite = (torch.isfinite(key).all(-1) & torch.isfinite(value).all(-1)).all(1)[0]
    spoilt = (seen & ~finite).any(1)
    key, value = (one.masked_fill(~finite.unsqueeze(1), 0) for one in (key, value))
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling, enable_gqa=grouped)
    return out.masked_fill(spoilt.unsqueeze(1), float("nan")).transpose(1, 2)


# -- in graphs ---------------------------------------------------------------------------------------------------------

_LEAST_TOKENS = 128  # a GPU that computes with fewer waits for the weights as long
_BUSY_TOKENS = 512
_LEAST_COLUMNS = 256

Key = tuple[int, int | None, bool, bool]  # tokens, columns, whether they are scored, whether some have an adapter


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
        adapters: that pieces may have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: PagedCache,
        limits: Limits,
        settings: CUDAGraphConfig | None,
        group: Group,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._model, self._step, self._settings, self._group = model, PackedStep(model, memory), settings, group
        doubling = sizes(_LEAST_TOKENS, limits.tokens, 2)
        # Where a GPU is busy with them, tokens that are padding cost as much as others.
        between = [3 * size // 2 for size in doubling if size >= _BUSY_TOKENS and 3 * size // 2 < limits.tokens]
        self.tokens = sorted({*doubling, *between})
        # One size where any number of columns takes the time of those that there are.
        self._by_length = reads_by_length(memory)
        self.columns = [limits.columns] if self._by_length else sizes(_LEAST_COLUMNS, limits.columns, 4)
        self._buffer = PackedBuffer(memory, limits, self._by_length, adapters)
        self._device, self._released = memory.device, 0
        self.wrappers: dict[Key, CUDAGraphModule] = {}
        self._counts = BucketStats()

    def __call__(self, pieces: list[Piece]) -> Tensor:
        """Stores the keys and values of pieces, in their order; gives the logits after those that are `last`, (pieces
        that are last, vocabulary)."""
        return self._computed(pieces)[: sum(piece.last for piece in pieces)]

    def scored(self, pieces: list[Piece]) -> tuple[Tensor, Scores]:
        """What a call gives, for pieces that have targets, and the scores of all tokens."""
        logits, scores = self._computed(pieces)
        return logits[: sum(piece.last for piece in pieces)], scores

    def _computed(self, pieces: list[Piece]) -> Any:
        key = self._key(pieces)
        packed = self._buffer.fill(pieces, key)
        with attention(self._model, NAME), self._adapters.applied(packed.adapters):
            found = (self._wrapper(key) if self._settings else self._step)(packed)
        self._counts.eager_steps += self._settings is None
        self._counts.row_steps += key[0]
        self._counts.padding_row_steps += key[0] - sum(len(piece.tokens) for piece in pieces)
        return found

    def nearest_size(self, tokens: int) -> int:
        """About as many tokens, of which none is padding when as many are prefilled."""
        return min(self.tokens, key=lambda size: abs(size - tokens))

    def uncounted(self, pieces: list[Piece]) -> Tensor:
        """What a call gives, without a graph, and without traces in the counters."""
        with attention(self._model, NAME):
            logits = self._step(self._buffer.fill(pieces, self._key(pieces)))
        return logits[: sum(piece.last for piece in pieces)]

    def _key(self, pieces: list[Piece]) -> Key:
        used = sum(len(piece.tokens) for piece in pieces)
        size = next(size for size in self.tokens if size >= used)
        columns = None
        if self._by_length or any(piece.start for piece in pieces):
            columns = next(size for size in self.columns if size >= sum(piece.end for piece in pieces))
        scored = any(piece.targets is not None for piece in pieces)
        return size, columns, scored, any(piece.slot for piece in pieces)

    def _wrapper(self, key: Key) -> CUDAGraphModule:
        wrapper = self.wrappers.get(key)
        if wrapper is None:
            name = f"prefill of {key[0]} tokens"
            wrapper = self.wrappers[key] = CUDAGraphModule(self._step, self._settings, name=name, group=self._group)
        return wrapper

    def capture(self, longest: int, adapted: set[bool], progress: bool) -> None:
        """Captures ahead of time, with nothing but padding.

        Args:
            longest: tokens of the longest sequence.
            adapted: whether some of the tokens have an adapter.
            progress: show a bar, on a terminal.
        """
        if self._settings is None:
            return
        most = next((size for size in self.columns if size >= longest), self.columns[-1])
        columns = [None] * (not self._by_length) + [size for size in self.columns if size <= most]
        sizes = [(size, held) for size in self.tokens for held in columns if held is None or held >= size]
        keys = [(size, held, False, some) for size, held in sizes[::-1] for some in sorted(adapted)]
        with tqdm(keys, desc="capturing prefill", unit="graph", disable=None if progress else True) as bar:
            for key in bar:
                for _ in range(self._settings.warmup_steps + 1):
                    packed = self._buffer.fill([], key)
                    with attention(self._model, NAME), self._adapters.applied(packed.adapters):
                        self._wrapper(key)(packed)
                bar.set_postfix(tokens=key[0], refresh=False, **free_memory(self._device))

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


ToDevice = Callable[[list, torch.dtype], Tensor]


# -- with the model's own attention ------------------------------------------------------------------------------------


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
    """Prefills pieces of prompts with the model's own attention, without graphs.

    Args:
        model: with its own attention.
        memory: where keys and values go.
        budget: tokens of one call.
        to_device: brings Python lists to the device.
        adapters: that pieces may have.
        mode: makes the context in which it computes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: PagedCache,
        budget: int,
        to_device: ToDevice,
        adapters: Adapters,
        mode: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.model, self.memory, self.budget, self.to_device = model, memory, budget, to_device
        self._adapters, self._mode = adapters, mode
        self._keeps = takes(model, "logits_to_keep")

    def __call__(self, pieces: list[Piece]) -> Tensor:
        return self._computed(pieces)[0]

    def scored(self, pieces: list[Piece]) -> tuple[Tensor, Scores]:
        """What a call gives, for pieces that have targets, and the scores of all tokens."""
        logits, scores = self._computed(pieces)
        return logits, Scores(*map(torch.cat, zip(*(scores[index] for index in range(len(pieces))), strict=True)))

    def _computed(self, pieces: list[Piece]) -> tuple[Tensor, dict[int, Scores]]:
        found: dict[int, Tensor] = {}
        scores: dict[int, Scores] = {}
        for batch in batches(pieces, self.budget):
            with self._mode():
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
        spare = memory.spare_slots[torch.arange(len(real), device=memory.device) % len(memory.spare_slots)]
        slots = slot_mapping(position, table.repeat_interleave(longest, 0), real, spare, size)
        view = GatheredView(memory, slots, table, start + lengths, start + longest, longest)
        last = sorted({len(piece.tokens) - 1 for piece in pieces})
        scored = pieces[0].targets is not None
        keep = self.to_device(last, torch.int64)
        slots, mask = [piece.slot for piece in pieces], None
        if any(slots):
            mask = self._adapters.chosen(self.to_device(slots, torch.int64).repeat_interleave(longest))
        with self._adapters.applied(mask):
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
