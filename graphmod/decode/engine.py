"""`DecodeEngine`: generates from a transformers causal LM, prefill eager, each decode step a replay of a graph.

Owns the parts of decode and their life; the loop that moves sequences is in `batch`.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from graphmod.config import CompileMode
from graphmod.decode.attention.choice import choose
from graphmod.decode.batching.batch import ContinuousBatch
from graphmod.decode.batching.prefill import Prefill
from graphmod.decode.batching.requests import RequestReader, eos_ids
from graphmod.decode.batching.scheduler import Scheduler
from graphmod.decode.cache.blocks import BlockAllocator
from graphmod.decode.cache.cache import PagedCache
from graphmod.decode.config import EngineConfig, Sampling
from graphmod.decode.errors import DecodeError, RequestError
from graphmod.decode.model_state import decoding
from graphmod.decode.results import Completion, DecodeStats, Run, TokenEvent, events
from graphmod.decode.step.anatomy import look_at, require_causal_lm
from graphmod.decode.step.graphs import BucketGraphs, context_sizes
from graphmod.decode.step.sampling import GREEDY
from graphmod.decode.step.state import BatchState
from graphmod.decode.step.step import DecodeStep
from graphmod.decode.text.codec import Codec
from graphmod.decode.text.stream import completion_text
from graphmod.decode.verification import compare_made_up, compare_tokens
from graphmod.errors import ConfigError
from graphmod.models.exchange import attention

log = logging.getLogger("graphmod")


class DecodeEngine:
    """Generates tokens with the model's own weights; nothing is copied or converted.

    Weights that change in place (an optimizer step, `load_state_dict`) are seen by the next token. Between calls the
    model is as it was: training mode, attention, `graph_layers`.

    Args:
        model: a transformers causal LM whose layers keep keys and values, on one device. It is called on a few tokens,
            to see how it attends, and its logits are compared with those of its own forward.
        config: settings; None means the defaults.
        codec: turns text into tokens and back, for prompts and stops that are text.
        settings: single fields of `EngineConfig`, such as `max_batch_size=8`.

    Raises:
        ConfigError: a setting that cannot be used with this model or here.
        DecodeError: a model that keeps something else than keys and values, or whose logits come out otherwise here.
    """

    def __init__(
        self, model: PreTrainedModel, config: EngineConfig | None = None, *, codec: Codec | None = None, **settings: Any
    ) -> None:
        require_causal_lm(model)
        self.model = model
        self.config = dataclasses.replace(config or EngineConfig(), **settings)
        text = model.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        self.max_seq_len = self.config.max_seq_len or positions
        if self.max_seq_len is None:
            raise ConfigError("the number of positions of this model is unknown; give max_seq_len")
        if positions is not None and self.max_seq_len > positions:
            raise ConfigError(f"max_seq_len={self.max_seq_len} is more than the {positions} positions of the model")
        self.device = model.device
        self._modules = list(model.modules())
        with decoding(self._modules):
            anatomy = look_at(model, self.max_seq_len)
        block_size = self.config.block_size
        table = -(-self.max_seq_len // block_size)
        rows = self.config.max_batch_size
        blocks = rows * table if self.config.cache_tokens is None else self.config.cache_tokens // block_size
        if blocks < 1:
            raise ConfigError(f"cache_tokens={self.config.cache_tokens} is less than one block of {block_size} tokens")
        self.memory = PagedCache(anatomy.layers, blocks, block_size, rows, model.dtype, self.device)
        compiled = self.config.compile is not CompileMode.none
        self.attention, self.attention_us = choose(
            self.config.attention, self.memory, compiled, self.max_seq_len, anatomy.own_reason
        )
        self.state = BatchState(rows, table, 2 * self.config.steps_per_sync, self.device)
        self.scheduler = Scheduler(BlockAllocator(blocks, block_size, self.memory.first_block), rows)
        contexts = context_sizes(block_size, table * block_size, self.attention.stops_at_context)
        step = DecodeStep(model, self.memory, self.config.compile, own=self.attention.name is None)
        self.graphs = BucketGraphs(step, self.state, self.config, contexts)
        self.requests = RequestReader(text.vocab_size, self.max_seq_len, eos_ids(model, codec), codec, positions)
        prefill = Prefill(model, self.memory, self.config.prefill_tokens, self.state.to_device)
        self._batch = ContinuousBatch(
            model,
            self.memory,
            self.state,
            self.scheduler,
            self.graphs,
            prefill,
            self.attention.name,
            self.config.steps_per_sync,
        )
        self._busy = self._suspended = self._compared = False
        with decoding(self._modules):
            compare_made_up(model, self.memory, self.state, prefill, self.attention)

    # -- generating ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: list[Any],
        n: int = 1,
        sampling: Sampling | list[Sampling] | None = None,
        *,
        on_finish: Callable[[Completion], None] | None = None,
        **settings: Any,
    ) -> list[Completion]:
        """Generates for all prompts; they share batches as they come and go.

        Args:
            prompts: each a list or 1-D tensor of token ids, or a text if the engine has a codec.
            n: samples of each prompt; they share its prefill and its blocks.
            sampling: settings for all prompts, or one for each; None means the defaults.
            on_finish: called with each completion as it finishes, so that an interruption loses none of them.
            settings: single fields of `Sampling` for all prompts, such as `temperature=0.8`.

        Returns:
            n completions for each prompt, in order of the prompts and samples.

        Raises:
            RequestError: a prompt or setting cannot be used; nothing has run.
            DecodeError: the first tokens of this engine are not those of the model's own forward.
        """
        finished: list[Completion] = []

        def take(completion: Completion) -> None:
            finished.append(completion)
            if self.requests.codec is not None:
                completion.text = completion_text(self.requests.codec, completion.prompt, completion.tokens)
            if on_finish is not None:
                on_finish(completion)

        self._begin(prompts, n, sampling, settings)
        try:
            with decoding(self._modules):
                while self._batch.unfinished:
                    ended = [run for run in self._advance() if run.ended]
                    for run in sorted(ended, key=lambda run: len(run.tokens)):  # as they finished
                        take(run.completion)
        finally:
            self._end()
        return sorted(finished, key=lambda c: (c.request, c.sample))

    def stream(
        self, prompts: list[Any], n: int = 1, sampling: Sampling | list[Sampling] | None = None, **settings: Any
    ) -> Iterator[TokenEvent]:
        """As `generate`, but yields tokens as they become known, up to `steps_per_sync` at a time.

        The model may be used for other things between two tokens, and closing the iterator ends all requests.
        """
        self._begin(prompts, n, sampling, settings)
        try:
            while self._batch.unfinished:
                with decoding(self._modules):
                    runs = self._advance()
                yield from events(runs)
        finally:
            self._end()

    def _advance(self) -> list[Run]:
        runs = self._batch.advance()
        for done in () if self._compared else [run.completion for run in runs]:
            if len(done.tokens) > 1 and len(done.prompt) <= self.config.prefill_tokens:
                compare_tokens(self.model, done, f"decode steps with {self.attention.name or 'own attention'}")
                self._compared = True
                break
        return runs

    def _begin(self, prompts: list[Any], n: int, sampling: Any, settings: dict) -> None:
        if self._busy:
            raise DecodeError("this engine is already generating; finish or close the other iterator first")
        if self._suspended:
            raise DecodeError("this engine is suspended and has no KV memory; call resume() first")
        if self.model.device != self.device:
            raise DecodeError(f"the model moved from {self.device} to {self.model.device}; make a new engine")
        found = self.requests.read(prompts, n, sampling, settings)
        there = self.scheduler.allocator.count
        for sequence in found:
            needed = self.scheduler.blocks_needed(sequence)
            if needed > there:
                size = self.memory.block_size
                raise RequestError(
                    f"prompt {sequence.completion.request} needs {needed * size} tokens of KV memory and the engine "
                    f"has {there * size} in all; lower max_new_tokens, or raise cache_tokens"
                )
        self.scheduler.waiting.extend(found)
        self._modules = list(self.model.modules())
        self._busy = True

    def _end(self) -> None:
        self._batch.end()
        self._busy = False

    # -- lifecycle -----------------------------------------------------------------------------------------------

    def warm_up(
        self, sizes: list[int] | None = None, *, max_context: int | None = None, kinds: tuple = (GREEDY,), progress=True
    ) -> None:
        """Captures graphs ahead of time, largest first; without it each is captured when it is first needed.

        Args:
            sizes: batch sizes among the buckets; None means all.
            max_context: capture for contexts up to this length; None means `max_seq_len`. Of no importance where
                attention stops at the context by itself.
            kinds: of sampling: `GREEDY`, `PLAIN`, `FILTERED` of `graphmod.decode.step.sampling`.
            progress: show a bar with the free memory.
        """
        if self._busy or self._suspended:
            raise DecodeError("capture ahead of time while the engine is idle, and not suspended")
        unknown = sorted(set(sizes or ()) - set(self.graphs.sizes))
        if unknown:
            raise ConfigError(f"sizes={unknown} are no batch sizes with a graph; choose among {self.graphs.sizes}")
        most = self.graphs.visited(min(max_context or self.max_seq_len, self.max_seq_len))
        contexts = [c for c in self.graphs.contexts if c is None or c <= most]
        try:
            with decoding(self._modules), attention(self.model, self.attention.name):
                self.graphs.capture(sizes or self.graphs.sizes, contexts, kinds, progress)
        finally:
            self._end()

    def suspend(self) -> None:
        """Gives KV memory and graphs back, for a phase of training. Does nothing when called again.

        Raises:
            DecodeError: something is being generated.
        """
        if self._busy:
            raise DecodeError("requests are running; finish or close their iterator before suspend()")
        if self._suspended:
            return
        self._suspended = True
        self.graphs.reset()
        self.memory.release()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self) -> None:
        """Takes KV memory again. Graphs come back as they are needed; what did not move is not captured again, so that
        `resume` without `suspend` costs nothing."""
        if self._suspended:
            self.memory.allocate()
            self._suspended = False

    def force_enable(self) -> None:
        """Lets buckets that failures disabled be captured again."""
        self.graphs.force_enable()

    @property
    def stats(self) -> DecodeStats:
        """Counters since the engine was made."""
        buckets, seconds, pool = self.graphs.stats()
        states = {bucket.state for bucket in buckets.values()}
        ran = {b.state for b in buckets.values() if b.launches or b.eager_steps}
        state = next((s for s in ("capturing", "valid") if s in states), None)
        state = state or ("disabled" if ran == {"disabled"} else "invalid")
        return DecodeStats(
            state=state,
            buckets=buckets,
            prompt_tokens=self._batch.prompt_tokens,
            tokens=self._batch.tokens,
            capture_seconds=seconds,
            waited_seconds=self._batch.waited_seconds,
            graph_bytes=pool,
            cache_bytes=self.memory.nbytes,
            attention_us=dict(self.attention_us),
        )
