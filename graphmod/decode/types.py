"""What decode is told and what it gives back: settings, tokens as they come, finished completions, counters, errors. No
PyTorch.

`EngineConfig` is about memory and speed, and changes no token but by `generation_config`; `Sampling` is about what one
request draws.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, NamedTuple

from graphmod.config import BackendName, CompileMode, choice, integer, names_settings
from graphmod.errors import ConfigError, GraphmodError


class DecodeError(GraphmodError, RuntimeError):
    """Decoding cannot continue, or is impossible with this model; the message gives the reason and what helps."""


class RequestError(GraphmodError, ValueError):
    """One request cannot be served: an empty or too long prompt, an unknown stop, a setting out of range."""


MOST_TOP = 20
"""Most likely tokens that are told of a place, at most."""
STRUCTURES = frozenset(("json", "json_object", "regex", "choice", "grammar"))
"""Forms of `Sampling.structured_outputs`."""
NO_TOKEN_LEFT = (
    "no token is left to choose: min_tokens, allowed_token_ids, bad_words, structured_outputs or logits_processors "
    "rule out all of them, or a logits processor has made NaN or infinity; allow at least one"
)
"""The error of a completion whose own request has ended it."""
TOO_COMPLEX = "what comes next of structured_outputs cannot be told; make it simpler"
"""The beginning of another such error."""


class AttentionName(StrEnum):
    """Which attention decode steps use; `auto` takes the first of `triton`, `sdpa` and `own` that works."""

    auto = "auto"
    sdpa = "sdpa"
    triton = "triton"
    own = "own"


class OffloadName(StrEnum):
    """What of the KV cache is kept in the memory of the host: nothing, or the caches of whole layers."""

    none = "none"
    layers = "layers"


class Keep(StrEnum):
    """What `DecodeEngine.suspend` keeps: nothing (`none`), or graphs and the addresses they read (`graphs`)."""

    none = "none"
    graphs = "graphs"


class WeightsName(StrEnum):
    """What weights of linear layers are decoded from: what was `saved`, or 8 bits for each number (`int8`, `fp8`)."""

    saved = "saved"
    int8 = "int8"
    fp8 = "fp8"


class GenerationConfigName(StrEnum):
    """Where the defaults of sampling come from: the model's generation config (`auto`), or this package (`none`)."""

    auto = "auto"
    none = "none"


@dataclass
class BatchSettings:
    """The settings of `EngineConfig` that say how much is decoded at a time, and where keys and values are.

    Attributes:
        max_batch_size, max_seq_len, block_size, cache_tokens, offload, offload_buffers, offload_resident, attention,
            steps_per_sync, prefill_tokens: of `EngineConfig`. `attention` is `auto`, `sdpa` or `triton`.
    """

    max_batch_size: int = 16
    max_seq_len: int | None = None
    block_size: int = 64
    cache_tokens: int | None = None
    offload: OffloadName = OffloadName.none
    offload_buffers: int = 2
    offload_resident: float = 0.0
    attention: AttentionName = AttentionName.auto
    steps_per_sync: int = 8
    prefill_tokens: int = 4096


@names_settings
@dataclass
class EngineConfig(BatchSettings):
    """Settings of `DecodeEngine`.

    Attributes:
        max_batch_size: sequences decoded at the same time; more wait.
        max_seq_len: tokens of a sequence, prompt included; null takes the model's positions.
        block_size: tokens of a block of the paged cache.
        cache_tokens: tokens the cache holds; null is room for `max_batch_size` sequences of `max_seq_len`.
            Longer requests are shortened.
        offload: `layers` keeps keys and values in the memory of the host, and brings them to the GPU layer by layer
            in each step: for a cache that is larger than the GPU. `none` keeps all on the GPU.
        offload_buffers: layers there is room for on the GPU at a time.
        offload_resident: the share of layers that stay on the GPU all the time, 0 to 1.
        attention: `auto`, `sdpa`, `triton` or `own`, the model's own attention.
        buckets: batch sizes that have a graph; null means 1, 2, 4, 8, 16, 24, 32, ... The maximum is always added.
        steps_per_sync: decode steps launched before results are read; one with `offload=layers`, whatever this says.
        prefill_tokens: tokens of prompts that are prefilled at once, at most; longer prompts go in pieces.
        max_adapters: LoRA adapters there is memory for, beside the model: see `load_adapter`. 0 is for none.
        max_adapter_rank: the largest that they may have; all take the memory of this.
        keep_prefixes: find the beginnings of prompts in the cache even after the engine had nothing to do.
        frozen: nobody changes the model for as long as the engine lives, so that nothing looks whether the beginnings
            in the cache are still its own. Otherwise each arrival of requests reads the weights once.
        generation_config: `auto` takes temperature, top_k, top_p, min_p and repetition_penalty of requests that do not
            say them from the model's generation config, the temperature where that says to draw (`do_sample`); `none`
            does not.
        batch_invariant: compute each token the same, bit for bit, whatever else is in the batch, and as a trainer's
            forward does within `graphmod.decode.batch_invariant(model)`. Takes longer.
        graphs: capture decode steps. Without, every step is eager and counted.
        compile: `none`, `default` or `max`: compile captured steps. On a GPU only.
        compile_in_background: compile in a thread of its own; steps run uncompiled until it is done, instead of
            waiting. So it depends on time which tokens compiled code computes, whose last bits may differ.
        warmup_steps: eager steps of a new bucket before its capture.
        max_failures: failures in a row after which a bucket stays eager.
        backend: `auto`, `cuda` or `emulated`.
    """

    buckets: list[int] | None = None
    max_adapters: int = 0
    max_adapter_rank: int = 16
    keep_prefixes: bool = False
    frozen: bool = False
    generation_config: GenerationConfigName = GenerationConfigName.auto
    batch_invariant: bool = False
    graphs: bool = True
    compile: CompileMode = CompileMode.none
    compile_in_background: bool = False
    warmup_steps: int = 1
    max_failures: int = 3
    backend: BackendName = BackendName.auto

    def __post_init__(self) -> None:
        self.attention = choice(AttentionName, self.attention, "attention")
        self.offload = choice(OffloadName, self.offload, "offload")
        self.generation_config = choice(GenerationConfigName, self.generation_config, "generation_config")
        self.compile = choice(CompileMode, self.compile, "compile")
        self.backend = choice(BackendName, self.backend, "backend")
        for name in (
            "max_batch_size",
            "block_size",
            "offload_buffers",
            "steps_per_sync",
            "prefill_tokens",
            "max_failures",
            "warmup_steps",
            "max_adapter_rank",
        ):
            integer(getattr(self, name), 1, name)
        integer(self.max_adapters, 0, "max_adapters")
        for name, least in (("max_seq_len", 2), ("cache_tokens", 1)):  # of a sequence, a token that is generated too
            if getattr(self, name) is not None:
                integer(getattr(self, name), least, name)
        if self.cache_tokens is not None and self.cache_tokens < self.block_size:
            raise ConfigError(f"cache_tokens={self.cache_tokens} is less than one block of {self.block_size} tokens")
        for size in self.buckets or ():
            integer(size, 1, "each of buckets")
        share = self.offload_resident
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 <= share <= 1:
            raise ConfigError(f"offload_resident must be a number from 0 to 1, got {share!r}")
        for name in ("offload_buffers", "offload_resident"):
            value = getattr(self, name)
            if self.offload is OffloadName.none and value != getattr(EngineConfig, name):
                raise ConfigError(
                    f"{name}={value} is for a cache in the host's memory, and offload=none keeps it on the GPU; add "
                    "offload=layers, or leave it out"
                )
        if self.batch_invariant and self.attention is not AttentionName.auto:
            raise ConfigError(
                f"batch_invariant=True has an attention of its own, and attention={self.attention} names another; use "
                "attention=auto"
            )
        if self.batch_invariant and self.max_adapters:
            raise ConfigError(
                f"batch_invariant=True cannot be used with max_adapters={self.max_adapters}, which add up what "
                "adapters make in another order than a trainer's model does; make the engine of the PEFT model itself"
            )
        if self.batch_invariant and self.compile is not CompileMode.none:
            raise ConfigError(
                f"batch_invariant=True cannot be used with compile={self.compile}, whose kernels depend on the batch; "
                "use compile=none"
            )
        if self.offload is OffloadName.layers and self.compile is not CompileMode.none:
            raise ConfigError(
                f"offload=layers cannot be used with compile={self.compile}: its steps wait for copies, which "
                "compiled code does not shorten; use compile=none"
            )

    def bucket_sizes(self) -> list[int]:
        """The batch sizes that may be captured, ascending, `max_batch_size` last."""
        if self.buckets:
            sizes = [size for size in self.buckets if size < self.max_batch_size]
        else:
            sizes = [size for size in (1, 2, 4) if size < self.max_batch_size]
            sizes += range(8, self.max_batch_size, 8)
        return sorted({*sizes, self.max_batch_size})


def _kind(name: str, value: object, kind: type, words: str) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{name} must be {words}, got {value!r}")


# Kinds of what `Sampling.structured_outputs` may hold, and in words.
_STRUCTURED: dict[str, tuple[Any, str]] = {
    "json": ((str, dict), "a JSON schema: an object, or its text"),
    "json_object": (bool, "true"),
    "regex": (str, "a regular expression that is not empty"),
    "choice": (list, "a list of texts"),
    "grammar": (str, "a grammar that is not empty"),
    "disable_any_whitespace": (bool, "true or false"),
    "whitespace_pattern": (str, "a regular expression"),
}
_TEXTS = ("regex", "grammar")
_KINDS = {Real: "a number", Integral: "an integer"}
# Kinds of the numbers of `Sampling`, what they may be, and in words.
_RANGES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (Real, lambda value: 0 <= value < inf, "be 0 (greedy) or above and finite"),
    "top_k": (Integral, lambda value: value >= 0, "be 0 (all) or above"),
    "top_p": (Real, lambda value: 0 < value <= 1, "be above 0 and at most 1"),
    "min_p": (Real, lambda value: 0 <= value <= 1, "be 0 (all) to 1"),
    "repetition_penalty": (Real, lambda value: 0 < value < inf, "be above 0 and finite"),
    "presence_penalty": (Real, lambda value: -2 <= value <= 2, "be -2 to 2"),
    "frequency_penalty": (Real, lambda value: -2 <= value <= 2, "be -2 to 2"),
    "seed": (Integral, lambda value: -(2**63) <= value < 2**63, "fit into 64 bits"),
    "max_new_tokens": (Integral, lambda value: value >= 1, "be at least 1"),
    "top_logprobs": (Integral, lambda value: 0 <= value <= MOST_TOP, f"be 0 (none) to {MOST_TOP}"),
}


def said(structure: dict[str, Any]) -> dict[str, Any]:
    """What `Sampling.structured_outputs` asks for: without null and false."""
    return {name: value for name, value in structure.items() if value is not None and value is not False}


def _check_structure(given: Any) -> None:
    forms = ", ".join(name for name in _STRUCTURED if name in STRUCTURES)
    if not isinstance(given, dict) or len(STRUCTURES & said(given).keys()) != 1:
        raise RequestError(f"structured_outputs must be an object with one of {forms}, got {given!r:.80}")
    for name, value in said(given).items():
        if name not in _STRUCTURED:
            known = ", ".join(_STRUCTURED)
            raise RequestError(f"structured_outputs has {name!r}, which is not known; it may have {known}")
        kind, words = _STRUCTURED[name]
        texts = value if name == "choice" and isinstance(value, list) else [value if name in _TEXTS else "text"]
        if not isinstance(value, kind) or not texts or not all(isinstance(one, str) and one for one in texts):
            raise RequestError(f"structured_outputs: {name} must be {words}, got {value!r:.80}")


@names_settings
@dataclass
class Sampling:
    """How the tokens of one request are chosen.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it. None is that of the model's
            generation config where that says to draw, else 0; see `EngineConfig.generation_config`.
        top_k: keep the k most likely tokens; 0 keeps all. None is that of the generation config, else 0.
        top_p: keep the fewest most likely tokens whose probabilities reach p; 1 keeps all. Applied after top_k. None is
            that of the generation config, else 1.
        min_p: keep tokens whose probability is at least this share of the most likely one's; 0 keeps all. Applied
            after top_p. None is that of the generation config, else 0.
        repetition_penalty: divides the positive logits of tokens that are in the prompt or the completion, and
            multiplies the negative ones; 1 changes none. None is that of the generation config, else 1.
        presence_penalty: taken from the logits of tokens that are in the completion; -2 to 2.
        frequency_penalty: taken from those logits as often as the token is there; -2 to 2.
        logit_bias: token id -> number that is added to its logit, before the penalties.
        min_tokens: tokens to generate at least: until then stops of one token are no choice, and others do not count.
        allowed_token_ids: the tokens that may be chosen; None allows all.
        bad_words: what must not come, also where it begins in the prompt: token ids, up to 1,024 sequences of up to
            16 token ids, or strings (if the engine was given a codec), with and without a space before them.
        logits_processors: functions `f(tokens, logits)` that return the logits to choose by. They get those of the
            whole batch, after bias, penalties and what is ruled out, before the temperature: `tokens` (rows,
            max_seq_len), prompt and completion, then -1; `logits` (rows, vocabulary) float32. They are captured with
            the step, so they run on the device.
        structured_outputs: what a completion must look like: a dict with one of `json` (a JSON schema), `json_object`
            (True), `regex`, `choice` (a list of texts), `grammar` (GBNF or Lark's). With a JSON form also
            `disable_any_whitespace` (True) or `whitespace_pattern` (a regex). None is free.
        seed: of this request's random numbers. They depend on the seed, the number of the sample and the position
            alone, so the same request draws the same tokens in any batch. Where one seed is given for all prompts of
            a call, each prompt but the first gets one made from it and from the number of the prompt. None draws one
            for each call from torch's default CPU generator.
        max_new_tokens: tokens to generate at most.
        stop: what ends a sequence besides the model's own end-of-sequence token: token ids, sequences of token ids,
            or strings (if the engine was given a codec).
        ignore_eos: continue after the end-of-sequence token.
        adapter: the name of the adapter to compute with, which `DecodeEngine.load_adapter` was given; None is the model
            itself.
        top_logprobs: tell so many of the most likely tokens at each place, with their log-probabilities; up to 20.
        prompt_logprobs: tell the log-probabilities of the prompt's tokens too, and `top_logprobs` of each place in it.
            Nothing of such a prompt is taken from the cache.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    allowed_token_ids: list[int] | None = None
    bad_words: list[Any] = field(default_factory=list)
    logits_processors: list[Any] = field(default_factory=list)
    structured_outputs: dict[str, Any] | None = None
    seed: int | None = None
    max_new_tokens: int = 128
    stop: list[Any] = field(default_factory=list)
    ignore_eos: bool = False
    adapter: str | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def check(self) -> None:
        """Raises RequestError for a setting of the wrong kind or out of range."""
        for name, (kind, fits, words) in _RANGES.items():
            value = getattr(self, name)
            if value is None and getattr(Sampling, name) is None:
                continue
            _kind(name, value, kind, _KINDS[kind])
            if not fits(value):
                raise RequestError(f"{name} must {words}, got {value}")
        _kind("min_tokens", self.min_tokens, Integral, _KINDS[Integral])
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise RequestError(f"min_tokens must be 0 to the most tokens, {self.max_new_tokens}, got {self.min_tokens}")
        for name in ("stop", "bad_words", "logits_processors"):
            if not isinstance(getattr(self, name), (list, tuple)):
                raise RequestError(f"{name} must be a list, got {getattr(self, name)!r}")
        allowed, bias = self.allowed_token_ids, self.logit_bias
        if allowed is not None and not (isinstance(allowed, (list, tuple)) and allowed):
            raise RequestError(f"allowed_token_ids must be a list of at least one token id, got {allowed!r}")
        if not isinstance(bias, dict):
            raise RequestError(f"logit_bias must be a dict of token ids and numbers, got {bias!r}")
        for token, value in bias.items():
            if not isinstance(value, Real) or isinstance(value, bool) or not isfinite(value):
                raise RequestError(f"logit_bias must have finite numbers, got {value!r} for token {token!r}")
        for process in self.logits_processors:
            if not callable(process):
                raise RequestError(f"logits_processors must be functions f(tokens, logits), got {process!r}")
        if self.structured_outputs is not None:
            _check_structure(self.structured_outputs)
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise RequestError(f"adapter must be the name of one, got {self.adapter!r}")


# -- the seeds of samples and prompts ----------------------------------------------------------------------------------

_SAMPLE_STRIDE = 0x9E3779B97F4A7C15  # so that sample 1 of seed 0 is not sample 0 of seed 1
_PROMPT_STRIDE = 0xBF58476D1CE4E5B9  # another one, so that sample 0 of prompt 1 is not sample 1 of prompt 0


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def prompt_seed(seed: int, number: int) -> int:
    """The seed of prompt `number` of a call that was given one for all. The first prompt's is the seed itself, so that
    a prompt alone draws what it draws with a seed of its own."""
    return _int64(int(seed) + number * _PROMPT_STRIDE)  # numpy's integers have 64 bits themselves


def sample_seed(seed: int, number: int) -> int:
    """The seed of sample `number` of a prompt; that of the first is the prompt's own."""
    return _int64(int(seed) + number * _SAMPLE_STRIDE)


@dataclass
class TokenEvent:
    """One token of one sample.

    Attributes:
        request, sample: which prompt, in the order given, and which of its n samples.
        token: its id; None only where the request failed before it had one.
        logprob: log-probability (nats) under the model's own distribution, before penalties and temperature.
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

    def total(self, counter: str) -> int:
        """A counter of `BucketStats`, summed over the buckets."""
        return sum(getattr(bucket, counter) for bucket in self.buckets.values())
