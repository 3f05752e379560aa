"""The life of a signature (warm-up, captured, disabled) and the counters users see. Imports `signature` and
`matcher`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from graphmod.matcher import Matcher
from graphmod.signature import Signature


@dataclass
class GraphStats:
    """Counters of one module, or summed over several.

    Attributes:
        state: `warm-up`, `captured` (at least one signature has a graph), `disabled`, or `eager` (never called yet,
            or not to be captured).
        captures: graphs captured, forward and backward counted apart.
        replays: graph launches, the ones that complete a capturing call included.
        eager_calls: calls that ran without a graph, warm-up included.
        failures: captures and replays that failed or were refused.
        capture_seconds: host time spent capturing.
        pool_bytes: memory reserved by the graphs' pools.
        copied_bytes: bytes copied into static inputs so far.
    """

    state: str = "eager"
    captures: int = 0
    replays: int = 0
    eager_calls: int = 0
    failures: int = 0
    capture_seconds: float = 0.0
    pool_bytes: int = 0
    copied_bytes: int = 0

    def __add__(self, other: GraphStats) -> GraphStats:
        summed = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "state"}
        order = ("eager", "warm-up", "captured", "disabled")
        return GraphStats(state=max(self.state, other.state, key=order.index), **summed)


class Entry:
    """What one module knows about one signature.

    States: warm-up (`calls` < warmup_steps) -> captured (`graphs` not empty) -> disabled (`failures_in_a_row` reached
    the limit). A success sets the count of failures to zero; `rearm` leads from disabled back to warm.
    """

    __slots__ = (
        "called",
        "called_forward",
        "calls",
        "copies_out",
        "disabled",
        "failures_in_a_row",
        "generators",
        "graphs",
        "last_used",
        "match",
        "misses",
        "moves",
        "needs_grad",
        "reason",
        "recaptures",
        "script",
        "signature",
    )  # fmt: skip

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.calls = 0
        self.graphs: list[Any] = []
        self.failures_in_a_row = 0
        self.disabled = False
        self.misses = 0
        self.needs_grad = False
        self.script: Any = None  # of the recorded warm-up call
        self.generators: list = []
        self.reason = ""
        self.last_used = 0
        self.match: Matcher | None = None  # made for the first replay
        self.moves = 0  # recaptures because something moved, without a replay in between
        self.recaptures = 0  # because its backward did not fit, without a fitting one in between
        self.called: list[Any] = []  # the modules that ran inside when it was last recorded
        self.called_forward = False  # outside of any backward
        self.copies_out = False  # results are held in a way that does not let them be moved: hand out copies

    def failed(self, reason: str, most: int) -> bool:
        """Counts a failure; True when it was the one that disables."""
        self.reason = reason
        self.failures_in_a_row += 1
        if self.failures_in_a_row >= most and not self.disabled:
            self.disabled = True
            return True
        return False

    def succeeded(self) -> None:
        self.failures_in_a_row = 0
        self.misses = 0

    def rearm(self) -> None:
        self.disabled = False
        self.failures_in_a_row = self.moves = 0
