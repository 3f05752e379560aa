"""Cuts batches from a corpus: which windows a step sees, and a thread that has the next ones ready.

A batch is int64 of shape (A, B, S + 1) on the host: A microbatches of B windows of S inputs and, shifted by one, S
targets.
"""

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphmod.errors import ConfigError
from graphmod.train.data.corpus import Corpus
from graphmod.train.loss import has_masks
from graphmod.train.settings import DataConfig
from graphmod.train.step import pinned


def split(corpus: Corpus, data: DataConfig) -> tuple[Tensor, Tensor]:
    """The training tokens and, from the end of the corpus, the evaluation tokens (empty with eval_fraction=0).

    Raises:
        ConfigError: one of them is shorter than a single window.
    """
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


def window_starts(tokens: Tensor, length: int) -> np.ndarray:
    """Where windows of `length` inputs and, shifted by one, targets begin: each token but the first is a target.

    The last window overlaps the one before it where the tokens end. Windows in which there is nothing to train on are
    left out.

    Raises:
        ConfigError: that is all of them.
    """
    last = len(tokens) - 1 - length
    starts = np.unique(np.append(np.arange(0, last + 1, length), last))
    if has_masks(tokens):
        trained = np.concatenate([[0], (tokens >= 0).numpy().cumsum()])
        starts = starts[trained[starts + length + 1] > trained[starts + 1]]
        if not len(starts):
            raise ConfigError(
                "the data has no token to train on: completions, or what the assistant says, are empty; look at its "
                "rows, or set data.train_on=all"
            )
    return starts


@dataclass(frozen=True)
class Place:
    """Which part of the data is whose: each step takes as many microbatches as all ranks have, in their order.

    Attributes:
        rank, ranks: which one this is, of how many.
        step, seen, count: when `step` steps were done, `seen` windows (or batches of buckets) had been seen, of `count`
            in an epoch. A run that goes on with other ranks goes on there.
    """

    rank: int = 0
    ranks: int = 1
    step: int = 0
    seen: int = 0
    count: int = 1

    def of(self, count: int) -> int:
        """What had been seen where an epoch has `count`."""
        return self.seen * count // self.count


ALL = Place()


class Sampler:
    """Things one after the other, in the order of `ShuffledEpochs`; so many for each step and rank.

    Args:
        count: of the things.
        rows: that a step of one rank takes.
        seed: of the order.
        place: of this rank.
    """

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
    """Windows of one row of tokens.

    Args:
        tokens: (N,) of any integer dtype, N at least seq_len + 1.
        shape: (A, B, S), microbatches, sequences and tokens.
        seed: of the order.
        place: of this rank.
    """

    def __init__(self, tokens: Tensor, shape: tuple[int, int, int], seed: int, place: Place = ALL) -> None:
        self._shape, self._tokens, self._starts = shape, tokens, window_starts(tokens, shape[2])
        super().__init__(len(self._starts), shape[0] * shape[1], seed, place)

    def starts(self, step: int) -> np.ndarray:
        """(A * B,): where the windows of `step` begin."""
        return self._starts[self.chosen(step)]

    def __call__(self, step: int) -> Tensor:
        """The batch of `step`, counted from 0: (A, B, S + 1) int64."""
        return windows_at(self._tokens, self.starts(step), self._shape)


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


class Prefetcher:
    """Iterates over `make(step)` for the given steps, made ahead of time by a thread and pinned if asked.

    An exception of `make` is raised where the batch would have come. Use it as a context manager; leaving it early
    stops the thread.

    Args:
        make: from a step to its batch.
        steps: the steps, in order.
        pin: put the batches into pinned memory, from where a GPU copies without stalling the host.
        depth: batches made ahead, at most.
    """

    def __init__(self, make: Callable[[int], Any], steps: range, *, pin: bool = False, depth: int = 2) -> None:
        self._make, self._steps, self._pin = make, steps, pin
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="batches", daemon=True)
        self._thread.start()

    def _put(self, item: tuple[Any, BaseException | None]) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=0.1)  # wakes up to see whether anyone still wants batches
            except queue.Full:
                continue

    def _fill(self) -> None:
        try:
            for step in self._steps:
                if self._closed.is_set():
                    return
                batch = self._make(step)
                self._put((pinned(batch) if self._pin else batch, None))
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put((None, error))

    def __iter__(self) -> Iterator[Any]:
        for _ in self._steps:
            batch, error = self._queue.get()
            if error is not None:
                raise error
            yield batch

    def close(self) -> None:
        """Stops the thread and waits for it; may be called twice."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
