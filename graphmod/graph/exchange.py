"""Other kernels for a captured call: a graph of code that does the same takes the place of the one that was captured.

Arguments, guards and order stay those of the call that was recorded, so nothing but the kernels changes.
"""

from __future__ import annotations

from graphmod.errors import CaptureRefused
from graphmod.graph.forward import ForwardGraph


def exchangeable(graph: ForwardGraph) -> bool:
    """Whether all that a call leaves behind lies in tensors from outside, where other code can leave it as well."""
    return graph.stands_alone and not graph.results.with_grad and not graph.random and not graph.advanced


def take_over(graph: ForwardGraph) -> bool:
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
