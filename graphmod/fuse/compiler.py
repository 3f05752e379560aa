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
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphmod.errors import reason
from graphmod.fuse.inductor import compile_graph, timed_in_graphs
from graphmod.fuse.program import (
    Compiled,
    Observer,
    Piece,
    Program,
    Unsupported,
    Value,
    as_observed,
    cut,
    description,
    graph_of,
)
from graphmod.torch_private import FakeTensorMode
from graphmod.wrap.extension import exchange, memory_of, observed, serving
from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")

_LAST = 60  # seconds that the compilation of a piece may still take when the interpreter ends
# What was compiled in this process: pieces hold no tensors, so any engine with the same layers uses them.
_compiled: dict[tuple, Callable[..., tuple]] = {}
_compiling = threading.Lock()


class _Job:
    """A program that is to be compiled. It holds no tensors, nor who wants it.

    Attributes:
        code: the pieces and what was compiled of each, once it is there.
        done: whether nothing more is to come.
    """

    def __init__(self, program: Program, name: str, tuned: bool, compile: Callable) -> None:
        self.program, self.name, self.tuned, self.compile = program, name, tuned, compile
        self.code: tuple[list[Piece], list[Callable]] | None = None
        self.done = False

    def work(self) -> None:
        """Compiles it. What goes wrong keeps the graph that there is."""
        began, known = time.perf_counter(), len(_compiled)
        try:
            pieces = cut(self.program)
            with _device_of(self.program):
                self.code = pieces, [_function(piece, self) for piece in pieces]
            took, new = time.perf_counter() - began, len(_compiled) - known
            log.info("%r is compiled: %d new pieces of %d, %.1f s", self.name, new, len(pieces), took)
        except Unsupported as why:
            _say(self.name, str(why))
        except Exception as error:  # of compilers and their kernels: anything
            log.debug("%r could not be compiled", self.name, exc_info=error)
            _say(self.name, f"{type(error).__name__}: {reason(error)}")
        self.done = True


class _Task:
    """A captured step whose place compiled code is to take."""

    def __init__(self, job: _Job, inputs: dict[int, Tensor]) -> None:
        self.job, self.inputs = job, inputs
        self.run: Compiled | None = None  # kept: graphs read constants that it holds


class StepCompiler:
    """Watches wrappers of decode steps.

    Args:
        tuned: see `inductor.by_inductor`.
        background: compile in a thread; steps run from the graphs that were captured until it is done. Else the call
            after that which captured a step waits.
        compile: makes code of a graph, as `compile_graph`.

    Attributes:
        taken_over: called when compiled code is to take the place of a graph.
    """

    def __init__(self, tuned: bool, background: bool, compile: Callable = compile_graph) -> None:
        self._tuned, self._background, self._compile = tuned, background, compile
        self._tasks: weakref.WeakKeyDictionary[Any, _Task] = weakref.WeakKeyDictionary()  # by graph
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.taken_over: Callable[[], None] = lambda: None
        finalizer: Any = weakref.finalize(self, self._jobs.put, None)
        finalizer.atexit = False

    def call(self, wrapper: CUDAGraphModule, *args: Any) -> None:
        """Calls a step, from compiled code if there is some."""
        graph = serving(wrapper)
        task = None if graph is None else self._tasks.get(graph)
        if task is not None and task.run is None:
            self._take_over(wrapper, task)
        observer = Observer()
        with observed(observer):
            wrapper(*args)
        graph = serving(wrapper)
        if observer.saw_any and graph is not None and graph not in self._tasks:
            self._take(wrapper.graph_name, graph, observer)

    @property
    def waiting(self) -> int:
        """Steps that are still to be compiled."""
        return sum(not task.job.done for task in list(self._tasks.values()))

    def forget(self) -> None:
        """Lets go of all steps, with the tensors they work on. Compiled pieces stay."""
        self._tasks.clear()
        _drain(self._jobs)

    def _take(self, name: str, graph: Any, observer: Observer) -> None:
        """Takes in a graph that was captured."""
        try:
            program, inputs = observer.program(*memory_of(graph))
        except Unsupported as why:
            return _say(name, str(why))
        job = _Job(program, name, self._tuned, self._compile)
        self._tasks[graph] = _Task(job, inputs)
        if self._background:
            self._jobs.put(job)
            if self._thread is None or not self._thread.is_alive():  # it is not after a fork
                self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="graphmod compile", daemon=True)
                self._thread.start()
                atexit.register(_end, weakref.ref(self._thread), self._jobs)

    def _take_over(self, wrapper: CUDAGraphModule, task: _Task) -> None:
        if not task.job.done and not self._background:
            task.job.work()
        if task.job.code is not None:
            task.run = Compiled(*task.job.code, task.inputs)
            if exchange(wrapper, task.run):
                self.taken_over()
            else:
                _say(wrapper.graph_name, "what it leaves behind is not in tensors from outside alone")


def _function(piece: Piece, job: _Job) -> Callable:
    if piece.is_compiled:
        return piece.operations[0].op.run
    settings = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    name = job.compile, job.tuned, settings, description(piece, job.program)
    with _compiling:
        if name not in _compiled:
            values = [job.program.values[number] for number in piece.inputs]
            # Inductor keeps on disk only what was compiled with a shape environment.
            with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
                inputs = list(map(_like, values))
            function = job.compile(graph_of(piece), inputs, job.tuned)
            _run_beside(function, values)
            _compiled[name] = function
        return _compiled[name]


def _like(value: Value) -> Tensor:
    """A tensor of zeros with the geometry of another."""
    extent = sum((size - 1) * stride for size, stride in zip(value.size, value.stride, strict=True)) + 1
    length = value.offset + (extent if all(value.size) else 0)
    whole = torch.zeros(length, dtype=value.dtype, device=value.device)
    return whole.as_strided(value.size, value.stride, value.offset)


@as_observed
def _run_beside(function: Callable[..., tuple], values: list[Value]) -> None:
    """Runs a piece on other memory than a step's, so that its kernels are loaded and tuned before one waits for
    them."""
    on_gpu = any(value.device.type == "cuda" for value in values)
    try:
        with timed_in_graphs() if on_gpu else contextlib.nullcontext(), torch.inference_mode():
            function(*map(_like, values))
            if on_gpu:
                torch.cuda.current_stream().synchronize()
    except torch.OutOfMemoryError:
        log.debug("no memory to run a compiled piece beforehand; the first step that uses it waits for its kernels")


def _device_of(program: Program) -> contextlib.AbstractContextManager:
    """The GPU that a program works on is the current one of this thread, too."""
    found = next((value.device for value in program.values if value.device.type == "cuda"), None)
    return contextlib.nullcontext() if found is None else torch.cuda.device(found)


def _say(name: str, why: str) -> None:
    log.warning("%r stays uncompiled: %s", name, why)


# -- the thread --------------------------------------------------------------------------------------------------------


def _serve(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.work()
        finally:
            job.done = True
        del job


def _drain(jobs: queue.SimpleQueue) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            jobs.get_nowait()


def _end(thread: weakref.ref[threading.Thread], jobs: queue.SimpleQueue) -> None:
    """A thread that is met inside PyTorch when the interpreter ends would abort the process."""
    _drain(jobs)
    jobs.put(None)
    found = thread()
    if found is not None:
        found.join(_LAST)
