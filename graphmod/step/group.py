"""What wrappers that are captured together share: backend, buffers, memory pools, and when their calls are verified."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphmod.backend import Backend, default_device, make_backend
from graphmod.config import BackendName
from graphmod.ranks.fully_shard import FixedPlaces
from graphmod.signature.modes import key_reader
from graphmod.step.arena import Arena, Tape
from graphmod.step.entry import Entry
from graphmod.step.log import Said

MOST_ARENAS = 4

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
    of a method; patches, which are in place while somebody records; and what is known about operators, compiled graphs
    and bytecode.

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
        self.shares_casts = False  # see `layers.autocast`
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
