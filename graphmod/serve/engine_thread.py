"""The thread that steps the engine for a server: between two steps it takes in all that was asked for meanwhile.

What a step finds goes to the front in one message, because the GPU waits for whatever this thread does besides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from functools import partial
from typing import Any

from graphmod.decode.engine import DecodeEngine
from graphmod.decode.streams import Handle
from graphmod.decode.types import RequestError, Run, Sampling
from graphmod.serve.link import Line

log = logging.getLogger("graphmod")


@dataclasses.dataclass
class _Request:
    """What runs of a request: its handles, one for each prompt, and how many samples have not ended."""

    handles: list[Handle]
    left: int


class EngineThread:
    """Steps an engine for a front, which `Remote` is in.

    Args:
        engine: to step. Others may use it beside.
        line: to the front.
    """

    def __init__(self, engine: DecodeEngine, line: Line) -> None:
        self._engine, self._line = engine, line
        self._requests: dict[int, _Request] = {}
        self._news: list[Any] = []  # to be told
        self._runs: list[Any] = []
        self._thread = threading.Thread(target=self._work, name="graphmod-engine")

    def start(self) -> None:
        """Goes to work; it ends with the line."""
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Ends all requests, which are told so, and the thread.

        Args:
            timeout: seconds after which nobody is told any more.
        """
        self._line.hear_no_more()
        if self._thread.ident is not None:
            with contextlib.suppress(Exception):  # of an engine that has failed, which its thread tells
                self._engine.abort_all()  # by the next step, where one is under way
            self._thread.join(timeout)
        self._line.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        engine, line = self._engine, self._line
        try:
            while True:
                for kind, *given in line.receive(0 if engine.unfinished else None):
                    self._guarded(self._ask if kind == "ask" else self._abort, *given)
                self._tell()
                if line.ended:
                    break
                if engine.unfinished:
                    self._guarded(engine.step)
                    self._tell()
            self._guarded(engine.abort_all)
            self._tell()
        finally:
            line.close()

    def _guarded(self, act: Any, *given: Any) -> None:
        """Does it. An error of the engine has ended all requests, and they are told."""
        try:
            act(*given)
        except BaseException as error:
            log.error("decoding failed, and the requests that ran or waited have ended: %s", error)
            self._news.append(("failed", str(error)))
            for number, request in [*self._requests.items()]:
                if lost := [handle.error for handle in request.handles if handle.error is not None]:
                    del self._requests[number]
                    self._news.append(("lost", number, str(lost[0])))

    def _tell(self) -> None:
        if self._runs or self._news:
            self._line.send([("runs", self._runs), *self._news])  # what was got before an error comes before it
            self._runs, self._news = [], []

    # -- what the front asks for -----------------------------------------------------------------------------------

    def _ask(self, number: int, prompts: list[list[int]], n: int, sampling: list[dict[str, Any]]) -> None:
        handles: list[Handle] = []
        try:
            for prompt, own in zip(prompts, sampling, strict=True):
                if own["temperature"] is None:  # as in OpenAI's API, tokens are drawn
                    own["temperature"] = self._engine.requests.defaults.temperature
                take = partial(self._take, number, len(handles) * n)
                handles.append(self._engine.submit(prompt, n, Sampling(**own), on_run=take, text=False))
        except RequestError as error:
            self._news.append(("refused", number, len(handles), str(error)))
        except Exception as error:
            log.error("a request could not be served", exc_info=error)
            self._news.append(("lost", number, str(error)))
        else:
            self._requests[number] = _Request(handles, len(prompts) * n)
            self._news.append(("taken", number))
            return
        for handle in handles:
            self._engine.abort(handle)

    def _abort(self, number: int) -> None:
        request = self._requests.pop(number, None)
        for handle in request.handles if request is not None else ():
            self._engine.abort(handle)

    def _take(self, number: int, first: int, run: Run) -> None:
        """Called by the engine with what a sample has got."""
        done, request = run.completion, self._requests.get(number)
        if request is None:  # it was refused, or aborted
            return
        reason = done.finish_reason if run.ended else None
        of_prompt = None
        if done.prompt_logprobs is not None and len(run.tokens) == len(done.tokens):  # with the first tokens
            of_prompt = done.prompt_logprobs, done.prompt_top_logprobs
        got = run.tokens, run.logprobs, run.top_logprobs, of_prompt
        self._runs.append((number, first + done.sample, got, reason, done.error))
        if run.ended:
            request.left -= 1
            if not request.left:
                del self._requests[number]
