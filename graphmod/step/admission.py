"""Whether a call that fits no graph may be recorded or captured now: patience, `max_graphs`, and a place for its graph;
else, why not.
"""

from __future__ import annotations

from graphmod.step.arena import Tape
from graphmod.step.context import Context
from graphmod.step.entry import Entry
from graphmod.step.graph import ALIGNED_OTHERWISE
from graphmod.step.group import MOST_ARENAS
from graphmod.step.recording import Recording

CAPTURE_ANOTHER = "its graphs expect other gradients (None, or to be added to) than the coming backward will find"
UNFINISHED = "no backward followed when it was captured"
IN_USE = "its graphs are in use, or earlier in their order than what was called last"
CANNOT_MOVE = "views of its results are held, which this version of torch cannot move"
TAKE_TURNS = "more signatures than may have graphs (max_graphs) take turns"
_REMEDIES = {
    CAPTURE_ANOTHER: "Call zero_grad() at one place of the loop",
    IN_USE: "Keep results of earlier calls with detach(), or call under torch.no_grad() where no backward follows",
    UNFINISHED: "Call the part under torch.no_grad() where no backward follows",
    TAKE_TURNS: "Raise max_graphs",
}
_MANY = 16  # calls of one iteration: more are told of, because they may be results that somebody just keeps
_IDLE = 4  # times max_graphs: calls for which a signature was not used before its graphs make room for another's


def choose_tape(context: Context, entry: Entry, reason: str, recording: Recording) -> Tape | None:
    """The tape on which this call may be captured now, or None to run it eagerly.

    Args:
        reason: why the graphs that there are do not fit; `CAPTURE_ANOTHER` if another one would.
        recording: of the present state.
    """
    group, account, patience = context.group, entry.account, context.config.warmup_steps
    tape = group.growing_tape(entry)
    again = tape is not None and any(graph.tape is tape for graph in entry.graphs)
    known = any(graph.recording is recording for graph in entry.graphs)
    if tape is None and known and reason not in (CAPTURE_ANOTHER, UNFINISHED, ALIGNED_OTHERWISE):
        # The graphs there are do not fit. Once is an exception, several times is how it is from now on.
        account.missed(entry.replays)
        if account.misses <= patience:
            remedy = f". {_REMEDIES[reason]}" if reason in _REMEDIES else ""
            if account.misses >= min(2, patience):
                context.log_once(
                    f"{context.name!r} runs eagerly: {reason}. After {patience} such calls it may be captured again"
                    f"{remedy}",
                    key=reason,
                )
            return None
    if not again and recording.captured and not affordable(context, entry, reason if entry.graphs else ""):
        return None
    if not _make_space(context, entry):
        return None
    if tape is None and not (entry.needs_grad and group.eager_in_flight):
        tape = group.new_tape()
    if tape is None:
        if not known:
            account.missed(entry.replays)
        # In the middle of an iteration only where there never is a beginning, because one is always in flight: some of
        # these calls are gone without a backward. Where all still wait, it is a long one, whose backward adds up the
        # gradients of all of them in their order.
        waiting = context.waiting()
        if account.misses > max(patience * (3 if group.eager_in_flight else 1), waiting):
            tape = group.new_tape(MOST_ARENAS)  # in an order that the others do not allow
        if tape is None and waiting > _MANY:
            context.log_once(
                f"{context.name!r} runs eagerly: {waiting} of its calls wait for their backward, and it may be "
                f"captured once that has come. {_REMEDIES[IN_USE]}",
                key=UNFINISHED,
            )
        if tape is None and reason == IN_USE and account.misses > 3 * patience:
            context.log_once(f"{context.name!r} runs eagerly: {reason}. {_REMEDIES[IN_USE]}", key=reason)
    return tape


def affordable(context: Context, entry: Entry, reason: str) -> bool:
    """Whether what was done for graphs has brought enough replays so far, so that another call may be recorded or
    captured. Where not, and where there is no graph that could pay for one, the signature stays eager.

    Args:
        reason: why that is necessary; "" where that is because graphs were lost.
    """
    own = entry.account.allows(entry.replays)
    if own and context.account.allows(context.counters.replays):
        return True
    why = reason or entry.lost or "too many signatures have come, each for a few calls only"
    remedy = _REMEDIES.get(why, "Keep that as it is, or keep this part out of the graphs (ungraph, or call .module)")
    what = "for these arguments " if not own else ""
    then = "runs eagerly where it would have to be captured again"
    if not (own or entry.graphs):
        context.keep_eager(entry, why)
        then, remedy = "stays eager", f"{remedy}; force_enable() tries again, and so do some later calls"
    context.log_once(
        f"{context.name!r} {then}: it was recorded or captured again and again {what}with hardly a replay in between, "
        f"because {why}. {remedy}",
        key=f"account: {then}",
    )
    return False


def _make_space(context: Context, entry: Entry) -> bool:
    """Keeps to `max_graphs`, evicting the least recently used signature that is not in flight, if it was not used for a
    while: where more of them take turns, some are captured and stay so."""
    most, known = context.config.max_graphs, context.entries
    held = [other for other in known if other.graphs and other is not entry]
    if len(held) < most:
        return True
    for victim in sorted(held, key=lambda other: other.last_used):
        if known.clock - victim.last_used < _IDLE * most:
            break
        if not any(graph.tape.arena.in_flight for graph in victim.graphs):
            context.drop(*{graph.tape for graph in victim.graphs}, why=TAKE_TURNS)
            return True
    context.log_once(
        f"{context.name!r} runs eagerly for some arguments: all {most} graphs (max_graphs) are in use for others. "
        f"{_REMEDIES[TAKE_TURNS]}"
    )
    return False
