"""Capture and replay with `torch.cuda.CUDAGraph`.

Everything is captured on one side stream per backend, so that autograd's nodes belong to it and a captured graph is one
chain; only then do `backend.nodes` part what does not depend on each other. Nothing is ever run on that stream: once a
process has launched a handful of kernels on a second stream, the kernels of every graph follow each other 0.3 us later.
Warm-up calls and replays run on the caller's stream.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from graphmod.backend.lifetime import Graphs, capturing, launcher
from graphmod.backend.nodes import divisible, spread, use_kernels
from graphmod.cuda_driver import last_captured
from graphmod.torch_private import (
    TensorBase,
    TorchDispatchMode,
    current_node,
    end_allocation_to_pool,
    growing_segments,
    is_traceable_wrapper_subclass,
    settle_attention_order,
)
from graphmod.trace.garbage import no_garbage_collection
from graphmod.trace.recorder import Follower, Graph, Parts
from graphmod.trace.script import Script
from graphmod.trace.undo import within

log = logging.getLogger("graphmod")
# Graphs whose capture CUDA ended: up to torch 2.11 the allocator of pinned memory goes on to ask them (pytorch#180395).
_given_up: list[torch.cuda.CUDAGraph] = []
# The recorder belongs to a thread, and so does a cuBLAS workspace: a backward inside stays on the one that captures.
on_this_thread = torch.autograd.set_multithreading_enabled


class CudaPool:
    """A memory pool of the caching allocator that only captures allocate from."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._reserved = 0
        self.handle = torch.cuda.graph_pool_handle()

    def open_for(self, graph: torch.cuda.CUDAGraph) -> list[torch.cuda.CUDAGraph]:
        """Makes the pool ready for the capture of `graph`. PyTorch closes a pool for good with its last graph, as after
        a first capture that failed; the next capture then gets a new one.

        Returns:
            The graphs that keep the pool open; hold them until the capture has begun.
        """
        open_by = list(self._graphs)
        if not open_by:
            self.handle = torch.cuda.graph_pool_handle()
            self._reserved = 0
        self._graphs.add(graph)
        return open_by

    def abandon(self) -> None:
        """Leaves the pool to the graphs it has, because a capture that CUDA cut short left it in an unknown state."""
        self._graphs.clear()

    def grew(self, size: int) -> None:
        """Counts memory that a capture reserved; a pool keeps it until its last graph is gone.

        Counted, because `torch.cuda.memory_snapshot` corrupts Python's heap now and then (seen with torch 2.11).
        """
        self._reserved += max(size, 0)

    def bytes(self) -> int:
        """Bytes of GPU memory the pool has reserved."""
        return self._reserved if self._graphs else 0

    def release(self) -> None:
        """Gives the blocks nobody uses any more back to the driver."""
        torch.cuda.empty_cache()


class CudaCapture:
    """A captured call, in one CUDA graph or two: the second begins with the first of what others see, a write to memory
    that outlives it or a collective. One with eager parts has a graph before, between and after them.

    Attributes:
        seen: what the recorder saw.
        start: launches what comes before any of that; None where that is nothing, or nobody can tell what it is.
        finish: launches the rest.
        replay: launches all of it.
        segments: launch what comes before, between and after its eager parts.
    """

    def __init__(self, held: Graphs, parts: list[list[Callable[[], None]]], seen: Follower) -> None:
        self.seen = seen
        self._held = held
        # No method of its own: the memory of a graph that was let go would wait for the garbage collector.
        self.segments = [part[0] if len(part) == 1 else partial(_do_all, part) for part in parts]
        launches = [launch for part in parts for launch in part]
        self.replay = self.segments[0] if len(parts) == 1 else partial(_do_all, launches)
        if len(parts) > 1:
            self.start, self.finish = None, self.replay
        elif len(launches) == 2:
            self.start, self.finish = launches
        elif seen.written or seen.inputs_written or seen.collectives:
            self.start, self.finish = None, self.replay
        else:
            self.start, self.finish = launches[0], lambda: None

    def before(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of what tensors from outside were before the capture, while its first replay is still to come."""
        return [tensor.clone() for tensor in tensors]

    def discard(self) -> None:
        """Nothing to undo: capturing ran nothing."""


def _do_all(launches: list[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


class CudaBackend:
    """Captures on `device`.

    Args:
        device: a CUDA device.
    """

    on_gpu = True
    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        settle_attention_order(self.device)
        self.stream = stream_for(self, self.device)
        self._generator = torch.cuda.default_generators[self.device.index]

    def new_pool(self) -> CudaPool:
        return CudaPool()

    def prepare_capture(self) -> None:
        """Gives cached blocks back, because a private pool cannot use what the warm-up left behind."""
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Runs the body after what the capture stream was given so far, and before what it is given next.

        For changes of gradients in a backward in which autograd accumulates into them too: while the autograd graph of
        a capture lives, it does so on the capture stream.
        """
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        try:
            yield
        finally:
            self.stream.wait_stream(current)

    def views(self, parameters: list[Tensor], within: bool) -> list[Tensor]:
        """A view of each parameter whose autograd node belongs to the capture stream; `within`, the accumulator behind
        it may too, where there is none yet."""
        edges = [] if within else [get_gradient_edge(parameter) for parameter in parameters]
        with torch.cuda.stream(self.stream):
            made = [parameter.view_as(parameter) for parameter in parameters]
        del edges  # till here they kept the accumulators of the caller's stream alive; now the views do
        return made

    def has_room(self, pools: int) -> bool:
        """Whether an eager call finds as much memory, in bytes, as the graphs' pools hold."""
        idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device) - pools
        return idle >= pools or max(idle, 0) + torch.cuda.mem_get_info(self.device)[0] >= pools

    def random_state(self) -> Any:
        return self._generator.get_offset()

    def set_random_state(self, state: Any) -> None:
        self._generator.set_offset(state)

    def capture(
        self,
        run: Callable[[], Any],
        pool: CudaPool,
        inputs: list[Tensor],
        generators: list[torch.Generator],
        check: Callable[[Follower, Any], None] | None = None,
        targets: dict[int, Tensor] | None = None,
        split: bool = False,
        script: Script | None = None,
        parts: Parts | None = None,
        made_before: Callable[[int], bool] | None = None,
    ) -> tuple[CudaCapture, Any]:
        """Captures `run()` into `pool`; nothing runs on the GPU until the graph's first replay, but what comes before
        an eager part, which is launched there (`parts`). `check(recorder, result)` may still refuse. `targets`,
        `script`, `made_before`: see `Follower`. With `split`, what comes before the first write to memory from outside
        becomes a graph of its own, where that is possible.

        Raises:
            CaptureRefused: `run` did something a graph cannot repeat.
            Exception: whatever `run` raised, or what CUDA said; stream and generators are usable again.
        """
        reserved = torch.cuda.memory_reserved(self.device)
        held = Graphs()
        graphs = held.graphs
        segments: list[list[Callable[[], None]]] = []
        thread = threading.get_ident()
        spare: list[tuple[torch.Generator, Any]] = []
        growing = contextlib.ExitStack()  # not in eager parts, whose memory would serve nobody else afterwards

        def keep() -> None:
            """Keeps where the generators are, for a capture that fails."""
            every = (self._generator, *generators)
            spare[:] = [(g, g.clone_state()) for g in every if g.device.type == "cuda"]

        def part(in_backward: bool) -> None:
            here = thread == threading.get_ident() and torch.cuda.current_stream(self.device) == self.stream
            here = here and (in_backward or current_node() is None)
            first = not recorder.written and not recorder.inputs_written and not recorder.collectives
            if split and len(graphs) == 1 and not segments and here and first and recorder.trace:
                graphs[0].capture_end()
                self._begin(graphs, pool, generators, caller)

        # Per graph, the nodes between which operations on lists of tensors lie.
        spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        backend = self

        def end() -> list[Callable[[], None]]:
            """Ends the graph under way, and gives what launches those since the last eager part."""
            with warnings.catch_warnings():  # between two eager parts there may be nothing
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                graphs[-1].capture_end()
            launches = []
            for place in range(sum(map(len, segments)), len(graphs)):
                raw = graphs[place].raw_cuda_graph()
                for improve in (partial(spread, raw, spans[place]), partial(use_kernels, raw, backend.stream)):
                    try:
                        improve()
                    except Exception as error:  # an older driver: slower, but the same
                        _say_unedited(str(error))
                graphs[place].instantiate()
                launches.append(launcher(graphs[place]))
            segments.append(launches)
            return launches

        class Captured(Graph):
            def before_write(self, tensor: Tensor) -> None:
                part(in_backward=False)

            def before_collective(self) -> None:
                part(in_backward=True)

            @contextlib.contextmanager
            def around(self, args: Iterable[Any]) -> Iterator[None]:
                before = backend._last_captured() if divisible(args) else None
                yield
                last = backend._last_captured()
                if before is not None and last:
                    spans[len(graphs) - 1].append((before, last))

            def pause(self) -> None:
                launches = end()
                growing.close()
                torch.cuda.set_stream(caller)
                _do_all(launches)

            def resume(self, memory: Iterable[Tensor]) -> None:
                keep()
                growing.enter_context(growing_segments())
                torch.cuda.set_stream(backend.stream)
                backend._begin(graphs, pool, generators, caller)

        recorder = Follower(
            inputs,
            gpu=self.device.index,
            script=script,
            targets=targets,
            graph=Captured(),
            parts=parts,
            made_before=made_before,
        )
        keep()
        caller = torch.cuda.current_stream(self.device)

        def capture() -> Any:
            torch.cuda.current_blas_handle()  # makes the workspace of this stream, which outlives every pool
            try:
                self._begin(graphs, pool, generators, caller)
            except BaseException:
                self._clean_up(graphs, pool, spare)
                raise
            try:
                result = within(recorder, call=run)
                recorder.check()
                if check is not None:
                    check(recorder, result)
            except BaseException:
                try:
                    if torch.cuda.current_stream(self.device) == self.stream:  # else in an eager part
                        self._abandon(graphs[-1], pool, spare)
                finally:
                    recorder.finish()
                raise
            try:
                end()
            except BaseException:
                self._clean_up(graphs, pool, spare)
                raise
            return result

        with capturing(), growing, on_this_thread(False), torch.cuda.stream(self.stream):
            growing.enter_context(growing_segments())
            result = within(no_garbage_collection(), call=capture)
        pool.grew(torch.cuda.memory_reserved(self.device) - reserved)
        return CudaCapture(held, segments, recorder.finish()), result

    def _begin(
        self,
        graphs: list[torch.cuda.CUDAGraph],
        pool: CudaPool,
        generators: list[torch.Generator],
        caller: torch.cuda.Stream,
    ) -> None:
        """Appends a graph and begins its capture, on the current stream; what that runs, it runs on the caller's."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graphs.append(graph)
        open_by = pool.open_for(graph)
        begin_capture(graph, (self._generator, *generators), caller, pool=pool.handle)
        del open_by

    def _last_captured(self) -> int | None:
        if torch.cuda.current_stream(self.device) != self.stream:
            return None
        try:
            return last_captured(self.stream.cuda_stream)
        except Exception as error:  # an older driver
            _say_unedited(str(error))
            return None

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: CudaPool, spare: list) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._clean_up([graph], pool, spare)

    def _clean_up(self, graphs: list[torch.cuda.CUDAGraph], pool: CudaPool, spare: list) -> None:
        """`capture_end` gave up half-way because CUDA had invalidated the capture: do the rest of its work."""
        _given_up.extend(graphs)
        pool.abandon()
        with contextlib.suppress(RuntimeError):
            end_allocation_to_pool(self.device.index, pool.handle)
        for generator, state in spare:
            generator.graphsafe_set_state(state)


@functools.cache
def _say_unedited(why: str) -> None:
    """Says, once in a process, why graphs are not edited."""
    log.warning(
        "graphs stay as they are captured, with memsets and copies between kernels, and the kernels of multi-tensor "
        "operations (an optimizer's step, the norm of gradients) one after the other: the same numbers, but slower: %s",
        why,
    )


# -- capture streams, and what belongs to a stream ---------------------------------------------------------------------


def renew_gradient_accumulators(parameters: list[Tensor]) -> None:
    """Makes autograd create the parameters' AccumulateGrad nodes anew, on the stream that is current when it does.

    Such a node keeps the stream it was made on, and lives as long as any loss that leads to it. A loop that always
    holds the last loss hands the node from step to step, so that without this a capture would for ever fork to the
    stream of the first eager step. Autograd drops its reference when a parameter's data changes dtype. It does so there
    and back within one call of C code, because an interrupt between the two would leave a weight empty.
    """
    targets, contents = [], []
    for parameter in parameters:
        if parameter.is_leaf and parameter.requires_grad:
            data = parameter.data
            other = torch.float32 if data.dtype is not torch.float32 else torch.float64
            targets += [parameter, parameter]
            contents += [_empty_of_kind(data, other), data]
    deque(map(_set_data, targets, contents), maxlen=0)


def _empty_of_kind(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    empty = torch.empty([0] * tensor.dim() or 0, device=tensor.device, dtype=dtype)
    if not is_traceable_wrapper_subclass(tensor):
        return empty
    if not hasattr(tensor, "device_mesh"):
        return torch.empty_like(tensor, dtype=dtype)
    split: Any = tensor  # a DTensor, whose module may not be imported for others
    return type(split).from_local(empty, split.device_mesh, split.placements, run_check=False)


_set_data = vars(TensorBase)["data"].__set__


# A stream keeps its cuBLAS workspace (32 MiB) for as long as the process lives. So a stream whose backend is gone
# serves the next one, always the oldest, so that runs of the same kind use the same ones.
_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def stream_for(owner: Any, device: torch.device) -> torch.cuda.Stream:
    """A capture stream, which is idle again when `owner` is gone."""
    idle = _idle_streams[device]
    if idle:
        found = min(idle, key=lambda stream: stream.stream_id)
        idle.remove(found)
    else:
        found = torch.cuda.Stream(device)
    weakref.finalize(owner, idle.append, found)
    return found


class _RunOn(TorchDispatchMode):
    """Runs operations on `stream`, whichever is the current one."""

    hides_nothing = True  # what it runs is no part of what is recorded

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._stream = stream

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to import torch._dynamo takes a second, and here it would be in the middle of a capture

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch.cuda.stream(self._stream):
            return func(*args, **(kwargs or {}))


def begin_capture(
    graph: torch.cuda.CUDAGraph, generators: Iterable[torch.Generator], caller: torch.cuda.Stream, **settings: Any
) -> None:
    """Begins a capture on the current stream; what that runs, it runs on the caller's.

    Args:
        generators: all of them, also the default one, which a capture would register by itself: where an interrupt
            comes in the middle of that, in the Python of `_RunOn`, PyTorch ends the process when the graph goes.
        settings: of `capture_begin`.
    """
    for generator in generators:
        if generator.device.type == "cuda":
            graph.register_generator_state(generator)
    with _RunOn(caller):  # seed and offset of the generators are written
        graph.capture_begin(capture_error_mode="thread_local", **settings)


def is_capturing() -> bool:
    """Whether what the current stream is given becomes part of a graph. Code in other rooms that asks PyTorch for it,
    while a call is captured, is told what it was told in the eager call."""
    return torch.cuda.is_current_stream_capturing()
