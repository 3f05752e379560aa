"""What a call does: which of replay, warm-up, capture and an eager call it is."""

from __future__ import annotations

from typing import Any

from graphmod.ranks.agreement import Choice
from graphmod.ranks.ballot import LateRanks
from graphmod.reads.backwards import end_left, watches
from graphmod.signature.call import Call, Flat
from graphmod.signature.flattening import unrepeatable
from graphmod.signature.modes import FOREIGN
from graphmod.signature.signature import Signature, argument_paths, tensor_key
from graphmod.step.capture import affordable, capture, place
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.recording import Recording
from graphmod.step.replay import find, launch
from graphmod.step.together import agrees, alone, is_nested
from graphmod.step.verification import LOOKS
from graphmod.step.verify import due, verify
from graphmod.step.warmup import warm_up
from graphmod.torch_private import is_fx_tracing, is_traced, next_sequence_number
from graphmod.trace.tensors import is_stale
from graphmod.trace.undo import let_through, undo_left

TRACED = ", and no graph is in what is made of it; trace first, and wrap that: CUDAGraphModule(traced)"


def run(context: Context, call: Call) -> Any:
    """One call, on all ranks alike where it communicates; see `_run`."""
    if watches:
        end_left()
    undo_left()
    if is_nested(context):
        return call()
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
    usual, modes = entries.usual, group.modes()
    function = None if call.function is context.call else call.function
    leaves = None
    # Most calls are like the one before.
    known = None if usual is None else usual.signature
    if known is not None and known.modes == modes and known.function is function and not usual.disabled:
        leaves = usual.matcher.match(call.args, call.kwargs)
    if leaves is not None and known.training is context.training:
        entry, call.leaves = usual, leaves
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
    if entry.stays_eager():
        return eager(context, call, entry)
    if entry.keeps_casts and context.shares_casts(entry):
        return eager(context, call, entry)
    if entry.needs_grad and not group.busy:
        group.begin_pass()
    if (entry.verified_in != group.verification.round or not entry.replays % LOOKS) and entry.graphs:
        recording = due(context, entry)
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
        except RuntimeError as error:
            let_through(error)
            context.drop(graph.tape)
            context.failed(entry, error, "a replay")
            return eager(context, call)
        if reason is None:
            return context.results(graph, leaves, state)
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
    recording = entry.recording_of_now()
    if recording is None and entry.other_branch and not entry.records_branch():
        return eager(context, call, entry)
    if recording is None or recording.refused is not None:
        if not affordable(context, entry, entry.difference):
            return eager(context, call, entry)
        return warm_up(context, entry, call)
    if context.awaits_backward(entry, recording):
        return eager(context, call, entry, recording)
    tape = place(context, entry, reason, recording)
    if tape is None:
        return eager(context, call, entry, recording)
    if not agrees(context, entry, Choice.capture):
        return eager(context, call, entry)
    captured = capture(context, entry, call, recording, tape)
    return eager(context, call) if captured is None else context.results(captured[0], leaves, captured[1])


def eager(context: Context, call: Call, entry: Entry | None = None, recording: Recording | None = None) -> Any:
    """A call without a graph; with an `entry` its backward is waited for, and with a `recording` of the present state
    judged, where none was yet."""
    context.ran_eagerly()
    oldest = next_sequence_number()
    result = alone(context, entry, call)
    if entry is None or not entry.needs_grad:
        return result
    call.result = Flat(result)
    return context.eager_result(entry, call, recording, oldest)


def _entry(context: Context, call: Call, function: Any) -> Entry | None:
    """What is known of calls with this signature; None where no other call can have it. `function`: see `Signature`."""
    structure, leaves, group = call.flat.structure, call.leaves, context.group
    key = tuple(map(tensor_key, leaves))
    signature = Signature(structure, key, group.modes(), context.training, function)
    entry = None if group.backend is None else context.entries.get(signature)
    if entry is not None:
        return entry
    names = call.names
    unknown = unrepeatable(structure[1], named=names) or unrepeatable(structure[2])
    if unknown is not None:
        path, why = unknown
        context.log_once(f"{context.name!r} runs eagerly, because its argument {path!r} is {why}")
        return None
    if any(map(is_stale, leaves)):
        context.last_failure = (
            "an argument is a view that was made under no_grad, and whose memory was changed with gradients since; "
            "pass it detached"
        )
        context.log_once(f"{context.name!r} runs eagerly: {context.last_failure}")
        return None
    stranger = context.entries.stranger(signature)
    if stranger is not None:
        path = next((path for path, part in argument_paths(structure, names).items() if part is stranger), "")
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
