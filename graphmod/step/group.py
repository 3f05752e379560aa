"""What wrappers that are captured together share: backend, arenas, gradient buffers, and what is known of the gradients
that the next backward will meet.
"""

from __future__ import annotations

import functools
import logging
import math
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
from graphmod.step.entry import Entry
from graphmod.step.gradients import GradientBuffer, Passing
from graphmod.step.log import Said
from graphmod.step.tape import Arena, Tape
from graphmod.torch_private import current_backward

log = logging.getLogger("graphmod")


@functools.cache  # once a process: it says nothing about one module
def _tell_of_emulation() -> None:
    log.warning("graphs are emulated on the CPU: this checks correctness, and nothing gets faster")


class Group:
    """The modules that are captured together: one backend, shared arenas, shared gradient buffers.

    Nothing here is shared between groups (rule R9), so two models in one process do not meet. What is kept for the
    whole process elsewhere: idle capture streams, which serve the next backend; graphs whose capture CUDA ended, and
    those that wait to be destroyed; autocast blocks that are open; backwards that are watched; how ranks vote, and what
    shuts down process groups; what is compiled for an optimizer that lives; the hook by which a wrapper takes the place
    of a method; patches while somebody records; and what is known about operators, compiled graphs and bytecode.

    Whether a backward will find gradients to be None or present is learned (`expects_fresh_grads`): for what is known
    when a pass begins (whether the gradient of one parameter is None, whether an optimizer has changed it, what the
    last pass found), what the first backward then found is expected again. So `zero_grad` between forward and backward
    is foreseen, too.

    `shared` are the parameters (by identity) that more than one use feeds in one backward. Eager adds up all uses
    before it adds the sum to `.grad`; so must graphs, and therefore those gradients go through autograd.

    `anchor` is a leaf on the device that every replayed forward with a backward has among its inputs, `anchor_node`
    where its gradient would be accumulated. One for all: autograd visits that node once in a backward, not once for
    each module.

    `held_back` says whether calls are on another device now than the backend, which cannot change yet, because a
    result of its graphs is held.
    """

    backend: Backend  # from `settle` on

    def __init__(self) -> None:
        self.settled = False  # on a backend
        self._guessed = False  # the device: no tensor was known
        self.held_back = False
        self.modes = key_reader("cpu")  # of the present call, as they matter to the backend
        self._in_backward: tuple = ()  # the modes
        self._of_backward = -1  # in which they were read
        self.arenas: list[Arena] = []
        self.eager_in_flight = 0
        self.parameters: list[Tensor] = []
        # By parameter, which its buffer holds; the buffers are held by the graphs that write them.
        self.gradients: weakref.WeakValueDictionary[int, GradientBuffer] = weakref.WeakValueDictionary()
        self.passing = Passing()  # where the gradients lie that are taken as soon as a backward is over
        self.whole = FixedPlaces()  # where parameters lie that `fully_shard` collects for each use
        self.buffers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.shared: dict[int, Tensor] = {}
        self.shares_casts = False  # see `layers.uses`
        self.tied: dict[int, Tensor] = {}
        self.stash: dict[int, Tensor] = {}
        self.producers: dict[tuple, list] = {}  # of gradients, by the shape of a capture; see `layers.capture`
        self.static: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.context: tuple | None = None
        self.begun = 0  # passes
        self.said = Said()
        self.verification = Verification()
        self.anchor: Tensor | None = None
        self.anchor_node: Any = None
        self._learned: dict[tuple, bool] = {}
        self._version = -1
        self.found_fresh: bool | None = None  # whether the last pass found gradients to be None

    def settle(self, name: BackendName, device: torch.device | None, misguessed: bool = False) -> bool:
        """Sees to a backend and an anchor for calls on `device`, which may be unknown. From the CPU to a GPU, or from
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
        device = self.backend.device
        if self.anchor is None or self.anchor.device != device:
            with torch.inference_mode(False):
                self.anchor = torch.empty(0, device=device, requires_grad=True)
                self.anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node
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
            self.context = None

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

    # -- will the coming backward write gradients, or accumulate? ------------------------------------------------

    @property
    def busy(self) -> bool:
        if self.eager_in_flight > 0:
            return True
        for arena in self.arenas:  # noqa: SIM110 - half the time of any() with a generator, before each layer
            if arena.in_flight:
                return True
        return False

    def begin_pass(self) -> None:
        """Notes, before the first forward of a pass, what is known about the gradients its backward will meet: are
        they None now, has the optimizer stepped since the last pass began, and were they None in that?"""
        self.begun += 1
        probe = self._probe()
        if probe is None:
            self.context = None
            return
        self.stash.clear()
        version = probe._version
        # Fused optimizers leave the version alone; then what the last pass met tells one kind of pass from another.
        self.context = (probe.grad is None, version != self._version, self.found_fresh)
        self._version = version

    def expects_fresh_grads(self) -> bool | None:
        """Whether the backward of the pass that begins will find gradients to be None; None if nobody can tell."""
        return None if self.context is None else self._learned.get(self.context, self.context[0])

    def modes_in_backward(self) -> tuple:
        """The modes of the backward that runs now, the same object while they are the same."""
        task = current_backward()
        if task != self._of_backward or task < 0:
            self._of_backward = task  # no code of the user's runs between the nodes of one backward, hooks apart
            now = self.modes()
            if now != self._in_backward:
                self._in_backward = now
        return self._in_backward

    def first_backward(self, _: Any = None) -> None:
        """Called as each backward begins; the first of a pass tells what the gradients really were."""
        probe = self._probe()
        if self.context is not None and probe is not None:
            self._learned[self.context] = self.found_fresh = probe.grad is None
            self.context = None

    def _probe(self) -> Tensor | None:
        return next((p for p in self.parameters if p.requires_grad), None)

    def share(self, parameters: Sequence[Tensor], lasting: bool = False) -> None:
        """Notes parameters as shared, with `lasting` also beyond a `release`."""
        self.shared.update((id(parameter), parameter) for parameter in parameters)
        if lasting:
            self.tied.update((id(parameter), parameter) for parameter in parameters)

    def release(self) -> None:
        """Forgets every tape and buffer; the memory is free once the last user of it lets go."""
        self._free_graphs()
        self.gradients.clear()
        self.passing.clear()
        self.whole.release()
        self.parameters.clear()
        self.shared.clear()
        self.shared.update(self.tied)
        self.producers.clear()
        self.stash.clear()
        self.static.clear()
        self.buffers.clear()
        self._learned.clear()

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
