"""Requests that come and go while others run: whose turn it is, who is let in and out, and whom an error ends."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from graphmod.attention import decoding
from graphmod.decode.adapters import Adapters
from graphmod.decode.batch import ContinuousBatch
from graphmod.decode.cache import PagedCache
from graphmod.decode.model import ModelWatch, WeightsWatch
from graphmod.decode.requests import RequestReader
from graphmod.decode.streams import Handle, tell
from graphmod.decode.types import DecodeError, EngineConfig, Run
from graphmod.decode.verification import FirstTokens
from graphmod.interrupts import Held
from graphmod.text import completion_text

log = logging.getLogger("graphmod")

_LOOK = 0.05  # seconds between two looks whether there still is something to wait for
_LONG = 10  # seconds after which who waits is told for whom
_LAST = 10  # seconds that a step may still take when the interpreter ends
_all: weakref.WeakSet[Turns] = weakref.WeakSet()


_RLock: Any = type(threading.RLock())


class Turns(_RLock):
    """A lock that goes to a thread that waits for it before the one that has just had it gets it again.

    A thread that steps an engine takes it again right after it has released it, and nobody else would ever get it from
    `threading.RLock`. The thread that has it may take it again.

    Attributes:
        paused: the thread that keeps it for a while, and where it says so in the source; None while none does.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()
        self.paused: tuple[threading.Thread, str] | None = None
        _all.add(self)

    def take(self, interrupts: Held) -> bool:
        """Waits for it; says whether this thread had it before.

        Args:
            interrupts: that are held: who is interrupted once he has it may not be able to give it back.

        Raises:
            DecodeError: the thread that has paused has ended.
        """
        if self._is_owned():
            return self.acquire()
        self._wait_for(self._next, interrupts)
        try:
            self._wait_for(self, interrupts)
        finally:
            self._next.release()
        return False

    def _wait_for(self, lock: Any, interrupts: Held) -> None:
        began, told = time.monotonic(), False
        while not lock.acquire(timeout=_LOOK):
            interrupts.tell()
            if (paused := self.paused) is None:
                continue
            thread, place = paused
            if not thread.is_alive():
                raise DecodeError(
                    f"the thread {thread.name!r} has ended and never left the engine.pause() that it entered at "
                    f"{place}; write `with engine.pause():`, and make a new engine"
                )
            if not told and time.monotonic() - began > _LONG:
                log.warning("waiting for thread %r to leave the engine.pause() of %s", thread.name, place)
                told = True

    def do_if_free(self, act: Callable[[], Any]) -> bool:
        """Does it while it has the lock, if that needs no waiting; says whether it did."""
        if self._is_owned():
            act()
            return True
        try:
            if not self.acquire(blocking=False):
                return False
            act()
            return True
        finally:
            if self._is_owned():
                self.release()


@atexit.register
def _end() -> None:
    """Takes the turns of all engines and keeps them: a daemon thread that the end of the interpreter meets in the
    middle of an operation of PyTorch would abort the process."""
    for turns in [*_all]:
        if turns.paused is None:
            turns.acquire(timeout=_LAST)


class Traffic:
    """Lets one thread at a time move sequences, for all that arrive from any thread.

    Args:
        model: that decodes.
        batch: moves the sequences.
        memory: the KV cache.
        first: compares the first tokens.
        requests: has the codec that makes the texts of completions.
        config: of the engine.
        adapters: that sequences may have.

    Attributes:
        turns: who may move sequences.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: ContinuousBatch,
        memory: PagedCache,
        first: FirstTokens,
        requests: RequestReader,
        config: EngineConfig,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._model, self._batch, self._memory, self._first = model, batch, memory, first
        self._requests, self._keep_prefixes, self._frozen = requests, config.keep_prefixes, config.frozen
        self._modules = list(model.modules())
        self._weights, self._watch = WeightsWatch(), ModelWatch(model)
        self._watched = False  # since before what is in the cache was computed
        self._asked = False  # requests have come since the model was looked at
        self.turns = Turns()
        self._arrived: deque[Handle] = deque()
        self._leaving: deque[Handle] = deque()
        self._handles: list[Handle] = []
        self._moving = False

    # -- from any thread -----------------------------------------------------------------------------------------

    def enter(self, handle: Handle) -> None:
        """Lets a request in, before the next step."""
        self._arrived.append(handle)

    def leave(self, handle: Handle) -> None:
        """Lets a request out: at once, or before the next step if another thread is in the middle of one.

        Raises:
            DecodeError: it is another engine's.
        """
        if handle.done:
            return
        if handle not in self.everybody() and not handle.done:  # it may end in between
            raise DecodeError("this request is another engine's; abort it there")
        self._leaving.append(handle)
        self._let_out()

    def everybody(self) -> list[Handle]:
        """Who is there, or was a moment ago."""
        return [*self._arrived, *self._handles]  # the way they go, so that none is missed in between

    @property
    def unfinished(self) -> bool:
        """Whether there is something to do."""
        return bool(self._arrived or self._leaving or self._handles)

    @contextlib.contextmanager
    def turn(self) -> Iterator[Held]:
        """Nobody else moves sequences meanwhile, and Ctrl-C comes after it, or where what it gives lets it be heard.
        Who is aborted meanwhile is let out at the end.

        Raises:
            DecodeError: this thread is in the middle of a step.
        """
        with Held() as interrupts:
            try:
                again = self.turns.take(interrupts)
                try:
                    if self._moving and again:
                        raise DecodeError(
                            "the engine is in the middle of a step of this very thread, from which nothing else can be "
                            "asked of it but submit() and abort()"
                        )
                    if self._moving:
                        self._give_up(DecodeError("the engine was interrupted before this request had ended"))
                    self._let_out()
                    yield interrupts
                finally:
                    self.turns.release()
            finally:
                self._let_out()

    @property
    def suspended(self) -> bool:
        """Whether there is no KV memory now."""
        return not self._memory.mapped

    def require_memory(self) -> None:
        """Raises DecodeError while the engine is suspended."""
        if self.suspended:
            raise DecodeError("this engine is suspended and has no KV memory; call resume() first")

    def require_rest(self, words: str) -> None:
        """Raises DecodeError with these words while there is something to do, or the engine is suspended."""
        if self.unfinished or self.suspended:
            raise DecodeError(words)

    # -- within a turn -------------------------------------------------------------------------------------------

    def decoding(self, act: Callable[..., Any], *given: Any) -> Any:
        """What it returns with the model as decode needs it; see `attention.decoding`."""
        try:
            return decoding(self._modules, act, *given)
        finally:
            self._adapters.leave()  # Ctrl-C, which is held here, may have met the end of `Applied`

    def step(self, among_others: bool = True) -> list[Run]:
        """Takes in who arrived, launches the next steps, and gives out what became known from those before.

        Args:
            among_others: code that may change the model is likely to run before other requests come.
        """
        with self._failing():
            self._take_in()
            if not self._batch.unfinished:
                return []
            self.require_memory()
            runs = self._move(self.decoding, self._compared, self._batch.advance, among_others)
            self._give_out(runs)
            self._rest()
            return runs

    def drain(self) -> None:
        """Gives out what all launched steps find; nothing is under way after it."""
        with self._failing():
            self._give_out(self._move(self.decoding, self._compared, self._batch.drain))

    def forget(self) -> None:
        """What is in the cache is no beginning of a prompt any more, and what runs was made by weights of two times."""
        self._watched = False
        self._batch.scheduler.allocator.forget()
        sequences = (sequence for handle in self._handles for sequence in handle.sequences)
        self._first.pass_over(sequence.completion for sequence in sequences if sequence.stored)

    def _look(self) -> bool:
        """Forgets what may be of another model than there is now, where requests have come, or get their row, that
        could begin with it; says whether all that is left is of this one."""
        asked, self._asked = self._asked or self._batch.scheduler.may_begin, False
        changed = asked and self._weights.changed(self._modules)
        if not self._begun:
            self._watched = False
        elif asked and not self._frozen and (changed or not self._watched or self._watch.changed()):
            self.forget()
        else:
            return self._watched or self._frozen
        return True

    @property
    def _begun(self) -> bool:
        """Whether something has been computed that later prompts may begin with."""
        scheduler = self._batch.scheduler
        return bool(scheduler.running or scheduler.filling or scheduler.allocator.knows)

    def _let_out(self) -> None:
        """Lets out who leaves, unless a thread is in the middle of something: that one does it. It may be this one:
        streams are closed wherever garbage is collected."""
        if self._leaving:
            with Held():
                while self._leaving and not self._moving and self.turns.do_if_free(self._take_in_safely):
                    pass

    def _take_in_safely(self) -> None:
        with self._failing():
            self._take_in()

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
            modules, self._asked = list(self._model.modules()), True
            if modules != self._modules:  # one may attend otherwise: with a config of its own, as a copied layer has
                self._modules = modules
                self._first.awaited = True
        while self._arrived:
            handle = self._arrived[0]
            if not handle.done:
                self._handles.append(handle)  # before it is taken away, so that whoever looks finds it
                self._batch.scheduler.waiting.extend(handle.sequences)
            self._arrived.popleft()
        dropped: list[Run] = []
        with torch.inference_mode():
            while self._leaving:
                sequences = self._leaving.popleft().sequences
                dropped += [self._batch.drop(sequence) for sequence in sequences if not sequence.done]
        return dropped

    def _compared(self, act: Callable[[], list[Run]], among_others: bool = False) -> list[Run]:
        known = self._look()
        runs = act()
        if self._first.awaited:
            if self._weights.changed(self._modules):
                self.forget()
                known = True
            self._first.compare(runs)
        if (among_others or self._keep_prefixes) and self._begun and not (self._frozen or self._watched):
            if not known:
                self.forget()
            self._watch.take(self._modules)
            self._watched = True
        return runs

    def _give_out(self, runs: list[Run]) -> None:
        codec, errors = self._requests.codec, []
        for run in sorted(runs, key=lambda run: len(run.tokens)):  # as they ended
            try:
                if run.ended and codec is not None and run.handle.with_text:
                    run.completion.text = completion_text(codec, run.completion.prompt, run.completion.tokens)
                run.handle.take(run)
            except BaseException as error:  # by which the others do not lose what they have got
                errors.append(error)
            if run.handle.done and run.handle in self._handles:
                self._handles.remove(run.handle)
        tell({id(run.handle): run.handle for run in runs}.values())
        if errors:
            raise errors[0]

    def _rest(self) -> None:
        """Puts everything back where it was, once there is nothing to do."""
        if not self._batch.unfinished:
            self._move(self._batch.end)
            if not self._keep_prefixes:
                self._batch.scheduler.allocator.forget()

    # -- errors --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever goes wrong within it ends all requests."""
        try:
            yield
        except BaseException as error:
            self._moving = True
            while self._arrived:  # one by one: others may arrive meanwhile
                self._handles.append(self._arrived[0])
                self._arrived.popleft()
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Ends all requests but those that have only arrived; these too, where the engine cannot go on."""
        try:
            self._batch.give_up()
        except Exception as broken:  # a GPU that has failed fails there again, and nobody would be let in any more
            while self._arrived:
                self._arrived[0].fail(broken)  # it is in one of the two lists at any time
                self._arrived.popleft()
            raise
        finally:
            for handle in [*self._handles]:
                handle.fail(error)
                self._handles.remove(handle)
        self._moving = False


class Pause:
    """For as long as it is entered no step runs or is under way. It is entered once; other threads wait for its end.

    Args:
        traffic: that stands still.
        place: in the source, for those who wait.
    """

    def __init__(self, traffic: Traffic, place: str) -> None:
        self._traffic, self._place = traffic, place
        self._left: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        if self._left is not None:
            raise DecodeError("this pause has been entered already; call engine.pause() for another")
        self._left = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            interrupts = stack.enter_context(self._traffic.turn())
            self._traffic.drain()
            stack.callback(self._traffic.forget)
            turns = self._traffic.turns
            stack.callback(setattr, turns, "paused", turns.paused)
            turns.paused = threading.current_thread(), self._place
            stack.enter_context(interrupts.heard())
            self._left = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        assert self._left is not None
        self._left.close()

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # modules have nothing in them any more
            return
        if self._left is None:
            said = f"engine.pause() of {self._place} was not entered, and pauses nothing: write `with engine.pause():`"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        else:
            with contextlib.suppress(RuntimeError):  # of another thread than this: nobody else can leave it
                self._left.close()
