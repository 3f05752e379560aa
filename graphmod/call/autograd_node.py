"""The backward of a replayed forward: an autograd node that replays, captures or computes anew what it is asked for."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphmod.call.recompute import recompute
from graphmod.call.together import agrees
from graphmod.capture.backward import capture_backward
from graphmod.capture.recorded_backward import DIFFERENTIATED_AGAIN
from graphmod.errors import BackwardUnavailable
from graphmod.graph.backward import BackwardGraph, GradientsExchanged, Outvoted
from graphmod.graph.forward import ForwardGraph
from graphmod.graph.tape import Ticket
from graphmod.graph.uses import watch_sums
from graphmod.ranks.agreement import Choice
from graphmod.ranks.ballot import LateRanks
from graphmod.signature.modes import FOREIGN
from graphmod.state.account import REPLAY
from graphmod.state.said import cause_of
from graphmod.torch_private import keeps_graph, will_run
from graphmod.trace.undo import let_through

_NOTHING_BESIDE = contextlib.nullcontext()
_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)
"""What autograd says."""


class Replayed(torch.autograd.Function):
    """The autograd node of one replayed forward.

    The inputs are the arguments that require grad, the parameters whose gradients go through autograd, and maybe one
    witness of the others, which gets no gradient here (unless hooks were put on it since) but lets
    `torch.autograd.grad` for parameters reach this node.
    `anchor` is a leaf that makes the outputs require grad also where parameters are all there is to differentiate;
    whether autograd means to accumulate into it tells `.backward()` from `torch.autograd.grad`.
    """

    @staticmethod
    def forward(ctx: Any, ticket: Ticket, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ticket = ticket
        ticket.node = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        return tuple([output.hand_out() for output in ticket.graph.results.with_grad])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        ticket = ctx.ticket
        found = run_backward(ticket, grads)
        if ticket.graph.witness is None:
            return (None, None, *found)
        grad, ticket.of_witness = ticket.of_witness, None
        return (None, None, *found, grad)


class InTurn(torch.autograd.Function):
    """Stands between a parameter and `Replayed`. Autograd runs the node that was made last first, and what accumulates
    a gradient as soon as it is there: so the hooks of several parameters run in the order in which these are made."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


apply_replayed = super(torch.autograd.Function, Replayed).apply  # without the wrapper for functorch transforms


def run_backward(ticket: Ticket, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    """The backward of one replayed forward: a replay where that is safe, a capture the first time, else eager.

    Raises:
        BackwardUnavailable: for a second-order gradient, or when the forward's values were overwritten since.
    """
    graph: ForwardGraph = ticket.graph
    context = graph.context
    if ticket.finished and graph.saves:
        raise RuntimeError(_TWICE)
    if torch.is_grad_enabled():
        graph.recording.its_backward.forget()  # the next calls are eager, so that it shows whether they all are
        context.drop(graph.tape, why=DIFFERENTIATED_AGAIN)
        raise BackwardUnavailable(
            f"{context.name!r} was replayed from a graph, which has no gradient of its gradient (create_graph=True); "
            "run this part eagerly: graph=none, ungraph(model), or call the module as .module"
        )
    if not ticket.current:
        raise BackwardUnavailable(
            f"the values that {context.name!r} saved for this backward were overwritten by a later call, after a first "
            "backward that did not say retain_graph=True"
        )
    try:
        return _backward(ticket, graph, grads)
    finally:
        if keeps_graph():
            ticket.done = True  # another may follow: what it needs is in use for as long as somebody holds the node
        else:
            ticket.finish()
        if not ticket.arena.in_flight:
            ticket.arena.rest()


def _backward(ticket: Ticket, graph: ForwardGraph, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    context, tape = graph.context, graph.tape
    if context.agreement is not None:
        context.agreement.begin()
    accumulates = will_run(context.group.anchor_node)
    if not accumulates and graph.witness is not None and graph.witness.requires_grad and _wanted(graph.witness):
        raise BackwardUnavailable(
            f"the gradients of the parameters inside {context.name!r} go straight to .grad and cannot be had through "
            "torch.autograd.grad or backward(inputs=...); call loss.backward(), or run this part eagerly (ungraph, or "
            "call .module)"
        )
    if ticket.done or not accumulates:
        return _again(ticket, graph, grads, accumulates)
    known = graph.backward
    otherwise = graph.watch.differentiated_otherwise()
    if known is not None:  # else autograd compares the versions of what it saved
        changed = ticket.changed()
        if changed and any(parameter is weight for parameter in changed for weight in known.weights):
            raise context.changed_in_place()
    if context.group.context is not None:
        context.group.first_backward()
    graph.entry.backward_began(context.group.begun)
    on_tape = tape.arena.active is tape
    modes = context.group.modes_in_backward()
    if otherwise is not None or modes[FOREIGN] is not None:
        _count_mismatch(graph, False)
        return _again(ticket, graph, grads, accumulates)
    if known is None:
        if graph.captured_in != tape.arena.passes:
            # The optimizer has changed what the retained autograd graph saved: it is good for its own pass only.
            graph.entry.left_unfinished()
            return _again(ticket, graph, grads, accumulates)
        pending = _used_later(ticket, graph)
        stash = context.group.stash
        shared = [p for p in graph.direct if id(p) in pending or id(p) in stash or _used_eagerly(p, graph)]
        if shared:
            # Captured anew with these gradients going through autograd; this once, summed up here.
            context.group.share(shared)
            context.drop(tape, why="code outside uses its parameters too")
        elif on_tape and tape.at_end and not tape.dropped and _is_as_recorded(graph, grads):
            if agrees(context, graph.entry, Choice.capture):
                known = capture_backward(graph, grads)
            if known is not None:
                graph.backward_modes = modes
                return _hand_out(known, ticket)
            return _again(ticket, graph, grads, True, pending)
        return _again(ticket, graph, grads, accumulates, pending)
    for output in known.saved:
        if output.changed():
            raise context.changed_in_place()
    for output in graph.results.sharing:
        if output.changed():  # eager would follow the change into what shares its memory
            raise context.changed_in_place()
    if context.group.stash and any(id(parameter) in context.group.stash for parameter in graph.direct):
        return _again(ticket, graph, grads, accumulates)  # which adds its uses, one by one, to what waits for them
    as_then = modes is graph.backward_modes or modes == graph.backward_modes
    changed = known.changed()
    if changed is not None:
        _reads_otherwise(graph, changed)
        return _again(ticket, graph, grads, accumulates)
    if on_tape and known.index >= tape.cursor and as_then and known.fits(grads, tape.arena.passes):
        # Where autograd may add to the same gradients in this backward, because the module also ran without a graph.
        group, agreed = context.group, functools.partial(agrees, context, graph.entry, Choice.replay)
        try:
            with group.backend.in_turn() if context.eager_in >= group.begun - 1 else _NOTHING_BESIDE:
                copied, as_captured = known.launch(grads, tape.arena.passes, agreed)
        except GradientsExchanged:
            graph.entry.adds_apart = True
            context.drop(tape, why="gradients that it adds to, or that are held, are others each time")
            return _again(ticket, graph, grads, accumulates)
        except Outvoted:
            return _again(ticket, graph, grads, accumulates)
        except LateRanks:
            raise
        except Exception as error:
            let_through(error)
            context.failed(graph.entry, error, "a replay of its backward")
            context.drop(tape)
            return _again(ticket, graph, grads, accumulates)
        context.counters.copied_bytes += copied
        tape.cursor = known.index + 1
        context.counters.replays += 1
        if graph.mismatches or not as_captured:
            _count_mismatch(graph, as_captured)
        return _hand_out(known, ticket)
    _count_mismatch(graph, False)
    return _again(ticket, graph, grads, accumulates)


def _again(
    ticket: Ticket, graph: ForwardGraph, grads: tuple[Tensor | None, ...], accumulates: bool, pending: Any = ()
) -> Sequence[Tensor | None]:
    """The backward without a graph, on all ranks alike."""
    agreement = graph.context.agreement
    if agreement is not None:
        agreement.choose(Choice.eager, "its backward fits no graph")
    return recompute(ticket, graph, grads, accumulates, pending)


def _hand_out(known: BackwardGraph, ticket: Ticket) -> list[Tensor | None]:
    copies = ticket.graph.entry.copies_out
    found = [
        None if result is None else result.tensor.clone() if copies else result.hand_out() for result in known.results
    ]
    if any(known.wholes):
        found = [one if whole is None else whole.around(one) for one, whole in zip(found, known.wholes, strict=True)]
    if ticket.graph.summed:
        watch_sums(ticket.graph, ticket.node(), ticket.graph.summed, found)
    return found


def _used_later(ticket: Ticket, graph: ForwardGraph) -> set[int]:
    """The identities of the parameters whose gradients other forwards still to come in this very backward add to."""
    found: set[int] = set()
    for arena in graph.context.group.arenas:
        for other in arena.active.owners if arena.active is not None else ():
            there = other.ticket() if other.ticket is not None else None
            if there is None or there is ticket or there.done or not there.current or there.node is None:
                continue
            node = there.node()
            if node is not None and will_run(node):
                found |= {id(parameter) for parameter in other.parameters}
    return found


def _wanted(parameter: Tensor) -> bool:
    """Whether the present backward, which is not a plain one, was asked for this parameter's gradient."""
    with torch.enable_grad():
        accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return will_run(accumulator)
    except RuntimeError:  # autograd does not answer for leaves that torch.autograd.grad was asked for
        return True


def _used_eagerly(parameter: Tensor, graph: ForwardGraph) -> bool:
    """Whether autograd itself is going to accumulate into this parameter in the present backward. Nobody can tell for
    the witness, which autograd always visits."""
    if parameter is graph.witness:
        return False
    with torch.enable_grad():
        accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
    return will_run(accumulator)


def _is_as_recorded(graph: ForwardGraph, grads: tuple[Tensor | None, ...]) -> bool:
    """Whether a backward like this one was recorded, in the present state. Where it was not, the next calls are eager,
    so that it may be."""
    known, context = graph.recording.its_backward, graph.context
    given = tuple(grad is not None for grad in grads)
    if not known.knows(given):
        known.want()
        context.drop(graph.tape, why="no backward of it was recorded")
        return False
    changed = known.changed(given)
    if changed is not None:
        _reads_otherwise(graph, changed, patience=0)
    return changed is None


def _reads_otherwise(graph: ForwardGraph, changed: str, patience: int | None = None) -> None:
    """A backward whose code would read something else than when it was recorded; after some in a row the call is
    recorded anew."""
    context, entry = graph.context, graph.entry
    graph.mismatches += 1
    context.log_once(f"the backward of {context.name!r} runs eagerly: {changed}", key=f"backward: {cause_of(changed)}")
    if graph.mismatches <= (context.config.warmup_steps if patience is None else patience):
        return
    entry.difference = changed
    entry.forget(graph.recording)


def _count_mismatch(graph: ForwardGraph, matched: bool) -> None:
    """Several backwards in a row that the captured one did not fit: this is how it is from now on, capture anew. Where
    that does not help, the slower replay is as good as it gets."""
    context, entry = graph.context, graph.entry
    graph.mismatches = 0 if matched else graph.mismatches + 1
    if not matched:
        context.spend(entry, REPLAY)
    if graph.tape.dropped or graph.mismatches <= context.config.warmup_steps:
        return
    if entry.account.allows(entry.replays, 4):  # with the next capture
        context.spend(entry, 3)
        context.drop(graph.tape, why="its backward finds other gradients than when it was captured")
