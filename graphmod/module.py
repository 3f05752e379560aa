"""`CUDAGraphModule`: warm-up, capture and replay of one module or callable.

Owns the decision what each call does; how a graph is captured and replayed is in `forward` and `backward`. May import
every part of the core.
"""

from __future__ import annotations

import copy
import logging
import operator
import types
import weakref
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.backend import make_backend
from graphmod.capturing import capture, place
from graphmod.config import CUDAGraphConfig
from graphmod.errors import CaptureRefused
from graphmod.lifecycle import Entry, GraphStats
from graphmod.reach import Reach, reach
from graphmod.recorder import is_recording
from graphmod.registry import Registry
from graphmod.replaying import OTHER_MODES, find, launch, results
from graphmod.signature import (
    Signature,
    flatten,
    mode_key,
    parameter_names,
    tensor_key,
)
from graphmod.tape import EagerCall, Group, Tape
from graphmod.trace import place_of
from graphmod.warmup import track, warm_up
from graphmod.watch import HOOKS

log = logging.getLogger("graphmod")

_training = operator.attrgetter("training")
_grad = operator.attrgetter("grad")


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

    _reach_through = ("root",)

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
        self.__dict__["root"] = module
        if isinstance(module, nn.Module) and call is None:
            self.module = module
        else:
            self.__dict__["module"] = module
        self.config = config or CUDAGraphConfig()
        self.name = name or getattr(module, "__name__", type(module).__name__)
        self.__dict__["call"] = call or (module.forward if isinstance(module, nn.Module) else module)
        self.group = group or Group()
        self.stats_ = GraphStats()
        self.last_failure = ""
        self._hooks_outside = isinstance(module, nn.Module) and call is None
        self.entries = Registry()
        self._start()

    def _start(self) -> None:
        self._found: Reach | None = None
        self._reached: list[nn.Module] = []
        self.eager_calls: weakref.WeakSet[EagerCall] = weakref.WeakSet()
        self._parameters_reached: list[Tensor] = []
        self._logged: set[str] = set()
        self.anchor: Tensor | None = None

    # -- calling -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same result as `module(*args, **kwargs)`."""
        root = self.root
        if self._hooks_outside and any(getattr(root, kind) for kind in HOOKS):
            # The module's own hooks run on every call, around the graph instead of inside it.
            root.__dict__["forward"] = self.run
            try:
                return root(*args, **kwargs)
            finally:
                del root.__dict__["forward"]
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped callable without the module's own hooks."""
        if torch._C._len_torch_dispatch_stack() and is_recording():
            return self.call(*args, **kwargs)  # part of what another wrapper captures
        usual = self.entries.usual
        leaves = usual.match(args, kwargs) if usual is not None else None
        if leaves is not None and usual.signature.modes != mode_key(self.group.backend.device_type):
            leaves = None
        # Train/eval modes are many to look at: where nothing depends on the answer before the launch, after it.
        late = leaves is not None and not usual.needs_grad
        if leaves is not None and (late or usual.signature.training == self.training_modes()):
            entry = usual
            self.entries.touch(entry)
        else:
            leaves = []
            structure = flatten((args, kwargs), leaves, {})
            if self._found is None:
                self._discover(leaves)
            entry = self._entry(structure, leaves)
        if entry.disabled:
            return self._eager(args, kwargs)
        if entry.needs_grad and not self.group.busy:
            self.group.begin_pass()
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
                self.drop(graph.tape)
                self.capture_failed(entry, error, "a replay")
                return self._eager(args, kwargs)
            if reason is None:
                return results(self, graph, leaves, state)
            if reason is OTHER_MODES:
                break
        if late and entry.signature.training != self.training_modes():
            self.entries.usual = None
            return self.run(*args, **kwargs)
        if entry.calls < self.config.warmup_steps:
            return warm_up(self, entry, args, kwargs)
        tape = place(self, entry, reason)
        if tape is None:
            return self._eager(args, kwargs, entry)
        captured = capture(self, entry, tape, leaves)
        return self._eager(args, kwargs) if captured is None else results(self, captured[0], leaves, captured[1])

    def training_modes(self) -> bytes:
        """Train/eval mode of every module reached, and which gradients are absent where that matters."""
        training = bytes(map(_training, self._reached))
        if self._parameters_reached:  # the callable may run a backward: absent gradients are part of its state
            training += bytes(map(operator.is_, map(_grad, self._parameters_reached), repeat(None)))
        return training

    def _entry(self, structure: Any, leaves: list[Tensor]) -> Entry:
        modes = mode_key(self.group.backend.device_type)
        signature = Signature(structure, tuple(map(tensor_key, leaves)), modes, self.training_modes())
        entry = self.entries.get(signature)
        if entry is None:
            names = parameter_names(self.call)
            lines = self.entries.nearest(signature, names)
            if lines:
                self.log_once(
                    f"{self.name!r} is called with other inputs:\n  " + "\n  ".join(lines), key="other inputs"
                )
            entry = self.entries.add(signature)
        return entry

    # -- eager calls ---------------------------------------------------------------------------------------------

    def _eager(self, args: tuple, kwargs: dict, entry: Entry | None = None) -> Any:
        self.stats_.eager_calls += 1
        if entry is not None and entry.needs_grad:
            return track(self, entry, self.call(*args, **kwargs))
        return self.call(*args, **kwargs)

    def capture_failed(self, entry: Entry, error: BaseException, what: str) -> None:
        """Counts a failure of a capture or replay and says once why."""
        reason = str(error).partition("\n")[0] or type(error).__name__
        place = None if isinstance(error, CaptureRefused) else place_of(error)  # a refusal names its place itself
        if place is not None:
            reason = f"{place}: {reason}"
        if "capturable is False" in reason:
            reason += " Build the optimizer with fused=True, capturable=True."
        self.stats_.failures += 1
        self.last_failure = reason
        log.debug("%s: %s", self.name, reason, exc_info=error)
        self.log_once(f"{self.name!r} runs eagerly, because {what} could not be captured: {reason}")
        if entry.failed(reason, self.config.max_failures):
            self.drop(*{graph.tape for graph in entry.graphs})
            self.log_once(
                f"{self.name!r} stays eager after {self.config.max_failures} failures in a row; the last: {reason}. "
                "force_enable() tries again"
            )

    def drop(self, *tapes: Tape) -> None:
        """Takes the tapes' graphs away from every module; their memory is free once nothing in flight needs it."""
        for tape in tapes:
            for graph in tape.owners:
                if graph in graph.entry.graphs:
                    graph.entry.graphs.remove(graph)
            tape.dropped = True

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _discover(self, leaves: list[Tensor]) -> None:
        """Finds, before the first call, the modules and parameters the callable reaches, and its device."""
        found = self._found = reach(self.root)
        self._reached = found.modules
        self.owned = list(self.root.parameters()) if isinstance(self.root, nn.Module) else found.parameters()
        self._parameters_reached = [] if isinstance(self.root, nn.Module) else self.owned
        known = {id(parameter) for parameter in self.group.parameters}
        self.group.share([parameter for parameter in self.owned if id(parameter) in known])
        self.group.parameters += [parameter for parameter in self.owned if id(parameter) not in known]
        tensors = [*leaves, *self.owned, *(tensor for _, _, tensor in found.slots)]
        device = next((t.device for t in tensors if t.is_cuda), torch.device("cpu"))
        if self.group.backend is None:
            self.group.backend = make_backend(self.config.backend, device)
            if not self.group.backend.on_gpu:
                self.log_once(f"{self.name!r}: emulated graphs on the CPU: they check correctness and bring no speed")
        if self.anchor is None:
            with torch.inference_mode(False):
                self.anchor = torch.empty(0, device=device, requires_grad=True)
                self.anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node

    def accumulators_to_renew(self) -> list[Tensor]:
        """The parameters whose gradient accumulators may be made anew: none while a forward of this module that holds
        the present ones still has its backward to come."""
        if any(not call.done for call in self.eager_calls):
            return []
        for entry in self.entries:
            for graph in entry.graphs:
                ticket = graph.ticket() if graph.ticket is not None else None
                if ticket is not None and not ticket.done:
                    return []
        return [parameter for parameter in self.owned if id(parameter) not in self.group.shared]

    def reached(self, *objects: Any) -> Reach:
        """What the callable and `objects` reach now. A module whose tensors are all in place is not walked again."""
        if not isinstance(self.root, nn.Module) or objects or not self._found.in_place():
            self._found = reach(self.root, *objects)
            self._reached = self._found.modules
        return self._found

    def log_once(self, message: str, key: str | None = None) -> None:
        key = key or message
        if key not in self._logged:
            self._logged.add(key)
            log.warning(message)

    @property
    def stats(self) -> GraphStats:
        """Counters so far; `pool_bytes` counts the pools this module shares with its group."""
        return GraphStats(
            **{
                **vars(self.stats_),
                "state": self.entries.state,
                "pool_bytes": sum(a.pool.bytes() for a in self.group.arenas),
            }
        )

    def reset(self) -> None:
        """Frees the graphs and starts over with warm-up; signatures that were disabled stay so. May be called often."""
        for entry in self.entries:
            self.drop(*{graph.tape for graph in entry.graphs})
        self.entries.restart()
        self._start()
        self.group.release()

    def force_enable(self) -> None:
        """Lets signatures that failures disabled be captured again."""
        for entry in self.entries:
            entry.rearm()
        self._logged.clear()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("root", "module"):
                raise
            return getattr(self.root, name)

    def __deepcopy__(self, memo: dict) -> CUDAGraphModule:
        """A wrapper around a copy of the module, with graphs of its own still to be captured."""
        root = copy.deepcopy(self.root, memo)
        call = self.call
        if isinstance(call, types.MethodType) and call.__self__ is self.root:
            call = types.MethodType(call.__func__, root)
        group = memo.setdefault(id(self.group), Group())
        made = CUDAGraphModule(
            root, self.config, name=self.name, group=group, call=None if self._hooks_outside else call
        )
        memo[id(self)] = made
        return made

    def __getstate__(self) -> dict:
        raise TypeError(
            f"{self.name!r} holds CUDA graphs, which cannot be pickled; save state_dict(), or ungraph(model) first"
        )
