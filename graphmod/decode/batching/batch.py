"""Continuous batching: sequences join, decode together, leave; the host stays a chunk of steps behind the device.

Owns what is in flight.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from graphmod.decode.batching.prefill import Prefill
from graphmod.decode.batching.scheduler import Scheduler, Sequence
from graphmod.decode.cache.cache import PagedCache
from graphmod.decode.results import Run
from graphmod.decode.step.graphs import BucketGraphs
from graphmod.decode.step.sampling import sample
from graphmod.decode.step.state import BAD, FULL, NOTHING, STOPPED, BatchState
from graphmod.models.exchange import attention

_NO_NUMBERS = (
    "the model's logits hold NaN or infinity, so no token can be chosen; look at its weights (a diverged training run, "
    "an overflow in fp16)"
)


@dataclass
class _Chunk:
    """Steps that were launched together: in which rows whose tokens come, and where the host finds them."""

    sequences: list[Sequence]
    bucket: int
    kept: list[int]
    event: torch.cuda.Event | None


class ContinuousBatch:
    """Moves sequences from the queue through prefill and decode steps to their end, a turn at a time.

    Args:
        model: with everything for decoding switched on, except its attention, whenever `advance` is called.
        memory, state, scheduler, graphs, prefill: the parts.
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
        prefill: Prefill,
        attention_name: str | None,
        steps: int,
    ) -> None:
        self._model, self._memory, self._state, self.scheduler = model, memory, state, scheduler
        self._graphs, self._prefill = graphs, prefill
        self._attention, self._steps = attention_name, steps
        self._in_flight: deque[_Chunk] = deque()
        self._next_step = 0
        self.prompt_tokens = self.tokens = 0
        self.waited_seconds = 0.0

    def end(self) -> None:
        """Gives up whatever has not finished, and makes every row padding."""
        for chunk in self._in_flight:
            for sequence in chunk.sequences:
                if sequence.blocks and not self.scheduler.runs(sequence):
                    self.scheduler.release(sequence)
        self.scheduler.clear()
        self._in_flight.clear()
        with torch.inference_mode():
            self._state.restart()
        self._next_step = 0

    @property
    def unfinished(self) -> bool:
        return self.scheduler.busy or bool(self._in_flight)

    def advance(self) -> list[Run]:
        """Lets in who fits, launches the next steps, and only then reads the results of the steps before them."""
        runs = self._admit()
        launched = self._launch()
        if self._in_flight and (len(self._in_flight) > 1 or not launched):
            runs += self._read(self._in_flight[0])
            self._in_flight.popleft()  # not before: a codec may raise, and `end` frees the blocks of what is in flight
        return runs

    def _admit(self) -> list[Run]:
        groups, copies = self.scheduler.admit()
        if not groups:
            return []
        firsts = [group[0] for group in groups]
        try:
            logits = self._prefill([first.prompt for first in firsts], [first.blocks for first in firsts])
            self._memory.copy_blocks(copies)
            sequences = [sequence for group in groups for sequence in group]
            of_prompt = [number for number, group in enumerate(groups) for _ in group]
            logits = logits.index_select(0, self._state.to_device(of_prompt, torch.int64))
            tokens, logprobs, bad = self._first_tokens(logits, sequences)
            self.prompt_tokens += sum(len(first.prompt) for first in firsts)
            runs, joining = [], []
            for sequence, token, logprob, wrong in zip(sequences, tokens, logprobs, bad, strict=True):
                over = sequence.steps_left == 0
                status = BAD if wrong else STOPPED if token in sequence.stop_ids else FULL if over else 0
                runs.append(self._take(sequence, [token], [logprob], [status]))
                if sequence.done:
                    self._release(sequence)
                else:
                    joining.append(sequence)
        except BaseException:
            for group in groups:
                for sequence in group:
                    self.scheduler.release(sequence)
            raise
        if joining:
            self._state.set_rows(self.scheduler.join(joining), [sequence.row_values() for sequence in joining])
        return runs

    def _first_tokens(self, logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list, list, list]:
        bring = self._state.to_device
        choice = sample(
            logits,
            bring([s.sampling.temperature for s in sequences], torch.float32),
            bring([s.sampling.top_k for s in sequences], torch.int64),
            bring([s.sampling.top_p for s in sequences], torch.float32),
            bring([s.seed for s in sequences], torch.int64),
            bring([len(s.prompt) for s in sequences], torch.int64),
            max(s.kind for s in sequences),
        )
        return choice.tokens.tolist(), choice.logprobs.tolist(), choice.bad.tolist()

    def _launch(self) -> bool:
        running = self.scheduler.running
        steps = min(self._steps, max((s.steps_left for s in running), default=0))
        if not steps:
            return False
        kind = max(s.kind for s in running)
        for sequence in running:
            sequence.launched += min(steps, sequence.steps_left)
        context = max(len(s.prompt) + s.launched for s in running)
        with attention(self._model, self._attention):
            bucket = self._graphs.launch(len(running), context, kind, steps)
        kept, event = self._state.read_back(self._next_step, steps)
        self._next_step = (self._next_step + steps) % self._state.steps
        self._in_flight.append(_Chunk(list(running), bucket, kept, event))
        # Whose last step this was is known now; the row need not wait until its tokens are read.
        for sequence in [s for s in running if not s.steps_left]:
            self._vacate(sequence)
        return True

    def _read(self, chunk: _Chunk) -> list[Run]:
        if chunk.event is not None:
            began = time.perf_counter()
            chunk.event.synchronize()
            self.waited_seconds += time.perf_counter() - began
        rows = zip(chunk.sequences, *self._state.results_at(chunk.kept, len(chunk.sequences)), strict=True)
        runs = [self._take(sequence, *found) for sequence, *found in rows if not sequence.done]
        self._graphs.count(chunk.bucket, chunk.bucket * len(chunk.kept), sum(len(run.logprobs) for run in runs))
        for sequence in chunk.sequences:
            if sequence.done and sequence.blocks:
                if self.scheduler.runs(sequence):
                    self._vacate(sequence)
                self._release(sequence)
        return runs

    def _take(self, sequence: Sequence, tokens: list[int], logprobs: list[float], statuses: list[int]) -> Run:
        """Books what successive steps found for a sequence, up to its end."""
        done, before = sequence.completion, len(sequence.completion.tokens)
        if sequence.ends_on_host or any(statuses) or NOTHING in tokens:
            for token, logprob, status in zip(tokens, logprobs, statuses, strict=True):
                if token != NOTHING:
                    self._take_one(sequence, token, logprob, status)
                if sequence.done:
                    break
        else:  # as nearly always; rows times steps are many to look at one by one
            done.tokens += tokens
            done.logprobs += logprobs
        run = Run(done, done.tokens[before:], done.logprobs[before:], sequence.done)
        self.tokens += len(run.tokens)
        return run

    def _take_one(self, sequence: Sequence, token: int, logprob: float, status: int) -> None:
        """Books a token of a sequence and whether it was the last."""
        done = sequence.completion
        if status == BAD:
            done.finish_reason, done.error = "error", _NO_NUMBERS
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
            # What nobody holds any more may hold NaN, which masks do not take out.
            self._memory.clear([block for block in blocks if not self.scheduler.allocator.holders(block)])
