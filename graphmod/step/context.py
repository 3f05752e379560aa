"""What all parts know about one wrapped callable: its name, settings, counters and signatures.

Graphs hold this, and know no wrapper. Owns what a failure leads to (rule R7): it is counted and explained once, and
after some in a row the signature stays eager.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.config import CUDAGraphConfig, Verify
from graphmod.errors import CaptureRefused, VerificationFailed
from graphmod.guards.guards import Guards
from graphmod.signature.call import Call
from graphmod.step.arena import Tape
from graphmod.step.entry import Account, Entry, GraphStats, Registry
from graphmod.step.found_parts import FoundParts
from graphmod.step.group import Group
from graphmod.step.log import reason_of
from graphmod.step.recording import Recording
from graphmod.step.surroundings import Surroundings
from graphmod.trace.undo import clear_frames

log = logging.getLogger("graphmod")

_PATIENCE = 128  # attempts without enough replays in between; see `Account`


class Context:
    """One wrapped callable.

    Attributes:
        root: the module or callable.
        call: how it is called.
        name: how log lines name it.
        group: what it shares with others.
        counters: what it has done.
        last_failure: why the last failed capture or replay failed, or calls stay eager; "" where neither is so.
        entries: the signatures it was called with.
        around: what it works on.
        found: the functions that it calls and that are eager parts.
        account: the patience with all signatures together.
        without_layers: that with eager calls of a body whose layers run as plain modules meanwhile, see `Body`.
        served: the graph behind the last call; None where that had none.
        eager_in: the pass of the group in which it last ran without a graph.
        agreement: of all ranks that take part in its calls; None where none but this process is known to.
        nested: whether its last call was no more than a part of another, which is captured or is going to be.
        instead: what the log adds where it says that calls are eager.
    """

    def __init__(
        self, root: nn.Module | Callable, call: Callable, config: CUDAGraphConfig, name: str, group: Group
    ) -> None:
        self.root, self.call, self.config, self.name, self.group = root, call, config, name, group
        self.is_module = isinstance(root, nn.Module)
        self.counters = GraphStats()
        self.last_failure = self.instead = ""
        self.agreement: Any = None
        self.entries = Registry(config.warmup_steps - 1)
        self.start()

    def start(self) -> None:
        """Forgets all but counters and signatures."""
        self.around = Surroundings(self.root)
        self.found = FoundParts(self.config.eager_parts)
        self.served: Any = None
        self._open_accounts()
        self.eager_in = -1
        self.nested = False

    def _open_accounts(self) -> None:
        self.account = Account(max(_PATIENCE, 16 * self.config.max_graphs))
        self.without_layers = Account(self.config.warmup_steps + 2)

    @property
    def training(self) -> bool | None:
        """The mode of a wrapped module as a whole; what its parts are in is for the guards."""
        return getattr(self.root, "training", None) if self.is_module else None  # a frozen script has no mode

    @property
    def stats(self) -> GraphStats:
        """Counters so far; `pool_bytes` counts the pools shared with the group."""
        pools = sum(arena.pool.bytes() for arena in self.group.arenas)
        return replace(self.counters, state=self.entries.state, pool_bytes=pools)

    def discover(self) -> None:
        """Finds, before the first call, what the callable plainly works on."""
        self.around.discover()
        self.around.take_over()
        self.group.learn(self.around.parameters)

    def learn(self, guards: Guards) -> None:
        """Takes in what a recorded call has read."""
        known = {id(parameter) for parameter in self.around.parameters}
        lasting = [one.guards for entry in self.entries for one in entry.recordings]
        self.group.forget(self.around.learn(guards, lasting))
        self.around.take_over()
        self.group.learn([parameter for parameter in self.around.parameters if id(parameter) not in known])

    def ran_eagerly(self) -> None:
        """Takes in that a call runs without a graph."""
        self.counters.eager_calls += 1
        self.served, self.eager_in = None, self.group.begun

    def drop(self, *tapes: Tape, why: str = "") -> None:
        """Takes the tapes' graphs away from everybody; their memory is free once nothing in flight needs it."""
        for tape in tapes:
            tape.drop(why)
        if self.served is not None and self.served.tape.dropped:
            self.served = None

    def reset(self) -> None:
        """Frees the graphs and starts over with warm-up; signatures that were disabled stay so."""
        for entry in self.entries:
            self.drop(*{graph.tape for graph in entry.graphs})
        self.entries.restart()
        self.group.said.forget(self.name)
        self.start()
        self.group.release()

    def leave_ranks(self, group: Any) -> None:
        """Frees the graphs where a process group that they may use is about to be destroyed; where it is that of the
        whole program, lets go of the other ranks, too."""
        self.reset()
        if group is torch.distributed.group.WORLD:
            self.agreement = None

    def rearm(self) -> None:
        """Lets signatures that failures disabled be captured again."""
        for entry in self.entries:
            entry.rearm()
        self._open_accounts()
        self.group.said.forget(self.name)

    def out_of_date(self, entry: Entry, difference: str) -> None:
        """A verified call did not do what was captured.

        Raises:
            VerificationFailed: if every call is verified.
        """
        replays = entry.replays - entry.verified_at
        message = (
            f"{self.name!r} is no longer what was captured, and no guard noticed: {difference}. Its last {replays} "
            "replays may have given other numbers than eager calls"
        )
        self.counters.failures += 1
        self.last_failure = difference
        self.drop(*{graph.tape for graph in entry.graphs}, why=difference)
        entry.recordings.clear()
        if self.config.verify is Verify.always:
            raise VerificationFailed(message)
        entry.disable(difference, out_of_date=True)
        self.log_once(f"{message}; it stays eager, and force_enable() tries again", key=difference)

    def keep_eager(self, entry: Entry, reason: str) -> None:
        """From now on calls with this signature are eager."""
        entry.disable(reason)
        self.last_failure = reason

    def spend(self, entry: Entry, cost: float = 1) -> None:
        """Takes what something costs from both accounts."""
        entry.account.spend(cost)
        self.account.spend(cost)

    # -- a backward outside of the graph: none here; see `layers.context` ------------------------------------------

    def among_hooks(self, pack: Callable, call: Call, run: Callable[[], Any]) -> Any:
        """A call while hooks for saved tensors are active.

        Args:
            pack: the first of the innermost hooks.
            run: makes the call, from a graph or not.
        """
        return run()

    def waiting(self) -> int:
        """How many calls without a graph wait for their backward."""
        return 0

    def shares_casts(self, entry: Entry) -> bool:
        """Whether a call is to stay eager, because it shares casts that autocast keeps; asked where it keeps any."""
        return False

    def own_casts(self, entry: Entry) -> AbstractContextManager:
        """For a capture, which casts what it uses itself."""
        return nullcontext()

    def refuses(self, call: Call, recording: Recording) -> str | None:
        """Why the backward of a recorded call's result keeps it from being captured; asked of each."""
        return None

    def learn_uses(self, entry: Entry, call: Call, recording: Recording) -> None:
        """Learns from a recorded call what else uses its arguments, parameters and casts."""

    def awaits_backward(self, entry: Entry, recording: Recording) -> bool:
        """Whether a call is to be eager, because a backward of its result has to be recorded first."""
        return False

    def eager_result(self, entry: Entry, call: Call, recording: Recording | None = None) -> Any:
        """Hands out the result of an eager call, whose backward may come.

        Args:
            recording: of the present state, by which that is to be judged, if it was not yet.
        """
        return call.result.value

    def new_graph(self, entry: Entry, tape: Tape, recording: Recording) -> Any:
        """For a call whose results have a backward.

        Raises:
            CaptureRefused: here there is none.
        """
        raise CaptureRefused("returns a tensor that requires grad; return it detached")

    def results(self, graph: Any, leaves: list[Tensor], random_state: Any) -> Any:
        """The results of a replay that was just launched.

        Args:
            leaves: the call's tensor arguments.
            random_state: before the replay; see `StepGraph.random_state`.
        """
        return graph.results.make(graph.given(leaves), ())

    # -- what the log says ---------------------------------------------------------------------------------------

    def log_once(self, message: str, key: str | None = None) -> None:
        """Logs a warning that begins with the name, unless one of the same cause was; see `Said.once`."""
        more = self.instead if "eager" in message else ""
        self.group.said.once(type(self.root), self.name, message + more, key)

    def failed(self, entry: Entry, error: BaseException, what: str) -> None:
        """Counts a failure and says once why.

        Args:
            what: that failed, in words.
        """
        reason = reason_of(error)
        self.counters.failures += 1
        self.last_failure = reason
        log.debug("%s: %s", self.name, reason, exc_info=error)
        # A context that its frames hold open, as `checkpoint` does up to torch 2.12, must not be around the eager call.
        clear_frames(error)
        self.log_once(f"{self.name!r} runs eagerly, because {what} could not be captured: {reason}")
        most = self.config.max_failures
        if entry.failed(reason, most):
            self.drop(*{graph.tape for graph in entry.graphs})
            self.log_once(
                f"{self.name!r} stays eager after {most} such failures in a row; force_enable() tries "
                "again, and so do some later calls"
            )
