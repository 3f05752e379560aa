"""What is offered to libraries on top of graphs, beside the wrappers: shared groups, static inputs, what may be done
during a capture and what must wait, and whether a call still reads what it read.

`decode` and `fuse` import nothing of the rooms below this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from graphmod.backend.cuda import begin_capture, is_capturing, stream_for
from graphmod.backend.lifetime import Graphs, between_captures, capturing, do_what_waits, prepare_launches
from graphmod.errors import CaptureRefused
from graphmod.guards.changes import what_changed
from graphmod.guards.guards import HOOKS, Guards, TensorWatch
from graphmod.signature.call import Call
from graphmod.step.buffers import mark_static
from graphmod.step.group import Group
from graphmod.step.recording import watch
from graphmod.trace.garbage import no_garbage_collection

__all__ = [
    "HOOKS",
    "Graphs",
    "Group",
    "Reads",
    "between_captures",
    "capture_launches",
    "capturing",
    "do_what_waits",
    "is_capturing",
    "mark_static",
    "prepare_launches",
    "stream_for",
    "with_memory",
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
        _, notes, _ = watch(Call(call, args, {}), device.index if device.type == "cuda" else None, root)
        if (changes := what_changed(notes)) is not None:
            raise CaptureRefused(changes)
        self._guards = Guards(notes)
        self.tensors: list[Tensor] = self._guards.tensors

    def changed(self) -> str | None:
        """What is no longer so, in words: a value, or where a tensor is; what tensors hold is not looked at."""
        return self._guards.moved() or self._guards.changed(gradients=False)


def with_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of some tensors that have memory, and those that one without (a DTensor) stands for."""
    return TensorWatch(list(tensors), {}).tensors


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
