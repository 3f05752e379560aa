"""The life of a signature (warm-up, captured, disabled) and the counters users see."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from graphmod.signature.flattening import opaque_parts
from graphmod.signature.modes import AUTOCAST, GRAD
from graphmod.signature.signature import Matcher, Signature
from graphmod.state.account import Account
from graphmod.state.said import cause_of


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

    def __add__(self, other: GraphStats) -> GraphStats:
        summed = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "state"}
        order = ("eager", "nested", "warm-up", "captured", "disabled")
        return GraphStats(state=max(self.state, other.state, key=order.index), **summed)

    def __radd__(self, other: Any) -> GraphStats:
        """For `sum(wrapper.stats for wrapper in wrappers)`, which begins with 0."""
        return self if other == 0 else NotImplemented


_PATIENCE = 12  # recorded calls and captures, without enough replays in between
_MOST_RECORDINGS = 4


class Entry:
    """What one module knows about one signature.

    States: warm-up (`calls` < warmup_steps) -> captured (`graphs` not empty) -> disabled (failures, or an empty
    account). `rearm` leads from disabled back to warm.
    """

    __slots__ = (
        "account",
        "adds_apart",
        "astray",
        "backwards",
        "called_forward",
        "calls",
        "capture_in",
        "casts_once",
        "cause",
        "copies_out",
        "difference",
        "disabled",
        "graphs",
        "keeps_casts",
        "last_used",
        "lost",
        "matcher",
        "needs_grad",
        "per_pass",
        "period",
        "reason",
        "recordings",
        "replays",
        "signature",
        "strayed",
        "used_outside",
        "verified_at",
        "verified_in",
        "waits_for",
    )  # fmt: skip

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.calls = 0  # eager ones in a state that is new, since the last recording
        self.graphs: list[Any] = []
        casts = signature.modes[AUTOCAST]
        self.keeps_casts = bool(casts is not None and casts[-1] and signature.modes[GRAD])  # autocast, of weights
        self.casts_once = False  # known of the recorded call: it uses each cast once
        self.disabled = False
        self.needs_grad = False
        self.recordings: list[Any] = []  # of calls in different states, the newest first
        self.astray = False  # the state is one that was recorded, and only chance chooses another branch
        self.strayed = 0  # how often that was so
        self.difference = ""  # between the last recording and the state after it, in words
        self.waits_for = ""  # the difference for which a call was eager last
        self.cause = ""  # of the difference between the last recording and the one before it
        self.reason = ""
        self.last_used = 0
        self.matcher: Matcher | None = None  # made for the first replay
        self.adds_apart = False  # gradients that the user puts in place are others each time: add to them outside
        self.called_forward = False  # outside of any backward
        self.account = Account(_PATIENCE)
        self.replays = 0
        self.verified_at = 0  # replays before the last verified call
        self.verified_in = -1  # the round of that
        self.lost = ""  # why its graphs were dropped last, or were not made
        self.per_pass = 0  # how many of its calls had a backward in one pass; of those that came to an end, the most
        self.period = -1  # the pass in which `backwards` were counted
        self.backwards = 0
        self.capture_in = 0  # calls after which one is captured that may have a backward; 0 where none is to be
        self.used_outside: set[int] = set()  # tensor arguments that it uses several times, and code outside too
        self.copies_out = False  # results are held in a way that does not let them be moved: hand out copies

    def recording_of_now(self) -> Any:
        """The recording of a call in the present state; None where there is none."""
        self.difference, self.astray = "", False
        for recording in self.recordings:
            reason = recording.guards.moved() or recording.guards.changed()
            if reason is None:
                reason = recording.host_draws.choose_otherwise()
                if reason is None:
                    return recording
                self.astray = self.astray or recording.refused is None
                self.difference = reason if self.astray else self.difference
            if recording.refused is None:
                self.difference = self.difference or reason  # the newest is most like the present
        return None

    def follows_chance(self) -> bool:
        """Whether a call is to be recorded whose random numbers chose a branch that has no recording: more and more
        seldom, since there may be as many branches as there are layers to drop, and more."""
        self.strayed += 1
        return not self.strayed & (self.strayed - 1)

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
            if changed is None or known.guards.exchanged:
                self.forget(known)
        for _ in self.recordings[_MOST_RECORDINGS - 1 :]:
            self.forget(min(reversed(self.recordings), key=self._served))
        self.recordings.insert(0, recording)

    def _served(self, recording: Any) -> int:
        """How often the graphs of a recording were launched, if it is one of those that chance chooses between."""
        if not recording.host_draws:
            return 0
        return sum(graph.launches for graph in self.graphs if graph.recording is recording)

    def forget(self, recording: Any) -> None:
        """Forgets a recording, and drops the graphs that stand on it."""
        self.recordings = [known for known in self.recordings if known is not recording]
        for graph in list(self.graphs):
            if graph.recording is recording:
                graph.tape.drop(self.difference or "its code reads other objects in each call")

    def failed(self, reason: str, most: int) -> bool:
        """Counts a failure; True when it was the one that disables."""
        self.reason = reason
        self.account.failures += 1
        if self.account.failures < most or self.disabled:
            return False
        self.disable(reason)
        return True

    def disable(self, reason: str) -> None:
        """Lets all calls be eager from now on."""
        self.disabled, self.reason, self.recordings = True, reason, []
        for part in opaque_parts(self.signature.structure):  # a cache of gigabytes, for one
            part.let_go()

    def backward_began(self, period: int) -> None:
        """Takes in that a call of this pass has its backward."""
        if self.period != period:
            self.pass_began(period)
        self.backwards += 1

    def pass_began(self, period: int) -> None:
        """Takes in which pass is under way, so that those before have come to their end."""
        if self.period != period:
            self.per_pass = max(self.per_pass, self.backwards)
            self.period, self.backwards = period, 0

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

    def succeeded(self) -> None:
        self.account.failures = 0

    def rearm(self) -> None:
        self.disabled = False
        for part in opaque_parts(self.signature.structure):
            part.hold()
        self.account = Account(_PATIENCE)
