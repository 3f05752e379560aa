"""Where a call that fits no graph may be captured, and its capture.

May import what `forward` may, `forward`, `failures` and `tape`; knows `module` by its attributes only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.failures import capture_failed, tell_of_unseen
from graphmod.forward import ForwardGraph
from graphmod.lifecycle import Entry
from graphmod.tape import Tape

if TYPE_CHECKING:
    from graphmod.module import CUDAGraphModule

CAPTURE_ANOTHER = "its graphs expect other gradients (None, or to be added to) than the coming backward will find"


def place(module: CUDAGraphModule, entry: Entry, reason: str) -> Tape | None:
    """The tape on which this call may be captured now, or None to run it eagerly.

    Args:
        reason: why the graphs that there are do not fit; `CAPTURE_ANOTHER` if another one would.
    """
    group, patience = module._group, module._config.warmup_steps
    if entry.called_forward and not entry.graphs and torch._C._current_autograd_node() is not None:
        return None  # a checkpoint runs an eager forward again, and counts what it saves
    growing = group.growing_tape()
    if growing is None and entry.graphs and reason != CAPTURE_ANOTHER:
        # The graphs there are do not fit. Once is an exception, several times in a row is how it is from now on.
        entry.misses += 1
        if entry.misses <= patience:
            module._log_once(
                f"{module._name!r} runs eagerly: {reason}. After {patience} such calls it is captured again"
            )
            return None
        _drop_moved(module, entry)
        if entry.disabled:
            return None
    if not _make_space(module, entry):
        return None
    tape = growing or group.place(entry.needs_grad)
    if tape is None:
        entry.misses += 0 if entry.graphs else 1
        # In the middle of an iteration only where there never is a beginning, because one is always in flight.
        if entry.misses > patience * (3 if group.eager_in_flight else 1):
            tape = group.new_tape_elsewhere()
    return tape


def _drop_moved(module: CUDAGraphModule, entry: Entry) -> None:
    """Drops graphs whose addresses are gone. A graph that moves each time before it was ever replayed counts as a
    failure, so that recapturing comes to an end."""
    moved = [graph for graph in entry.graphs if not graph.tape.arena.in_flight and graph.watch.moved()]
    for graph in moved:
        reason = graph.watch.moved()
        module._drop(graph.tape)
        entry.script = None  # of the code as it was before the change
        entry.moves += 1
        if entry.moves >= module._config.max_failures:
            entry.disabled, entry.reason = True, f"captured again and again, because {reason}"
            module._log_once(f"{module._name!r} stays eager: {entry.reason}. force_enable() tries again")


def _make_space(module: CUDAGraphModule, entry: Entry) -> bool:
    """Keeps to `max_graphs`, evicting the least recently used signature that is not in flight."""
    held = module._entries.holding(but=entry)
    if len(held) < module._config.max_graphs:
        return True
    for victim in held:
        if not any(graph.tape.arena.in_flight for graph in victim.graphs):
            module._drop(*{graph.tape for graph in victim.graphs})
            return True
    module._log_once(f"{module._name!r} runs eagerly: all {module._config.max_graphs} graphs (max_graphs) are in use")
    return False


def capture(module: CUDAGraphModule, entry: Entry, tape: Tape, leaves: list[Tensor]) -> tuple[ForwardGraph, Any] | None:
    """Captures a call on its tensor arguments and launches it.

    Returns:
        The graph and the random state before it; None where that failed, which has been counted and logged.
    """
    began = time.perf_counter()
    arena, backend = tape.arena, module._group.backend
    try:
        if torch.is_grad_enabled() and module._around.distributed():
            raise CaptureRefused(
                "is trained with DistributedDataParallel, which reduces gradients in hooks that no replay would run"
            )
        if not arena.in_flight:
            backend.prepare_capture()
            arena.begin(tape)
        graph = ForwardGraph(module, entry, tape)
        state = backend.random_state()
        torch.clear_autocast_cache()
        try:
            graph.capture(leaves)
        finally:
            torch.clear_autocast_cache()
        graph.launch()
    except Exception as error:  # whatever user code or CUDA raised: the eager call decides what the user sees
        capture_failed(module, entry, error, "its forward")
        return None
    tell_of_unseen(module, graph.graph.seen, graph.watch.unseen)
    graph.index = tape.append(graph)
    module._served = graph
    entry.graphs.append(graph)
    entry.misses = 0
    entry.needs_grad = bool(graph.results.with_grad)
    if entry.needs_grad:
        arena.awaiting.add(graph)
    if not entry.needs_grad:
        entry.succeeded()
    module._counters.captures += 1
    module._counters.replays += 1
    module._counters.capture_seconds += time.perf_counter() - began
    return graph, state
