"""What wrappers that are captured together share: backend, buffers, memory pools with the order of their graphs (rule
R4), and when their calls are verified.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from graphmod.backend import Backend, default_device, make_backend
from graphmod.config import BackendName
from graphmod.ranks.fully_shard import FixedPlaces
from graphmod.signature.modes import key_reader
from graphmod.step.entry import Entry
from graphmod.step.log import Said

MOST_ARENAS = 4

_clock = count(1)
log = logging.getLogger("graphmod")


@functools.cache  # once a process: it says nothing about one module
def _tell_of_emulation() -> None:
    log.warning("graphs are emulated on the CPU: this checks correctness, and nothing gets faster")


class Group:
    """The modules that are captured together: one backend, shared arenas and buffers; see `layers.group` for what a
    backward outside of their graphs adds.

    Nothing here is shared between groups (rule R9), so two models in one process do not meet. What is kept for the
    whole process elsewhere: idle capture streams, which serve the next backend; graphs whose capture CUDA ended, and
    those that wait to be destroyed; autocast blocks that are open; backwards that are watched; how ranks vote, and what
    shuts down process groups; what is compiled for an optimizer that lives; the hook by which a wrapper takes the place
    of a method; patches while somebody records; and what is known about operators, compiled graphs and bytecode.

    `shared` are the parameters (by identity) that more than one use feeds in one backward. Eager adds up all uses
    before it adds the sum to `.grad`; so must graphs, and therefore those gradients go through autograd.

    `held_back` says whether calls are on another device now than the backend, which cannot change yet, because a
    result of its graphs is held.
    """

    backend: Backend  # from `settle` on

    def __init__(self) -> None:
        self.settled = False  # on a backend
        self._guessed = False  # the device: no tensor was known
        self.held_back = False
        self.modes = key_reader("cpu")  # of the present call, as they matter to the backend
        self.arenas: list[Arena] = []
        self.eager_in_flight = 0
        self.parameters: list[Tensor] = []
        self.whole = FixedPlaces()  # where parameters lie that `fully_shard` collects for each use
        self.buffers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.shared: dict[int, Tensor] = {}
        self.shares_casts = False  # see `layers.uses`
        self.tied: dict[int, Tensor] = {}
        self.static: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.begun = 0  # passes
        self.said = Said()
        self.verification = Verification()

    def settle(self, name: BackendName, device: torch.device | None, misguessed: bool = False) -> bool:
        """Sees to a backend for calls on `device`, which may be unknown. From the CPU to a GPU, or from
        one GPU to another, the backend changes, and graphs captured before are dropped.

        Args:
            misguessed: whether a call could not be repeated on a device that had to be guessed, if it had to.

        Returns:
            Whether there is another backend now.

        Raises:
            ConfigError: the backend `name` cannot work there.
        """
        corrected = misguessed and self._guessed
        self.held_back = False
        changes = not self.settled or (
            device is not None and device != self.backend.device and (device.type == "cuda" or corrected)
        )
        if changes:
            self.held_back = any(arena.in_flight for arena in self.arenas)
            if self.held_back:
                return False
            self.backend = make_backend(name, device or default_device(name))
            self.settled = True
            self._guessed = device is None and name is BackendName.auto
            self._free_graphs()
            if not self.backend.on_gpu:
                _tell_of_emulation()
        self.modes = key_reader(self.backend.device_type)
        return changes

    @property
    def gpu(self) -> int | None:
        """Index of the GPU on which it captures; None in the emulator."""
        return self.backend.device.index if self.settled and self.backend.on_gpu else None

    def learn(self, parameters: list[Tensor]) -> None:
        """Takes in the parameters of one of its modules; those that others have too are shared."""
        known = {id(parameter) for parameter in self.parameters}
        self.share([parameter for parameter in parameters if id(parameter) in known])
        self.parameters += [parameter for parameter in parameters if id(parameter) not in known]

    def forget(self, parameters: list[Tensor]) -> None:
        """Lets go of parameters that others have taken the place of."""
        gone = {id(parameter) for parameter in parameters}
        if gone:
            self.parameters = [parameter for parameter in self.parameters if id(parameter) not in gone]
            for key in gone - self.tied.keys():
                self.shared.pop(key, None)

    # -- where a forward may run ---------------------------------------------------------------------------------

    def growing_tape(self, entry: Entry) -> Tape | None:
        """The tape of a pass under way whose end has been reached, so that a new graph of this signature may follow on
        it. It may as often as calls of it had a backward in one pass before: a result that is only held, and will
        never have one, makes no tape grow."""
        entry.pass_began(self.begun)
        found = None
        for arena in self.arenas:
            tape = arena.active
            if not arena.in_flight or tape is None or not tape.at_end or tape.dropped:
                continue
            there = sum(graph.tape is tape for graph in entry.graphs)
            if there < max(entry.most_backwards, 1) and (found is None or arena.began > found.arena.began):
                found = tape
        return found

    def new_tape(self, most_arenas: int = 1) -> Tape | None:
        """A tape for a new pass, in an idle pool, or in a new one where fewer than that are there for all tapes. None
        where neither may be."""
        for arena in self.arenas:
            if not arena.in_flight and (arena.kept_to is None or arena.kept_to.dropped):
                return Tape(arena)
        if sum(arena.kept_to is None for arena in self.arenas) >= most_arenas:
            return None
        self.arenas.append(Arena(self.backend))
        return Tape(self.arenas[-1])

    # -- what is in flight -----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        if self.eager_in_flight > 0:
            return True
        for arena in self.arenas:  # noqa: SIM110 - half the time of any() with a generator, before each layer
            if arena.in_flight:
                return True
        return False

    def begin_pass(self) -> None:
        """Takes in that a forward comes whose backward is to follow, and that nothing is in flight."""
        self.begun += 1

    def expects_fresh_grads(self) -> bool | None:
        """Whether the backward of the pass that begins will find gradients to be None; None if nobody can tell."""
        return None

    def share(self, parameters: Sequence[Tensor], lasting: bool = False) -> None:
        """Notes parameters as shared, with `lasting` also beyond a `release`."""
        self.shared.update((id(parameter), parameter) for parameter in parameters)
        if lasting:
            self.tied.update((id(parameter), parameter) for parameter in parameters)

    def release(self) -> None:
        """Forgets every tape and buffer; the memory is free once the last user of it lets go."""
        self._free_graphs()
        self.whole.release()
        self.parameters.clear()
        self.shared.clear()
        self.shared.update(self.tied)
        self.static.clear()
        self.buffers.clear()

    def _free_graphs(self) -> None:
        for arena in self.arenas:
            for tape in list(arena.tapes):
                tape.drop()
            arena.pool.release()
        self.arenas.clear()


# -- who may replay or capture when ------------------------------------------------------------------------------------


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


_SHARE = 1000  # verified calls take at most one part in so many of the time
LOOKS = 61  # replays after which it is asked whether it is time; a prime, so that each call of a pass has its turn


class Verification:
    """The rounds in which the calls of a group of modules are verified: all in one pass, because after one eager call
    those that follow would find their arguments elsewhere than in a graph's result.

    Attributes:
        round: how many have begun.
    """

    def __init__(self) -> None:
        self.round = 0
        self._seconds = 0.0  # that a round takes
        self._next: float | None = None

    def expect(self, seconds: float) -> None:
        """Takes in, before the first round, how long one of the calls will take, at most."""
        self._seconds += seconds

    def stop(self) -> None:
        """Begins no round any more."""
        self._next = math.inf

    def begins(self) -> bool:
        """Whether it is time for another round, which begins if so."""
        now = time.perf_counter()
        if self._next is None:
            self._next = now + _SHARE * self._seconds
        if now < self._next:
            return False
        self._next = now
        self.round += 1
        return True

    def took(self, seconds: float) -> None:
        """Takes in how long a verified call of this round took."""
        self._next = max(self._next or 0.0, time.perf_counter()) + _SHARE * seconds
