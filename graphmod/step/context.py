"""What all parts know about one wrapped callable: its name, settings, counters, signatures, and what it works on.

Graphs hold this, and know no wrapper. Owns what a failure leads to (rule R7): it is counted and explained once, and
after some in a row the signature stays eager.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from graphmod.config import CUDAGraphConfig, Verify
from graphmod.errors import CaptureRefused, VerificationFailed
from graphmod.guards.guards import Guards
from graphmod.ranks.data_parallel import compiled_around, is_taken_over, joins, take_over_later
from graphmod.ranks.fully_shard import shared_otherwise
from graphmod.signature.call import Call
from graphmod.step.arena import Tape
from graphmod.step.eager_parts import Methods
from graphmod.step.entry import Account, Entry, GraphStats, Registry
from graphmod.step.group import Group
from graphmod.step.log import reason_of
from graphmod.step.recording import Recording

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
        methods: those that it calls and that are eager parts.
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
        self.methods = Methods(self.config.eager_parts)
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
        return graph.results.make(leaves, ())

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
        self.log_once(f"{self.name!r} runs eagerly, because {what} could not be captured: {reason}")
        most = self.config.max_failures
        if entry.failed(reason, most):
            self.drop(*{graph.tape for graph in entry.graphs})
            self.log_once(
                f"{self.name!r} stays eager after {most} such failures in a row; force_enable() tries "
                "again, and so do some later calls"
            )


# -- what it works on --------------------------------------------------------------------------------------------------


T = TypeVar("T")
_MOST = 4096  # objects looked at
_DEPTH = 4


class Surroundings:
    """What a callable is known to work on: at first what it plainly holds, later what recorded calls have shown. Empty
    until `discover`.

    Attributes:
        known: whether it has been discovered.
        parameters: the leaf tensors it may differentiate.
        not_to_be_recorded: why its calls must not even be watched; None where they may.
    """

    def __init__(self, root: nn.Module | Callable) -> None:
        self._root = root
        self.known = False
        self.parameters: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._device: torch.device | None = None  # of tensors that a function closes over or names, which may change
        self.not_to_be_recorded: str | None = None
        self._parallel: dict[nn.parallel.DistributedDataParallel, None] = {}

    def discover(self) -> None:
        """Looks at the module, or at what a function closes over and names."""
        self.known = True
        self._tensors = []
        for module in self._modules():
            self._take_in(module.parameters())
            self._tensors += module.buffers()
            self._note_parallel(module.modules())

    def _modules(self) -> list[nn.Module]:
        if isinstance(self._root, nn.Module):
            return [self._root]
        found = list(_modules_and_tensors_of(self._root))
        places = [one.device for one in found if isinstance(one, Tensor)]
        self._device = next((one for one in places if one.type == "cuda"), places[0] if places else None)
        return [one for one in found if isinstance(one, nn.Module)]

    def learn(self, guards: Any, lasting: Iterable[Any] = ()) -> list[Tensor]:
        """Takes in what a recorded call has read.

        Args:
            lasting: the guards of the recordings that still count.

        Returns:
            Parameters that were exchanged since: neither of these leads to them any more.
        """
        self.discover()
        self._take_in(guards.parameters())
        self._tensors += [tensor for tensor in guards.tensors if tensor.is_cuda][:1] or guards.tensors[:1]
        self._note_parallel(guards.modules)
        current = {id(parameter) for module in self._modules() for parameter in module.parameters()}
        current.update(id(parameter) for one in (guards, *lasting) for parameter in one.parameters())
        gone = [parameter for parameter in self.parameters if id(parameter) not in current]
        self.parameters = [parameter for parameter in self.parameters if id(parameter) in current]
        return gone

    def _take_in(self, parameters: Any) -> None:
        known = {id(parameter) for parameter in self.parameters}
        self.parameters += [parameter for parameter in parameters if id(parameter) not in known]

    def _note_parallel(self, modules: Any) -> None:
        for one in modules:
            self.not_to_be_recorded = self.not_to_be_recorded or shared_otherwise(one) or compiled_around(one)
            if isinstance(one, nn.parallel.DistributedDataParallel):
                self._parallel[one] = None

    def device(self, leaves: list[Tensor]) -> torch.device | None:
        """A GPU that the callable or its arguments have tensors on, else the CPU; None where there is no tensor."""
        tensors = (*leaves, *self.parameters, *self._tensors)
        on_gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        return on_gpu or self._device or (torch.device("cpu") if tensors else None)

    def joins(self) -> bool:
        """Whether ranks may make calls a different number of times."""
        return any(map(joins, self._parallel))

    def reducers(self) -> dict[int, type]:
        """What averages the gradients of each DistributedDataParallel, as its class tells."""
        return {id(one): type(one) for one in self._parallel}

    def parallel(self) -> list[nn.parallel.DistributedDataParallel]:
        """Those whose gradients are averaged: it works on them, or runs inside the forward of one."""
        around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        return [*self._parallel, *(() if around is None else (around,))]

    def take_over(self) -> str | None:
        """Lets each DistributedDataParallel average gradients in a way that can be captured, from its next forward on.

        Returns:
            Why a replay would not average them: the callable works on one with settings that are not supported, or
            runs inside the forward of one that is not taken over yet. None where it would.
        """
        around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        reasons = [take_over_later(one, inside=True) for one in self._parallel]
        why = next(filter(None, reasons), None)
        if why is None and around is not None and not is_taken_over(around):
            why = take_over_later(around) or "a reducer that is replaced before its next forward"
        return why and f"it is trained with DistributedDataParallel with {why}"


def _modules_and_tensors_of(root: Callable) -> Iterator[nn.Module | Tensor]:
    """Those that a callable closes over, names or holds in attributes."""
    queue: list[tuple[Any, int]] = [(root, 0)]
    seen: set[int] = set()
    while queue and len(seen) < _MOST:
        value, depth = queue.pop(0)
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if _is(value, Tensor) or (_is(value, nn.Module) and not hasattr(type(value), "_reach_through")):
            yield value
        else:
            queue += [(item, depth + 1) for item in _held(value)]


def _is(value: Any, kind: type[T]) -> TypeGuard[T]:
    """Whether a value is one, or says so; a weak proxy of what is gone says nothing."""
    try:
        return isinstance(value, kind)
    except ReferenceError:
        return False


def _held(value: Any) -> Iterator[Any]:
    kind = type(value)  # and not what it says it is: below it is taken for what it is made of
    if issubclass(kind, (type, types.ModuleType, str, bytes, Tensor)):
        return
    if issubclass(kind, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif issubclass(kind, types.FunctionType):
        yield from (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # still empty
                continue
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        if hasattr(value, "__wrapped__"):
            yield value.__wrapped__
    elif issubclass(kind, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif issubclass(kind, dict):
        yield from list(dict.values(value))[:_MOST]
    elif issubclass(kind, (list, tuple)):
        yield from (list if issubclass(kind, list) else tuple).__getitem__(value, slice(_MOST))
    else:
        try:
            yield from list(object.__getattribute__(value, "__dict__").values())
        except (AttributeError, TypeError):
            return
