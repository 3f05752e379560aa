"""What is offered to libraries on top of graphs, beside the wrappers: shared groups, static inputs, what may be done
during a capture and what must wait, whether a call still reads what it read; and for what compiles a call after it was
captured, the operations of that call, and other kernels in their place.

`decode` and `fuse` import nothing of the rooms below this one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from graphmod.backend.cuda import begin_capture, is_capturing, stream_for
from graphmod.backend.lifetime import Graphs, between_captures, capturing, do_what_waits, prepare_launches
from graphmod.errors import CaptureRefused
from graphmod.guards.changes import what_changed
from graphmod.guards.guards import HOOKS, Guards, with_memory
from graphmod.layers.group import LayerGroup as Group
from graphmod.signature.call import Call
from graphmod.step.recording import record_reads
from graphmod.step.static_inputs import mark_static
from graphmod.trace import dispatch
from graphmod.trace.compiled import CompiledGraph
from graphmod.trace.garbage import no_garbage_collection
from graphmod.trace.operations import Facts, address, draws, each_tensor, facts, written
from graphmod.trace.patches import Patch, Replacement
from graphmod.trace.recorder import observing
from graphmod.trace.untraced import untraced
from graphmod.wrap.module import CUDAGraphModule

__all__ = [
    "HOOKS",
    "CompiledGraph",
    "Facts",
    "Graphs",
    "Group",
    "Reads",
    "address",
    "between_captures",
    "capture_launches",
    "capturing",
    "do_what_waits",
    "draws",
    "each_tensor",
    "exchange",
    "facts",
    "is_capturing",
    "mark_static",
    "memory_of",
    "observed",
    "prepare_launches",
    "serving",
    "stream_for",
    "with_memory",
    "written",
]


class Reads:
    """What a call reads, as the guards of graphs compare it: attributes, globals, closures, hooks, tensors.

    Args:
        call: is made once, to see what it reads.
        device: that it works on.
        root: the module whose state it is.

    Attributes:
        tensors: that it reads, other than its arguments.

    Raises:
        CaptureRefused: it changes something itself, so that nothing can be known.
        Exception: whatever the call raised.
    """

    def __init__(self, call: Callable, args: tuple, device: torch.device, root: torch.nn.Module) -> None:
        _, notes, _ = record_reads(Call(call, args, {}), device.index if device.type == "cuda" else None, root)
        if (changes := what_changed(notes)) is not None:
            raise CaptureRefused(changes)
        self._guards = Guards(notes)
        self.tensors: list[Tensor] = self._guards.tensors

    def changed(self) -> str | None:
        """What is no longer so, in words: a value, or where a tensor is; what tensors hold is not looked at."""
        return self._guards.moved() or self._guards.changed(gradients=False)


def capture_launches(launch: Callable[[int], Any]) -> Graphs:
    """A graph of kernels that are launched past PyTorch: nothing is recorded, and nothing will be compared.

    Nothing runs on the stream of the capture: once kernels have run on a second stream, those of every graph of the
    process follow each other later. (32 rows on an H200 took 1.45 ms a step where kernels had been tuned on one, and
    1.42 in the next process, which found them tuned.)

    Args:
        launch: is given the stream to launch on.
    """
    current, stream, held = torch.cuda.current_stream(), torch.cuda.Stream(), Graphs()
    with capturing(), no_garbage_collection(), torch.cuda.stream(stream):
        held.graphs.append(graph := torch.cuda.CUDAGraph())
        try:
            begin_capture(graph, [torch.cuda.default_generators[current.device_index]], current)
            launch(stream.cuda_stream)
            graph.capture_end()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # nothing is captured (any more)
                graph.capture_end()
            held.graphs.clear()
            del graph  # in this turn, and not when the error is forgotten
            raise
    return held


# -- other kernels in the place of a captured call ---------------------------------------------------------------------


class Observer(Protocol):
    """Sees the operations of a capture, beside its recorder. Raises nothing, and keeps no tensor alive that the capture
    makes."""

    def __call__(self, op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        """Takes in an operation, as `after` of `trace.recorder.Graph`."""

    def note_launch(self) -> None:
        """Takes in that Python launches a kernel of Triton that is no operation of PyTorch."""


def _launches() -> list[Replacement]:
    kind = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
    if kind is None:
        return []
    launch = kind.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if observing.by is not None and not dispatch.within_an_operation():
            untraced(observing.by.note_launch)  # which changes what it is of
        return launch(self, *args, **kwargs)

    return [(kind, "run", run)]


_patch_of_launches = Patch(_launches)


@contextlib.contextmanager
def observed(by: Observer) -> Iterator[None]:
    """Lets `by` observe the captures that this thread makes meanwhile."""
    before = observing.by
    try:
        _patch_of_launches.take(by)
        observing.by = by
        yield
    finally:
        observing.by = before
        _patch_of_launches.leave(by)


def serving(wrapper: CUDAGraphModule) -> Any:
    """Stands for the graph behind the last call: another object after each capture of the call. None if there was
    none."""
    return wrapper._context.served


def memory_of(graph: Any) -> tuple[set[int], set[int]]:
    """Addresses of the memory that was there before the capture of a graph, which `serving` gave; and of tensors that
    it took over from the recorded call."""
    seen = graph.graph.seen
    return {*seen.outside, *(address(static.tensor) for static in graph.inputs)}, seen.kept_at


def exchange(wrapper: CUDAGraphModule, run: Callable[[], None]) -> bool:
    """Lets other code take the place of the graph behind the last call: from the next call on, a graph of `run()` is
    replayed. Arguments, guards and order stay those of the call that was recorded. Once that call is captured anew, for
    whatever reason, its own code is back.

    Args:
        run: does all that the call did, from and to the same tensors, and returns nothing. It must have run once, so
            that whatever it compiles and loads is there.

    Returns:
        Whether it does: not if no graph served the last call, or one that returns tensors, copies arguments, draws
        random numbers or has a backward.
    """
    graph = serving(wrapper)
    # All that the call leaves behind lies in tensors from outside, where other code can leave it as well.
    if graph is None or not graph.stands_alone or graph.results.with_grad or graph.random or graph.advanced:
        return False
    graph.replace_by(run)
    return True
