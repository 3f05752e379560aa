"""One sample on its way, and the seeds of samples and prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphmod.decode.config import Sampling
from graphmod.decode.results import Completion
from graphmod.decode.step.sampling import FILTERED, GREEDY, PLAIN
from graphmod.decode.step.state import RowValues
from graphmod.decode.text.stops import StopTexts

_SAMPLE_STRIDE = 0x9E3779B97F4A7C15  # so that sample 1 of seed 0 is not sample 0 of seed 1
_PROMPT_STRIDE = 0xBF58476D1CE4E5B9  # another one, so that sample 0 of prompt 1 is not sample 1 of prompt 0


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def prompt_seed(seed: int, number: int) -> int:
    """The seed of prompt `number` of a call that was given one for all. The first prompt's is the seed itself, so that
    a prompt alone draws what it draws with a seed of its own."""
    return _int64(seed + number * _PROMPT_STRIDE)


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
    done: bool = False

    @property
    def prompt(self) -> list[int]:
        return self.completion.prompt

    @property
    def seed(self) -> int:
        return _int64((self.sampling.seed or 0) + self.completion.sample * _SAMPLE_STRIDE)

    @property
    def steps_left(self) -> int:
        """Decode steps that may still be launched; the first token needs none."""
        return max(0, self.limit - len(self.prompt) - 1 - self.launched)

    @property
    def kind(self) -> int:
        if self.sampling.temperature <= 0:
            return GREEDY
        return FILTERED if self.sampling.top_k > 0 or self.sampling.top_p < 1 else PLAIN

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
