"""What prefill is given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphmod.decode.step.sampling import most_likely


class Piece(NamedTuple):
    """Part of a prompt, whose tokens before it are in the cache.

    Attributes:
        tokens: of this part.
        start: how many come before it.
        blocks: of the cache, for the whole sequence.
        last: whether the prompt ends with it, so that the logits after its last token are needed.
        targets: the token that comes after each of its tokens, whose log-probability is asked for (after the last of
            the prompt, any); None where none is.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    last: bool
    targets: list[int] | None = None

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
