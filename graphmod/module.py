"""`CUDAGraphModule`: warm-up, capture and replay of one module or callable.

Owns the decision what each call does; how a graph is captured and replayed is in `forward` and `backward`. May import
every part of the core.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from graphmod.capturing import capture, place
from graphmod.config import CUDAGraphConfig, settings
from graphmod.failures import capture_failed
from graphmod.forward import ForwardGraph
from graphmod.group import EagerCall, Group
from graphmod.hook_watch import HOOKS
from graphmod.lifecycle import Entry, GraphStats
from graphmod.registry import Registry
from graphmod.replaying import OTHER_MODES, find, launch, results
from graphmod.signature import (
    Signature,
    flatten,
    mode_key,
    parameter_names,
    tensor_key,
)
from graphmod.surroundings import Surroundings
from graphmod.tape import Tape
from graphmod.tracer import is_recording
from graphmod.warmup import track, warm_up

log = logging.getLogger("graphmod")


@contextlib.contextmanager
def _in_place_of_forward(module: nn.Module, run: Callable) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = run
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


class CUDAGraphModule(nn.Module):
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

    Attributes of the wrapped module are reachable through the wrapper.
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
        self.__dict__["_call"] = call or (module.forward if isinstance(module, nn.Module) else module)
        self._group = group or Group()
        self._counters = GraphStats()
        self.last_failure = ""
        self._hooks_outside = isinstance(module, nn.Module) and call is None
        self._entries = Registry()
        self._start()

    def _start(self) -> None:
        self._around = Surroundings(self._root)
        self._training_modes = self._around.modes
        self._eager_calls: weakref.WeakSet[EagerCall] = weakref.WeakSet()
        self._logged: set[str] = set()
        self._served: ForwardGraph | None = None  # the graph behind the last call
        self._eager_in = -1  # the pass of the group in which it last ran without a graph

    # -- calling -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same result as `module(*args, **kwargs)`."""
        root = self._root
        if self._hooks_outside and any(getattr(root, kind) for kind in HOOKS):
            # The module's own hooks run on every call, around the graph instead of inside it.
            with _in_place_of_forward(root, self._run):
                return root(*args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped callable without the module's own hooks."""
        if is_recording():
            self._served = None
            return self._call(*args, **kwargs)  # part of what another wrapper captures
        usual = self._entries.usual
        leaves = usual.match(args, kwargs) if usual is not None and not usual.disabled else None
        if leaves is not None and usual.signature.modes != mode_key(self._group.backend.device_type):
            leaves = None
        # Train/eval modes are many to look at: where nothing depends on the answer before the launch, after it.
        late = leaves is not None and not usual.needs_grad
        if leaves is not None and (late or usual.signature.training == self._training_modes()):
            entry = usual
            self._entries.touch(entry)
        else:
            leaves = []
            structure = flatten((args, kwargs), leaves, {})
            if not self._around.known:
                self._discover()
            entry = self._entry(structure, leaves)
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
                state, reason = launch(self, graph, leaves, careful, late)
            except RuntimeError as error:
                self._drop(graph.tape)
                capture_failed(self, entry, error, "a replay")
                return self._eager(args, kwargs)
            if reason is None:
                return results(self, graph, leaves, state)
            if reason is OTHER_MODES:
                break
        if late and entry.signature.training != self._training_modes():
            self._entries.usual = None
            return self._run(*args, **kwargs)
        if entry.calls < self._config.warmup_steps:
            return warm_up(self, entry, args, kwargs)
        if self._group.settle(self._config.backend, self._around.device(leaves)):
            return self._run(*args, **kwargs)  # of other modes, and so of another signature
        tape = place(self, entry, reason)
        if tape is None:
            return self._eager(args, kwargs, entry)
        captured = capture(self, entry, tape, leaves)
        return self._eager(args, kwargs) if captured is None else results(self, captured[0], leaves, captured[1])

    def _entry(self, structure: Any, leaves: list[Tensor]) -> Entry:
        key, group = tuple(map(tensor_key, leaves)), self._group
        modes = None if group.backend is None else mode_key(group.backend.device_type)
        signature = Signature(structure, key, modes, self._training_modes())
        entry = None if modes is None else self._entries.get(signature)
        if entry is None:
            group.settle(self._config.backend, self._around.device(leaves))
            signature = signature._replace(modes=mode_key(group.backend.device_type))
            names = parameter_names(self._call)
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

    def _drop(self, *tapes: Tape) -> None:
        """Takes the tapes' graphs away from every module; their memory is free once nothing in flight needs it."""
        for tape in tapes:
            tape.drop()

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _discover(self) -> None:
        """Finds, before the first call, what the callable reaches."""
        self._around.discover()
        group = self._group
        known = {id(parameter) for parameter in group.parameters}
        group.share([parameter for parameter in self._around.parameters if id(parameter) in known])
        group.parameters += [parameter for parameter in self._around.parameters if id(parameter) not in known]

    def _eager_in_flight(self) -> bool:
        """Whether a call without a graph waits for its backward."""
        return any(not call.done for call in self._eager_calls)

    def _log_once(self, message: str, key: str | None = None) -> None:
        key = key or message
        if key not in self._logged:
            self._logged.add(key)
            log.warning(message)

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
        self._start()
        self._group.release()

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
        self._logged.clear()

    def extra_repr(self) -> str:
        return f"{self._name!r}, {self.stats.state}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("_root", "module"):
                raise
            return getattr(self._root, name)

    def __deepcopy__(self, memo: dict) -> CUDAGraphModule:
        """A wrapper around a copy of the module, with graphs of its own still to be captured."""
        root = copy.deepcopy(self._root, memo)
        call = self._call
        if isinstance(call, types.MethodType) and call.__self__ is self._root:
            call = types.MethodType(call.__func__, root)
        group = memo.get(id(self._group))
        if group is None:
            group = memo[id(self._group)] = Group()
            group.share([copy.deepcopy(tied, memo) for tied in self._group.tied.values()], lasting=True)
        made = CUDAGraphModule(
            root, self._config, name=self._name, group=group, call=None if self._hooks_outside else call
        )
        memo[id(self)] = made
        return made

    def __getstate__(self) -> dict:
        raise TypeError(
            f"{self._name!r} holds CUDA graphs, which cannot be pickled; save state_dict(), or ungraph(model) first"
        )
