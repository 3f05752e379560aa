"""The signatures that one module knows, the life of each (warm-up, captured, disabled), and the counters users see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from graphmod.signature.flattening import Opaque, opaque_parts
from graphmod.signature.modes import AUTOCAST, GRAD
from graphmod.signature.signature import Matcher, Signature, difference, remedy
from graphmod.step.log import cause_of

REPLAY = 1 / 8  # what one pays
_OTHER_VALUE = 1 / 16  # what a call costs whose values, read before it, are others than any that were recorded
_DENIED = 1 / 256  # what an eager call pays that had to be one because the account was empty


@dataclass
class GraphStats:
    """Counters of one module, or summed over several.

    Attributes:
        state: `warm-up`, `captured` (at least one signature has a graph), `disabled`, `eager` (never called yet, or not
            to be captured), or `nested` (its calls are part of those of a wrapper around it).
        captures: graphs captured, forward and backward counted apart.
        replays: graph launches, the ones that complete a capturing call included.
        eager_calls: calls that ran without a graph, warm-up and verified ones included.
        failures: captures and replays that failed or were refused.
        capture_seconds: host time spent capturing.
        pool_bytes: memory reserved by the graphs' pools.
        copied_bytes: bytes copied into static inputs so far.
        verified: calls that ran eagerly and were compared with what was captured.
        host_read_seconds: host time spent on values that calls read on the host, to compare them before replays, the
            wait for the GPU included.
        eager_parts: calls that were made between the graphs of one capture, see `eager`.
    """

    state: str = "eager"
    captures: int = 0
    replays: int = 0
    eager_calls: int = 0
    failures: int = 0
    capture_seconds: float = 0.0
    pool_bytes: int = 0
    copied_bytes: int = 0
    verified: int = 0
    host_read_seconds: float = 0.0
    eager_parts: int = 0

    def __add__(self, other: GraphStats) -> GraphStats:
        summed = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "state"}
        order = ("eager", "nested", "warm-up", "captured", "disabled")
        return GraphStats(state=max(self.state, other.state, key=order.index), **summed)

    def __radd__(self, other: Any) -> GraphStats:
        """For `sum(wrapper.stats for wrapper in wrappers)`, which begins with 0."""
        return self if other == 0 else NotImplemented


class Account:
    """The patience with one signature, or with all signatures of one wrapper.

    A recorded call costs one, its first capture included, and each further capture one; a recorded call in which
    something was compiled costs two, and a captured backward that is given up because it does not fit, three. Eight
    replays pay one back, up to what there was at first; one whose backward does not fit pays nothing. Once less than
    one is left, nothing more is recorded or captured: graphs that fit go on, and may pay for others; a signature
    without any stays eager, with the reason. A call that reads other values on the host than any recorded one costs a
    sixteenth; once that is not left, few calls look at theirs.

    Calls for which no graph was free are no reason to capture another until they have become more than the warm-up
    calls, less one for each eight replays. Failures are counted apart, because the next success makes up for all of
    them: `max_failures` in a row end it too. `force_enable()` opens a new account.

    Args:
        full: how much there is at first, and at most.

    Attributes:
        failures: those since the last success.
        misses: calls for which no graph was free, or no place for one.
    """

    __slots__ = ("_full", "_left", "_replays", "failures", "misses")

    def __init__(self, full: int) -> None:
        self._full = full
        self._left = float(full)
        self._replays = 0
        self.failures = 0
        self.misses = 0.0

    def allows(self, replays: int, cost: float = 1) -> bool:
        """Whether something may be tried, such as to record or capture a call; `replays` counts all there were."""
        self._take_in(replays)
        if self._left >= cost:
            return True
        self._left += _DENIED
        return False

    def missed(self, replays: int) -> None:
        """Takes in that no graph was free for a call, or no place for one; `replays` counts all there were."""
        self._take_in(replays)
        self.misses += 1

    def _take_in(self, replays: int) -> None:
        paid = (replays - self._replays) * REPLAY
        self._left, self.misses = min(self._full, self._left + paid), max(0.0, self.misses - paid)
        self._replays = replays

    def try_again(self) -> None:
        """Lets one more attempt be made."""
        self._left = max(self._left, 1.0)

    def spend(self, cost: float) -> None:
        """Takes in that something was tried."""
        self._left -= cost


_PATIENCE = 12  # recorded calls and captures, without enough replays in between
_MOST_RECORDINGS = 4
_RETRY = 64  # calls while a signature was disabled, before one is tried again the first time


@dataclass(slots=True, eq=False)
class Entry:
    """What one module knows about one signature.

    States: warm-up (no graph) -> captured (`graphs` not empty) -> disabled (failures, or an empty account). From there
    `rearm`, or one of the calls that `stays_eager` counts, leads back to warm-up.

    Attributes:
        ordinary: warm-up calls in the present state that are still to come before one is recorded.
        recordings: of calls in different states, the newest first.
        difference: between the last recording and the state after it, in words; cause: what it said beside values
            before the last recording; eager_for: the one for which a call was eager last.
        follows: recorded calls find out how what they read on the host comes about.
        other_branch: the present state was recorded, and only chance, or what is read on the host, chooses another
            branch; other_branches counts how often that was so.
        needs_grad: its results have a backward.
        turned_down: calls while it was disabled; retry_at: how many of them until another is tried.
        reason: why it is disabled, or failed last; lost: why its graphs were dropped last, or were not made.
        last_used: the call of the module, counted, that was the last of this signature.
        matcher: made for the first replay.
        replays: forwards that were replayed; verified_at: those before the last verified call; verified_in: its round.
        capture_in: calls until one is captured that may have a backward; 0 where none is to be.
        most_backwards: how many of its calls had a backward in one pass, at most, of those passes that have ended;
            backwards: in the pass `counted_in`.
        keeps_casts: autocast keeps casts of its weights; casts_once: the recorded call uses each cast once.
        used_outside: tensor arguments that it uses several times, and code outside too.
        adds_apart: gradients that the user puts in place are others each time: add to them outside.
        out_of_date: a verified call did not do what was captured, so that only the user can have it captured again.
        copies_out: results are held in a way that does not let them be moved: hand out copies.
    """

    signature: Signature
    ordinary: int
    account: Account = field(default_factory=lambda: Account(_PATIENCE))
    graphs: list[Any] = field(default_factory=list)
    recordings: list[Any] = field(default_factory=list)
    disabled: bool = False
    turned_down: int = 0
    retry_at: int = _RETRY
    difference: str = ""
    cause: str = ""
    eager_for: str = ""
    follows: bool = False
    other_branch: bool = False
    other_branches: int = 0
    needs_grad: bool = False
    reason: str = ""
    lost: str = ""
    last_used: int = 0
    matcher: Matcher | None = None
    replays: int = 0
    verified_at: int = 0
    verified_in: int = -1
    capture_in: int = 0
    most_backwards: int = 0
    backwards: int = 0
    counted_in: int = -1
    keeps_casts: bool = False
    casts_once: bool = False
    used_outside: set[int] = field(default_factory=set)
    adds_apart: bool = False
    out_of_date: bool = False
    copies_out: bool = False
    _present: Any = None  # the recording of the last call's state

    def __post_init__(self) -> None:
        casts = self.signature.modes[AUTOCAST]
        self.keeps_casts = bool(casts is not None and casts[-1] and self.signature.modes[GRAD])

    # -- recordings ----------------------------------------------------------------------------------------------

    def begin_warm_up(self) -> bool:
        """Takes in a warm-up call; returns whether it is to be recorded."""
        self.eager_for = self.difference or self.eager_for
        if not self.ordinary:
            return True
        self.ordinary -= 1
        return False

    def warm_up_again(self, calls: int, why: str = "") -> None:
        """Has a call recorded after some ordinary ones; `why` none was good for a graph so far."""
        self.ordinary, self.lost = calls, why or self.lost

    def recording_of_now(self, leaves: list[Tensor]) -> Any:
        """The recording of a call with these tensor arguments in the present state; None where there is none."""
        self.difference, self.other_branch, self._present = "", False, None
        for recording in self.recordings:
            guards = recording.guards
            reason = guards.moved() or guards.changed() or guards.finds_elsewhere(leaves)
            if reason is None:
                reason = recording.host_draws.choose_otherwise(leaves)
                if reason is None:
                    self._present = recording
                    return recording
                self.other_branch = self.other_branch or recording.refused is None
                self.difference = reason if self.other_branch else self.difference
            if recording.refused is None:
                self.difference = self.difference or reason  # the newest is most like the present
        return None

    def records_branch(self) -> bool:
        """Whether a call is to be recorded whose random numbers chose a branch that has no recording: more and more
        seldom, since there may be as many branches as there are layers to drop, and more."""
        if self.follows:
            self.account.spend(_OTHER_VALUE)
        self.other_branches += 1
        return not self.other_branches & (self.other_branches - 1)

    def looks_at_values(self) -> bool:
        """Whether to compare what a call reads on the host, which waits for the GPU; hardly ever where values that are
        others each time have used the account up."""
        return not self.follows or self.account.allows(self.replays, _OTHER_VALUE)

    @property
    def keeps_changing(self) -> bool:
        """Whether what has changed since the last recording had changed before it, too."""
        return bool(self.difference) and self.cause == cause_of(self.difference)

    def add(self, recording: Any) -> None:
        """Takes in the recording of a call in a state that none of the others was of, and forgets those whose objects
        have been exchanged, and the oldest beyond a number."""
        self.cause = cause_of(self.difference)
        for known in list(self.recordings):
            changed = known.guards.moved() or known.guards.changed()
            if known is self._present or (changed is not None and known.guards.exchanged):
                self.forget(known)
        for _ in self.recordings[_MOST_RECORDINGS - 1 :]:
            self.forget(min(reversed(self.recordings), key=self._served))
        self.recordings.insert(0, recording)
        self.follows = self.follows or recording.follow

    def _served(self, recording: Any) -> int:
        """How often the graphs of a recording were launched, if it is one of those that chance chooses between."""
        if not recording.host_draws:
            return 0
        return sum(graph.launches for graph in self.graphs if graph.recording is recording)

    def forget(self, recording: Any, why: str = "") -> None:
        """Forgets a recording, and drops the graphs that stand on it; `why` is what has changed since, if that is not
        the difference that is known."""
        self.difference = why or self.difference
        self.recordings = [known for known in self.recordings if known is not recording]
        for graph in list(self.graphs):
            if graph.recording is recording:
                graph.tape.drop(self.difference or "its code reads other objects in each call")

    # -- graphs --------------------------------------------------------------------------------------------------

    def captured(self, graph: Any) -> None:
        """Takes in a graph that was just captured."""
        self.graphs.append(graph)
        self.needs_grad = bool(graph.results.with_grad)
        if not self.needs_grad:
            self.account.failures = 0

    def lose(self, graph: Any, why: str) -> None:
        """Takes in that a graph was dropped."""
        if graph in self.graphs:
            self.graphs.remove(graph)
            self.lost = why

    def replayed(self, succeeded: bool) -> None:
        """Takes in a replay; `succeeded` if nothing of the call can fail any more."""
        self.replays += 1
        if succeeded:
            self.account.failures = 0

    def copy_out(self) -> None:
        """From now on results are copied: they are held in a way that does not let them be moved."""
        self.copies_out = True

    def begin_round(self, number: int) -> bool:
        """Takes in that its calls are to be verified in a round; returns whether that is its first."""
        first, self.verified_in = self.verified_in < 0, number
        return first

    def verified(self) -> None:
        """Takes in that a call was compared with what was captured."""
        self.verified_at = self.replays

    def failed(self, reason: str, most: int) -> bool:
        """Counts a failure; True when it was the one that disables."""
        self.reason = reason
        self.account.failures += 1
        if self.account.failures < most or self.disabled:
            return False
        self.disable(reason)
        return True

    def disable(self, reason: str, out_of_date: bool = False) -> None:
        """Lets all calls be eager from now on; see the class for `out_of_date`."""
        self.disabled, self.reason, self.recordings = True, reason, []
        self.out_of_date = self.out_of_date or out_of_date
        for part in opaque_parts(self.signature.structure):  # a cache of gigabytes, for one
            part.let_go()

    def stays_eager(self) -> bool:
        """Whether a call is eager because the signature is disabled, as it is; asked once a call.

        What disabled it may be gone. So the 64th of these calls is tried once more, the 128th, and so on, except where
        a verified call has shown that no guard notices what changes.
        """
        self.turned_down += 1
        if self.turned_down < self.retry_at or self.out_of_date:
            return True
        self.retry_at *= 2
        self._enable()
        self.account.try_again()
        return False

    # -- a backward outside of the graph ---------------------------------------------------------------------------

    def expect_backward(self) -> bool:
        """Takes in that a result has a backward; returns whether that is new."""
        new, self.needs_grad = not self.needs_grad, True
        return new

    def cast_apart(self, once: bool) -> None:
        """Takes in whether its recorded call uses each cast once."""
        self.casts_once = once

    def add_apart(self) -> None:
        """From now on gradients are added outside of the graph to those that the user puts in place."""
        self.adds_apart = True

    def awaited_capture(self) -> bool:
        """Counts down to the next capture of a call that may have a backward; returns whether it has come."""
        self.capture_in -= 1
        return not self.capture_in

    def backward_began(self, number: int) -> None:
        """Takes in that a call of the pass with this number has its backward."""
        self.pass_began(number)
        self.backwards += 1

    def pass_began(self, number: int) -> None:
        """Takes in which pass is under way, so that those before have come to their end."""
        if self.counted_in != number:
            self.most_backwards = max(self.most_backwards, self.backwards)
            self.counted_in, self.backwards = number, 0

    def left_unfinished(self) -> None:
        """Takes in that a backward met a forward whose capture saw no backward. Another call is to be captured: the
        next one, or, if that is one without a backward again, the one after it, and so on."""
        self.capture_in = sum(graph.backward is None for graph in self.graphs)

    def finished(self, graph: Any) -> None:
        """Takes in that a graph has its backward now. Those that have none, and never will, make room."""
        self.capture_in = 0
        for tape in {other.tape for other in self.graphs if other.backward is None and other.tape is not graph.tape}:
            if not (tape.arena.in_flight and tape.arena.active is tape) and all(
                owner.backward is None for owner in tape.owners
            ):
                tape.drop()

    # -- what the user decides -----------------------------------------------------------------------------------

    def rearm(self) -> None:
        self._enable()
        self.account = Account(_PATIENCE)
        self.turned_down, self.retry_at = 0, _RETRY

    def _enable(self) -> None:
        self.disabled = self.out_of_date = False
        for part in opaque_parts(self.signature.structure):
            part.hold()


_MOST_OPAQUE = 4
_MOST_STRANGERS = 16  # objects that are known by identity, one after the other, before the next is turned away
_MOST_UNCAPTURED = 64  # signatures without a graph that are remembered; more means that one of them changes each call


def _gone(signature: Signature) -> bool:
    """Whether no call can have this signature any more, because an object in it is gone."""
    return any(part.value is None for part in opaque_parts(signature.structure))


class Registry:
    """Finds the entry of a signature, and forgets those that lead nowhere.

    Args:
        ordinary: warm-up calls of a signature before one is recorded.

    Attributes:
        usual: the entry of the last replay, because most calls are like the one before; None at first.
    """

    def __init__(self, ordinary: int) -> None:
        self._ordinary = ordinary
        self._known: dict[Signature, Entry] = {}
        self.clock = 0  # calls so far
        self.usual: Entry | None = None
        self._strangers = 0
        self._turned_away: Opaque | None = None

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._known.values()))

    def touch(self, entry: Entry) -> None:
        """Notes that an entry was used now."""
        self.clock += 1
        entry.last_used = self.clock

    def expect(self, entry: Entry) -> None:
        """Takes in that calls like those of an entry, which was replayed, are to be expected."""
        if entry.matcher is None:
            entry.matcher = Matcher(entry.signature)
        self.usual = entry

    def get(self, signature: Signature) -> Entry | None:
        entry = self._known.get(signature)
        if entry is not None:
            self.touch(entry)
        return entry

    def stranger(self, signature: Signature) -> Opaque | None:
        """An object in a new signature that makes it one of many that came once: known by identity, another in each
        call, of which none was ever captured. None where there is none, or where the last of them has come again."""
        known = [part for entry in self for part in opaque_parts(entry.signature.structure)]
        part = next((part for part in opaque_parts(signature.structure) if part not in known), None)
        if part is None:
            return None
        captured = any(entry.graphs and any(True for _ in opaque_parts(entry.signature.structure)) for entry in self)
        self._strangers = 0 if captured or part == self._turned_away else self._strangers + 1
        if self._strangers <= _MOST_STRANGERS:
            return None
        part.let_go()
        self._turned_away = part
        return part

    def add(self, signature: Signature) -> Entry:
        """A new entry. Beyond a number, the least recently used of those that have no graph goes."""
        for known in [one for one in self if one.disabled and _gone(one.signature)]:
            del self._known[known.signature]
        uncaptured = [entry for entry in self if not entry.graphs and not entry.disabled]
        opaque = any(True for _ in opaque_parts(signature.structure))  # such a signature keeps an object alive
        if len(uncaptured) >= (_MOST_OPAQUE if opaque else _MOST_UNCAPTURED):
            del self._known[min(uncaptured, key=lambda entry: entry.last_used).signature]
            self.usual = None
        entry = self._known[signature] = Entry(signature, self._ordinary)
        self.touch(entry)
        return entry

    def nearest(self, signature: Signature, names: list[str]) -> list[str]:
        """In which arguments a new signature differs from the most similar one in the same modes, a line for each, and
        what helps; [] where there is none. `names` are those of the callable's positional parameters."""
        asked = signature.modes, signature.function
        others = [one for one in self if (one.signature.modes, one.signature.function) == asked]
        if not others:
            return []
        nearest = min(others, key=lambda entry: len(difference(entry.signature, signature, [])))
        helps = remedy(nearest.signature, signature)
        each = "Each kind of call is recorded and captured on its own, up to max_graphs" + (
            f": {helps}" if helps else ""
        )
        return [*difference(nearest.signature, signature, names), each]

    def restart(self) -> None:
        """Forgets everything but which signatures are disabled."""
        disabled = [entry for entry in self if entry.disabled]
        self.__init__(self._ordinary)
        for entry in disabled:
            kept = self.add(entry.signature)
            kept.disable(entry.reason, entry.out_of_date)

    @property
    def state(self) -> str:
        """`captured` if any entry has a graph, `disabled` if all are, `warm-up` else; `eager` before the first call."""
        if any(entry.graphs for entry in self):
            return "captured"
        if self._known and all(entry.disabled for entry in self):
            return "disabled"
        return "warm-up" if self._known else "eager"
