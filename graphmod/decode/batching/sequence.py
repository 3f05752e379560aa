"""One sample on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphmod.decode.batching.seeds import sample_seed
from graphmod.decode.config import Sampling
from graphmod.decode.prefill.piece import Scores
from graphmod.decode.results import Completion
from graphmod.decode.step.sampling import FILTERED, GREEDY, PLAIN, TOP
from graphmod.decode.step.state import RowValues
from graphmod.decode.text.stream import StopTexts


def kind_of(sequences: list[Sequence]) -> int:
    """What a batch of these needs: see `step.sampling`."""
    return max(one.kind for one in sequences) + TOP * any(one.sampling.top_logprobs for one in sequences)


@dataclass(eq=False)
class Sequence:
    """One sample on its way.

    Attributes:
        completion: what the user will get.
        sampling: its settings.
        limit: length at which it ends, prompt included.
        stop_ids: tokens that end it, looked at on the device.
        stop_sequences, stop_texts: what else ends it, looked at on the host.
        handle: of the request it is part of (`batching.handle`).
        blocks: its KV memory, once its prompt has been begun.
        epoch: of what is known of blocks, at that time.
        stored: tokens of its prompt whose keys and values are in its blocks, or will be by what was launched.
        launched: decode steps launched for it; it has at most one token more.
        scores: of its prompt, on their way to the host: each piece's `prefill.piece.Scores`.
        done: whether it has ended.
    """

    completion: Completion
    sampling: Sampling
    limit: int
    stop_ids: list[int]
    stop_sequences: list[list[int]] = field(default_factory=list)
    stop_texts: StopTexts | None = None
    handle: Any = None
    blocks: list[int] = field(default_factory=list)
    epoch: int = 0
    stored: int = 0
    launched: int = 0
    scores: list[Scores] = field(default_factory=list)
    done: bool = False

    @property
    def prompt(self) -> list[int]:
        return self.completion.prompt

    @property
    def seed(self) -> int:
        return sample_seed(self.sampling.seed or 0, self.completion.sample)

    @property
    def tokens_launched(self) -> int:
        """Tokens whose keys and values are in its blocks after all that was launched."""
        return len(self.prompt) + self.launched

    @property
    def steps_left(self) -> int:
        """Decode steps that may still be launched; the first token needs none."""
        return max(0, self.limit - len(self.prompt) - 1 - self.launched)

    @property
    def kind(self) -> int:
        if self.sampling.temperature <= 0:
            return GREEDY
        return FILTERED if self.sampling.top_k > 0 or self.sampling.top_p < 1 else PLAIN

    def book_scores(self) -> None:
        """Gives the completion those of its prompt, once the host has them."""
        done, top = self.completion, self.sampling.top_logprobs
        last = len(self.prompt) - 1  # what comes after the prompt is among the tokens
        done.prompt_logprobs = [one for piece in self.scores for one in piece.logprobs.tolist()][:last]
        if top:
            found = [one for piece in self.scores for one in piece.most_likely(top)]
            done.prompt_top_logprobs = found[:last]
        self.scores = []

    @property
    def ends_on_host(self) -> bool:
        """Whether the host has to look at each token for a stop."""
        return bool(self.stop_sequences) or self.stop_texts is not None

    def ended_by(self, token: int) -> bool:
        """Whether `token`, now the last of the completion, completes a stop of several tokens, or a text."""
        tokens = self.completion.tokens
        if any(tokens[-len(stop) :] == stop for stop in self.stop_sequences):
            return True
        return self.stop_texts is not None and self.stop_texts.met(token)

    def row_values(self) -> RowValues:
        """What its row holds when it joins: the last token of its prompt, as if a decode step were to be given it."""
        return RowValues(
            [self.prompt[-1], len(self.prompt) - 1, 1, self.limit, self.seed, self.sampling.top_k],
            [self.sampling.temperature, self.sampling.top_p],
            self.blocks,
            self.stop_ids,
        )
