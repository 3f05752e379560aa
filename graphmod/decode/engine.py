"""`DecodeEngine`: generates from a transformers causal LM; prefill and each decode step are replays of graphs.

Owns the parts of decode and their life, and who may do what when; what moves sequences is in `batch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from graphmod.decode.batching.handle import Handle
from graphmod.decode.config import EngineConfig, Sampling
from graphmod.decode.errors import DecodeError, RequestError
from graphmod.decode.loop import EngineLoop
from graphmod.decode.model_state import decoding, weights_state
from graphmod.decode.parts import build
from graphmod.decode.results import Completion, DecodeStats, Run
from graphmod.decode.step.anatomy import require_causal_lm
from graphmod.decode.step.sampling import GREEDY
from graphmod.decode.streaming import TokenStream
from graphmod.decode.text.codec import Codec
from graphmod.decode.text.stream import completion_text
from graphmod.decode.turns import Turns
from graphmod.decode.verification import compare_tokens
from graphmod.errors import ConfigError
from graphmod.models.exchange import attention


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
        config = dataclasses.replace(config or EngineConfig(), **settings)
        self.model, self.config, self.device = model, config, model.device
        self._modules = list(model.modules())
        parts = self._parts = build(model, config, codec)
        self.max_seq_len, self.requests = parts.max_seq_len, parts.requests
        self.memory, self.state, self.scheduler = parts.memory, parts.state, parts.scheduler
        self.attention, self.attention_us = parts.attention, parts.attention_us
        self.graphs, self.prefill, self._batch = parts.graphs, parts.prefill, parts.batch
        self._turns = Turns()
        self._arrived: deque[Handle] = deque()
        self._leaving: deque[Handle] = deque()
        self._handles: list[Handle] = []
        self._suspended = self._compared = self._moving = False
        self._weights = 0
        self._mixed: set[int] = set()  # ids of completions that weights before and after a change have made
        self._loop: EngineLoop | None = None
        self._making_loop = threading.Lock()

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Any,
        n: int = 1,
        sampling: Sampling | None = None,
        *,
        on_run: Callable[[Run], None] | None = None,
        **settings: Any,
    ) -> Handle:
        """Gives the engine a request, which is worked on from the next `step` on. Any thread may call it.

        Args:
            prompt: a list or 1-D tensor of token ids, or a text if the engine has a codec.
            n: samples; they share the blocks of the prompt.
            sampling: settings; None means the defaults.
            on_run: called with what a sample gets, by the thread that steps the engine.
            settings: single fields of `Sampling`, such as `temperature=0.8`.

        Raises:
            RequestError: the prompt or a setting cannot be used.
            DecodeError: the engine is suspended, or the model moved to another device.
        """
        return self._submit([prompt], n, sampling, settings, on_run)

    def step(self) -> list[Run]:
        """Takes in who arrived, launches the next steps, and returns what became known from those before.

        Call it for as long as there is something `unfinished`. `generate`, `stream` and `EngineLoop` do that.

        Raises:
            DecodeError: the first tokens of this engine are not those of the model's own forward.
            Exception: whatever goes wrong in a step. All requests end with it, and the engine may be used again.
        """
        with self._turn():
            try:
                self._take_in()
                if not self._batch.unfinished:
                    return []
                self._require_memory()
                if self.scheduler.waiting:
                    self._forget_if_changed()
                runs = self._move(self._decoded, self._batch.advance)
                self._give_out(runs)
                self._rest()
            except BaseException as error:
                self._fail(error)
                raise
            return runs

    def abort(self, handle: Handle) -> None:
        """Ends what has not ended of a request, with the reason "abort", and frees its memory: at once, or before the
        next step if another thread is in the middle of one. Any thread may call it."""
        if handle.done:
            return
        self._leaving.append(handle)
        self._let_out()

    def abort_all(self) -> None:
        """Ends all requests; see `abort`."""
        for handle in [*self._arrived, *self._handles]:  # the way they go, so that none is missed in between
            self.abort(handle)

    @property
    def unfinished(self) -> bool:
        """Whether there is something to do."""
        return bool(self._arrived or self._leaving or self._handles)  # any thread may ask, while another steps

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """For as long as it is entered no step runs or is under way, so that weights may change as a whole. Requests
        go on after it, with what they have."""
        with self._turn():
            try:
                self._give_out(self._move(self._decoded, self._batch.drain))
            except BaseException as error:
                self._fail(error)
                raise
            try:
                yield
            finally:
                self._forget()

    @property
    def loop(self) -> EngineLoop:
        """Steps the engine in a thread of its own; what `async for` over a stream uses."""
        if self._loop is None:
            with self._making_loop:  # two threads get the same one
                self._loop = self._loop or EngineLoop(self)
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

        handle = self._submit(prompts, n, sampling, settings, take)
        try:
            while not handle.done:
                self.step()
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
        return TokenStream(self, self._submit(prompts, n, sampling, settings))

    # -- inside a turn -------------------------------------------------------------------------------------------

    def _decoding(self) -> contextlib.AbstractContextManager:
        return decoding(self._modules)

    def _submit(
        self, prompts: Any, n: int, sampling: Any, settings: dict, on_run: Callable[[Run], None] | None = None
    ) -> Handle:
        self._require_memory()
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
        handle = Handle(found, on_run)
        if found:
            self._arrived.append(handle)
        return handle

    def _require_memory(self) -> None:
        if self._suspended:
            raise DecodeError("this engine is suspended and has no KV memory; call resume() first")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Nobody else moves sequences meanwhile. Who is aborted meanwhile is let out at the end."""
        try:
            with self._turns:
                if self._moving:
                    self._give_up(DecodeError("the engine was interrupted before this request had ended"))
                self._let_out()
                yield
        finally:
            self._let_out()

    def _let_out(self) -> None:
        """Lets out who leaves, unless a thread is in the middle of something: that one does it. It may be this one:
        streams are closed wherever garbage is collected."""
        while self._leaving and not self._moving and self._turns.do_if_free(self._take_in_safely):
            pass

    def _take_in_safely(self) -> None:
        try:
            self._take_in()
        except BaseException as error:
            self._fail(error)
            raise

    def _move(self, act: Callable[..., Any], *given: Any) -> Any:
        """Does it. If it is interrupted, `_moving` stays set, whatever else the interruption prevents."""
        self._moving = True
        found = act(*given)
        self._moving = False
        return found

    def _take_in(self) -> None:
        """Lets in who arrived, and out who leaves."""
        if self._arrived or self._leaving:
            self._give_out(self._move(self._arrive_and_leave))
            self._rest()

    def _arrive_and_leave(self) -> list[Run]:
        if self._arrived:
            self._modules = list(self.model.modules())
        while self._arrived:
            handle = self._arrived[0]
            if not handle.done:
                self._handles.append(handle)  # before it is taken away, so that whoever looks finds it
                self.scheduler.waiting.extend(handle.sequences)
            self._arrived.popleft()
        dropped: list[Run] = []
        with torch.inference_mode():
            while self._leaving:
                sequences = self._leaving.popleft().sequences
                dropped += [self._batch.drop(sequence) for sequence in sequences if not sequence.done]
        return dropped

    def _decoded(self, act: Callable[[], list[Run]]) -> list[Run]:
        with self._decoding():
            return self._compare(act())

    def _compare(self, runs: list[Run]) -> list[Run]:
        if not self._compared:
            self._forget_if_changed()
        for done in () if self._compared else [run.completion for run in runs if id(run.completion) not in self._mixed]:
            if len(done.tokens) > 1 and len(done.prompt) <= self.config.prefill_tokens:
                compare_tokens(self.model, done, f"decode steps with {self.attention.name or 'own attention'}")
                self._compared = True
                break
        return runs

    def _give_out(self, runs: list[Run]) -> None:
        codec, errors = self.requests.codec, []
        for run in sorted(runs, key=lambda run: len(run.tokens)):  # as they ended
            try:
                if run.ended and codec is not None:
                    run.completion.text = completion_text(codec, run.completion.prompt, run.completion.tokens)
                run.handle.take(run)
            except BaseException as error:  # by which the others do not lose what they have got
                errors.append(error)
            if run.handle.done and run.handle in self._handles:
                self._handles.remove(run.handle)
        if errors:
            raise errors[0]

    def _forget_if_changed(self) -> None:
        """What is in the cache is no beginning of a prompt any more once the weights are others."""
        now = weights_state(self.model)
        if now != self._weights:
            self._forget()  # even if nothing is known: what runs will be, once it has ended
        self._weights = now

    def _forget(self) -> None:
        self.scheduler.allocator.forget()
        if not self._compared:
            sequences = (sequence for handle in self._handles for sequence in handle.sequences)
            self._mixed = {id(sequence.completion) for sequence in sequences if sequence.stored}

    def _rest(self) -> None:
        """Puts everything back where it was, once there is nothing to do."""
        if not self._batch.unfinished:
            self._move(self._batch.end)
            if not self.config.keep_prefixes:
                self.scheduler.allocator.forget()

    def _fail(self, error: BaseException) -> None:
        """Ends all requests with an error."""
        self._moving = True
        while self._arrived:  # one by one: others may arrive meanwhile
            self._handles.append(self._arrived[0])
            self._arrived.popleft()
        self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """The same, but who has only arrived may go on."""
        try:
            self._batch.give_up()
        finally:  # a GPU that has failed fails there again
            for handle in [*self._handles]:
                handle.fail(error)
                self._handles.remove(handle)
        self._moving = False

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
            kinds: of sampling: `GREEDY`, `PLAIN`, `FILTERED` of `graphmod.decode.step.sampling`.
            prefill: also the graphs of prefill.
            progress: show a bar with the free memory, on a terminal.
        """
        with self._turn():
            self._require_rest("capture ahead of time while the engine is idle, and not suspended")
            unknown = sorted(set(sizes or ()) - set(self.graphs.sizes))
            if unknown:
                raise ConfigError(f"sizes={unknown} are no batch sizes with a graph; choose among {self.graphs.sizes}")
            most = self.graphs.visited(min(max_context or self.max_seq_len, self.max_seq_len))
            contexts = [c for c in self.graphs.contexts if c is None or c <= most]
            try:
                with self._decoding():
                    with attention(self.model, self.attention.name):
                        self.graphs.capture(sizes or self.graphs.sizes, contexts, kinds, progress)
                    if prefill and self.prefill is not None:
                        self.prefill.capture(min(max_context or self.max_seq_len, self.max_seq_len), progress)
            finally:
                self._batch.end()

    def suspend(self) -> None:
        """Gives KV memory and graphs back, for a phase of training. Does nothing when called again.

        Raises:
            DecodeError: something is being generated.
        """
        with self._turn():
            if self._suspended:
                return
            self._require_rest("requests are running; let them end, or abort them, before suspend()")
            self._suspended = True
            self.scheduler.allocator.forget()
            self.graphs.reset()
            if self.prefill is not None:
                self.prefill.reset()
            self.memory.release()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def resume(self) -> None:
        """Takes KV memory again. Graphs come back as they are needed; what did not move is not captured again, so that
        `resume` without `suspend` costs nothing."""
        with self._turn():
            if self._suspended:
                self.memory.allocate()
                self._suspended = False

    def _require_rest(self, words: str) -> None:
        if self.unfinished or self._suspended:
            raise DecodeError(words)

    def force_enable(self) -> None:
        """Lets buckets that failures disabled be captured again."""
        self.graphs.force_enable()
        if self.prefill is not None:
            self.prefill.force_enable()

    @property
    def stats(self) -> DecodeStats:
        """Counters since the engine was made."""
        return self._parts.stats()
