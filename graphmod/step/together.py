"""Where the calls of one rank meet those of the others: which of them communicate, and what all then agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from graphmod.ranks.agreement import Agreement, Choice, communicated, free_before_destruction, several_ranks
from graphmod.ranks.data_parallel import Depth, inside_calls
from graphmod.step.context import Context
from graphmod.step.entry import Entry

T = TypeVar("T")
_agreed_on = Depth()  # calls that all ranks make eagerly
run_again = Depth()  # forwards that run again for a backward without a graph


def is_nested(context: Context) -> bool:
    """Whether a call is to be no more than a part of another. That may be one that all ranks make eagerly: what is
    captured there on one rank, on another may be recorded as part of that. Or one that runs again for its backward,
    which asks autograd for the gradients of all parameters inside."""
    return run_again.count > 0 or (context.agreement is not None and _agreed_on.count > 0)


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
    agreement, inside, agreed_on = context.agreement, inside_calls.count, _agreed_on.count
    try:
        inside_calls.count = inside + 1
        if agreement is not None and agreement.is_open:
            disabled = entry is not None and entry.disabled
            reason = entry.reason if disabled else context.last_failure or "this call is new to it"
            agreement.choose(Choice.eager, reason, lasts=disabled)
        before = communicated() if several_ranks() else {}
        if agreement is not None:
            _agreed_on.count = agreed_on + 1
        result = call()
    finally:  # which nothing can interrupt
        inside_calls.count, _agreed_on.count = inside, agreed_on
    if before or several_ranks():
        _learn_ranks(context, before)
    return result


def _learn_ranks(context: Context, before: dict) -> None:
    groups = [group for group, count in communicated().items() if count != before.get(group, 0)]
    if not groups or context.around.joins():
        return
    if context.agreement is None:
        context.agreement = Agreement()
        free_before_destruction(context.leave_ranks)
    context.agreement.learn(groups)
