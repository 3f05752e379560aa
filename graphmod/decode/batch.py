"""Continuous batching: sequences join, decode together, leave; the host stays a chunk of steps behind the device.

Owns what is in flight.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphmod.attention import attention
from graphmod.decode.cache import PagedCache
from graphmod.decode.offload import Reader
from graphmod.decode.prefill import Limits, PackedPrefill, PaddedPrefill
from graphmod.decode.sampling import MASKED, TOP, kind_of_rows
from graphmod.decode.scheduler import Planned, Scheduler, Sequence
from graphmod.decode.step import BAD, FULL, NONE_LEFT, NOTHING, STOPPED, BatchState, BucketGraphs
from graphmod.decode.types import NO_TOKEN_LEFT, TOO_COMPLEX, Run

_NO_NUMBERS = (
    "the model's logits hold NaN or infinity, so no token can be chosen; look at its weights (a diverged training run, "
    "an overflow in fp16)"
)
_LEAST_TOKENS = 512  # of prompts in a turn: a replay of so many takes a GPU little longer than one of fewer
_TOKENS_PER_ROW = 24  # of prompts in a turn, for each row that waits for it meanwhile


@dataclass
class _Chunk:
    """Steps that were launched together, or first tokens (`bucket` is None): in which rows whose tokens come, where
    the host finds them, and whether it has."""

    sequences: list[Sequence]
    rows: slice
    bucket: int | None
    kept: list[int]
    event: torch.cuda.Event | None
    booked: bool = False


class ContinuousBatch:
    """Moves sequences from the queue through prefill and decode steps to their end, a turn at a time.

    Args:
        model: with everything for decoding switched on, except its attention, whenever `advance` is called.
        memory, state, scheduler, graphs, prefill: the parts.
        limits: of what is prefilled at once.
        attention_name: the function decode steps use; None for the model's own.
        steps: the most decode steps in a chunk; results are read a chunk at a time.

    Attributes:
        prompt_tokens, tokens: prefilled and generated so far.
        waited_seconds: host time spent waiting for results.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: PagedCache,
        state: BatchState,
        scheduler: Scheduler,
        graphs: BucketGraphs,
        prefill: PackedPrefill | PaddedPrefill,
        limits: Limits,
        attention_name: str | None,
        steps: int,
    ) -> None:
        self._model, self._memory, self._state, self.scheduler = model, memory, state, scheduler
        self._graphs, self._prefill, self._limits = graphs, prefill, limits
        self._attention, self._steps = attention_name, steps
        self._in_flight: deque[_Chunk] = deque()
        self._next_step = 0
        self.prompt_tokens = self.tokens = 0
        self.waited_seconds = 0.0

    def end(self) -> None:
        """Back to the beginning, once all has finished: every row is padding."""
        self._in_flight.clear()
        with torch.inference_mode():
            self._state.restart()
        self._next_step = 0

    def give_up(self) -> None:
        """Gives up everything, after an error that may have come anywhere."""
        given_up = {*self.scheduler.clear(), *(one for chunk in self._in_flight for one in chunk.sequences)}
        self._in_flight.clear()
        blocks = {block for sequence in given_up for block in sequence.blocks}
        for sequence in given_up:
            sequence.done, sequence.blocks = True, []
        self.scheduler.allocator.reset()
        self._next_step = 0
        with torch.inference_mode():
            self._state.restart()
            self._memory.clear([*blocks])  # nobody has looked at what they hold

    @property
    def unfinished(self) -> bool:
        """Whether somebody still waits for tokens."""
        return self.scheduler.busy or any(not one.done for chunk in self._in_flight for one in chunk.sequences)

    def advance(self) -> list[Run]:
        """Prefills what may join, launches the next steps, and only then reads the results of what came before them.

        First tokens are read while those steps run. Where the next token of a row depends on those before it by a mask,
        a single step is launched, and results are read in the middle of it, while the model runs.
        """
        self._fill()
        runs: list[Run] = []
        launched = self._launch(runs)
        return [*runs, *self._read_all(but=int(launched))]

    def drain(self) -> list[Run]:
        """Reads the results of all that was launched."""
        return self._read_all(but=0)

    def drop(self, sequence: Sequence) -> Run:
        """Ends a sequence that has not ended; its blocks are free at once, since whatever still writes to them was
        launched before what their next owner writes."""
        scheduler = self.scheduler
        unseen = sequence in scheduler.filling or any(sequence in chunk.sequences for chunk in self._in_flight)
        for queue in (scheduler.waiting, scheduler.filling):
            if sequence in queue:
                queue.remove(sequence)
        if sequence in scheduler.running:
            self._vacate(sequence)
        done = sequence.completion
        done.finish_reason = "abort"
        blocks = sequence.blocks
        self._release(sequence)
        if unseen:
            self._clear(blocks)  # nobody has looked at what they hold
        return Run(done, [], [], True, sequence.handle)

    def _budget(self) -> int:
        """Tokens of prompts for this turn: few while others wait for their next token, more where several wait for
        their first, who hold each other up."""
        scheduler = self.scheduler
        running = len(scheduler.running)
        if not running:
            return self._limits.tokens
        # Nobody is held up by who gets no row yet.
        joining = min(len(scheduler.waiting) + len(scheduler.filling), scheduler.rows - running)
        fair = max(_LEAST_TOKENS, _TOKENS_PER_ROW * running)
        if joining > 1:
            fair = fair * (running + joining) // running
        return self._prefill.nearest_size(min(fair, self._limits.tokens))

    def _fill(self) -> None:
        """Prefills some tokens of prompts; who has no more of them is given a row and its first token."""
        scheduler = self.scheduler
        planned = scheduler.plan(self._limits._replace(tokens=self._budget()))
        if not planned:
            return
        logits, planned = self._prefilled(planned)
        self.prompt_tokens += sum(len(piece.tokens) for _, piece in planned)
        joining = [sequence for sequence, piece in planned if piece.last]
        if not joining:
            return
        first = scheduler.join(joining)
        self._state.set_rows(first, [sequence.row_values() for sequence in joining])
        kind = kind_of_rows({one.kind for one in joining})
        if kind & MASKED:
            self._state.set_masks(first, [one.matcher for one in joining])
        part = self._state.part(first, len(joining), kind)
        self._graphs.step.take(logits, part, kind, self._graphs.chains_of(kind))
        self._sent(joining, slice(first, first + len(joining)), None, 1, bool(kind & TOP))

    def _prefilled(self, planned: list[Planned]) -> tuple[Tensor, list[Planned]]:
        """The logits after those parts that are the last of their prompts, and the parts in the order of these."""
        scored = [one for one in planned if one[1].targets is not None]
        others = [one for one in planned if one[1].targets is None]
        if not scored:
            return self._prefill([piece for _, piece in planned]), planned
        # First, since they read nothing that others write: all of their prompts is computed.
        found, scores = self._prefill.scored([piece for _, piece in scored])
        scores, begin = scores.on_host(), 0
        for sequence, piece in scored:
            sequence.scores.append(scores.part(begin, len(piece.tokens)))
            begin += len(piece.tokens)
        if others:
            found = torch.cat((found, self._prefill([piece for _, piece in others])))
        return found, [*scored, *others]

    def _launch(self, runs: list[Run]) -> bool:
        """Launches the next steps, if there are any; says so.

        Args:
            runs: gets what it has read on the way.
        """
        running = self.scheduler.running
        kind = kind_of_rows({one.kind for one in running})
        # Half as many as usual while somebody waits: a row that ended within a chunk is empty until the next one.
        most = max(1, self._steps // 2) if self.scheduler.waiting else self._steps
        most = 1 if kind & MASKED else most
        steps = min(most, max((s.steps_left for s in running), default=0))
        before = [sequence.tokens_launched for sequence in running]
        for sequence in running:
            sequence.launched += min(steps, sequence.steps_left)
        if steps:
            context = max(s.tokens_launched for s in running)
            self._memory.expect(
                [Reader(s.blocks, b + 1, s.tokens_launched) for s, b in zip(running, before, strict=True)]
            )
            with attention(self._model, self._attention):
                if kind & MASKED:
                    self._graphs.launch_forward(len(running), context, kind)
                    for chunk in self._in_flight:
                        runs += self._booked(chunk)
                    self._state.set_masks(0, [None if one.done else one.matcher for one in running])
                bucket = self._graphs.launch(len(running), context, kind, steps)
            self._sent(list(running), slice(0, len(running)), bucket, steps, bool(kind & TOP))
        # Whose last step this was is known now; the row need not wait until its tokens are read.
        for sequence in [s for s in running if not s.steps_left]:
            self._vacate(sequence)
        return steps > 0

    def _sent(self, sequences: list[Sequence], rows: slice, bucket: int | None, steps: int, top: bool) -> None:
        kept, event = self._state.read_back(self._next_step, steps, top)
        self._next_step = (self._next_step + steps) % self._state.steps
        self._in_flight.append(_Chunk(sequences, rows, bucket, kept, event))

    def _read_all(self, but: int) -> list[Run]:
        runs: list[Run] = []
        while len(self._in_flight) > but:
            runs += self._booked(self._in_flight[0])
            self._let_go(self._in_flight[0].sequences)
            self._in_flight.popleft()  # not before: a codec may raise, and `end` frees the blocks of what is in flight
        return runs

    def _booked(self, chunk: _Chunk) -> list[Run]:
        """Books what a chunk has found; nothing the second time."""
        if chunk.booked:
            return []
        if chunk.event is not None:
            began = time.perf_counter()
            chunk.event.synchronize()
            self.waited_seconds += time.perf_counter() - began
        rows = zip(chunk.sequences, *self._state.results_at(chunk.kept, chunk.rows), strict=True)
        runs = [
            self._take(sequence, chunk, chunk.rows.start + number, tokens, logprobs, statuses)
            for number, (sequence, tokens, logprobs, statuses) in enumerate(rows)
            if not sequence.done
        ]
        if chunk.bucket is not None:
            self._graphs.count(chunk.bucket, chunk.bucket * len(chunk.kept), sum(len(run.logprobs) for run in runs))
        chunk.booked = True
        return runs

    def _let_go(self, sequences: list[Sequence]) -> None:
        """Frees the rows and blocks of those that have ended."""
        for sequence in sequences:
            if sequence.done and sequence.blocks:
                if sequence in self.scheduler.running:
                    self._vacate(sequence)
                self._release(sequence)

    def _take(
        self,
        sequence: Sequence,
        chunk: _Chunk,
        row: int,
        tokens: list[int],
        logprobs: list[float],
        statuses: list[int],
    ) -> Run:
        """Books what successive steps found for a sequence, up to its end."""
        done, before = sequence.completion, len(sequence.completion.tokens)
        if sequence.scores:
            sequence.book_scores()
        if sequence.ends_on_host or any(statuses) or NOTHING in tokens:
            for token, logprob, status in zip(tokens, logprobs, statuses, strict=True):
                if token != NOTHING:
                    self._take_one(sequence, token, logprob, status)
                if sequence.done:
                    break
        else:  # as nearly always; rows times steps are many to look at one by one
            done.tokens += tokens
            done.logprobs += logprobs
        new, top = done.tokens[before:], None
        if count := sequence.sampling.top_logprobs:
            top = self._state.top_at(chunk.kept, row, count)[: len(new)]
            done.top_logprobs = [] if done.top_logprobs is None else done.top_logprobs
            done.top_logprobs += top
        run = Run(done, new, done.logprobs[before:], sequence.done, sequence.handle, top)
        self.tokens += len(run.tokens)
        return run

    def _take_one(self, sequence: Sequence, token: int, logprob: float, status: int) -> None:
        """Books a token of a sequence and whether it was the last."""
        done, matcher = sequence.completion, sequence.matcher
        if status in (BAD, NONE_LEFT):
            done.finish_reason, done.error = "error", _NO_NUMBERS if status == BAD else NO_TOKEN_LEFT
        elif matcher is not None and not matcher.consume_token(token):
            done.finish_reason, done.error = "error", f"{TOO_COMPLEX}: {matcher.get_error()}"
        else:
            done.tokens.append(token)
            done.logprobs.append(logprob)
            if status == STOPPED or sequence.ended_by(token):
                done.finish_reason = "stop"
            elif status == FULL:
                done.finish_reason = "length"
        sequence.done = done.finish_reason is not None

    def _vacate(self, sequence: Sequence) -> None:
        """Frees the row of a sequence; the last row takes its place."""
        last, row = self.scheduler.leave(sequence)
        if last != row:
            self._state.move_row(last, row)
        self._state.clear_row(last)

    def _release(self, sequence: Sequence) -> None:
        blocks = sequence.blocks
        self.scheduler.release(sequence)
        if sequence.completion.error is not None:
            self._clear(blocks)

    def _clear(self, blocks: list[int]) -> None:
        """Of blocks that may hold NaN, which masks do not take out, those that nobody holds any more."""
        allocator = self.scheduler.allocator
        for block in blocks:
            allocator.unknow(block)
        self._memory.clear([block for block in blocks if not allocator.holders(block)])
