"""Which graph serves a call, and its replay."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from graphmod.errors import CaptureRefused, SuccessorFailed
from graphmod.errors import reason as failure
from graphmod.ranks.agreement import Choice
from graphmod.signature.signature import Matcher
from graphmod.step.capture import CANNOT_MOVE, CAPTURE_ANOTHER, IN_USE, UNFINISHED
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.graph import StepGraph
from graphmod.step.together import agrees
from graphmod.trace.undo import let_through


def find(context: Context, entry: Entry, leaves: list[Tensor], careful: bool) -> tuple[StepGraph | None, str]:
    """A graph of this signature that may replay now, or the reason why none may."""
    reason = IN_USE
    best = None
    unfinished = False
    if entry.capture_in and not careful:
        entry.capture_in -= 1
        unfinished = not entry.capture_in
    for graph in entry.graphs:
        tape, arena = graph.tape, graph.tape.arena
        if arena.in_flight:
            if arena.active is not tape or graph.index < tape.cursor:
                continue
        elif entry.needs_grad and tape.fresh_grads is not None:
            expected = context.group.expects_fresh_grads()
            if expected is not None and expected is not tape.fresh_grads:
                reason = CAPTURE_ANOTHER
                continue
        if unfinished and graph.backward is None:
            reason = UNFINISHED
            continue
        unfit = graph.unfit(leaves, careful)
        if unfit is not None:
            reason = unfit
            continue
        if arena.in_flight or not graph.index:
            best = graph
            break  # those that follow were captured later
        if best is None or graph.index < best.index:
            best = graph
    if best is not None and not best.tape.arena.in_flight:
        stuck = best.tape.arena.begin(best.tape)
        for other in stuck or ():
            other.copies_out = True  # from now on: its results are held in a way that does not let them be moved
        if stuck:
            context.drop(*{graph.tape for other in (entry, *stuck) for graph in other.graphs}, why=CANNOT_MOVE)
            return None, CAPTURE_ANOTHER
    return best, reason


def launch(context: Context, graph: StepGraph, leaves: list[Tensor], careful: bool) -> tuple[Any, str | None]:
    """Replays.

    Args:
        careful: everything about the graph has been checked.

    Returns:
        The random state before, where it is needed later; and why the replay was stopped before it had changed
        anything that lasts, None if it was not.
    """
    entry = graph.entry
    graph.load(leaves)
    state = graph.random_state()
    graph.tape.cursor = graph.index + 1
    early = graph.starts_early and not careful and graph.successor is None
    finished = False
    try:
        if early:
            graph.graph.start()  # the GPU works while the host looks
        reason = graph.changed() if graph.starts_early and not careful else None
        if reason is None and not agrees(context, entry, Choice.replay):
            reason = "another rank runs eagerly"
        if reason is not None:
            return None, reason
        replayed = graph.successor is None or not _taken_over(context, graph)
        if early:
            graph.graph.finish()
        elif replayed:
            graph.graph.replay()
        finished = True
    finally:
        if not finished:
            graph.set_random_state(state)
    graph.launched(leaves)
    context.counters.replays += replayed
    context.counters.eager_calls += not replayed
    context.served = graph  # past nn.Module's __setattr__, which takes a microsecond
    if context.entries.usual is not entry:
        if entry.matcher is None:
            entry.matcher = Matcher(entry.signature)
        context.entries.usual = entry
    entry.replays += 1
    if graph.backward is not None or not graph.results.with_grad:
        entry.succeeded()
    return state, None


def _taken_over(context: Context, graph: StepGraph) -> bool:
    """Whether the successor of a graph has done this call; see `_take_over`."""
    began, first = time.perf_counter(), not graph.succeeded
    try:
        done = _take_over(graph)
    except Exception as error:
        let_through(error)
        graph.successor = None
        if first:
            raise SuccessorFailed(
                f"{context.name!r}: code that was to take the place of its graph failed: {failure(error)}. It may have "
                "changed something, so begin again; the graph does all further calls"
            ) from error
        context.log_once(f"{context.name!r} keeps the kernels it has: {failure(error)}")
        return False
    if not done:  # no capture of the call, of which there is one already
        context.counters.capture_seconds += time.perf_counter() - began
    return done


def _take_over(graph: StepGraph) -> bool:
    """Lets the successor of a graph do this call: itself, when it is asked for the first time, since it may load and
    compile what no capture may; the second time by a graph that is captured now, whose replay must come at once.

    Returns:
        Whether the call is done.

    Raises:
        CaptureRefused: a graph cannot repeat that code.
        Exception: whatever a capture raised. The graph is as it was, and does the call.
    """
    run = graph.successor
    if not graph.succeeded:
        graph.succeeded = True
        run()
        return True
    graph.successor = None
    backend = graph.context.group.backend
    backend.prepare_capture()
    captured, result = backend.capture(run, graph.tape.arena.pool, [], [], split=False)
    if result is not None or not captured.seen.outside:
        captured.discard()
        raise CaptureRefused("code that takes the place of a graph returns nothing, and works on tensors from outside")
    graph.graph, graph.starts_early = captured, False
    return False
