"""Memory pools and the order in which their graphs may replay or be captured (rule R4)."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from itertools import count
from typing import Any

from graphmod.backend import Backend

_clock = count(1)


class Tape:
    """Graphs captured one after the other in one arena. `cursor` is the least index that may be replayed next.

    Memory that a forward graph saves for its backward may be reused by anything captured after that backward. Replaying
    any increasing subsequence of a tape is therefore safe: what a later graph needs was alive while everything between
    was captured. One integer comparison decides.

    In full: let graph j read a value in the pool that it does not write. Some graph i < j of the tape wrote it. At the
    capture of j it was there, so its memory was allocated from the capture of i to that of j, and the allocator gave it
    to no graph captured between them. A replay that visits i and later j with increasing indices runs only graphs from
    between them in the meantime, and none of these writes there. Values from outside the pool are never the allocator's
    to give. That i itself ran in this pass is ensured for a backward by its ticket, and for an adopted argument by its
    address.

    `serial` is how many graphs its arena had captured before its first; `outputs` are the results that its graphs hand
    out, and `stamps` says which capture of the arena each came from. `fresh_grads` says whether the first backward of
    the tape found gradients to be None (it writes) or present (it accumulates); None before there was a backward.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.serial = arena.captures
        arena.tapes.add(self)
        self.outputs: list[Any] = []
        self.stamps: list[int] = []
        self.cursor = 0
        self.length = 0
        self.fresh_grads: bool | None = None
        self.owners: list[Any] = []
        self.dropped = False

    def drop(self, why: str = "") -> None:
        """Takes its graphs away from their modules; their memory is free once nothing in flight needs it."""
        for graph in self.owners:
            graph.entry.lose(graph, why)
        self.dropped = self.arena.holds_dropped = True
        self.arena.let_go_of_dropped()

    def hand_out(self, outputs: list[Any]) -> None:
        """Takes in the results of a graph that was just captured."""
        self.arena.captures += 1
        self.outputs += outputs
        self.stamps += [self.arena.captures] * len(outputs)

    @property
    def at_end(self) -> bool:
        return self.cursor == self.length

    def append(self, owner: Any) -> int:
        """Adds a captured graph and counts it as just replayed; returns its index."""
        self.owners.append(owner)
        self.length += 1
        self.cursor = self.length
        return self.length - 1


class Arena:
    """One memory pool: at most one tape is being traversed in it at a time.

    A pass is one traversal: it begins when nothing is in flight and ends when every forward it began has had its
    backward or has been given up.
    """

    def __init__(self, backend: Backend) -> None:
        self.pool: Any = backend.new_pool()  # of the kind that this backend takes
        self.active: Tape | None = None
        self.in_flight = 0
        self.passes = 0
        self.captures = 0
        self.began = 0  # when its last pass did, among those of all arenas
        self.tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        self.kept_to: Tape | None = None  # which leaves tensors behind (gradients) that others would overwrite
        self.awaiting: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs captured in this pass, backward still to come
        self.holds_dropped = False  # whether tapes were dropped that still hold their graphs
        self._recent: list[Tape] = []

    def begin(self, tape: Tape) -> list[Any] | None:
        """Starts a pass.

        What the tape's graphs use in passing may lie where results lie that were captured later than they were: those
        that the caller still holds are moved out of the way.

        Returns:
            None if it has begun; else the signatures of the results, and gradients, that could not be moved.
        """
        stuck, recent = [], []
        for other in self._recent:
            if other is tape or other.serial > tape.serial:
                stuck += [output.entry for output in other.outputs if not output.evacuate()]
                continue
            if other.stamps and other.stamps[-1] > tape.serial:  # it grew since
                later = bisect_right(other.stamps, tape.serial)
                stuck += [output.entry for output in other.outputs[later:] if not output.evacuate()]
            if not other.dropped or any(output.held() for output in other.outputs):
                recent.append(other)
        if stuck:
            return stuck  # nothing has begun
        self._recent = [*recent, tape]
        self.active = tape
        for graph in self.awaiting:
            graph.forget_autograd()
        self.awaiting.clear()
        self.passes = self.began = next(_clock)  # no two arenas' passes are one number: they share buffers
        tape.cursor = 0
        return None

    def rest(self) -> None:
        """Lets go of arguments, and of results that nobody holds, after a pass: the next one begins sooner for it, and
        the GPU may wait for that."""
        for tape in self._recent:
            for output in tape.outputs:
                output.let_go()
            for graph in tape.owners:
                graph.forget_arguments()
        self.let_go_of_dropped()

    def let_go_of_dropped(self) -> None:
        """Frees what dropped tapes hold, but for results that somebody still has, unless a backward may need it."""
        if self.in_flight or not (self.holds_dropped or any(tape.dropped for tape in self._recent)):
            return
        if self.active is not None and self.active.dropped:
            self.active = None
        for graph in self.awaiting:
            graph.forget_autograd()
        self.awaiting.clear()
        for tape in self.tapes if self.holds_dropped else ():
            if tape.dropped:
                tape.owners = []
        self.holds_dropped = False
        self._recent = [t for t in self._recent if not t.dropped or any(output.held() for output in t.outputs)]
