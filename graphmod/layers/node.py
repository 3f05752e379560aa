"""The backward of a replayed forward: an autograd node that replays, captures or computes anew what it is asked for."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from graphmod.errors import BackwardUnavailable
from graphmod.guards.hooks import has_gradient_hooks, without_gradient_hooks
from graphmod.layers.capture import capture_backward
from graphmod.layers.graph import BackwardGraph, GradientsExchanged, LayerGraph, Outvoted, Ticket, changed_in_place
from graphmod.layers.group import LayerGroup
from graphmod.layers.recorded import DIFFERENTIATED_AGAIN, GRADIENT_WITHIN, asks_for_gradient
from graphmod.layers.uses import compare_sums
from graphmod.ranks.agreement import Choice, LateRanks
from graphmod.signature.flattening import rebuild
from graphmod.signature.modes import FOREIGN, entered_again
from graphmod.step.dispatch import agrees
from graphmod.step.entry import REPLAY
from graphmod.step.gradients import out_of_pool
from graphmod.step.log import cause_of
from graphmod.step.static_inputs import without_history
from graphmod.torch_private import keeps_graph, will_run
from graphmod.trace.undo import let_through, under_way

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
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return grads[0]


_plain: Any = super(torch.autograd.Function, Replayed)
apply_replayed = _plain.apply  # without the wrapper for functorch transforms


def run_backward(ticket: Ticket, grads: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    """The backward of one replayed forward: a replay where that is safe, a capture the first time, else eager.

    Raises:
        BackwardUnavailable: for a second-order gradient, or when the forward's values were overwritten since.
    """
    graph: LayerGraph = ticket.graph
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
    if any(starmap(asks_for_gradient, ticket.inside)):
        for other in [one.graph for one in _in_flight(graph.group) if any(starmap(asks_for_gradient, one.inside))]:
            other.recording.its_backward.forget()  # as above
            other.context.drop(other.tape, why=GRADIENT_WITHIN)
        raise BackwardUnavailable(f"{context.name!r} was replayed from a graph, but {GRADIENT_WITHIN}")
    if not ticket.current:
        raise BackwardUnavailable(
            f"the values that {context.name!r} saved for this backward were overwritten by a later call, after a first "
            "backward that did not say retain_graph=True"
        )
    try:
        if context.agreement is not None:
            context.agreement.begin()
        accumulates = will_run(graph.group.anchor_node)
        if not accumulates and graph.witness is not None and graph.witness.requires_grad and _wanted(graph.witness):
            raise BackwardUnavailable(
                f"the gradients of the parameters inside {context.name!r} go straight to .grad and cannot be had "
                "through torch.autograd.grad or backward(inputs=...); call loss.backward(), or run this part eagerly "
                "(ungraph, or call .module)"
            )
        pending: set[int] = set()
        known = _graph_for(ticket, grads, pending) if accumulates and not ticket.done else None
        if known is not None:
            return _hand_out(known, ticket)
        if context.agreement is not None:
            context.agreement.choose(Choice.eager, "its backward fits no graph")
        return recompute(ticket, grads, accumulates, pending)
    finally:
        if keeps_graph():
            ticket.done = True  # another may follow: what it needs is in use for as long as somebody holds the node
        else:
            ticket.finish()
        if not ticket.arena.in_flight:
            ticket.arena.rest()


def _graph_for(ticket: Ticket, grads: tuple[Tensor | None, ...], pending: set[int]) -> BackwardGraph | None:
    """The captured backward, launched for a plain one: replayed, or captured now. None where neither can be; then
    `pending` has taken in the parameters (by identity) whose other uses in this backward are still to come."""
    graph: LayerGraph = ticket.graph
    context, entry, tape, known = graph.context, graph.entry, graph.tape, graph.backward
    group = graph.group
    otherwise = graph.guards.differentiated_otherwise()
    if known is not None:  # else autograd compares the versions of what it saved
        changed = ticket.changed()
        if changed and any(parameter is weight for parameter in changed for weight in known.weights):
            raise changed_in_place(context.name)
    if group.facts is not None:
        group.first_backward()
    entry.backward_began(group.begun)
    on_tape = tape.arena.active is tape
    modes = group.modes_in_backward()
    if otherwise is not None or modes[FOREIGN] is not None:
        _count_mismatch(graph, False)
        return None
    if known is None:
        if graph.captured_in != tape.arena.passes:
            # The optimizer has changed what the retained autograd graph saved: it is good for its own pass only.
            entry.left_unfinished()
            return None
        pending |= _used_later(ticket)
        others = pending | group.stash.keys()
        # Nobody can tell of the witness, which autograd always visits, whether eager code uses it.
        shared = [p for p in graph.direct if id(p) in others or (p is not graph.witness and will_run(_accumulator(p)))]
        if shared:
            # Captured anew with these gradients going through autograd; this once, summed up here.
            group.share(shared)
            context.drop(tape, why="code outside uses its parameters too")
            return None
        if any(p.grad is not None for p in graph.direct):
            group.keeps_gradients = True
        ready = on_tape and tape.at_end and not tape.dropped and _is_as_recorded(graph, grads)
        ready = ready and all(out_of_pool(p.grad) for p in graph.direct)
        return capture_backward(graph, grads, modes) if ready and agrees(context, entry, Choice.capture) else None
    if known.in_pool and group.keeps_gradients and not tape.dropped:
        context.drop(tape, why="gradients are kept when the next pass begins, for which they need memory of their own")
    for output in known.saved:
        if output.changed():
            raise changed_in_place(context.name)
    for output in graph.results.sharing:
        if output.changed():  # eager would follow the change into what shares its memory
            raise changed_in_place(context.name)
    if group.stash and any(id(parameter) in group.stash for parameter in graph.direct):
        return None  # without a graph its uses are added, one by one, to what waits for them
    as_then = modes is graph.backward_modes or modes == graph.backward_modes
    changed = known.changed()
    if changed is not None:
        _reads_otherwise(graph, changed)
        return None
    if not (on_tape and known.index >= tape.cursor and as_then and known.fits(grads, tape.arena.passes)):
        _count_mismatch(graph, False)
        return None
    try:
        # Where autograd may add to the same gradients in this backward, because the module also ran without a graph.
        with group.backend.in_turn() if context.eager_in >= group.begun - 1 else _NOTHING_BESIDE:
            agreed = functools.partial(agrees, context, entry, Choice.replay)
            copied, as_captured = known.launch(grads, tape.arena.passes, agreed)
    except GradientsExchanged:
        entry.add_apart()
        context.drop(tape, why="gradients that it adds to, or that are held, are others each time")
        return None
    except Outvoted:
        return None
    except LateRanks:
        raise
    except Exception as error:
        let_through(error)
        context.failed(entry, error, "a replay of its backward")
        context.drop(tape)
        return None
    context.counters.copied_bytes += copied
    tape.cursor = known.index + 1
    context.counters.replays += 1
    if graph.mismatches or not as_captured:
        _count_mismatch(graph, as_captured)
    return known


def _hand_out(known: BackwardGraph, ticket: Ticket) -> list[Tensor | None]:
    copies = ticket.graph.entry.copies_out
    found = [
        None if result is None else result.tensor.clone() if copies else result.hand_out() for result in known.results
    ]
    if any(known.wholes):
        found = [
            one if whole is None or one is None else whole.around(one)
            for one, whole in zip(found, known.wholes, strict=True)
        ]
    if ticket.graph.summed:
        compare_sums(ticket.graph, ticket.node(), ticket.graph.summed, found)
    return found


def _used_later(ticket: Ticket) -> set[int]:
    """The identities of the parameters whose gradients other forwards still to come in this very backward add to."""
    found: set[int] = set()
    for there in _in_flight(ticket.graph.group):
        if there is ticket or there.done or not there.current or there.node is None:
            continue
        node = there.node()
        if node is not None and will_run(node):
            found |= {id(parameter) for parameter in there.graph.parameters}
    return found


def _in_flight(group: LayerGroup) -> Iterator[Ticket]:
    """The last forward of each graph of the present passes, if its backward may still come."""
    for arena in group.arenas:
        for graph in arena.active.owners if arena.active is not None else ():
            there = graph.ticket() if isinstance(graph, LayerGraph) and graph.ticket is not None else None
            if there is not None:
                yield there


def _wanted(parameter: Tensor) -> bool:
    """Whether the present backward, which is not a plain one, was asked for this parameter's gradient."""
    accumulator = _accumulator(parameter)
    try:
        return will_run(accumulator)
    except RuntimeError:  # in a backward, autograd refuses to answer only for a leaf that torch.autograd.grad asks for
        return True


def _accumulator(parameter: Tensor) -> Node:
    """The node by which autograd itself accumulates into a parameter."""
    with torch.enable_grad():
        return get_gradient_edge(parameter).node


def _is_as_recorded(graph: LayerGraph, grads: tuple[Tensor | None, ...]) -> bool:
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


def _reads_otherwise(graph: LayerGraph, changed: str, patience: int | None = None) -> None:
    """A backward whose code would read something else than when it was recorded; after some in a row the call is
    recorded anew."""
    context, entry = graph.context, graph.entry
    graph.count_mismatch(False)
    context.log_once(f"the backward of {context.name!r} runs eagerly: {changed}", key=f"backward: {cause_of(changed)}")
    if graph.mismatches <= (context.config.warmup_steps if patience is None else patience):
        return
    entry.forget(graph.recording, changed)


def _count_mismatch(graph: LayerGraph, matched: bool) -> None:
    """Several backwards in a row that the captured one did not fit: this is how it is from now on, capture anew. Where
    that does not help, the slower replay is as good as it gets."""
    context, entry = graph.context, graph.entry
    graph.count_mismatch(matched)
    if not matched:
        context.spend(entry, REPLAY)
    if graph.tape.dropped or graph.mismatches <= context.config.warmup_steps:
        return
    if entry.account.allows(entry.replays, 4):  # with the next capture
        context.spend(entry, 3)
        context.drop(graph.tape, why="its backward finds other gradients than when it was captured")


# -- without a graph ---------------------------------------------------------------------------------------------------


def recompute(
    ticket: Ticket, grads: Sequence[Tensor | None], accumulates: bool, pending: Collection[int]
) -> list[Tensor | None]:
    """Runs the forward again, eagerly, on the inputs that are still in place, and differentiates that.

    For a backward that has no graph yet, or comes out of tape order, a second time, with other gradients than at
    capture, or through `torch.autograd.grad`. The autograd graph of the capture itself is no use outside of a capture:
    its attention kernels hold their random state as device addresses. Only where a parameter was changed since, so that
    another forward would have other values, is it that or nothing. Gradients of the parameters `pending` wait for their
    other uses in this backward.

    Raises:
        BackwardUnavailable: a parameter was changed since the forward, whose values can no longer be had.
        RuntimeError: the backward reads it again, as eager says it.
    """
    graph: LayerGraph = ticket.graph
    context = graph.context
    direct = graph.direct if accumulates else []
    stash, sums = graph.group.stash, {}
    with _trained(graph.parameters):
        outputs, leaves, edges = _as_captured(ticket) if ticket.changed() else _run_again(ticket)
        modified = [out for out, static in zip(outputs, graph.results.with_grad, strict=True) if static.changed()]
        if not edges:
            torch.autograd.graph.increment_version(modified)  # so that autograd refuses them where it needs them
        # Autograd visits the witness, and would run hooks that were put there since once more.
        late = graph.witness if direct and graph.witness is not None and has_gradient_hooks(graph.witness) else None
        with without_gradient_hooks([] if late is None else [late]):
            through, gradients = graph.differentiate(outputs, leaves, grads, direct, edges, {*pending, *stash})
    for parameter, grad in gradients:  # those of several uses one by one, as autograd adds them up
        earlier = sums[parameter] if parameter in sums else stash.pop(id(parameter), None)
        sums[parameter] = grad if earlier is None else earlier if grad is None else earlier + grad
    stash.update({id(p): grad.clone() for p, grad in sums.items() if grad is not None and id(p) in pending})
    ticket.of_witness = None if late is None or id(late) in stash else sums.pop(late, None)
    _tell_of_parts(graph, [p for p in sums if p is not graph.witness and id(p) not in stash])
    with graph.group.backend.in_turn():
        _deliver([(p, grad) for p, grad in sums.items() if id(p) not in stash])
    context.counters.eager_calls += 1
    if graph.summed and ticket.node is not None:
        compare_sums(graph, ticket.node(), graph.summed, through)
    return through


def _tell_of_parts(graph: LayerGraph, parameters: list[Tensor]) -> None:
    """Gradient hooks that have come since the forward run for each part of a gradient to which eager code adds, too."""
    if any(has_gradient_hooks(p) and p.requires_grad and will_run(_accumulator(p)) for p in parameters):
        graph.context.log_once(
            f"{graph.context.name!r}: a gradient hook came to a parameter after this call, and code without a graph "
            "uses the parameter in the same backward. This once the hook runs for each part of the gradient, where "
            "eager runs it for their sum; put hooks on parameters before the first call of a step",
            key="hook between calls",
        )


def _deliver(direct: list[tuple[Tensor, Tensor | None]]) -> None:
    """What AccumulateGrad does, for gradients computed eagerly."""
    for parameter, grad in direct:
        before = parameter.grad
        if grad is None or not parameter.requires_grad:
            continue
        if grad.layout is not torch.strided:
            parameter.grad = grad.detach() if before is None else before + grad
        elif before is None:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)
        elif before.layout is not torch.strided:
            parameter.grad = grad + before
        else:
            before.add_(grad)
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)  # which has come since the forward


@contextlib.contextmanager
def _trained(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Lets parameters require grad, as they did in the forward."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _as_captured(ticket: Ticket) -> tuple[Sequence[Tensor], list[Tensor], dict]:
    """What the capture of the forward left behind, if that was in this pass."""
    graph, known = ticket.graph, ticket.graph.backward
    if known is not None and any(parameter is weight for parameter in ticket.changed() for weight in known.weights):
        raise changed_in_place(graph.context.name)
    if (
        not graph.results.retained
        or (graph.random and graph.group.backend.on_gpu)
        or graph.captured_in != ticket.arena.passes
    ):
        raise BackwardUnavailable(
            f"a tensor that {graph.context.name!r} reads was changed in place between its forward and this backward, "
            "which comes in another order than when it was captured. Run the backward before the change, or keep this "
            "part out of the graphs (ungraph, or call .module)"
        )
    return graph.results.retained, [item.tensor for item in graph.inputs], graph.edges


def _run_again(ticket: Ticket) -> tuple[Sequence[Tensor], list[Tensor], dict]:
    graph = ticket.graph
    # In a checkpoint the code runs again anyway, on what is there by then, and what it writes stays.
    changed = [] if graph.runs_again else [(tensor, tensor.clone()) for tensor in graph.graph.seen.written.values()]
    now, depth = graph.random_state(), under_way.again
    graph.set_random_state(ticket.random_state)
    try:
        under_way.again = depth + 1
        for tensor, value in () if graph.runs_again else zip(graph.advanced, ticket.before or (), strict=True):
            tensor.copy_(value)
        leaves = [without_history(static.tensor) for static in graph.inputs]
        args, kwargs = rebuild(graph.entry.signature.structure, leaves)
        modes = entered_again(graph.entry.signature.modes, graph.group.backend.device_type)
        with torch.enable_grad(), modes, graph.recording.guards.as_recorded():
            outputs = graph.results.of_node(graph.function(*args, **kwargs))
    finally:
        under_way.again = depth
        graph.set_random_state(now)
        for tensor, before in changed:
            tensor.copy_(before)
    return outputs, leaves, {}
