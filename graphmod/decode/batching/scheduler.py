"""Which sequences run, in which rows, with which blocks; and which still wait. Knows numbers, no tensors.

A sequence gets all the blocks it can come to need when it joins. So none that runs can ever lack memory, nothing is
preempted, block tables do not change while steps run ahead, and what does not fit waits, in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from graphmod.decode.cache.blocks import BlockAllocator
from graphmod.decode.config import Sampling
from graphmod.decode.results import Completion
from graphmod.decode.step.sampling import FILTERED, GREEDY, PLAIN
from graphmod.decode.step.state import RowValues
from graphmod.decode.text.stops import StopTexts

_ROWS_WORTH_A_PREFILL = 8  # an eighth of the rows; see `Scheduler.admit`
_SAMPLE_STRIDE = 0x9E3779B97F4A7C15  # so that sample 1 of seed 0 is not sample 0 of seed 1
_PROMPT_STRIDE = 0xBF58476D1CE4E5B9  # another one, so that sample 0 of prompt 1 is not sample 1 of prompt 0


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def prompt_seed(seed: int, number: int) -> int:
    """The seed of prompt `number` of a call that was given one for all. The first prompt's is the seed itself, so that
    a prompt alone draws what it draws with a seed of its own."""
    return _int64(seed + number * _PROMPT_STRIDE)


@dataclass
class Sequence:
    """One sample on its way.

    Attributes:
        completion: what the user will get.
        sampling: its settings.
        limit: length at which it ends, prompt included.
        stop_ids: tokens that end it, looked at on the device.
        stop_sequences, stop_texts: what else ends it, looked at on the host.
        blocks: its KV memory, once it runs.
        launched: decode steps launched for it; it has at most one token more.
        done: whether it has ended.
    """

    completion: Completion
    sampling: Sampling
    limit: int
    stop_ids: list[int]
    stop_sequences: list[list[int]] = field(default_factory=list)
    stop_texts: StopTexts | None = None
    blocks: list[int] = field(default_factory=list)
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
        """What its row holds when it joins, its first token being known."""
        token, position = self.completion.tokens[-1], len(self.prompt) + len(self.completion.tokens) - 1
        return RowValues(
            [token, position, 1, self.limit, self.seed, self.sampling.top_k],
            [self.sampling.temperature, self.sampling.top_p],
            self.blocks,
            self.stop_ids,
        )


class Scheduler:
    """Admits waiting sequences to rows, and takes finished ones out.

    Args:
        allocator: of the KV cache.
        rows: the most sequences that run at the same time.

    Attributes:
        running: the sequences of rows 0, 1, ...; rows in use are always the first ones.
    """

    def __init__(self, allocator: BlockAllocator, rows: int) -> None:
        self.allocator, self.rows = allocator, rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def blocks_needed(self, sequence: Sequence) -> int:
        # The last token is never fed, so nothing of it is stored.
        return self.allocator.blocks_for(sequence.limit - 1)

    def admit(self) -> tuple[list[list[Sequence]], list[tuple[int, int]]]:
        """Takes sequences from the front of the queue for as long as rows and blocks last.

        A prefill holds everybody up for about as long whether one prompt joins or ten, so while others run it waits
        until an eighth of the rows is free, or enough for all who wait.

        Returns:
            Groups of samples of one prompt, which share its full blocks; and the `(from, to)` block copies to make
            once the first sample of each group has been prefilled. They are not running yet: see `join`.
        """
        groups: list[list[Sequence]] = []
        copies: list[tuple[int, int]] = []
        room = self.rows - len(self.running)
        if self.running and room < min(len(self.waiting), self.rows // _ROWS_WORTH_A_PREFILL):
            return groups, copies
        while self.waiting and room:
            sequence = self.waiting[0]
            total, length = self.blocks_needed(sequence), len(sequence.prompt)
            group = groups[-1] if groups and groups[-1][0].prompt is sequence.prompt else None
            shared = length // self.allocator.block_size if group else 0
            if total - shared > self.allocator.free_blocks:
                break
            if group:
                sequence.blocks, made = self.allocator.fork(group[0].blocks, length, total)
                copies += made
                group.append(sequence)
            else:
                sequence.blocks = self.allocator.allocate(total)
                groups.append([sequence])
            self.waiting.popleft()
            room -= 1
        return groups, copies

    def join(self, sequences: list[Sequence]) -> int:
        """Gives the next rows to `sequences`; returns the first of these rows."""
        first = len(self.running)
        self.running += sequences
        return first

    def runs(self, sequence: Sequence) -> bool:
        """Whether a sequence has a row."""
        return any(other is sequence for other in self.running)

    def leave(self, sequence: Sequence) -> tuple[int, int]:
        """Takes a sequence out of its row, blocks and all; the last row moves into its place.

        Returns:
            `(row that was last, row it moves to)`; the two are the same if the sequence was in the last.
        """
        row = next(index for index, other in enumerate(self.running) if other is sequence)
        last = self.running.pop()
        if last is not sequence:
            self.running[row] = last
        return len(self.running), row

    def release(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks."""
        sequence.done = True
        self.allocator.free(sequence.blocks)
        sequence.blocks = []

    def clear(self) -> None:
        """Gives everything up."""
        for sequence in self.running:
            self.release(sequence)
        self.running.clear()
        self.waiting.clear()
