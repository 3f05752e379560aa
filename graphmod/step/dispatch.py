"""What a call does: which of replay, warm-up, capture and an eager call it is."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphmod.config import Verify
from graphmod.errors import CaptureRefused, Diverged
from graphmod.ranks.agreement import Agreement, Choice, LateRanks, communicated, free_before_destruction, several_ranks
from graphmod.ranks.fully_shard import captured
from graphmod.reads.backwards import end_left, watches
from graphmod.signature.call import Call, Flat
from graphmod.signature.flattening import unrepeatable
from graphmod.signature.modes import FOREIGN, changed_mode
from graphmod.signature.signature import Signature, path_of, tensor_key
from graphmod.step.admission import CANNOT_MOVE, CAPTURE_ANOTHER, IN_USE, UNFINISHED, affordable, choose_tape
from graphmod.step.arena import Tape
from graphmod.step.context import Context
from graphmod.step.eager_parts import CutShort, VerifiedParts
from graphmod.step.entry import Entry
from graphmod.step.graph import READS_OTHERWISE, StepGraph
from graphmod.step.group import LOOKS
from graphmod.step.recording import Recording, record, record_operations
from graphmod.step.static_inputs import named_arguments, no_copy
from graphmod.torch_private import (
    is_fx_tracing,
    is_grad_enabled,
    is_traced,
    next_sequence_number,
    set_grad_enabled,
    top_saved_tensors_hooks,
)
from graphmod.trace import dispatch
from graphmod.trace.hazards import COMPILES
from graphmod.trace.operations import is_stale
from graphmod.trace.recorder import Recorder
from graphmod.trace.undo import is_interrupt, let_through, under_way, undo_left

TRACED = ", and no graph is in what is made of it; trace first, and wrap that: CUDAGraphModule(traced)"
STALE = (
    "an argument is a view that was made under no_grad, and whose memory was changed with gradients since; pass it "
    "detached"
)
PARTS_OF_RANKS = (
    "has an eager part, and takes part in what several ranks do together; keep that part outside of the captured call"
)
T = TypeVar("T")


def run(context: Context, call: Call) -> Any:
    """One call, on all ranks alike where it communicates; see `_run`."""
    if watches:
        end_left()
    undo_left()
    if is_nested(context):
        return call()
    grad, hooks = is_grad_enabled(), top_saved_tensors_hooks(True)
    try:
        if hooks is not None:
            return context.among_hooks(hooks[0], call, functools.partial(_start, context, call))
        return _start(context, call)
    except BaseException as error:
        if is_interrupt(error):
            set_grad_enabled(grad)  # `torch.no_grad` does not, where it is interrupted
        raise


def _start(context: Context, call: Call) -> Any:
    if context.agreement is not None:
        context.agreement.begin()
    return _run(context, call)


def _run(context: Context, call: Call) -> Any:
    """One call, by the first of these that can be:

    1. a replay of a graph whose arguments, guards and order fit; now and then an eager call in its place, to verify it;
    2. an eager call, where the signature is disabled, or somebody looks on (a transform, a tracer);
    3. a warm-up call, where no call was recorded in the present state: the last of some is recorded;
    4. a capture, where there is a place for it;
    5. an eager call, also where the account does not allow for 3 or 4.
    """
    group, entries = context.group, context.entries
    entry, modes = entries.usual, group.modes()
    function = None if call.function is context.call else call.function
    leaves = None
    # Most calls are like the one before.
    if entry is not None and entry.matcher is not None and not entry.disabled:
        known = entry.signature
        if known.modes == modes and known.function is function and known.training is context.training:
            leaves = entry.matcher.match(call.args, call.kwargs)
    if entry is not None and leaves is not None:
        call.leaves = leaves
        entries.touch(entry)
    else:
        if modes[FOREIGN] is not None or is_fx_tracing():
            traced = TRACED if is_traced() else ""
            context.log_once(f"{context.name!r} runs eagerly, because {modes[FOREIGN] or 'it is being traced'}{traced}")
            return eager(context, call)
        leaves = call.leaves
        if not context.around.known:
            context.discover()
        entry = _entry(context, call, function)
        if entry is None:
            return eager(context, call)
    if (entry.disabled and entry.stays_eager()) or not entry.looks_at_values():
        return eager(context, call, entry)
    if entry.keeps_casts and context.shares_casts(entry):
        return eager(context, call, entry)
    if entry.needs_grad and not group.busy:
        group.begin_pass()
    if (entry.verified_in != group.verification.round or not entry.replays % LOOKS) and entry.graphs:
        recording = due(context, entry, leaves)
        if recording is not None:
            return verify(context, entry, call, recording)
    reason = ""
    # A graph may start before everything about it has been checked; if that shows that it was none, once more with
    # care.
    for careful in (False, True) if entry.graphs else ():
        graph, reason = find(context, entry, leaves, careful)
        if graph is None:
            break
        try:
            state, reason = launch(context, graph, leaves, careful)
        except LateRanks:
            raise
        except CutShort as cut:
            return go_on(context, entry, call, cut)
        except RuntimeError as error:
            let_through(error)
            if graph.began_parts:
                raise  # from a graph, after such a part
            context.drop(graph.tape)
            context.failed(entry, error, "a replay")
            return eager(context, call)
        if reason is None:
            return context.results(graph, leaves, state)
        if reason is READS_OTHERWISE:
            context.spend(entry)
            if graph.missed_again():
                entry.forget(graph.recording, reason)  # the code goes another way by now
            context.last_failure = reason
            context.log_once(f"{context.name!r} runs eagerly where {reason}; use torch.where or clamp")
            return eager(context, call, entry)
        if context.agreement is not None and not context.agreement.is_open:
            return eager(context, call, entry)
    if group.settle(context.config.backend, context.around.device(leaves)):
        entry.recordings.clear()  # of calls elsewhere
        return _run(context, call)
    if group.held_back:
        context.log_once(
            f"{context.name!r} runs eagerly: it is on another device than its graphs, of which a result is held whose "
            "backward may still come"
        )
        return eager(context, call, entry)
    unwatched = context.around.not_to_be_recorded
    if unwatched is not None:
        context.keep_eager(entry, unwatched)
        context.log_once(f"{context.name!r} stays eager: it {unwatched}")
        return eager(context, call, entry)
    recording = entry.recording_of_now(call.leaves)
    if recording is None and entry.other_branch and not entry.records_branch():
        return eager(context, call, entry)
    if recording is None or recording.refused is not None:
        if not affordable(context, entry, entry.difference):
            return eager(context, call, entry)
        return warm_up(context, entry, call)
    if context.awaits_backward(entry, recording):
        return eager(context, call, entry, recording)
    tape = choose_tape(context, entry, reason, recording)
    if tape is None:
        return eager(context, call, entry, recording)
    if not agrees(context, entry, Choice.capture):
        return eager(context, call, entry)
    return capture(context, entry, call, recording, tape)()


def eager(context: Context, call: Call, entry: Entry | None = None, recording: Recording | None = None) -> Any:
    """A call without a graph; with an `entry` its backward is waited for, and with a `recording` of the present state
    judged, where none was yet."""
    context.ran_eagerly()
    call.oldest = next_sequence_number()
    result = alone(context, entry, call)
    if entry is None or not entry.needs_grad:
        return result
    call.result = Flat(result)
    return context.eager_result(entry, call, recording)


def _entry(context: Context, call: Call, function: Any) -> Entry | None:
    """What is known of calls with this signature; None where no other call can have it. `function`: see `Signature`."""
    structure, leaves, group = call.flat.structure, call.leaves, context.group
    key = tuple(map(tensor_key, leaves))
    signature = Signature(structure, key, group.modes(), context.training, function)
    entry = context.entries.get(signature) if group.settled else None
    if entry is not None:
        return entry
    names = call.names
    unknown = unrepeatable(structure)
    if unknown is not None:
        path = path_of(unknown, structure, names)
        context.log_once(f"{context.name!r} runs eagerly, because its argument {path!r} is {unknown.why}")
        return None
    if any(map(is_stale, leaves)):
        context.last_failure = STALE
        context.log_once(f"{context.name!r} runs eagerly: {context.last_failure}")
        return None
    stranger = context.entries.stranger(signature)
    if stranger is not None:
        path = path_of(stranger, structure, names)
        context.last_failure = (
            f"its argument {path!r} is another {type(stranger.value).__name__} in each call, which counts by identity "
            "because nobody can look into it; pass the same object, or what it holds: tensors, a dict, a dataclass"
        )
        context.log_once(f"{context.name!r} runs eagerly: {context.last_failure}")
        return None
    group.settle(context.config.backend, context.around.device(leaves))
    signature = signature._replace(modes=group.modes())
    lines = context.entries.nearest(signature, names)
    if lines:
        context.log_once(f"{context.name!r} is called with other inputs:\n  " + "\n  ".join(lines), key="other inputs")
    return context.entries.add(signature)


# -- replay: which graph serves a call ---------------------------------------------------------------------------------


def find(context: Context, entry: Entry, leaves: list[Tensor], careful: bool) -> tuple[StepGraph | None, str]:
    """A graph of this signature that may replay now, or the reason why none may."""
    reason = IN_USE
    best = None
    unfinished = False
    if entry.capture_in and not careful:
        unfinished = entry.awaited_capture()
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
            other.copy_out()
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
    early = graph.starts_early and (not careful or graph.looks) and graph.successor is None
    finished = False
    try:
        if early:
            graph.graph.start()  # the GPU works while the host looks
        reason = graph.guards.changed() if graph.starts_early and not careful else None
        if reason is None and not agrees(context, entry, Choice.replay):
            reason = "another rank runs eagerly"
        if reason is None and early and graph.reads_otherwise():
            reason = READS_OTHERWISE
        if reason is not None:
            return None, reason
        replayed = graph.successor is None or not graph.run_successor()
        if early:
            graph.graph.finish()
        elif replayed:
            graph.replay(leaves)
        finished = True
    finally:
        if not (finished or graph.began_parts):
            graph.set_random_state(state)
    graph.launched(leaves)
    context.counters.replays += replayed
    context.counters.eager_calls += not replayed
    context.served = graph  # past nn.Module's __setattr__, which takes a microsecond
    if context.entries.usual is not entry:
        context.entries.expect(entry)
    entry.replayed(succeeded=graph.backward is not None or not graph.results.with_grad)
    return state, None


def go_on(context: Context, entry: Entry, call: Call, cut: CutShort) -> Any:
    """The rest of a call whose graph cannot go on after an eager part."""
    graph = cut.parts.graph
    if isinstance(cut.reason, Diverged):
        entry.forget(graph.recording)
    if cut.reason is not None:
        context.drop(*({graph.tape} if graph in entry.graphs else ()))
        context.failed(entry, cut.reason, "what follows an eager part")
    context.ran_eagerly()
    return alone(context, entry, lambda: cut.parts.go_on(call))


# -- capture: the recorded call once more, into a graph (rule R2) ------------------------------------------------------


def capture(context: Context, entry: Entry, call: Call, recording: Recording, tape: Tape) -> Callable[[], Any]:
    """Captures a call and launches it.

    Args:
        recording: of an eager call in the present state.

    Returns:
        What ends the call once nothing holds on to the attempt any more: it hands out the results, or makes the call
        eagerly where the capture failed, which has been counted and logged.
    """
    began = time.perf_counter()
    arena, backend = tape.arena, context.group.backend
    if recording.captured and not any(graph.tape is tape for graph in entry.graphs):
        context.spend(entry)
    recording.captured, graph = True, None
    try:
        not_averaged = context.around.take_over() if torch.is_grad_enabled() else None
        if not_averaged is not None:
            raise CaptureRefused(not_averaged)
        if not arena.in_flight:
            backend.prepare_capture()
            if arena.begin(tape) is not None:
                raise CaptureRefused(CANNOT_MOVE)
        made = (entry, tape, recording)
        graph = context.new_graph(*made) if recording.differentiable else StepGraph(context, *made)
        communicates = captured() if recording.communicates else contextlib.nullcontext()
        with context.own_casts(entry), communicates:
            state = graph.capture(call)
        graph.launch_first(call.leaves)
    except LateRanks:
        raise
    except CutShort as cut:
        return functools.partial(go_on, context, entry, call, cut)
    except Exception as error:  # whatever user code or CUDA raised: the eager call decides what the user sees
        let_through(error)
        if graph is not None and graph.began_parts:
            raise  # from a graph, after such a part
        if context.agreement is not None:
            context.agreement.captured(False)
        if isinstance(error, Diverged):
            entry.cast_apart(once=False)
            entry.forget(recording)  # another eager call is recorded, and never what was refused is the measure
        context.failed(entry, error, "its forward")
        return functools.partial(eager, context, call)
    if context.last_failure == entry.eager_for:
        context.last_failure = ""
    context.served = graph
    entry.captured(graph)
    if entry.needs_grad:
        arena.awaiting.add(graph)
    context.counters.captures += 1
    context.counters.replays += 1
    context.counters.capture_seconds += time.perf_counter() - began
    return functools.partial(context.results, graph, call.leaves, state)


# -- warm-up (rule R1) -------------------------------------------------------------------------------------------------


def warm_up(context: Context, entry: Entry, call: Call) -> Any:
    """An ordinary call; the last of some in a state that is new is recorded, because the first may create what later
    ones only use."""
    context.ran_eagerly()
    if entry.difference:
        context.last_failure = entry.difference
        if entry.graphs or entry.keeps_changing:
            _say_difference(context, entry)
    if not entry.begin_warm_up():
        call.result = Flat(alone(context, entry, call))
    elif (why := no_copy(named_arguments(entry, call))) is not None:
        call.result = Flat(alone(context, entry, call))
        context.failed(entry, CaptureRefused(why), "its forward")
    else:
        how = {"found": context.found, "follows": entry.follows}
        recording = alone(context, entry, lambda: record(call, context.group.gpu, context.root, **how))
        _judge(context, entry, call, recording)
    return context.eager_result(entry, call)


def _judge(context: Context, entry: Entry, call: Call, recording: Recording) -> None:
    """Decides what a recorded call is good for: to be captured or refused, or for nothing, and another is recorded."""
    found = context.found
    if recording.settles:
        # Under the recorder functions of PyTorch are others, which compiled code may stand on. It may be compiled
        # once more, in a call like any other, and the one after that is recorded.
        context.spend(entry, 2)
        entry.warm_up_again(1, f"it {COMPILES.effect}, in each call")
        return
    if recording.refused is not None:
        recording.refused = found.refused or recording.refused
        if torch.is_grad_enabled():  # which it may be a consequence of
            recording.refused = context.around.take_over() or recording.refused
    of_backward = context.refuses(call, recording)
    recording.refused = recording.refused or of_backward
    if not (recording.refused or recording.communicates) and context.group.whole.take(recording.guards.tensors):
        return  # the next call is recorded, at the addresses that stay
    if recording.parts and context.agreement is not None:
        recording.refused = recording.refused or found.refused or PARTS_OF_RANKS
    recording.refused = recording.refused or changed_mode(entry.signature.modes, context.group.modes())
    if call.result.differentiable or recording.backward:
        recording.refused = recording.refused or context.around.kept_accumulators(recording.guards, recording.backward)
    entry.add(recording)
    if dispatch.current() is None:  # else it is part of a larger recording
        context.learn_uses(entry, call, recording)
    context.learn(recording.guards)
    if recording.refused is not None:
        # Before any attempt, so that the user's Python never runs twice for one call. The next one is recorded.
        if context.group.settle(context.config.backend, context.around.device([]), misguessed=True):
            entry.recordings.clear()
        elif recording.judged_again:
            context.last_failure = recording.refused
        else:
            context.failed(entry, CaptureRefused(recording.refused), "its forward")
    else:
        entry.warm_up_again(context.config.warmup_steps - 1)
        context.spend(entry)
        if entry.follows or found:  # what kept an earlier call eager is overcome
            context.last_failure = ""
        if found:
            context.log_once(
                f"{context.name!r} calls {', '.join(dict.fromkeys(part.name for part in recording.parts))} between its "
                f"graphs at each replay, because these cannot repeat it: {found.refused}",
                key="parts",
            )


def _say_difference(context: Context, entry: Entry) -> None:
    if entry.other_branch:
        is_layer = type(context.root) in context.group.said.like
        parts = "after ungraph(model), graph_layers(model, layers=[...]) keeps the parts that it names"
        keep = parts if is_layer else "graph_layers(model) keeps the layers"
        others = "" if context.instead else f"; {keep} in graphs, whichever of them run"
        context.log_once(
            f"{context.name!r} runs eagerly where {entry.difference}. Branches that come often get a graph "
            f"each{others}",
            key="other branch",
        )
        return
    then = (
        "recorded and captured again, as after each such change"
        if entry.graphs
        else "recorded anew after each such change, so that there is no graph yet"
    )
    context.log_once(f"{context.name!r} runs eagerly: {entry.difference}. It is {then}", key=entry.difference)


# -- verified calls: eager although a graph would serve them, and compared with what was captured ----------------------


def due(context: Context, entry: Entry, leaves: list[Tensor]) -> Recording | None:
    """The recording that a call of this signature is to be compared with; None where it is not to be verified now."""
    how, group = context.config.verify, context.group
    rounds = group.verification
    if how is Verify.sampled:
        if entry.verified_in < 0:
            rounds.expect(entry.recordings[0].seconds)
        elif entry.verified_in == rounds.round and (group.busy or several_ranks() or not rounds.begins()):
            return None
        first = entry.begin_round(rounds.round)
        if first or not group.backend.has_room(sum(arena.pool.bytes() for arena in group.arenas)):
            return None
    elif how is Verify.off:
        entry.begin_round(rounds.round)
        return None
    recording = entry.recording_of_now(leaves)
    return recording if any(graph.recording is recording for graph in entry.graphs) else None


def verify(context: Context, entry: Entry, call: Call, recording: Recording) -> Any:
    """An eager call that is compared with the recorded one.

    Raises:
        VerificationFailed: it did other operations, and every call is verified.
    """
    began = time.perf_counter()
    context.ran_eagerly()
    context.counters.verified += 1
    parts = VerifiedParts(recording.parts, recording.guards, context.group.modes)
    recorder = Recorder(call.leaves, gpu=context.group.gpu, parts=parts)
    alone(context, entry, lambda: record_operations(call, recorder, context.found.in_place()))
    script, trace = recording.script, recorder.trace
    difference = script.compare(trace, recorder.lifted)
    context.group.verification.took(time.perf_counter() - began)
    # A replay would have stopped at another truth value, or after such a part.
    stops = script.reads_otherwise(trace, recorder.truths)
    stops = stops or (parts.last is not None and script.begins_with(trace[: parts.last]))
    if difference is not None and not stops:
        context.out_of_date(entry, difference)
    entry.verified()
    return context.eager_result(entry, call)


# -- with other ranks: which calls communicate, and what all then agree on ---------------------------------------------


def is_nested(context: Context) -> bool:
    """Whether a call is to be no more than a part of another. That may be one that all ranks make eagerly: what is
    captured there on one rank, on another may be recorded as part of that. Or one that runs again for its backward,
    which asks autograd for the gradients of all parameters inside."""
    return under_way.again > 0 or (context.agreement is not None and under_way.agreed > 0)


def agrees(context: Context, entry: Entry, choice: Choice) -> bool:
    """Whether all ranks replay or capture this call, as this one would; asked once in a call."""
    agreement = context.agreement
    if agreement is None:
        return True
    agreed = agreement.choose(choice)
    if not agreed and agreement.why:
        context.log_once(f"{context.name!r} runs eagerly, because {agreement.why}", key="other ranks")
    if not agreed and agreement.lasts and entry.failed(agreement.why, context.config.max_failures):
        context.keep_eager(entry, agreement.why)
    return agreed


def alone(context: Context, entry: Entry | None, call: Callable[[], T]) -> T:
    """Makes a call without a graph, after the other ranks were told so, and finds out whether any take part; returns
    what it gives."""
    agreement, inside, agreed_on = context.agreement, under_way.eager, under_way.agreed
    try:
        under_way.eager = inside + 1
        if agreement is not None and agreement.is_open:
            disabled = entry is not None and entry.disabled
            why = context.last_failure or "this call is new to it"
            reason = entry.reason if entry is not None and entry.disabled else why
            agreement.choose(Choice.eager, reason, lasts=disabled)
        before = communicated() if several_ranks() else {}
        if agreement is not None:
            under_way.agreed = agreed_on + 1
        result = call()
    finally:  # which nothing can interrupt
        under_way.eager, under_way.agreed = inside, agreed_on
    after = communicated() if before or several_ranks() else {}
    groups = [group for group, count in after.items() if count != before.get(group, 0)]
    if groups and not context.around.joins():
        if context.agreement is None:
            context.agreement = Agreement()
            free_before_destruction(context.leave_ranks)
        context.agreement.learn(groups)
    return result
