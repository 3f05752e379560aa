"""`CUDAGraphModule`: warm-up, capture and replay of one module or callable.

Owns the decision what each call does; how a graph is captured and replayed is in `forward` and `backward`. May import
every part of the core.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import time
import types
import weakref
from collections.abc import Callable
from itertools import count, repeat
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.backend import make_backend
from graphmod.backward import apply_replayed
from graphmod.config import CUDAGraphConfig
from graphmod.errors import CaptureRefused
from graphmod.forward import ForwardGraph
from graphmod.lifecycle import Entry, GraphStats
from graphmod.reach import Reach, reach
from graphmod.recorder import Recorder, is_recording
from graphmod.results import resolved
from graphmod.signature import (
    Signature,
    difference,
    flatten,
    mode_key,
    opaque_parts,
    parameter_names,
    tensor_key,
)
from graphmod.tape import EagerCall, Group, Tape, Ticket
from graphmod.trace import place_of
from graphmod.watch import HOOKS

log = logging.getLogger("graphmod")

_training = operator.attrgetter("training")
_grad = operator.attrgetter("grad")
CAPTURE_ANOTHER = "its graphs expect other gradients (None, or to be added to) than the coming backward will find"
_OTHER_MODES = "it was called in other modes"
_MOST_OPAQUE = 4
_MOST_UNCAPTURED = 64  # signatures without a graph that are remembered; more means that one of them changes each call


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
        self._start()

    def _start(self) -> None:
        self._entries: dict[Signature, Entry] = {}
        self._usual: Entry | None = None  # of the last replay: most calls are like the one before
        self._clock = count()
        self._found: Reach | None = None
        self._reached: list[nn.Module] = []
        self._eager_calls: weakref.WeakSet[EagerCall] = weakref.WeakSet()
        self._parameters_reached: list[Tensor] = []
        self._logged: set[str] = set()
        self._anchor: Tensor | None = None

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
        usual = self._usual
        leaves = usual.match(args, kwargs) if usual is not None else None
        if leaves is not None and usual.signature.modes != mode_key(self.group.backend.device_type):
            leaves = None
        # Train/eval modes are many to look at: where nothing depends on the answer before the launch, after it.
        late = leaves is not None and not usual.needs_grad
        if leaves is not None and (late or usual.signature.training == self._training()):
            entry = usual
            entry.last_used = next(self._clock)
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
            graph, reason = self._find(entry, leaves, careful)
            if graph is None:
                break
            try:
                state, reason = self._launch(graph, leaves, careful, late)
            except RuntimeError as error:
                self.drop(graph.tape)
                self.capture_failed(entry, error, "a replay")
                return self._eager(args, kwargs)
            if reason is None:
                return self._results(graph, leaves, state)
            if reason is _OTHER_MODES:
                self._usual = None
                return self.run(*args, **kwargs)
        if entry.calls < self.config.warmup_steps:
            return self._warm_up(entry, args, kwargs)
        tape = self._place(entry, reason)
        if tape is None:
            return self._eager(args, kwargs, entry)
        return self._capture(entry, tape, leaves, args, kwargs)

    def _training(self) -> bytes:
        training = bytes(map(_training, self._reached))
        if self._parameters_reached:  # the callable may run a backward: absent gradients are part of its state
            training += bytes(map(operator.is_, map(_grad, self._parameters_reached), repeat(None)))
        return training

    def _entry(self, structure: Any, leaves: list[Tensor]) -> Entry:
        modes = mode_key(self.group.backend.device_type)
        signature = Signature(structure, tuple(map(tensor_key, leaves)), modes, self._training())
        entry = self._entries.get(signature)
        if entry is None:
            entry = self._new_entry(signature)
        entry.last_used = next(self._clock)
        return entry

    def _find(self, entry: Entry, leaves: list[Tensor], careful: bool) -> tuple[ForwardGraph | None, str]:
        """A graph of this signature that may replay now, or the reason why none may."""
        reason = "its graphs are in use, or earlier in their order than what was called last"
        best = None
        for graph in entry.graphs:
            tape, arena = graph.tape, graph.tape.arena
            if arena.in_flight:
                if arena.active is not tape or graph.index < tape.cursor:
                    continue
            elif entry.needs_grad and tape.fresh_grads is not None:
                expected = self.group.expects_fresh_grads()
                if expected is not None and expected is not tape.fresh_grads:
                    reason = CAPTURE_ANOTHER
                    continue
            unfit = graph.unfit(leaves, careful)
            if unfit is not None:
                reason = unfit
                continue
            if best is None or graph.index < best.index:
                best = graph
        if best is not None and not best.tape.arena.in_flight:
            stuck = best.tape.arena.begin(best.tape)
            for other in stuck:
                other.copies_out = True  # from now on: its results are held in a way that does not let them be moved
            if stuck:
                self.drop(*{graph.tape for other in (entry, *stuck) for graph in other.graphs})
                return None, CAPTURE_ANOTHER
        return best, reason

    def _launch(self, graph: ForwardGraph, leaves: list[Tensor], careful: bool, late: bool) -> tuple[Any, str | None]:
        """Replays.

        Args:
            careful: everything about the graph has been checked.
            late: train/eval modes have not.

        Returns:
            The random state before, where it is needed later; and why the replay was stopped before it had changed
            anything that lasts, None if it was not.
        """
        entry, backend = graph.entry, self.group.backend
        graph.load(leaves)
        state = backend.random_state() if graph.random else None
        graph.tape.cursor = graph.index + 1
        early = graph.starts_early and not careful
        if early:
            graph.graph.start()  # the GPU works while the host looks
        reason = _OTHER_MODES if late and entry.signature.training != self._training() else None
        if early and reason is None:
            reason = graph.moved()
        if reason is not None:
            if early and graph.random:
                backend.set_random_state(state)
            return None, reason
        if early:
            graph.graph.finish()
        else:
            graph.graph.replay()
        graph.after()
        self.stats_.replays += 1
        if self._usual is not entry:
            if entry.match is None:
                entry.match = self.group.matcher(entry.signature)
            self._usual = entry
        entry.misses = entry.moves = 0
        if graph.backward is not None or not graph.results.with_grad:
            entry.succeeded()
        return state, None

    def _results(self, graph: ForwardGraph, leaves: list[Tensor], random_state: Any) -> Any:
        outputs: tuple[Tensor, ...] = ()
        if graph.results.with_grad:
            ticket = Ticket(graph.tape.arena, graph, random_state)
            graph.ticket = weakref.ref(ticket)
            inputs = [leaves[i] for i in graph.differentiable]
            witness = () if graph.witness is None else (graph.witness,)
            outputs = apply_replayed(ticket, self._anchor, *inputs, *graph.hooked, *witness)
        return graph.results.make(leaves, outputs)

    # -- eager calls ---------------------------------------------------------------------------------------------

    def _eager(self, args: tuple, kwargs: dict, entry: Entry | None = None) -> Any:
        self.stats_.eager_calls += 1
        if entry is not None and entry.needs_grad:
            return self._track(entry, self.call(*args, **kwargs))
        return self.call(*args, **kwargs)

    def _warm_up(self, entry: Entry, args: tuple, kwargs: dict) -> Any:
        """An ordinary call on the capture stream; the last one before the capture is recorded."""
        self.stats_.eager_calls += 1
        entry.calls += 1
        recorder = Recorder(refuse=False, on_gpu=self.group.backend.on_gpu)
        record = entry.calls == self.config.warmup_steps
        found = self.reached(*opaque_parts(entry.signature.structure)) if record else None
        before = found.state() if record else None
        torch.clear_autocast_cache()  # what a graph casts, it casts itself; the recorded call must do so too
        watching = recorder if record else contextlib.nullcontext()
        leaves: list[Tensor] = []
        flatten((args, kwargs), leaves, {})
        with self.group.backend.warm_up(leaves) as results, watching:
            result = self.call(*args, **kwargs)
            result = resolved(result) if record else result
            flatten(result, results, {})
        if record:
            entry.trace = recorder.trace
            entry.generators = recorder.generators
            changed = found.changed_since(before)
            if changed is not None:
                # Known before any attempt, so that the user's Python never runs twice for one call. Once more of the
                # same kind is watched, because a first call may create what later ones only use.
                entry.calls -= 1
                self.capture_failed(
                    entry, CaptureRefused(f"changes {changed} as it runs, which a replay would not do"), "its forward"
                )
        return self._track(entry, result)

    def _track(self, entry: Entry, result: Any) -> Any:
        """Watches for the backward of an eager call, and learns whether there will be one."""
        for tensor in self.differentiable_outputs(result)[:1]:
            if not entry.needs_grad:
                entry.needs_grad = True
                if not self.group.busy:
                    self.group.begin_pass()
            call = EagerCall(self.group)
            self._eager_calls.add(call)
            tensor.register_hook(call.backward_began)
        return result

    def accumulators_to_renew(self) -> list[Tensor]:
        """The parameters whose gradient accumulators may be made anew: none while a forward of this module that holds
        the present ones still has its backward to come."""
        if any(not call.done for call in self._eager_calls):
            return []
        for entry in self._entries.values():
            for graph in entry.graphs:
                ticket = graph.ticket() if graph.ticket is not None else None
                if ticket is not None and not ticket.done:
                    return []
        return [parameter for parameter in self.owned if id(parameter) not in self.group.shared]

    def differentiable_outputs(self, result: Any) -> list[Tensor]:
        """The tensors in a result that have a backward, each once, in order."""
        leaves: list[Tensor] = []
        flatten(result, leaves, {})
        return [tensor for tensor in leaves if tensor.requires_grad and not tensor.is_leaf]

    # -- capturing -----------------------------------------------------------------------------------------------

    def _place(self, entry: Entry, reason: str) -> Tape | None:
        """Where this call may be captured, or None to run it eagerly now."""
        growing = self.group.growing_tape()
        if growing is None and entry.graphs and reason != CAPTURE_ANOTHER:
            # The graphs there are do not fit. Once is an exception, several times in a row is how it is from now on.
            entry.misses += 1
            self._log_once(f"{self.name!r} runs eagerly: {reason}")
            if entry.misses <= self.config.warmup_steps:
                return None
            self._drop_moved(entry)
            if entry.disabled:
                return None
        if not self._make_space(entry):
            return None
        tape = growing or self.group.place(entry.needs_grad)
        if tape is None:
            entry.misses += 0 if entry.graphs else 1
            # In the middle of an iteration only where there never is a beginning, because one is always in flight.
            patience = self.config.warmup_steps * (3 if self.group.eager_in_flight else 1)
            if entry.misses > patience:
                tape = self.group.new_tape_elsewhere()
        return tape

    def _drop_moved(self, entry: Entry) -> None:
        """Drops graphs whose addresses are gone. A graph that moves each time before it was ever replayed counts as
        a failure, so that recapturing comes to an end."""
        moved = [graph for graph in entry.graphs if not graph.tape.arena.in_flight and graph.watch.moved()]
        for graph in moved:
            reason = graph.watch.moved()
            self.drop(graph.tape)
            entry.trace = None  # of the code as it was before the change
            entry.moves += 1
            if entry.moves >= self.config.max_failures:
                entry.disabled, entry.reason = True, f"captured again and again, because {reason}"
                self._log_once(f"{self.name!r} stays eager: {entry.reason}. force_enable() tries again")

    def _make_space(self, entry: Entry) -> bool:
        """Keeps to `max_graphs`, evicting the least recently used signature that is not in flight."""
        held = [e for e in self._entries.values() if e.graphs and e is not entry]
        if len(held) < self.config.max_graphs:
            return True
        for victim in sorted(held, key=lambda e: e.last_used):
            if not any(graph.tape.arena.in_flight for graph in victim.graphs):
                for graph in list(victim.graphs):
                    self.drop(graph.tape)
                return True
        self._log_once(f"{self.name!r} runs eagerly: all {self.config.max_graphs} graphs (max_graphs) are in use")
        return False

    def _capture(self, entry: Entry, tape: Tape, leaves: list[Tensor], args: tuple, kwargs: dict) -> Any:
        began = time.perf_counter()
        arena, backend = tape.arena, self.group.backend
        try:
            if not arena.in_flight:
                backend.prepare_capture()
                arena.begin(tape)
            graph = ForwardGraph(self, entry, tape)
            state = backend.random_state()
            torch.clear_autocast_cache()
            try:
                graph.capture(leaves)
            finally:
                torch.clear_autocast_cache()
            graph.launch()
        except Exception as error:  # whatever user code or CUDA raised: the eager call decides what the user sees
            self.capture_failed(entry, error, "its forward")
            return self._eager(args, kwargs)
        graph.index = tape.append(graph)
        entry.graphs.append(graph)
        entry.misses = 0
        entry.needs_grad = bool(graph.results.with_grad)
        if not entry.needs_grad:
            entry.succeeded()
        self.stats_.captures += 1
        self.stats_.replays += 1
        self.stats_.capture_seconds += time.perf_counter() - began
        return self._results(graph, leaves, state)

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
        self._log_once(f"{self.name!r} runs eagerly, because {what} could not be captured: {reason}")
        if entry.failed(reason, self.config.max_failures):
            for graph in list(entry.graphs):
                self.drop(graph.tape)
            self._log_once(
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
                self._log_once(f"{self.name!r}: emulated graphs on the CPU: they check correctness and bring no speed")
        if self._anchor is None:
            with torch.inference_mode(False):
                self._anchor = torch.empty(0, device=device, requires_grad=True)
                self.anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node

    def reached(self, *objects: Any) -> Reach:
        """What the callable and `objects` reach now. A module whose tensors are all in place is not walked again."""
        if not isinstance(self.root, nn.Module) or objects or not self._found.in_place():
            self._found = reach(self.root, *objects)
            self._reached = self._found.modules
        return self._found

    def _new_entry(self, signature: Signature) -> Entry:
        others = [e for e in self._entries.values() if e.signature.modes == signature.modes]
        if others:
            nearest = min(others, key=lambda e: len(difference(e.signature, signature, [])))
            lines = difference(nearest.signature, signature, parameter_names(self.call))
            self._log_once(f"{self.name!r} was called with other inputs:\n  " + "\n  ".join(lines), key="other inputs")
        uncaptured = [e for e in self._entries.values() if not e.graphs and not e.disabled]
        opaque = any(True for _ in opaque_parts(signature.structure))  # such a signature keeps an object alive
        if len(uncaptured) >= (_MOST_OPAQUE if opaque else _MOST_UNCAPTURED):
            oldest = min(uncaptured, key=lambda e: e.last_used)
            del self._entries[oldest.signature]
            self._usual = None
        entry = self._entries[signature] = Entry(signature)
        return entry

    def _log_once(self, message: str, key: str | None = None) -> None:
        key = key or message
        if key not in self._logged:
            self._logged.add(key)
            log.warning(message)

    @property
    def stats(self) -> GraphStats:
        """Counters so far; `pool_bytes` counts the pools this module shares with its group."""
        entries = self._entries.values()
        if any(entry.graphs for entry in entries):
            state = "captured"
        elif entries and all(entry.disabled for entry in entries):
            state = "disabled"
        else:
            state = "warm-up" if entries else "eager"
        return GraphStats(
            **{**vars(self.stats_), "state": state, "pool_bytes": sum(a.pool.bytes() for a in self.group.arenas)}
        )

    def reset(self) -> None:
        """Frees the graphs and starts over with warm-up; signatures that were disabled stay so. May be called often."""
        disabled = [entry for entry in self._entries.values() if entry.disabled]
        for entry in self._entries.values():
            for graph in list(entry.graphs):
                self.drop(graph.tape)
        self._start()
        for entry in disabled:
            kept = self._entries[entry.signature] = Entry(entry.signature)
            kept.disabled, kept.reason = True, entry.reason
        self.group.release()

    def force_enable(self) -> None:
        """Lets signatures that failures disabled be captured again."""
        for entry in self._entries.values():
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
