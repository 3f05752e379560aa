"""Compiles captured decode steps, and lets compiled code take the place of their graphs once it is there."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from graphmod.backend.lifetime import capturing
from graphmod.decode.step.compile import compile_graph
from graphmod.decode.step.pieces import Compiled, Piece, cut, description, graph_of
from graphmod.decode.step.program import Observer, Program, Unsupported, Value
from graphmod.errors import reason
from graphmod.trace.observing import observed
from graphmod.trace.operations import address
from graphmod.wrap.exchange import exchange, serving
from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")

_LAST = 60  # seconds that the compilation of a piece may still take when the interpreter ends
# What was compiled in this process: pieces hold no tensors, so any engine with the same layers uses them.
_compiled: dict[tuple[Callable, bool, str], Callable[..., tuple]] = {}
_compiling = threading.Lock()


def captured_program(observer: Observer, graph: Any) -> Program:
    """What an observer saw of the capture of a graph, which `serving` stands for.

    Raises:
        Unsupported: see `Observer.program`.
    """
    seen = graph.graph.seen
    there = {*seen.outside, *(address(static.tensor) for static in graph.inputs)}
    return observer.program(there, seen.kept_at)


class _Task:
    """A captured step that is to be compiled.

    Attributes:
        graph: the one whose place it takes.
        run: what was compiled, once it is there.
        done: whether nothing more is to come.
    """

    def __init__(self, graph: Any, program: Program, name: str) -> None:
        self.graph, self.program, self.name = graph, program, name
        self.run: Callable[[], None] | None = None
        self.done = False


class StepCompiler:
    """Watches wrappers of decode steps.

    Args:
        tuned: see `compile.by_inductor`.
        background: compile in a thread; steps run from the graphs that were captured until it is done. Else the call
            that captures a step waits.
        compile: makes code of a graph, as `compile_graph`.
    """

    def __init__(self, tuned: bool, background: bool, compile: Callable = compile_graph) -> None:
        self._tuned, self._background, self._compile = tuned, background, compile
        self._tasks: dict[CUDAGraphModule, _Task] = {}
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, wrapper: CUDAGraphModule, *args: Any) -> None:
        """Calls a step, from compiled code if there is some."""
        task = self._tasks.get(wrapper)
        if task is not None and task.graph is serving(wrapper):
            if not task.done and not self._background:
                self._work(task)  # again: Ctrl-C ended it
            if task.run is not None:
                exchange(wrapper, task.run)
                task.run = None
            wrapper(*args)
            return
        observer = Observer()
        with observed(observer):
            wrapper(*args)
        if observer.saw_any:
            self._take(wrapper, serving(wrapper), observer)

    @property
    def waiting(self) -> int:
        """Steps that are still to be compiled."""
        return sum(not task.done for task in list(self._tasks.values()))

    def forget(self) -> None:
        """Lets go of all steps, whose programs hold the tensors they work on. Compiled pieces stay."""
        self._tasks.clear()

    def _take(self, wrapper: CUDAGraphModule, graph: Any, observer: Observer) -> None:
        if graph is None:
            return  # the capture failed
        try:
            program = captured_program(observer, graph)
        except Unsupported as why:
            program = Program([], [], {})
            _say(wrapper.graph_name, str(why))
        task = self._tasks[wrapper] = _Task(graph, program, wrapper.graph_name)
        task.done = not program.operations
        if task.done:
            return
        if not self._background:
            self._work(task)
            return
        self._queue.put(task)
        if self._thread is None:
            given = self._queue, self._work
            self._thread = threading.Thread(target=_serve, args=given, name="graphmod compile", daemon=True)
            self._thread.start()
            _until_exit(self._thread, self._queue)

    def _work(self, task: _Task) -> None:
        """Compiles a step. What goes wrong keeps the graph that there is."""
        began, known = time.perf_counter(), len(_compiled)
        try:
            pieces = cut(task.program)
            with _device_of(task.program):
                functions = [self._function(piece, task.program) for piece in pieces]
            task.run = Compiled(task.program, pieces, functions)
            took, new = time.perf_counter() - began, len(_compiled) - known
            log.info("%r is compiled: %d new pieces of %d, %.1f s", task.name, new, len(pieces), took)
        except Unsupported as why:
            _say(task.name, str(why))
        except Exception as error:  # of compilers and their kernels: anything
            log.debug("%r could not be compiled", task.name, exc_info=error)
            _say(task.name, f"{type(error).__name__}: {reason(error)}")
        task.done, task.program = True, Program([], [], {})

    def _function(self, piece: Piece, program: Program) -> Callable:
        if piece.is_compiled:
            return piece.operations[0].op.run
        name = self._compile, self._tuned, description(piece, program)
        with _compiling:
            if name not in _compiled:
                with FakeTensorMode():
                    inputs = [_fake(program.values[number]) for number in piece.inputs]
                function = self._compile(graph_of(piece), inputs, self._tuned)
                if self._background:
                    _run_beside(function, piece, program)
                _compiled[name] = function
            return _compiled[name]


def _device_of(program: Program) -> contextlib.AbstractContextManager:
    """The GPU that a program works on is the current one of this thread, too."""
    found = next((value.device for value in program.values if value.device.type == "cuda"), None)
    return contextlib.nullcontext() if found is None else torch.cuda.device(found)


def _fake(value: Value) -> Tensor:
    length = value.offset + sum((n - 1) * step for n, step in zip(value.size, value.stride, strict=True)) + 1
    whole = torch.empty(length if all(value.size) else value.offset, dtype=value.dtype, device=value.device)
    return whole.as_strided(value.size, value.stride, value.offset)


def _run_beside(function: Callable[..., tuple], piece: Piece, program: Program) -> None:
    """Runs a piece on copies of what it changes, so that its kernels are loaded and tuned before a step waits for them.
    No graph is captured meanwhile."""
    written = {program.values[number].storage for one in piece.operations for number in one.writes}

    def given(number: int) -> Tensor:
        value, there = program.values[number], program.inputs.get(number)
        if there is not None:
            return there.clone() if value.storage in written else there
        made = torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=value.device)
        return made.normal_() if value.dtype.is_floating_point else made.zero_()

    try:
        with capturing(), torch.inference_mode():
            function(*[given(number) for number in piece.inputs])
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
    except torch.OutOfMemoryError:
        log.debug("no memory to run a compiled piece beforehand; the first step that uses it waits for its kernels")


def _say(name: str, why: str) -> None:
    log.warning("%r stays uncompiled: %s", name, why)


def _serve(tasks: queue.SimpleQueue, work: Callable[[_Task], None]) -> None:
    while (task := tasks.get()) is not None:
        work(task)
        del task


def _until_exit(thread: threading.Thread, tasks: queue.SimpleQueue) -> None:
    """A thread that is met inside PyTorch when the interpreter ends would abort the process."""
    atexit.register(_end, weakref.ref(thread), tasks)


def _end(thread: weakref.ref[threading.Thread], tasks: queue.SimpleQueue) -> None:
    while not tasks.empty():
        tasks.get()
    tasks.put(None)
    found = thread()
    if found is not None:
        found.join(_LAST)
