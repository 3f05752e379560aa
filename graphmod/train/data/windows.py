"""Cuts batches from a corpus: which windows a step sees, and a thread that has the next ones ready.

A batch is int64 of shape (A, B, S + 1) on the host: A microbatches of B windows of S inputs and, shifted by one, S
targets.
"""

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from graphmod.errors import ConfigError
from graphmod.train.data.corpus import Corpus
from graphmod.train.schema import DataConfig


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
                f"the data is too short: {len(part)} tokens to {name}, and one sequence takes {needed} "
                f"(data.seq_len + 1), of {corpus.description}. Lower data.seq_len, give more text, or change "
                f"data.eval_fraction={data.eval_fraction}"
            )
    return training, evaluation


class WindowSampler:
    """Windows at random places; a pure function of (seed, step), so that a run can be resumed at any step.

    Args:
        tokens: (N,) of any integer dtype, N at least seq_len + 1.
        shape: (A, B, S), microbatches, sequences and tokens.
        seed: of the places.
    """

    def __init__(self, tokens: Tensor, shape: tuple[int, int, int], seed: int) -> None:
        self._microbatches, self._sequences, length = shape
        self._windows = tokens.unfold(0, length + 1, 1)
        self._seed = seed

    def __call__(self, step: int) -> Tensor:
        """The batch of `step`, counted from 0: (A, B, S + 1) int64."""
        places = np.random.default_rng([self._seed, step]).integers(
            0, len(self._windows), (self._microbatches, self._sequences)
        )
        return self._windows[torch.from_numpy(places)].long()


def evaluation_batches(tokens: Tensor, sequences: int, length: int, count: int) -> list[Tensor]:
    """`count` batches (1, B, S + 1) int64 of windows spread evenly over `tokens`; the same at every evaluation."""
    windows = tokens.unfold(0, length + 1, 1)
    places = torch.linspace(0, len(windows) - 1, count * sequences).long()
    return list(windows[places].long().view(count, 1, sequences, length + 1))


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

    def __init__(self, make: Callable[[int], Tensor], steps: range, *, pin: bool = False, depth: int = 2) -> None:
        self._make, self._steps, self._pin = make, steps, pin
        self._queue: queue.Queue[tuple[Tensor | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="batches", daemon=True)
        self._thread.start()

    def _put(self, item: tuple[Tensor | None, BaseException | None]) -> None:
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
                self._put((batch.pin_memory() if self._pin else batch, None))
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put((None, error))

    def __iter__(self) -> Iterator[Tensor]:
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
