"""What decode gives back: tokens as they come, finished completions, counters."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass
class TokenEvent:
    """One token of one sample.

    Attributes:
        request, sample: which prompt, in the order given, and which of its n samples.
        token: its id; None only where the request failed before it had one.
        logprob: log-probability (nats) under the model's own distribution, before temperature, top-k and top-p.
        finish_reason: None while the sequence continues; otherwise as in `Completion`.
        error: what went wrong where `finish_reason` is "error".
        top_logprobs: the most likely tokens at its place, with their log-probabilities; None unless asked for.
    """

    request: int
    sample: int
    token: int | None
    logprob: float
    finish_reason: str | None = None
    error: str | None = None
    top_logprobs: list[tuple[int, float]] | None = None


TopLogprobs = list[list[tuple[int, float]]]
"""For each place, some of the most likely tokens with their log-probabilities (nats), the likeliest first."""


@dataclass
class Completion:
    """One finished sample.

    Attributes:
        request, sample: which prompt, in the order given, and which of its n samples.
        prompt: its token ids.
        tokens: the generated ids; the one that ended it is the last.
        logprobs: of each of them; see `TokenEvent`.
        finish_reason: "stop" (end-of-sequence or a stop), "length", "error", or "abort" (it was ended by `abort`).
        error: what went wrong where it is "error"; the tokens before that are good.
        text: of the tokens after the prompt, where the engine has a codec, unless it was not asked for: that of both
            together, without that of the prompt, and without special tokens.
        top_logprobs: the most likely tokens at the place of each of `tokens`; None unless asked for.
        prompt_logprobs: of each token of the prompt but the first; None unless asked for, and before the first token.
        prompt_top_logprobs: the most likely tokens at their places; None unless asked for.
    """

    request: int
    sample: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    text: str | None = None
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: list[float] | None = None
    prompt_top_logprobs: TopLogprobs | None = None


class Run(NamedTuple):
    """What one sequence got from steps whose results were read together.

    Attributes:
        completion: that it went into.
        tokens, logprobs: what is new; of an error, what was good.
        ended: whether it ended with that.
        handle: of the request; None where that gave the run.
        top_logprobs: of `tokens`, where they are asked for.
    """

    completion: Completion
    tokens: list[int]
    logprobs: list[float]
    ended: bool
    handle: Any = None
    top_logprobs: TopLogprobs | None = None


def events(runs: list[Run]) -> Iterator[TokenEvent]:
    """The tokens of runs one by one: the first of each, then the second of each, and so on."""
    for step in range(max((len(run.tokens) for run in runs), default=-1) + 1):
        for done, tokens, logprobs, ended, _, top in runs:
            if step < len(tokens):
                last = ended and step == len(tokens) - 1 and done.error is None
                yield TokenEvent(
                    done.request,
                    done.sample,
                    tokens[step],
                    logprobs[step],
                    done.finish_reason if last else None,
                    top_logprobs=None if top is None else top[step],
                )
            elif step == len(tokens) and ended and done.error is not None:
                yield TokenEvent(done.request, done.sample, None, float("nan"), "error", done.error)


@dataclass
class BucketStats:
    """Counters of one batch size.

    Attributes:
        state: `invalid` (no graph), `capturing`, `valid` or `disabled`.
        launches: steps that were replays.
        captures: graphs captured; more than one where the kind of sampling or the visited context differ.
        recaptures: captures of what had been captured before (something moved).
        eager_steps: steps without a graph, warm-up included.
        failures: captures and launches that failed.
        row_steps: rows times steps.
        padding_row_steps: those of them that made no token: padding, and rows that ended within a chunk of steps.
    """

    state: str = "invalid"
    launches: int = 0
    captures: int = 0
    recaptures: int = 0
    eager_steps: int = 0
    failures: int = 0
    row_steps: int = 0
    padding_row_steps: int = 0

    @property
    def padding_waste(self) -> float:
        """Share of the row steps that made no token."""
        return self.padding_row_steps / self.row_steps if self.row_steps else 0.0


@dataclass
class DecodeStats:
    """Counters of an engine since it was made.

    Attributes:
        state: `capturing` while it is; else `valid` with any graph, `disabled` if all that ran are, else `invalid`.
        buckets: batch size -> its counters.
        prefill: counters of the graphs of prefill, whose rows are tokens of prompts.
        prompt_tokens: tokens of prompts that were prefilled.
        prefix_tokens: tokens of prompts that were not, because they were found in the cache.
        tokens: tokens generated.
        waiting, running: sequences that have no token yet, and those that have a row.
        blocks_used, blocks_total: blocks of the KV cache that sequences hold, and those that there are for them.
        capture_seconds: host time spent capturing.
        waited_seconds: host time spent waiting for results of steps.
        graph_bytes: memory reserved by the graphs' pool; it stays in `suspend(keep="graphs")`.
        cache_bytes: memory of the KV cache on the device; 0 while suspended.
        host_cache_bytes: memory of the host that it takes beside that (`offload=layers`); it stays in
            `suspend(keep="graphs")`.
        resume_seconds: what the last `resume` took to take and zero the memory; 0 before the first.
        attention_us: microseconds a layer of each attention that `attention=fastest` compared; else empty.
    """

    state: str
    buckets: dict[int, BucketStats]
    prefill: BucketStats
    prompt_tokens: int
    prefix_tokens: int
    tokens: int
    waiting: int
    running: int
    blocks_used: int
    blocks_total: int
    capture_seconds: float
    waited_seconds: float
    graph_bytes: int
    cache_bytes: int
    host_cache_bytes: int = 0
    resume_seconds: float = 0.0
    attention_us: dict[str, float] = field(default_factory=dict)

    def total(self, counter: str) -> int:
        """A counter of `BucketStats`, summed over the buckets."""
        return sum(getattr(bucket, counter) for bucket in self.buckets.values())
