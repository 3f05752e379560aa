"""Which data a run has, which batches it sees, and which loss they need: windows, buckets, packed documents, items."""

import functools
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from graphmod.errors import ConfigError
from graphmod.train.attention import BLOCK_MASK, DOCUMENT_BOUNDS, choose_attention
from graphmod.train.data import Corpus, load_corpus
from graphmod.train.loss import (
    IGNORED,
    PADDING,
    Criterion,
    Forward,
    causal_lm_loss,
    has_masks,
    inputs_of,
    mean_cross_entropy,
    next_token_loss,
    require_tokens,
    targets_counted_by,
    targets_of,
    transformers_logits,
)
from graphmod.train.settings import DataConfig, PackingAttention, RunConfig, Source
from graphmod.train.step import pinned
from graphmod.train.targets import in_words, located, made, named, passes_on, taken_by
from graphmod.words import counted

# -- windows: which of them a step sees, and a thread that has the next ones ready -------------------------------------
# A batch is int64 of shape (A, B, S + 1) on the host: A microbatches of B windows of S inputs and, shifted by one, S
# targets.


def split(corpus: Corpus, data: DataConfig) -> tuple[Tensor, Tensor]:
    """The training tokens and, from the end of the corpus, the evaluation tokens (empty with eval_fraction=0). Raises
    ConfigError where one of them is shorter than a single window."""
    kept = int(len(corpus.tokens) * data.eval_fraction)
    training, evaluation = corpus.tokens[: len(corpus.tokens) - kept], corpus.tokens[len(corpus.tokens) - kept :]
    needed = data.seq_len + 1
    for name, part, used in (("train on", training, True), ("evaluate on", evaluation, data.eval_fraction > 0)):
        if used and len(part) < needed:
            raise ConfigError(
                f"the data is too short: of {corpus.description}, data.eval_fraction={data.eval_fraction} leaves "
                f"{len(part):,} to {name}, and one sequence takes {needed} (data.seq_len + 1). Lower data.seq_len, "
                "give more text, or set another data.eval_fraction"
            )
    return training, evaluation


class ShuffledEpochs:
    """The order in which `count` things are seen: each once in an epoch, every epoch in another order, without end.

    A pure function of the seed, so that a run can be resumed at any step.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self._order = functools.lru_cache(2)(lambda epoch: np.random.default_rng([seed, epoch]).permutation(count))

    def __call__(self, first: int, number: int) -> np.ndarray:
        """(number,) int64: which things stand at the positions from `first` on."""
        places = np.arange(first, first + number)
        epochs, within = places // self.count, places % self.count
        found = np.empty(number, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            found[epochs == epoch] = self._order(epoch)[within[epochs == epoch]]
        return found


def _trained_before(tokens: Tensor) -> np.ndarray:
    """(N + 1,): how many tokens to train on there are before each, and in all."""
    return np.concatenate([[0], (tokens >= 0).numpy().cumsum()])


def window_starts(tokens: Tensor, length: int) -> np.ndarray:
    """Where windows of `length` inputs and, shifted by one, targets begin: each token but the first is a target. The
    last window overlaps the one before it where the tokens end. Windows in which there is nothing to train on are left
    out. Raises ConfigError where that is all of them."""
    last = len(tokens) - 1 - length
    starts = np.unique(np.append(np.arange(0, last + 1, length), last))
    if has_masks(tokens):
        trained = _trained_before(tokens)
        starts = starts[trained[starts + length + 1] > trained[starts + 1]]
        if not len(starts):
            raise ConfigError(
                "the data has no token to train on: completions, or what the assistant says, are empty; look at its "
                "rows, or set data.train_on=all"
            )
    return starts


@dataclass(frozen=True)
class Place:
    """Which part of the data is whose: each step takes as many microbatches as all ranks have, in their order."""

    # Which one this is, of how many.
    rank: int = 0
    ranks: int = 1
    # When `step` steps were done, `seen` windows (or batches of buckets) had been seen, of `count` in an epoch. A run
    # that goes on with other ranks goes on there.
    step: int = 0
    seen: int = 0
    count: int = 1

    def of(self, count: int) -> int:
        """What had been seen where an epoch has `count`."""
        return self.seen * count // self.count


ALL = Place()


class Sampler:
    """Things one after the other, in the order of `ShuffledEpochs`; `rows` of `count` for each step and rank."""

    def __init__(self, count: int, rows: int, seed: int, place: Place = ALL) -> None:
        self._order, self._rows, self._place = ShuffledEpochs(count, seed), rows, place
        self._before = place.of(count)

    def steps(self, epochs: int) -> int:
        """The steps of so many passes; the last one is filled up with the first of the next pass."""
        left = epochs * self._order.count - self._before
        return self._place.step - (-left // (self._rows * self._place.ranks))

    def seen(self, step: int) -> tuple[int, int]:
        """How many all ranks had before `step`, counted from 0, and how many an epoch has."""
        return self._before + (step - self._place.step) * self._rows * self._place.ranks, self._order.count

    def chosen(self, step: int) -> np.ndarray:
        """(rows,) int64: which things `step` takes."""
        return self._order(self.seen(step)[0] + self._place.rank * self._rows, self._rows)


class WindowSampler(Sampler):
    """Windows of one row of tokens (N,), N at least S + 1, in batches of `shape` (A, B, S); of packed documents,
    `documents` has the number of each token's."""

    def __init__(
        self,
        tokens: Tensor,
        shape: tuple[int, int, int],
        seed: int,
        place: Place = ALL,
        documents: Tensor | None = None,
    ) -> None:
        self._shape, self._starts = shape, window_starts(tokens, shape[2])
        self._parts = [tokens] if documents is None else [tokens, documents]
        super().__init__(len(self._starts), shape[0] * shape[1], seed, place)

    def __call__(self, step: int) -> Tensor:
        """The batch of `step`, counted from 0: (A, B, S + 1) int64; of packed documents (A, 2 B, S + 1)."""
        starts = self._starts[self.chosen(step)]
        return torch.cat([windows_at(part, starts, self._shape) for part in self._parts], dim=1)


def windows_at(tokens: Tensor, starts: np.ndarray, shape: tuple[int, int, int]) -> Tensor:
    """The windows of `tokens` that begin at `starts`, (A * B,), as a batch (A, B, S + 1) int64."""
    windows = tokens.unfold(0, shape[2] + 1, 1)
    return windows[torch.from_numpy(starts)].long().view(*shape[:2], -1)


def evenly(count: int, number: int) -> np.ndarray:
    """(number,) int64: which of so many things, evenly from the first to the last one."""
    return np.linspace(0, count - 1, number).astype(np.int64)


def evaluation_starts(tokens: Tensor, sequences: int, length: int, count: int) -> np.ndarray:
    """(count * sequences,): where the windows of an evaluation begin, spread evenly over `tokens`."""
    starts = window_starts(tokens, length)
    return starts[evenly(len(starts), count * sequences)]


_AHEAD = 3  # batches, at most


@contextmanager
def prefetched(make: Callable[[int], Any], steps: Iterable[int], *, pin: bool = False) -> Iterator[Iterator[Any]]:
    """`make(step)` for each of the given steps, made ahead of time by a thread, which ends with this context, and with
    `pin` put into pinned memory, from where a GPU copies without stalling the host. An exception of `make` is raised
    where the batch would have come."""
    left, ahead = iter(steps), deque()

    def ready(step: int) -> Any:
        return pinned(make(step)) if pin else make(step)

    def batches(thread: ThreadPoolExecutor) -> Iterator[Any]:
        while True:
            ahead.extend(thread.submit(ready, step) for step in itertools.islice(left, _AHEAD - len(ahead)))
            if not ahead:
                return
            yield ahead.popleft().result()

    with ThreadPoolExecutor(1, "batches") as thread:
        try:
            yield batches(thread)
        finally:
            thread.shutdown(cancel_futures=True)


# -- documents of different lengths in batches of a few fixed shapes ---------------------------------------------------
# A batch is int64 (A, B, S + 1) for one of the bucket lengths S; padding, at the end of each row, is a token 0 that
# is only read (`train/loss.py`). All buckets hold the same number of tokens: shorter ones have more rows. Attention
# is causal, so real tokens see no padding.


@targets_counted_by(lambda tokens: (tokens[:, 1:] >= 0).sum())
def padded_next_token_loss(
    model: nn.Module, tokens: Tensor, criterion: Criterion = mean_cross_entropy, forward: Forward = transformers_logits
) -> Tensor:
    """Mean cross entropy, in nats per token, over the targets that are neither padding nor only read; the arguments are
    those of `next_token_loss`, padding at the end of rows and tokens that are only read as their complement."""
    require_tokens(tokens)
    return criterion(forward(model, inputs_of(tokens[:, :-1])), targets_of(tokens[:, 1:]))


def cut(starts: np.ndarray, end: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents that begin at `starts` into pieces of at most `longest` + 1 tokens, each of which begins with the
    last token of the one before. Returns start and length of each piece; those of a single token, in which there is
    nothing to predict, are left out."""
    predictions = np.diff(starts, append=end) - 1
    counts = -(-predictions // longest)
    numbers = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    begins = np.repeat(starts, counts) + numbers * longest
    return begins, np.minimum(np.repeat(predictions, counts) - numbers * longest, longest) + 1


class BucketSampler(Sampler):
    """Pieces of documents in the bucket they fit, each once in an epoch; a pure function of (seed, step).

    A batch that its bucket's pieces do not fill is filled up with more of them. Pieces in which there is nothing to
    train on are left out. All ranks have the same bucket in a step.

    Args:
        tokens: (N,) of any integer dtype.
        starts: where documents begin in `tokens`, ascending, the first at 0.
        buckets: lengths in tokens, ascending.
        shape: (A, B): microbatches, and rows of the longest bucket.

    Raises:
        ConfigError: there is no document of two tokens.
    """

    def __init__(
        self,
        tokens: Tensor,
        starts: Tensor,
        buckets: Sequence[int],
        shape: tuple[int, int],
        seed: int,
        place: Place = ALL,
    ) -> None:
        self._tokens, self.buckets, self._whose = tokens, list(buckets), place
        self._microbatches = shape[0]
        begins, lengths = cut(starts.numpy(), len(tokens), self.buckets[-1])
        if has_masks(tokens):
            trained = _trained_before(tokens)
            kept = trained[begins + lengths] > trained[begins + 1]
            begins, lengths = begins[kept], lengths[kept]
        if not len(begins):
            raise ConfigError("data.buckets: there is no document of at least two tokens with one to train on")
        which = np.searchsorted(np.asarray(self.buckets), lengths - 1)
        self._pieces = [(begins[which == i], lengths[which == i]) for i in range(len(self.buckets))]
        self.rows = [shape[1] * self.buckets[-1] // length for length in self.buckets]
        all_rows = [self._microbatches * place.ranks * n for n in self.rows]
        batches = [-(-len(p[0]) // n) for p, n in zip(self._pieces, all_rows, strict=True)]
        self._bucket_of = np.repeat(np.arange(len(batches)), batches)
        self._number_in_bucket = np.concatenate([np.arange(count) for count in batches])
        self._orders = [ShuffledEpochs(max(len(p[0]), 1), seed + 1 + i) for i, p in enumerate(self._pieces)]
        super().__init__(len(self._bucket_of), 1, seed, replace(place, rank=0, ranks=1))  # batches, which all share

    def __call__(self, step: int) -> Tensor:
        """The batch of `step`, counted from 0: (A, rows of its bucket, bucket length + 1) int64."""
        position, in_epoch = self.seen(step)
        batch_number = int(self.chosen(step)[0])
        which, number = int(self._bucket_of[batch_number]), int(self._number_in_bucket[batch_number])
        begins, lengths = self._pieces[which]
        rows = self._microbatches * self.rows[which]
        before = number * self._whose.ranks + self._whose.rank  # parts of the bucket's pieces
        chosen = self._orders[which](position // in_epoch * len(begins) + before * rows, rows)
        batch = torch.full((rows, self.buckets[which] + 1), PADDING, dtype=torch.int64)
        for row, piece in enumerate(chosen.tolist()):
            begin, length = int(begins[piece]), int(lengths[piece])
            batch[row, :length] = self._tokens[begin : begin + length].long()
        return batch.view(self._microbatches, self.rows[which], -1)

    def waste(self) -> dict[str, dict[str, float]]:
        """By bucket length: how many `pieces` are in it and which share of its positions is `padding`; under `all` the
        same of everything, and under `one bucket` if everything were padded to the longest."""
        report, slots, filled, count = {}, 0, 0, 0
        for length, (begins, lengths) in zip(self.buckets, self._pieces, strict=True):
            real, room = int((lengths - 1).sum()), len(begins) * length
            report[str(length)] = {"pieces": len(begins), "padding": 1 - real / room if room else 0.0}
            slots, filled, count = slots + room, filled + real, count + len(begins)
        report["all"] = {"pieces": count, "padding": 1 - filled / slots}
        report["one bucket"] = {"pieces": count, "padding": 1 - filled / (count * self.buckets[-1])}
        return report


# -- several documents in one row, none of which sees another, at one fixed shape --------------------------------------
# A packed batch is int64 (A, 2 B, S + 1): B rows of tokens and, below them, B rows of document numbers. The attention
# mask, or the bounds of the documents, and the positions are computed from the numbers on the device, so that one
# graph serves every packing.


def document_numbers(starts: Tensor, count: int) -> Tensor:
    """(count,) int32: the number of the document that each token belongs to; `starts` are ascending from 0."""
    begins = torch.zeros(count, dtype=torch.int32)
    begins[starts[starts < count]] = 1
    return begins.cumsum(0, dtype=torch.int32) - 1


def most_documents(starts: Tensor, length: int) -> int:
    """At most so many documents share `length` tokens in a row, wherever these begin; `starts` are ascending from 0."""
    starts = starts.unique()
    # The worst windows begin with the last token of a document.
    after = torch.searchsorted(starts, starts + length - 1)
    return min(length, int((after - torch.arange(len(starts))).max()) + 1)


def _begins(documents: Tensor) -> Tensor:
    """(B, S) bool: the first token of each document in each row."""
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return new


def positions(documents: Tensor) -> Tensor:
    """(B, S) int64: how far each token is from the first one of its document in its row."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.where(_begins(documents), index, 0).cummax(dim=1).values
    return index - first


def document_bounds(documents: Tensor, most: int) -> Tensor:
    """(B * most + 1,) int32: where each document begins in the B * S tokens, row after row, from the document of each
    token (B, S); B * S from the last on. A row has at most `most` documents."""
    so_far = _begins(documents).flatten().cumsum(0)
    wanted = torch.arange(1, documents.shape[0] * most + 2, device=documents.device)
    return torch.searchsorted(so_far, wanted, out_int32=True)


def block_mask(documents: Tensor) -> Tensor:
    """(B, 1, S, S) bool: whether a query (third dimension) may see a key: not later, and of the same document."""
    index = torch.arange(documents.shape[1], device=documents.device)
    causal = index[:, None] >= index[None, :]
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def _count_targets(rows: Tensor) -> Tensor:
    tokens, documents = rows.chunk(2)
    return ((documents[:, 1:] == documents[:, :-1]) & (tokens[:, 1:] >= 0)).sum()


@targets_counted_by(_count_targets)
def packed_next_token_loss(
    model: nn.Module, rows: Tensor, most: int | None = None, criterion: Criterion = mean_cross_entropy
) -> Tensor:
    """Mean cross entropy, in nats per token, of the next token within each document.

    Args:
        model: a transformers causal LM with the attention of `train/attention.py`.
        rows: (2 B, S + 1) int64, tokens over document numbers.
        most: documents that a row may have, for attention that is given their bounds; None gives it a mask.
    """
    tokens, documents = rows.chunk(2)
    seen, inputs = documents[:, :-1], inputs_of(tokens[:, :-1])
    apart = {BLOCK_MASK: block_mask(seen)} if most is None else {DOCUMENT_BOUNDS: document_bounds(seen, most)}
    logits = model(input_ids=inputs, position_ids=positions(seen), use_cache=False, **apart).logits
    targets = torch.where(documents[:, 1:] == seen, targets_of(tokens[:, 1:]), IGNORED)
    return criterion(logits, targets)


# -- a data set of one's own: items of any form, by their number -------------------------------------------------------
# Which items a step sees is decided as for windows of text, so that resuming and ranks work alike.

_COMPARED = 16  # items that the fingerprint is made of
_WHOLE = ""  # the name of the only part of an item that is one tensor
_OF_TRAINER = {"source", "target", "batch_size", "eval_fraction", "buckets", "packing"}


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _handed_on(data: DataConfig) -> dict[str, Any]:
    """The settings that the data set takes by name. Raises ConfigError for one that is set, and that it does not
    take."""
    taken = taken_by(located("data", data.target))
    found, default = {}, DataConfig(source=Source.custom)
    for one in fields(data):
        value = getattr(data, one.name)
        if one.name in _OF_TRAINER:
            continue
        if one.name in taken:
            if value is not None:
                found[one.name] = _plain(value)
        elif value != getattr(default, one.name):
            raise ConfigError(
                f"data.{one.name}={_plain(value)} does nothing: {named('data', data.target)} takes no argument "
                f"{one.name!r}; add that to it, or leave the setting out"
            )
    return found


def parts_of(item: Any) -> dict[Any, Any]:
    """The parts of an item or batch by name; by number in a tuple, and by `_WHOLE` where it is no collection."""
    if isinstance(item, Mapping):
        return dict(item)
    return dict(enumerate(item)) if isinstance(item, (tuple, list)) else {_WHOLE: item}


def described(parts: dict[Any, Tensor]) -> str:
    """Shapes and dtypes of tensors with names, in words."""
    return ", ".join(
        f"{name}{': ' if name != _WHOLE else ''}{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"
        for name, part in parts.items()
    )


class Items:
    """The data of a run that one's own data set holds.

    Attributes:
        fingerprint: number of items, and a checksum of some of them.
        count, held_out: of all items, and of those at the end that are evaluated on.
        vocab_size: every token is below it; None where the data set does not say.
        tokenizer: the transformers tokenizer of the data set, or None.
        length: tokens of an item that the model sees: of its first part of whole numbers; 1 without any.
        loss_fn: the loss that goes with the form of the items; None where none does.

    Raises:
        ConfigError: the data set cannot be made, is none with `len` and `[]`, has too few items, or an item that is no
            tensor, tuple or dict of tensors, or another one each time that it is read.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        self.name = named("data", data.target)
        given = _handed_on(data)
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            self._items = made("data", data.target, **given)
            self.count = self._length()
            self._parts = self.read(0)
            self.fingerprint = self._fingerprint()
            if self.fingerprint != self._fingerprint():
                raise ConfigError(
                    f"{self.name}: items are others each time that they are read, so no run could be resumed; draw "
                    "random numbers from a generator that is seeded with the item's number"
                )
        self.tokenizer = getattr(self._items, "tokenizer", None)
        if not isinstance(self.tokenizer, PreTrainedTokenizerBase):
            self.tokenizer = None
        self.vocab_size = getattr(self._items, "vocab_size", None)
        if self.vocab_size is None and self.tokenizer is not None:
            self.vocab_size = len(self.tokenizer)
        if self.vocab_size is not None and (type(self.vocab_size) is not int or self.vocab_size < 1):
            raise ConfigError(f"{self.name}: vocab_size must be a whole number above 0, got {self.vocab_size!r}")
        self.held_out = int(self.count * data.eval_fraction)
        if self.count - self.held_out < 1 or (data.eval_fraction > 0 and not self.held_out):
            raise ConfigError(
                f"{self.name} has {counted(self.count, 'item')}, of which data.eval_fraction={data.eval_fraction} "
                f"leaves {self.count - self.held_out} to train on and {self.held_out} to evaluate on; give more items, "
                "or another data.eval_fraction (0, with train.eval_every=0, evaluates on none)"
            )
        self.loss_fn, self.length = self._fitting()

    def _length(self) -> int:
        kind = type(self._items).__name__
        try:
            count = len(self._items)
        except Exception as error:
            if passes_on(error):
                raise
            raise ConfigError(
                f"{self.name} made a {kind} without a length: {in_words(error)}; make a data set with __len__ and "
                "__getitem__, from which any item can be read: that is how a run is shuffled and resumed"
            ) from error
        if not count:
            raise ConfigError(f"{self.name} made an empty {kind}; give it something to read")
        return count

    def read(self, index: int) -> dict[Any, Tensor]:
        """The parts of an item, as `parts_of` names them. Raises ConfigError where it cannot be read, or does not
        consist of tensors on the host."""
        try:
            item = self._items[index]
        except Exception as error:
            if passes_on(error):
                raise
            raise ConfigError(f"{self.name}: item {index} cannot be read: {in_words(error)}") from error
        parts = parts_of(item)
        wrong = [
            f"{f'{n!r} is ' if n != _WHOLE else ''}a {type(v).__name__}" for n, v in parts.items() if not _is_dense(v)
        ]
        if wrong or not parts:
            some = ", ".join(wrong[:3]) or "it is empty"
            raise ConfigError(
                f"{self.name}: item {index} is not made of tensors on the host ({some}); "
                "return a tensor, or a tuple or dict of tensors (torch.tensor(...))"
            )
        return parts

    def _fitting(self) -> tuple[Callable | None, int]:
        """The loss for items of this form, and their length."""
        whole = [part for part in self._parts.values() if part.dtype is torch.int64]
        length = whole[0].numel() if whole else 1
        if {*self._parts} == {_WHOLE}:
            tokens = self._parts[_WHOLE]
            if tokens.dtype is torch.int64 and tokens.dim() == 1 and len(tokens) > 1:
                return next_token_loss, length - 1
        elif {"input_ids", "labels"} <= {*self._parts}:
            ids, labels = self._parts["input_ids"], self._parts["labels"]
            if ids.dtype is labels.dtype is torch.int64 and ids.dim() == 1 and ids.shape == labels.shape:
                return causal_lm_loss, len(ids)
        return None, length

    def require_loss(self) -> Callable:
        """`loss_fn`. Raises ConfigError where none goes with the items."""
        if self.loss_fn is None:
            raise ConfigError(
                f"no built-in loss is for the items of {self.name}, which are {described(self._parts)}; give items of "
                "tokens, (seq_len + 1,) int64, or a dict of input_ids and labels, (seq_len,) int64 both, or set "
                "train.loss._target_=my_package.loss, a function loss(model, microbatch)"
            )
        return self.loss_fn

    @property
    def names(self) -> list[Any]:
        """Of the parts of an item."""
        return [*self._parts]

    def _fingerprint(self) -> str:
        value = 0
        for index in dict.fromkeys(evenly(self.count, min(_COMPARED, self.count)).tolist()):
            value = _checksum(self.read(index), value)
        return f"{self.count}-items-{value:08x}"

    def summary(self) -> str:
        """What it is, in words."""
        return f"{counted(self.count, 'item')} of {self.name}, each {described(self._parts)}"

    def batch(self, chosen: np.ndarray, shape: tuple[int, int]) -> Any:
        """The items with these numbers, (A * B,), in one batch of their form, each tensor (A, B, ...), `shape` being
        (A, B). Raises ConfigError where they have different shapes, or a token is not below `vocab_size`."""
        indices = chosen.tolist()
        read = [self.read(index) for index in indices]
        first = _form(read[0])
        for index, parts in zip(indices, read, strict=True):
            if _form(parts) != first:
                raise ConfigError(
                    f"{self.name}: the items of a batch must have equal shapes; item {indices[0]} is "
                    f"{described(read[0])}, and item {index} is {described(parts)}; pad them to one shape"
                )
        found = {name: torch.stack([parts[name] for parts in read]) for name in read[0]}
        if self.vocab_size is not None and self.loss_fn is not None:
            for name in (one for one in (_WHOLE, "input_ids", "labels") if one in found):
                self._require_in_vocabulary(name, found[name], indices, self.vocab_size)
        made_up = {name: part.view(*shape, *part.shape[1:]) for name, part in found.items()}
        if _WHOLE in made_up:
            return made_up[_WHOLE]
        return tuple(made_up.values()) if 0 in made_up else made_up

    def _require_in_vocabulary(self, name: str, tokens: Tensor, indices: list[int], size: int) -> None:
        wrong = (tokens >= size) | ((tokens < 0) & ((tokens != IGNORED) if name == "labels" else True))
        if wrong.any():
            row = int(wrong.flatten(1).any(1).nonzero()[0])
            raise ConfigError(
                f"{self.name}: item {indices[row]} holds the token {int(tokens[row][wrong[row]][0])}"
                f"{f' in {name!r}' if name else ''}, and the vocabulary is 0 to {size - 1}; raise the data "
                "set's vocab_size, or correct the item"
            )


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.layout is torch.strided


def _checksum(parts: dict[Any, Tensor], value: int = 0) -> int:
    for name, part in parts.items():
        value = zlib.crc32(f"{name} {part.dtype} {tuple(part.shape)}".encode(), value)
        value = zlib.crc32(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return value


def _form(parts: dict[Any, Tensor]) -> list[tuple]:
    return [(name, part.shape, part.dtype) for name, part in parts.items()]


class ItemSampler(Sampler):
    """Batches of items (A, B), in the order of `ShuffledEpochs`; the last ones, which are held out, are not among
    them."""

    def __init__(self, items: Items, shape: tuple[int, int], seed: int, place: Place = ALL) -> None:
        super().__init__(items.count - items.held_out, shape[0] * shape[1], seed, place)
        self._items, self._shape = items, shape

    def __call__(self, step: int) -> Any:
        """The batch of `step`, counted from 0, of the form of the items; each tensor is (A, B, ...)."""
        return self._items.batch(self.chosen(step), self._shape)


# -- the batches of a run ----------------------------------------------------------------------------------------------

_EVALUATION_SEED = 1

Data = Corpus | Items


def load_data(config: RunConfig) -> Data:
    """The data of a run, on the host; enough for one sequence to train on, and one to evaluate on. Raises ConfigError
    where it cannot be read, or is too short."""
    if config.data.source is Source.custom:
        return Items(config.data, config.train.seed)
    corpus = load_corpus(config.data, config.model, config.train.seed)
    split(corpus, config.data)
    return corpus


@dataclass
class Batches:
    """Where batches come from."""

    # From a step, counted from 0, to its batch; it knows how many steps an epoch has.
    sampler: WindowSampler | BucketSampler | ItemSampler
    evaluation: list[Any]  # batches of the evaluation, on the host; the same at every one
    loss_fn: Callable | None  # the loss that goes with their form; None where none does

    def report(self, captures: dict[int, int]) -> dict[str, dict[str, Any]]:
        """Padding of each bucket, and its graphs from `captures` by length; empty without buckets."""
        if not isinstance(self.sampler, BucketSampler):
            return {}
        found: dict[str, dict[str, Any]] = self.sampler.waste()
        for length in self.sampler.buckets:
            found[str(length)]["graphs"] = captures.get(length, 0)
        return found


def _packed_loss(config: RunConfig, starts: list[Tensor], device: torch.device, dims: Any) -> Callable:
    chosen = choose_attention(config.data.packing_attention, device, config.train.precision, dims)
    if chosen is PackingAttention.mask:
        return packed_next_token_loss
    most = max(most_documents(begins, config.data.seq_len) for begins in starts)
    return partial(packed_next_token_loss, most=most)


def make_batches(config: RunConfig, corpus: Data, device: torch.device, dims: Any, place: Place = ALL) -> Batches:
    """The batches of a run: of this rank, and those of an evaluation, which has the batches of all, and none without
    `train.eval_every`. `dims` is the transformers config of the model. Raises ConfigError where the data is too short,
    or `data.packing_attention` cannot be used."""
    data, train = config.data, config.train
    count = train.eval_batches if train.eval_every else 0
    if isinstance(corpus, Items):
        sampler = ItemSampler(corpus, (train.grad_accumulation, data.batch_size), train.seed, place)
        rows, held_out = data.batch_size, corpus.held_out
        places = corpus.count - held_out + evenly(held_out, count * rows) if count else np.empty(0)
        evaluation = [corpus.batch(some, (1, rows)) for some in places.reshape(count, rows)]
        return Batches(sampler, evaluation, corpus.loss_fn if train.own_loss else corpus.require_loss())
    training, held_out = split(corpus, data)
    starts = corpus.starts[corpus.starts < len(training)]
    later = corpus.starts[corpus.starts > len(training)] - len(training)
    held_starts = torch.cat([torch.zeros(1, dtype=torch.int64), later])
    if data.buckets is not None:
        shape = (train.grad_accumulation, data.batch_size)
        sampler = BucketSampler(training, starts, data.buckets, shape, train.seed, place)
        evaluation = []
        if count:
            held = BucketSampler(held_out, held_starts, data.buckets, (1, data.batch_size), _EVALUATION_SEED)
            evaluation = [held(index) for index in range(count)]
        return Batches(sampler, evaluation, padded_next_token_loss)
    shape = (train.grad_accumulation, data.batch_size, data.seq_len)
    parts, sampler = [held_out], WindowSampler(training, shape, train.seed, place)
    loss_fn = padded_next_token_loss if has_masks(corpus.tokens) else next_token_loss
    if data.packing:
        sampler = WindowSampler(training, shape, train.seed, place, document_numbers(starts, len(training)))
        parts.append(document_numbers(held_starts, len(held_out)))
        loss_fn = _packed_loss(config, [starts, held_starts], device, dims)
    evaluation = []
    if count:
        places = evaluation_starts(held_out, data.batch_size, data.seq_len, count)
        found = [windows_at(part, places, (count, data.batch_size, data.seq_len)) for part in parts]
        evaluation = list(torch.cat(found, dim=1).unsqueeze(1))
    return Batches(sampler, evaluation, loss_fn)
