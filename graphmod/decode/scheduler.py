"""Which sequences run, in which rows, with which blocks of the KV cache; which still wait; and what is known to be in
the blocks. Knows numbers, no tensors.

A sequence gets all the blocks it can come to need when its prompt is begun. So none that runs can ever lack memory,
nothing is preempted, block tables do not change while steps run ahead, and what does not fit waits, in order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from graphmod.decode.prefill import Limits, Piece, Scores
from graphmod.decode.step import FILTERED, GREEDY, PLAIN, TOP, RowValues
from graphmod.decode.types import Completion, DecodeError, Sampling, sample_seed
from graphmod.text import StopTexts

_Place = tuple[int, tuple[int, ...]]  # the block before, by its serial number, and the tokens of this one


class BlockAllocator:
    """Hands out blocks `first .. first + count - 1`, counts who holds them, and finds prompts' beginnings in them.

    A full block that is known keeps its content after its last holder has gone, until it is handed out again: blocks
    that nobody knows first, then those that were freed longest ago. Lookups compare tokens, so that none goes wrong.

    Args:
        count: blocks there are.
        block_size: tokens of a block.
        first: number of the first one; those before it are not for sequences.

    Attributes:
        epoch: how often everything known was forgotten.
    """

    def __init__(self, count: int, block_size: int, first: int = 0) -> None:
        self.count, self.block_size, self.first = count, block_size, first
        self.epoch = 0
        self._known: dict[_Place, int] = {}
        self._place: dict[int, tuple[_Place, int]] = {}  # block -> where it is known, and its serial number
        self._serial = 0
        self.reset()

    @property
    def knows(self) -> bool:
        """Whether something is known to be in any block."""
        return bool(self._known)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, known ones included."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block - self.first]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks nobody holds; what was known to be in them is forgotten.

        Raises:
            DecodeError: there are fewer; nothing was taken.
        """
        if count > len(self._free):
            raise DecodeError(f"{count} blocks of KV memory were requested and {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._holders[block - self.first] = 1
            self.unknow(block)
        return taken

    def hold(self, blocks: list[int]) -> None:
        """Lets one more sequence hold `blocks`, which none of them may write to."""
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block - self.first] += 1

    def free(self, blocks: list[int]) -> None:
        """Gives up one hold on each of the blocks of a sequence.

        Raises:
            DecodeError: nobody holds one of them; a bug in the caller.
        """
        for block in reversed(blocks):  # the end of a sequence goes before its beginning, which more others share
            if self._holders[block - self.first] < 1:
                raise DecodeError(f"block {block} was freed twice")
            self._holders[block - self.first] -= 1
            if not self._holders[block - self.first]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._place)

    def match(self, tokens: list[int]) -> list[int]:
        """The known blocks that hold the beginning of `tokens`, all but the last token at most. None is held by that.

        The last token is left, since somebody has to compute what comes after it.
        """
        found: list[int] = []
        serial, size = 0, self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            block = self._known.get((serial, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            serial = self._place[block][1]
        return found

    def know(self, tokens: list[int], blocks: list[int]) -> None:
        """Notes that `blocks` hold `tokens`, as far as they fill them. Where others are known to hold the same, those
        stay the known ones."""
        serial, size = 0, self.block_size
        for start, block in zip(range(0, len(tokens) // size * size, size), blocks, strict=False):
            place = (serial, tuple(tokens[start : start + size]))
            known = self._known.get(place)
            if known is None:
                if block in self._place:
                    return  # it is known to come after another block, whose content was replaced since
                self._serial += 1
                self._known[place] = known = block
                self._place[block] = (place, self._serial)
            serial = self._place[known][1]

    def unknow(self, block: int) -> None:
        """Forgets what is in a block; what came after it is not found any more."""
        place, _ = self._place.pop(block, (None, 0))
        if place is not None:
            del self._known[place]

    def forget(self) -> None:
        """Forgets what is in all blocks, as after the weights have changed."""
        self._known.clear()
        self._place.clear()
        self.epoch += 1

    def reset(self) -> None:
        """Takes all blocks back, whoever holds them, and forgets what is in them."""
        self._free = OrderedDict.fromkeys(range(self.first, self.first + self.count))  # in the order of handing out
        self._holders = [0] * self.count
        self.forget()


def kind_of_row(sampling: Sampling) -> int:
    """What one sample needs."""
    if not sampling.temperature:
        return GREEDY
    return FILTERED if sampling.top_k or sampling.top_p not in (None, 1) else PLAIN


def kind_of(sequences: list[Sequence]) -> int:
    """What a batch of these needs: see `step`."""
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
        return kind_of_row(self.sampling)

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

    def piece(self, start: int, end: int) -> Piece:
        """A part of its prompt."""
        last, targets = end == len(self.prompt), None
        if self.sampling.prompt_logprobs:
            targets = [*self.prompt[start + 1 : end + 1], *[0] * last]
        return Piece(self.prompt[start:end], start, self.blocks, last, targets)

    def row_values(self) -> RowValues:
        """What its row holds when it joins: the last token of its prompt, as if a decode step were to be given it."""
        return RowValues(
            [self.prompt[-1], len(self.prompt) - 1, 1, self.limit, self.seed, self.sampling.top_k or 0],
            [self.sampling.temperature or 0.0, self.sampling.top_p or 1.0],
            self.blocks,
            self.stop_ids,
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
            if not limits.pieces:
                return planned
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
        known = [] if sequence.sampling.prompt_logprobs else allocator.match(sequence.prompt)
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
        if end <= begin:
            return limits
        planned.append((sequence, sequence.piece(begin, end)))
        sequence.stored = end
        if sequence.epoch == self.allocator.epoch:
            self.allocator.know(sequence.prompt[:end], sequence.blocks)
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
            self.allocator.know((sequence.prompt + done.tokens)[:-1], sequence.blocks)
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
