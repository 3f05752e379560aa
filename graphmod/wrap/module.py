"""`CUDAGraphModule`: warm-up, capture and replay of one module or callable.

Owns the decision what each call does; how a graph is captured and replayed is in `forward` and `backward`. May import
every part of the core.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.call.replay import find, launch, results
from graphmod.call.warmup import track, warm_up
from graphmod.capture.forward import capture, place
from graphmod.capture.recording import Recording
from graphmod.config import CUDAGraphConfig, settings
from graphmod.graph.forward import ForwardGraph
from graphmod.graph.group import EagerCall, Group
from graphmod.graph.tape import Tape
from graphmod.guards.guards import HOOKS
from graphmod.signature.flattening import flatten
from graphmod.signature.modes import FOREIGN
from graphmod.signature.signature import Signature, parameter_names, tensor_key
from graphmod.signature.structure import unrepeatable
from graphmod.state.budget import Budget
from graphmod.state.entry import Entry, GraphStats
from graphmod.state.failures import capture_failed
from graphmod.state.registry import Registry
from graphmod.state.surroundings import Surroundings
from graphmod.torch_private import is_fx_tracing
from graphmod.trace.tracer import is_recording
from graphmod.wrap.surface import Surface
from graphmod.wrap.target import HOLDERS, Target, caller_with, in_place_of_forward

_reference_count = sys.getrefcount
_dynamo_compiles = torch.compiler.is_dynamo_compiling


def _training(root: Any) -> Any:
    """The mode of a wrapped module as a whole; what its parts are in is for the guards."""
    return root.training if isinstance(root, nn.Module) else None


class CUDAGraphModule(Surface):
    """Runs a module or callable from CUDA graphs, with the results of the eager call.

    The first `config.warmup_steps` calls of a signature (structure, shapes, dtypes, constants, modes) are ordinary
    calls. The next one is captured and replayed, and so are later calls with the same signature. If an output requires
    grad, its backward is captured inside the first real backward. A call that cannot use a graph runs eagerly and is
    counted in `stats`.

    Results lie in memory of the graph. One that is still held when the graph runs again is moved to a copy first, so
    it never changes; `config.clone_outputs=True` copies at once. The parameters' gradients are buffers of the graph:
    keep a gradient beyond the next backward with `p.grad.clone()`.

    Args:
        module: a module or callable. A callable may run a whole training iteration and return a detached loss.
        config: settings; None means the defaults.
        name: how log lines name it; the class or function name by default.

    Attributes of the wrapped module are read, set and deleted through the wrapper. torch.compile, torch.export and the
    like see the wrapped module in its place, and no graph.
    """

    _reach_through = ("_root",)

    def __init__(
        self,
        module: nn.Module | Callable,
        config: CUDAGraphConfig | None = None,
        *,
        name: str | None = None,
        group: Group | None = None,
        call: Callable | None = None,
    ) -> None:
        super().__init__()
        if not callable(module):
            raise TypeError(f"CUDAGraphModule wraps an nn.Module or a callable, got {type(module).__name__}")
        self.__dict__["_root"] = module
        if isinstance(module, nn.Module) and call is None:
            self.module = module
        else:
            self.__dict__["module"] = module
        self._config = settings(config)
        self._name = name or getattr(module, "__name__", type(module).__name__)
        self.__dict__["_call"] = call or (Target(module) if isinstance(module, nn.Module) else module)
        self._group = group or Group()
        self._counters = GraphStats()
        self.last_failure = ""
        self._hooks_outside = isinstance(module, nn.Module) and call is None
        self._entries = Registry()
        self._mark: Any = object()  # the `Mark` of a layer whose forward leads here
        self._retired = False
        self._class = type(module) if isinstance(module, nn.Module) else nn.Module
        self._class_forward = self._class.forward
        if isinstance(module, nn.Module) and not self._hooks_outside:
            self._group.said.join(type(module), self._name)
        self._start()
        self._made = True

    def _start(self) -> None:
        self._around = Surroundings(self._root)
        self._eager_calls: weakref.WeakSet[EagerCall] = weakref.WeakSet()
        self._served: ForwardGraph | None = None  # the graph behind the last call
        self._budget = Budget(max(64, 8 * self._config.max_graphs))  # over all signatures
        self._eager_in = -1  # the pass of the group in which it last ran without a graph

    # -- calling -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same result as `module(*args, **kwargs)`."""
        root = self._root
        if _dynamo_compiles():
            return root(*args, **kwargs)
        if not self._hooks_outside:
            return self._run(*args, **kwargs)
        own = root.__dict__.get("forward")
        if own is not self._call.own and getattr(own, "__self__", None) is not self:
            self._call.own = own
            self.reset()
        if self._calls_itself() or any(getattr(root, kind) for kind in HOOKS):
            # The module's own hooks and `__call__` run on every call, around the graph instead of inside it.
            with in_place_of_forward(root, self._run):
                return root(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _calls_itself(self) -> bool:
        """Whether the module's class has a `__call__` of its own that leads to `forward`."""
        kind = type(self._root)
        return kind.__call__ is not nn.Module.__call__ and kind.forward is not nn.Module.forward

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped callable without the module's own hooks."""
        if is_recording():
            self._served = None
            return self._call(*args, **kwargs)  # part of what another wrapper captures
        if _dynamo_compiles():
            return self._call(*args, **kwargs)
        if _reference_count(self._mark) > HOLDERS:
            other = caller_with(self._mark)
            if other is not None and other is not self._root:
                return self._for_copy(other, args, kwargs)
        if self._class.forward is not self._class_forward:
            self._class_forward = self._class.forward
            self.reset()
        usual, modes = self._entries.usual, self._group.modes()
        leaves = None
        if usual is not None and usual.signature.modes == modes and not usual.disabled:
            leaves = usual.match(args, kwargs)
        if leaves is not None and usual.signature.training is _training(self._root):
            entry = usual
            self._entries.touch(entry)
        else:
            if self._retired:
                other = caller_with(self._mark)
                return self._call(*args, **kwargs) if other is None else self._for_copy(other, args, kwargs)
            if modes[FOREIGN] is not None and is_recording():
                self._served = None
                return self._call(*args, **kwargs)  # part of what another wrapper captures
            if modes[FOREIGN] is not None or is_fx_tracing():
                return self._beside(modes[FOREIGN] or "it is being traced", args, kwargs)
            leaves = []
            structure = flatten((args, kwargs), leaves, {})
            if not self._around.known:
                self._discover()
            entry = self._entry(structure, leaves)
            if entry is None:
                return self._eager(args, kwargs)
        if entry.disabled:
            return self._eager(args, kwargs)
        if entry.needs_grad and not self._group.busy:
            self._group.begin_pass()
        reason = ""
        # A graph may start before everything about it has been checked; if that shows that it was none, once more with
        # care.
        for careful in (False, True) if entry.graphs else ():
            graph, reason = find(self, entry, leaves, careful)
            if graph is None:
                break
            try:
                state, reason = launch(self, graph, leaves, careful)
            except RuntimeError as error:
                self._drop(graph.tape)
                capture_failed(self, entry, error, "a replay")
                return self._eager(args, kwargs)
            if reason is None:
                return results(self, graph, leaves, state)
        recording = entry.recording_of_now()
        if recording is None or recording.refused is not None:
            return warm_up(self, entry, args, kwargs)
        if self._group.settle(self._config.backend, self._around.device(leaves)):
            entry.recordings.clear()  # of calls elsewhere
            return self._run(*args, **kwargs)
        tape = place(self, entry, reason, recording)
        if tape is None:
            return self._eager(args, kwargs, entry)
        captured = capture(self, entry, tape, leaves, recording)
        return self._eager(args, kwargs) if captured is None else results(self, captured[0], leaves, captured[1])

    def _entry(self, structure: Any, leaves: list[Tensor]) -> Entry | None:
        """What is known of calls with this signature; None where no other call can have it."""
        key, group = tuple(map(tensor_key, leaves)), self._group
        signature = Signature(structure, key, group.modes(), _training(self._root))
        entry = None if group.backend is None else self._entries.get(signature)
        if entry is None:
            names = parameter_names(self._call)
            unknown = unrepeatable(structure[1], named=names) or unrepeatable(structure[2])
            if unknown is not None:
                path, why = unknown
                self._log_once(f"{self._name!r} runs eagerly, because its argument {path!r} is {why}")
                return None
            group.settle(self._config.backend, self._around.device(leaves))
            signature = signature._replace(modes=group.modes())
            lines = self._entries.nearest(signature, names)
            if lines:
                self._log_once(
                    f"{self._name!r} is called with other inputs:\n  " + "\n  ".join(lines), key="other inputs"
                )
            entry = self._entries.add(signature)
        return entry

    # -- eager calls ---------------------------------------------------------------------------------------------

    def _eager(self, args: tuple, kwargs: dict, entry: Entry | None = None) -> Any:
        self._counters.eager_calls += 1
        self._served, self._eager_in = None, self._group.begun
        if entry is not None and entry.needs_grad:
            return track(self, entry, self._call(*args, **kwargs))
        return self._call(*args, **kwargs)

    def _beside(self, reason: str, args: tuple, kwargs: dict) -> Any:
        """An eager call for somebody who looks on."""
        self._log_once(f"{self._name!r} runs eagerly, because {reason}")
        return self._eager(args, kwargs)

    def _for_copy(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """An eager call of a shallow copy of the wrapped layer, whose `forward` leads here, too."""
        own = self._mark.forward
        return type(module).forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)

    def _drop(self, *tapes: Tape, why: str = "") -> None:
        """Takes the tapes' graphs away from every module; their memory is free once nothing in flight needs it."""
        for tape in tapes:
            tape.drop(why)
        if self._served is not None and self._served.tape.dropped:
            self._served = None

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _discover(self) -> None:
        """Finds, before the first call, what the callable reaches."""
        self._around.discover()
        self._group.learn(self._around.parameters)

    def _learn(self, recording: Recording) -> None:
        """Takes in what a recorded call has read."""
        known = {id(parameter) for parameter in self._around.parameters}
        lasting = [one.guards for entry in self._entries for one in entry.recordings]
        self._group.forget(self._around.learn(recording.guards, lasting))
        self._group.learn([parameter for parameter in self._around.parameters if id(parameter) not in known])

    def _eager_in_flight(self) -> bool:
        """Whether a call without a graph waits for its backward."""
        return any(not call.done for call in self._eager_calls)

    def _log_once(self, message: str, key: str | None = None) -> None:
        self._group.said.once(type(self._root), self._name, message, key)

    @property
    def graph_name(self) -> str:
        """How log lines name this wrapper."""
        return self._name

    @property
    def stats(self) -> GraphStats:
        """Counters so far; `pool_bytes` counts the pools this module shares with its group."""
        return GraphStats(
            **{
                **vars(self._counters),
                "state": self._entries.state,
                "pool_bytes": sum(a.pool.bytes() for a in self._group.arenas),
            }
        )

    def reset(self) -> None:
        """Frees the graphs and starts over with warm-up; signatures that were disabled stay so. May be called often."""
        for entry in self._entries:
            self._drop(*{graph.tape for graph in entry.graphs})
        self._entries.restart()
        self._group.said.forget(self._name)
        self._start()
        self._group.release()

    def retire(self) -> None:
        """Frees the graphs; every call is eager from now on."""
        self.reset()
        self._retired = True

    def replay(self, times: int) -> int:
        """Runs the graph behind the last call again, as so many calls like it would, and checks nothing.

        For callables that keep all that changes in tensors whose addresses stay: decoding, a solver. Between the last
        call and this one no argument may have been exchanged, and nothing that the callable reads.

        Returns:
            How often it ran: `times`, or 0 if the last call was served by no graph, or by one that returns tensors,
            copies arguments or has a backward; less than `times` if a launch failed. Call the module for the rest.
        """
        graph = self._served
        if graph is None or not graph.stands_alone or is_recording():
            return 0
        tape, arena = graph.tape, graph.tape.arena
        if tape.dropped or arena.in_flight or arena.active is not tape or tape.cursor != graph.index + 1:
            return 0
        for done in range(times):
            try:
                graph.launch()
            except RuntimeError as error:
                self._drop(graph.tape)
                capture_failed(self, graph.entry, error, "a replay")
                return done
            self._counters.replays += 1
        return times

    def force_enable(self) -> None:
        """Lets signatures that failures disabled be captured again."""
        for entry in self._entries:
            entry.rearm()
        self._group.said.forget(self._name)

    def extra_repr(self) -> str:
        return f"{self._name!r}, {self.stats.state}"

    def _got_or_lost(self) -> None:
        self.reset()

    def _around_copy(self, root: Any, call: Any, memo: dict | None) -> CUDAGraphModule:
        group = None if memo is None else memo.get(id(self._group))
        if group is None:
            group = Group()
            if memo is not None:
                memo[id(self._group)] = group
                group.share([copy.deepcopy(tied, memo) for tied in self._group.tied.values()], lasting=True)
        in_place = isinstance(self._root, nn.Module) and not self._hooks_outside
        made = CUDAGraphModule(root, self._config, name=self._name, group=group, call=call if in_place else None)
        if self._hooks_outside:
            made._call.own = call.own
        return made
