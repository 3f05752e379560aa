"""Which sequences run, in which rows, with which blocks of the KV cache; which still wait. Knows numbers, no tensors.

A sequence gets all the blocks it can come to need when its prompt is begun. So none that runs can ever lack memory,
nothing is preempted, block tables do not change while steps run ahead, and what does not fit waits, in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from graphmod.decode.adapters import NO_ADAPTER, Adapter
from graphmod.decode.blocks import BlockAllocator
from graphmod.decode.prefill import Limits, Piece, Scores
from graphmod.decode.sampling import ADJUSTED, Adjustment, kind_of_row
from graphmod.decode.step import RowValues
from graphmod.decode.structured import Matcher
from graphmod.decode.types import Completion, Sampling, sample_seed
from graphmod.text import StopTexts


@dataclass(eq=False)
class Sequence:
    """One sample on its way.

    Attributes:
        completion: what the user will get.
        sampling: its settings.
        limit: length at which it ends, prompt included.
        stop_ids: tokens that end it, looked at on the device.
        stop_sequences, stop_texts: what else ends it, looked at on the host.
        adjustment: what changes its logits; None if nothing does.
        matcher: of what it must look like; None if that is free.
        adapter: that it computes with.
        handle: of the request it is part of (`streams.Handle`).
        blocks: its KV memory, once its prompt has been begun.
        epoch: of what is known of blocks, at that time.
        stored: tokens of its prompt whose keys and values are in its blocks, or will be by what was launched.
        launched: decode steps launched for it; it has at most one token more.
        scores: of its prompt, on their way to the host: each piece's `prefill.Scores`.
        done: whether it has ended.
    """

    completion: Completion
    sampling: Sampling
    limit: int
    stop_ids: list[int]
    stop_sequences: list[list[int]] = field(default_factory=list)
    stop_texts: StopTexts | None = None
    adjustment: Adjustment | None = None
    matcher: Matcher | None = None
    adapter: Adapter = NO_ADAPTER
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

    @cached_property
    def kind(self) -> int:
        """What its row needs: see `sampling`."""
        return kind_of_row(self.sampling) | (ADJUSTED << self.adjustment.chain if self.adjustment else 0)

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
        return bool(self.stop_sequences) or self.stop_texts is not None or self.matcher is not None

    def ended_by(self, token: int) -> bool:
        """Whether `token`, now the last of the completion, completes a stop of several tokens, a text, or all that it
        may be."""
        tokens, matcher = self.completion.tokens, self.matcher
        if matcher is not None and matcher.is_stopped():
            return True
        early = len(tokens) <= self.sampling.min_tokens
        if not early and any(tokens[-len(stop) :] == stop for stop in self.stop_sequences):
            return True
        return self.stop_texts is not None and self.stop_texts.met(token, early)

    def piece(self, start: int, end: int) -> Piece:
        """A part of its prompt."""
        last, targets = end == len(self.prompt), None
        if self.sampling.prompt_logprobs:
            targets = [*self.prompt[start + 1 : end + 1], *[0] * last]
        return Piece(self.prompt[start:end], start, self.blocks, last, targets, self.adapter.slot)

    def row_values(self) -> RowValues:
        """What its row holds when it joins: the last token of its prompt, as if a decode step were to be given it."""
        prompt, asked, count = self.prompt, self.sampling, len(self.prompt)
        chain = self.adjustment.chain if self.adjustment else 0
        numbers = [self.limit, self.seed, asked.top_k or 0, count, count + asked.min_tokens, chain]
        drawn = [asked.temperature or 0.0, asked.top_p or 1.0, asked.min_p or 0.0]
        penalties = [asked.repetition_penalty or 1.0, asked.presence_penalty, asked.frequency_penalty]
        return RowValues(
            [prompt[-1], count - 1, 1, *numbers],
            [*drawn, *penalties],
            self.blocks,
            self.stop_ids,
            prompt,
            self.adjustment,
            self.adapter.slot,
        )


Planned = tuple[Sequence, Piece]
"""A sequence, and the part of its prompt that is prefilled next."""


class Scheduler:
    """Admits waiting sequences, a piece of their prompts at a time, gives them rows, and takes finished ones out.

    Args:
        allocator: of the KV cache.
        rows: the most sequences that run at the same time.

    Attributes:
        waiting: sequences whose prompts were not begun.
        filling: those whose prompts were, in part.
        running: the sequences of rows 0, 1, ...; rows in use are always the first ones.
        prefix_tokens: tokens of prompts that were found in the cache.
    """

    def __init__(self, allocator: BlockAllocator, rows: int) -> None:
        self.allocator, self.rows = allocator, rows
        self.waiting: deque[Sequence] = deque()
        self.filling: list[Sequence] = []
        self.running: list[Sequence] = []
        self.prefix_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.filling or self.running)

    @property
    def may_begin(self) -> bool:
        """Whether a sequence waits, and a row is free for it."""
        return bool(self.waiting) and len(self.running) + len(self.filling) < self.rows

    def plan(self, limits: Limits) -> list[Planned]:
        """The pieces of prompts to prefill next, in order: first of those that were begun, then of those that wait,
        for as long as rows and blocks last."""
        planned: list[Planned] = []
        for sequence in [*self.filling]:
            limits = self._piece(planned, sequence, limits)
        while self.waiting and limits.tokens and limits.pieces and self._begin(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.filling.append(sequence)
            limits = self._piece(planned, sequence, limits)
        return planned

    def _begin(self, sequence: Sequence) -> bool:
        """Gives a sequence its blocks, those that hold the beginning of its prompt among them; False if none is free,
        or no row."""
        allocator = self.allocator
        # Of what is not computed again there are no log-probabilities.
        known = [] if sequence.sampling.prompt_logprobs else allocator.match(sequence.prompt, sequence.adapter.number)
        # The last token is never fed, so nothing of it is stored.
        missing = allocator.blocks_for(sequence.limit - 1) - len(known)
        unheld = sum(not allocator.holders(block) for block in known)
        rows = self.rows - len(self.running) - len(self.filling)
        if not rows or missing > allocator.free_blocks - unheld:
            return False
        allocator.hold(known)
        sequence.blocks = known + allocator.allocate(missing)
        sequence.epoch, sequence.stored = allocator.epoch, len(known) * allocator.block_size
        self.prefix_tokens += sequence.stored
        return True

    def _piece(self, planned: list[Planned], sequence: Sequence, limits: Limits) -> Limits:
        """Plans as much of a prompt as fits; what is left of the limits."""
        begin = sequence.stored
        scored = sequence.sampling.prompt_logprobs
        end = min(len(sequence.prompt), begin + limits.tokens, limits.columns)
        end = min(end, begin + limits.scored) if scored else end
        if end <= begin or not limits.pieces:
            return limits
        planned.append((sequence, sequence.piece(begin, end)))
        sequence.stored = end
        if sequence.epoch == self.allocator.epoch:
            self.allocator.know(sequence.prompt[:end], sequence.blocks, sequence.adapter.number)
        return Limits(
            limits.tokens - (end - begin),
            limits.pieces - 1,
            limits.columns - end,
            limits.scored - (end - begin) * scored,
        )

    def join(self, sequences: list[Sequence]) -> int:
        """Gives the next rows to `sequences`, whose prompts are complete; returns the first of these rows."""
        first = len(self.running)
        for sequence in sequences:
            self.filling.remove(sequence)
        self.running += sequences
        return first

    def leave(self, sequence: Sequence) -> tuple[int, int]:
        """Takes a sequence out of its row, blocks and all; the last row moves into its place.

        Returns:
            `(row that was last, row it moves to)`; the two are the same if the sequence was in the last.
        """
        row = self.running.index(sequence)
        last = self.running.pop()
        if last is not sequence:
            self.running[row] = last
        return len(self.running), row

    def release(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks. What it generated is known from now on, as the beginning of a longer prompt."""
        done = sequence.completion
        good = done.error is None and sequence.stored == len(sequence.prompt)
        if good and sequence.epoch == self.allocator.epoch:
            self.allocator.know((sequence.prompt + done.tokens)[:-1], sequence.blocks, sequence.adapter.number)
        sequence.done = True
        self.allocator.free(sequence.blocks)
        sequence.blocks = []

    def clear(self) -> list[Sequence]:
        """Gives everything up; returns whom it had. Their blocks stay theirs."""
        had = [*self.running, *self.filling, *self.waiting]
        self.running.clear()
        self.filling.clear()
        self.waiting.clear()
        return had
