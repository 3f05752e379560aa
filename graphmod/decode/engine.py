"""`DecodeEngine`: generates from a transformers causal LM; prefill and each decode step are replays of graphs.

Owns the parts of decode and their life; requests come and go in `traffic`.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphmod.attention import attention, decoding
from graphmod.config import choice
from graphmod.decode import invariant
from graphmod.decode.adapters import Adapters, adaptable
from graphmod.decode.attention import choose
from graphmod.decode.batch import ContinuousBatch
from graphmod.decode.blocks import BlockAllocator
from graphmod.decode.cache import Offload, PagedCache
from graphmod.decode.model import look_at, require_causal_lm
from graphmod.decode.prefill import Limits, PackedPrefill, PaddedPrefill, unavailable
from graphmod.decode.requests import RequestReader
from graphmod.decode.sampling import ADAPTED, CHOICE, GREEDY
from graphmod.decode.scheduler import Scheduler
from graphmod.decode.step import BatchState, BucketGraphs, DecodeStep, context_sizes
from graphmod.decode.streams import EngineLoop, Handle, TokenStream
from graphmod.decode.traffic import Pause, Traffic
from graphmod.decode.types import (
    BucketStats,
    Completion,
    DecodeError,
    DecodeStats,
    EngineConfig,
    Keep,
    OffloadName,
    RequestError,
    Run,
    Sampling,
)
from graphmod.decode.verification import FirstTokens, compare_made_up
from graphmod.errors import ConfigError
from graphmod.text import Codec

_MOST_PIECES = 32  # of prompts that are prefilled at once: logits are made for the end of each
_MOST_LOGITS = 2**26  # numbers, where they are made for each token: 256 MiB in float32
_LEAST_SCORED = 128  # tokens, however large the vocabulary


def _length(config: EngineConfig, positions: int | None) -> int:
    found = config.max_seq_len or positions
    if found is None:
        raise ConfigError("the number of positions of this model is unknown; give max_seq_len")
    if positions is not None and found > positions:
        raise ConfigError(f"max_seq_len={found} is more than the {positions} positions of the model")
    return found


def _offload(config: EngineConfig, model: PreTrainedModel) -> Offload | None:
    if config.offload is OffloadName.none:
        return None
    if model.device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "offload=layers cannot be used: its copies are a Triton kernel, and Triton is not installed; use "
            "offload=none"
        )
    return Offload(config.offload_buffers, config.offload_resident)


class DecodeEngine:
    """Generates tokens with the model's own weights; nothing is copied or converted.

    Weights that change in place (an optimizer step, `load_state_dict`) are seen by the next token. Between calls the
    model is as it was: training mode, attention, `graph_layers`.

    Args:
        model: a transformers causal LM whose layers keep keys and values, on one device. It is called on a few tokens,
            to see how it attends, and its logits are compared with those of its own forward.
        config: settings; None means the defaults.
        codec: turns text into tokens and back, for prompts, stops and bad words that are text.
        logits_processors: functions for all requests, before their own: see `Sampling`.
        settings: single fields of `EngineConfig`, such as `max_batch_size=8`.

    Raises:
        ConfigError: a setting that cannot be used with this model or here.
        DecodeError: a model that keeps something else than keys and values, or whose logits come out otherwise here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig | None = None,
        *,
        codec: Codec | None = None,
        logits_processors: Iterable[Callable[[Tensor, Tensor], Tensor]] = (),
        **settings: Any,
    ) -> None:
        require_causal_lm(model)
        if codec is not None and not (hasattr(codec, "encode") and hasattr(codec, "decode")):
            raise ConfigError(f"codec must have encode(text) and decode(tokens), got a {type(codec).__name__}")
        config = dataclasses.replace(config or EngineConfig(), **settings)
        self.model, self.config, self.device = model, config, model.device
        text = model.config.get_text_config()
        positions = getattr(text, "max_position_embeddings", None)
        self.max_seq_len = max_seq_len = _length(config, positions)
        modules = list(model.modules())
        anatomy = decoding(modules, look_at, model, max_seq_len)
        shown = decoding(modules, adaptable, model) if config.max_adapters else {}
        self.adapters = adapters = Adapters(model, shown, config.max_adapters, config.max_adapter_rank)
        size, rows = config.block_size, config.max_batch_size
        table = -(-max_seq_len // size)
        blocks = rows * table if config.cache_tokens is None else config.cache_tokens // size
        self.memory = memory = PagedCache(
            anatomy.layers, blocks, size, rows, model.dtype, model.device, _offload(config, model)
        )
        exact = config.batch_invariant
        own_reason = anatomy.own_reason
        chosen = invariant.usable(memory, own_reason) if exact else choose(config.attention, memory, own_reason)
        # A launch that waits its turn reads memory of the host over and over, and takes 5 % of the bus from copies.
        steps = config.steps_per_sync if memory.ring is None else 1
        # Results of two chunks of steps wait to be read at most, and first tokens.
        self.state = state = BatchState(
            rows, table, 2 * steps + 1, model.device, text.vocab_size, max_seq_len, adapters
        )
        self.scheduler = scheduler = Scheduler(BlockAllocator(blocks, size, memory.first_block), rows)
        step = DecodeStep(model, memory, chosen.name is None, invariant.Invariant if exact else nullcontext)
        contexts = context_sizes(size, table * size, chosen.stops_at_context)
        self.graphs = graphs = BucketGraphs(step, state, config, contexts, adapters)
        tokens = config.prefill_tokens
        scored = min(tokens, max(_LEAST_SCORED, _MOST_LOGITS // text.vocab_size))
        limits = Limits(tokens, _MOST_PIECES, max(min(table, blocks) * size, 4 * tokens), scored)
        self.attention = chosen
        packed = None
        if chosen.name is not None and not exact and unavailable(memory) is None:
            packed = PackedPrefill(
                model, memory, limits, graphs.settings if config.graphs else None, graphs.group, adapters
            )
        self.prefill = packed  # None where the model attends by itself
        mode = functools.partial(invariant.batch_invariant, model) if exact else nullcontext
        padded = PaddedPrefill(model, memory, tokens, state.to_device, adapters, mode)
        self._batch = batch = ContinuousBatch(
            model, memory, state, scheduler, graphs, packed or padded, limits, chosen.name, steps
        )
        computed = packed.uncounted if packed else padded
        decoding(modules, compare_made_up, model, memory, state, computed, tokens, chosen, exact)
        self.requests = requests = RequestReader(
            model, max_seq_len, codec, config.generation_config, list(logits_processors), graphs.chains, adapters
        )
        first = FirstTokens(model, tokens, f"decode steps with {chosen.name or 'own attention'}", adapters)
        if graphs.compiler is not None:
            graphs.compiler.taken_over = first.await_again
        self._traffic = Traffic(model, batch, memory, first, requests, config, adapters)
        self._resume_seconds = 0.0
        self._loop: EngineLoop | None = None
        self._making_loop = threading.RLock()  # garbage collection may ask for it in between

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Any,
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        on_run: Callable[[Run], None] | None = None,
        text: bool = True,
        **settings: Any,
    ) -> Handle:
        """Gives the engine a request, which is worked on from the next `step` on. Any thread may call it.

        Args:
            prompt: a list or 1-D tensor of token ids, or a text if the engine has a codec.
            n: samples; they share the blocks of the prompt.
            sampling: settings; None means the defaults.
            on_run: called with what a sample gets, by the thread that steps the engine.
            text: whether completions get their text; who makes it from the tokens saves that thread the work.
            settings: single fields of `Sampling`, such as `temperature=0.8`.

        Raises:
            RequestError: the prompt or a setting cannot be used.
            DecodeError: the engine is suspended, or the model moved to another device.
        """
        return self.submit_all([prompt], n, sampling, on_run=on_run, text=text, **settings)

    def submit_all(
        self,
        prompts: list[Any],
        n: int = 1,
        sampling: Sampling | list[Sampling] | None = None,
        *,
        on_run: Callable[[Run], None] | None = None,
        text: bool = True,
        **settings: Any,
    ) -> Handle:
        """Gives the engine several prompts as one request, whose handle has all their samples. Any thread may call it.

        Args:
            prompts, n, sampling, settings: see `generate`.
            on_run, text: see `submit`.

        Raises:
            RequestError: a prompt or setting cannot be used; the engine has taken none of them.
            DecodeError: the engine is suspended, or the model moved to another device.
        """
        self._traffic.require_memory()
        if self.model.device != self.device:
            raise DecodeError(f"the model moved from {self.device} to {self.model.device}; make a new engine")
        found = self.requests.read(prompts, n, sampling, settings)
        there = self.scheduler.allocator.count * self.memory.block_size
        for sequence in found:
            if len(sequence.prompt) > there:
                raise RequestError(
                    f"prompt {sequence.completion.request} has {len(sequence.prompt)} tokens and the KV cache holds "
                    f"{there} in all; shorten it, or raise cache_tokens"
                )
            sequence.limit = min(sequence.limit, there + 1)  # the last token is never fed, and needs no place
        handle = Handle(found, on_run, text)
        if found:
            self._traffic.enter(handle)
        return handle

    def step(self) -> list[Run]:
        """Takes in who arrived, launches the next steps, and returns what became known from those before.

        Call it for as long as there is something `unfinished`. `generate`, `stream` and `EngineLoop` do that.

        Raises:
            DecodeError: the first tokens of this engine are not those of the model's own forward.
            Exception: whatever goes wrong in a step. All requests end with it, and the engine may be used again.
        """
        return self._step(among_others=True)

    def _step(self, among_others: bool) -> list[Run]:
        with self._traffic.turn():
            return self._traffic.step(among_others)

    def abort(self, handle: Handle) -> None:
        """Ends what has not ended of a request, with the reason "abort", and frees its memory: at once, or before the
        next step if another thread is in the middle of one. Any thread may call it.

        Raises:
            DecodeError: this is no handle of a request of this engine.
        """
        if not isinstance(handle, Handle):
            raise DecodeError(f"abort takes what submit() returns, or a stream's .handle, got {type(handle).__name__}")
        self._traffic.leave(handle)

    def abort_all(self) -> None:
        """Ends all requests; see `abort`."""
        for handle in self._traffic.everybody():
            self.abort(handle)

    @property
    def unfinished(self) -> bool:
        """Whether there is something to do."""
        return self._traffic.unfinished  # any thread may ask, while another steps

    def pause(self) -> Pause:
        """For `with engine.pause():`. While it is entered no step runs or is under way, so that weights may change as a
        whole. Requests go on after it, with what they have.

        The thread that has entered it may use the engine. Others wait; the log tells them for whom, and it is an error
        for them where that thread has ended without leaving it.
        """
        caller = sys._getframe(1)
        return Pause(self._traffic, f"{caller.f_code.co_filename}:{caller.f_lineno}")

    @property
    def loop(self) -> EngineLoop:
        """Steps the engine in a thread of its own; what `async for` over a stream uses."""
        if self._loop is None:
            made = EngineLoop(self)
            with self._making_loop:  # two threads get the same one
                if self._loop is None:
                    self._loop = made
        return self._loop

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
            n: samples of each prompt; they share its blocks.
            sampling: settings for all prompts, or one for each; None means the defaults.
            on_finish: called with each completion as it finishes, so that an interruption loses none of them.
            settings: single fields of `Sampling` for all prompts, such as `temperature=0.8`.

        Returns:
            n completions for each prompt, in order of the prompts and samples.

        Raises:
            RequestError: a prompt or setting cannot be used; nothing has run.
            DecodeError: the first tokens of this engine are not those of the model's own forward.
        """

        def take(run: Run) -> None:
            if run.ended and on_finish is not None:
                on_finish(run.completion)

        handle = self.submit_all(prompts, n, sampling, on_run=take, **settings)
        try:
            while not handle.done:
                self._step(among_others=False)
        finally:
            self.abort(handle)
        handle.check()
        return handle.completions

    def stream(
        self, prompts: list[Any], n: int = 1, sampling: Sampling | list[Sampling] | None = None, **settings: Any
    ) -> TokenStream:
        """As `generate`, but yields tokens as they become known, up to `steps_per_sync` of each sample at a time.

        The model may be used for other things between two tokens, other requests may run beside it, and closing the
        stream ends its own. `async for` lets a thread of the engine's own work.
        """
        return TokenStream(self, self.submit_all(prompts, n, sampling, **settings))

    # -- adapters ------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Loads a LoRA adapter that peft has saved, for requests with `adapter=name`. Any thread may call it, while
        requests run.

        Raises:
            ConfigError: the folder holds none that can be used, the name is taken, or there is no room.
        """
        found = self.adapters.read(Path(folder))
        with self._traffic.turn():
            self.adapters.put(name, found)

    def unload_adapter(self, name: str) -> None:
        """Takes no more requests with this adapter. Those that there are go on with it; then its room is free. Any
        thread may call it.

        Raises:
            ConfigError: there is no such adapter.
        """
        with self._traffic.turn():
            self.adapters.unload(name)

    # -- lifecycle -----------------------------------------------------------------------------------------------

    def warm_up(
        self,
        sizes: list[int] | None = None,
        *,
        max_context: int | None = None,
        kinds: tuple = (GREEDY,),
        prefill: bool = True,
        progress: bool = True,
    ) -> None:
        """Captures graphs ahead of time, largest first; without it each is captured when it is first needed.

        Args:
            sizes: batch sizes among the buckets; None means all.
            max_context: capture for contexts up to this length; None means `max_seq_len`. Of no importance where
                attention stops at the context by itself.
            kinds: of sampling: `GREEDY`, `PLAIN`, `FILTERED` of `graphmod.decode.sampling`, or one of them `| ADJUSTED`
                for requests with penalties, a bias, or tokens that are ruled out, or `| ADAPTED` for adapters.
            prefill: also the graphs of prefill.
            progress: show a bar with the free memory, on a terminal.
        """
        with self._traffic.turn():
            self._traffic.require_rest("capture ahead of time while the engine is idle, and not suspended")
            unknown = sorted(set(sizes or ()) - set(self.graphs.sizes))
            if unknown:
                raise ConfigError(f"sizes={unknown} are no batch sizes with a graph; choose among {self.graphs.sizes}")
            most = self.graphs.visited(min(max_context or self.max_seq_len, self.max_seq_len))
            contexts = [c for c in self.graphs.contexts if c is None or most is None or c <= most]
            # What the engine's logits processors or the model's generation config do to all requests.
            (usual,) = self.requests.read([[0]], 1, Sampling(temperature=1.0, seed=0), {})
            kinds = tuple({kind | usual.kind & ~CHOICE for kind in kinds})

            def capture() -> None:
                with attention(self.model, self.attention.name):
                    self.graphs.capture(sizes or self.graphs.sizes, contexts, kinds, progress)
                if prefill and self.prefill is not None:
                    adapted = {bool(kind & ADAPTED) for kind in kinds}
                    self.prefill.capture(min(max_context or self.max_seq_len, self.max_seq_len), adapted, progress)

            try:
                self._traffic.decoding(capture)
            finally:
                self._batch.end()

    def suspend(self, keep: Keep | str = Keep.none) -> None:
        """Gives memory back, for a phase of training, once nothing that was launched can use it. What is given back
        already stays so when it is called again.

        Args:
            keep: `none` gives KV memory and graphs back. `graphs` gives the KV memory back and keeps the graphs, and
                the addresses they read, so that `resume` needs no capture.

        Raises:
            ConfigError: `keep` is neither.
            DecodeError: something is being generated; or the cache lies in memory whose addresses cannot be kept, and
                nothing was given back.
        """
        kept = choice(Keep, keep, "keep") is Keep.graphs
        with self._traffic.turn():
            if not self._traffic.suspended:
                self._traffic.require_rest("requests are running; let them end, or abort them, before suspend()")
                self.scheduler.allocator.forget()
                if kept:
                    self.memory.unmap()
            if not kept and self.memory.allocated:
                self.graphs.reset()
                if self.prefill is not None:
                    self.prefill.reset()
                self.memory.release()
                if self.device.type == "cuda":
                    gc.collect()
                    torch.cuda.empty_cache()

    def resume(self) -> None:
        """Takes KV memory again, and does nothing without `suspend`. Graphs that were kept are used again, others come
        back as they are needed.

        Raises:
            torch.OutOfMemoryError: there is not enough memory; the engine stays as it is, for another try.
        """
        with self._traffic.turn():
            if self._traffic.suspended:
                began = time.perf_counter()
                self.memory.map()
                self._resume_seconds = time.perf_counter() - began

    def force_enable(self) -> None:
        """Lets buckets that failures disabled be captured again."""
        self.graphs.force_enable()
        if self.prefill is not None:
            self.prefill.force_enable()

    @property
    def stats(self) -> DecodeStats:
        """Counters since the engine was made."""
        buckets, seconds, pool = self.graphs.stats()
        prefill, prefill_seconds = self.prefill.stats() if self.prefill else (BucketStats(), 0.0)
        states = {bucket.state for bucket in buckets.values()}
        ran = {b.state for b in buckets.values() if b.launches or b.eager_steps}
        state = next((s for s in ("capturing", "valid") if s in states), None)
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        return DecodeStats(
            state=state or ("disabled" if ran == {"disabled"} else "invalid"),
            buckets=buckets,
            prefill=prefill,
            prompt_tokens=self._batch.prompt_tokens,
            prefix_tokens=scheduler.prefix_tokens,
            tokens=self._batch.tokens,
            waiting=len(scheduler.waiting) + len(scheduler.filling),
            running=len(scheduler.running),
            blocks_used=allocator.count - allocator.free_blocks,
            blocks_total=allocator.count,
            capture_seconds=seconds + prefill_seconds,
            waited_seconds=self._batch.waited_seconds,
            graph_bytes=pool,
            cache_bytes=self.memory.nbytes,
            host_cache_bytes=self.memory.host_nbytes,
            resume_seconds=self._resume_seconds,
        )
