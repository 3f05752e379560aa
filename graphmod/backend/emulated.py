"""Capture and replay with the semantics of a CUDA graph on a machine without a GPU.

A capture records the aten operations of a call with the very tensors they worked on; a replay runs the same
operations, by the same kernels, on the same addresses with the same scalars, and copies their results to where they
were. Views are not run again: they are the same memory. It brings correctness checks everywhere, and no speed. May
import `trace` and `torch_private`.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from graphmod.torch_private import BelowAutograd, NoAutocast, Work, functional_collectives, work_from_future
from graphmod.trace.garbage import no_garbage_collection
from graphmod.trace.hazards import NO_VALUES
from graphmod.trace.operations import address, each_tensor, facts, tensors_in
from graphmod.trace.recorder import Follower, Graph, Parts
from graphmod.trace.script import Script
from graphmod.trace.undo import within

# These change how a tensor looks at its memory, which the recording keeps as they have left it.
_RESHAPE = {"as_strided_", "detach_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
_NO_FILL = NO_VALUES | _RESHAPE


class EmulatedPool:
    """The memory that the graphs of one pool hold. Emulated memory is never shared, so this only counts it."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def bytes(self) -> int:
        return sum(self.storages.values())

    def release(self) -> None:
        self.storages.clear()


class EmulatedGraph(Graph):
    """A recorded call. `replay()` repeats it in place; the first replay after the capture has nothing left to do,
    because recording already ran the operations (on CUDA, capturing runs nothing and the first replay does)."""

    def __init__(self) -> None:
        self.seen: Follower | None = None
        self._calls: list[tuple[Callable, tuple, dict]] = []
        self._ran = False
        self._journal: _Journal | None = None
        self._until_write: int | None = None
        self._messages = _Messages()
        self._is_whole = False  # not to be started before it may also be finished
        self._parts: list[int] = []  # how many of the calls come before each eager part
        self._generators: list[tuple[torch.Generator, Tensor]] = []

    @property
    def segments(self) -> list[Callable[[], None]]:
        """What repeats what comes before, between and after its eager parts."""
        bounds = [0, *self._parts, len(self._calls)]
        return [functools.partial(self._repeat, self._calls[a:b]) for a, b in itertools.pairwise(bounds)]

    @property
    def start(self) -> Callable[[], None] | None:
        return None if self._is_whole else self._start

    @property
    def finish(self) -> Callable[[], None]:
        return self.replay if self._is_whole else self._finish

    def replay(self) -> None:
        self._start()
        self._finish()

    def _start(self) -> None:
        """Runs what comes before the first write to memory from outside."""
        if self._ran:
            self._repeat(self._calls[: self._until_write])

    def _finish(self) -> None:
        """Runs the rest."""
        if not self._ran:
            self._ran, self._journal = True, None
        elif self._until_write is not None:
            self._repeat(self._calls[self._until_write :])
            self._messages.end()

    def _repeat(self, calls: list[tuple[Callable, tuple, dict]]) -> None:
        with NoAutocast(), BelowAutograd():
            for run, args, kwargs in calls:
                self._messages.before((args, tuple(kwargs.values())))
                run(*args, **kwargs)

    def before_write(self, tensor: Tensor) -> None:
        if self._journal is not None:
            self._journal.save(tensor)
        self.before_collective()

    def before_collective(self) -> None:
        """What comes from here on, others see: memory from outside, or other processes."""
        if self._until_write is None:
            self._until_write = len(self._calls)

    def collective(self, op: Any, args: tuple, kwargs: dict) -> Any:
        return _without_running(op, args, kwargs)

    def begin(self, generators: Iterable[torch.Generator]) -> None:
        """What runs from here on is undone by `discard`."""
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._journal = _Journal()

    def pause(self) -> None:
        self._parts.append(len(self._calls))
        self._journal = None

    def resume(self, memory: Iterable[Tensor]) -> None:
        self.begin([generator for generator, _ in self._generators])
        for tensor in memory:
            self.before_write(tensor)

    def resized(self, storage: torch.UntypedStorage) -> None:
        self._calls.append((storage.resize_, (storage.nbytes(),), {}))

    def before(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of what tensors from outside were before the capture, while its first replay is still to come."""
        return [tensor.clone() if self._journal is None else self._journal.before(tensor) for tensor in tensors]

    def discard(self) -> None:
        """Undoes what recording changed, for a capture that is not going to be replayed."""
        if self._journal is not None:
            self._journal.undo()
            for generator, state in self._generators:
                generator.set_state(state)

    def after(self, op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        about = facts(op)
        fresh = [tensor for tensor in fresh if not tensor._is_zerotensor()]  # such have no memory, and never change
        if about.lifts:  # what it makes is there before any replay; the code may go on to change it
            values = fresh[0].detach()
            if values.untyped_storage().resizable():  # else it is memory of somebody else: an array of numpy
                self._calls.append((values.copy_, (values.clone(),), {}))
            return
        message = {"c10d::send": self._messages.send, "c10d::recv_": self._messages.receive}.get(about.name)
        if message is not None:
            self._calls.append((message, (op._op, *map(_frozen, args)), {}))
            return
        if (not fresh and not about.writes) or about.short in _NO_FILL:
            return
        args, kwargs = _frozen(args), {key: _frozen(value) for key, value in kwargs.items()}
        run = _waiting(op._op) if about.collective else op._op
        if torch.is_autocast_enabled("cpu"):  # which reaches the operations that this one is made of, too
            run = _casting(run, torch.get_autocast_dtype("cpu"))
        if not fresh:
            self._calls.append((run, args, kwargs))
            return
        results = list(tensors_in((result,)))
        kept = [(i, tensor.detach()) for i, tensor in enumerate(results) if any(tensor is one for one in fresh)]
        self._calls.append((_run_and_copy, (run, args, kwargs, kept), {}))


def _casting(run: Callable, dtype: torch.dtype) -> Callable:
    """Calls `run` under autocast, as it was when it was recorded."""

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype, cache_enabled=False):
            return run(*args, **kwargs)

    return cast


def _run_and_copy(run: Callable, args: tuple, kwargs: dict, kept: list[tuple[int, Tensor]]) -> None:
    results = list(tensors_in((run(*args, **kwargs),)))
    for index, memory in kept:
        made = results[index]
        if made.size() != memory.size():
            raise RuntimeError(
                f"{run} made a tensor of shape {tuple(made.shape)}, in the capture {tuple(memory.shape)}"
            )
        if made.stride() == memory.stride() and 0 in memory.stride():  # several elements in one place
            sizes = [min(size, 1) if not step else size for size, step in zip(made.size(), made.stride(), strict=True)]
            made, memory = (tensor.as_strided(sizes, tensor.stride()) for tensor in (made, memory))
        memory.copy_(made)


def _frozen(value: Any) -> Any:
    """The value with each tensor replaced by an alias that holds its memory but none of its autograd history."""
    return each_tensor(value, Tensor.detach)


class _Journal:
    """Copies of the memory a capture changed, so that a failed one can be undone (it really ran here)."""

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def save(self, tensor: Tensor) -> None:
        where = address(tensor)
        if where not in self._saved and not (tensor.is_meta or tensor._is_zerotensor()):  # such have no memory
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._saved[where] = (whole, whole.clone())

    def before(self, tensor: Tensor) -> Tensor:
        saved = self._saved[address(tensor)][1].untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype)
        return made.set_(saved, tensor.storage_offset(), tensor.size(), tensor.stride()).clone()

    @torch.no_grad()
    def undo(self) -> None:
        for whole, before in self._saved.values():
            whole.copy_(before)


# -- what several processes do together -----------------------------------------------------------------------------
def _waiting(run: Callable) -> Callable:
    """A collective whose results are there when it returns."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.ScriptObject):
                Work.unbox(one).wait()
            elif isinstance(one, Tensor):
                functional_collectives.wait_tensor(one)  # does nothing with what nobody waits for
        return result

    return call


class _Messages:
    """What two processes send each other in a replay. It begins where the code began it, and is waited for when its
    memory is used, because two that send first would wait for each other."""

    def __init__(self) -> None:
        self._coming: list[tuple[Any, set]] = []
        self._going: list[tuple[Any, list[Tensor]]] = []

    def send(self, run: Callable, tensors: list[Tensor], *others: Any) -> None:
        """Sends what tensors are now."""
        tensors = [one.clone() for one in tensors]
        self._going.append((Work.unbox(run(tensors, *others)), tensors))

    def receive(self, run: Callable, tensors: list[Tensor], *others: Any) -> None:
        """Begins to receive into these tensors."""
        self._coming.append((Work.unbox(run(tensors, *others)), _memory_of(tensors)))

    def before(self, values: Any) -> None:
        """Waits for what comes into the memory of these values."""
        if not self._coming:
            return
        used = _memory_of(values)
        for work, memory in self._coming:
            if memory & used:
                work.wait()
        self._coming = [one for one in self._coming if not one[1] & used]

    def end(self) -> None:
        """Waits for all."""
        for work, _ in (*self._coming, *self._going):
            work.wait()
        self._coming, self._going = [], []


def _memory_of(values: Iterable[Any]) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in tensors_in(values)}


def _without_running(op: Any, args: tuple, kwargs: dict) -> Any:
    """What a collective returns, holding whatever was in that memory: in a capture none runs, since other processes
    may fail to come that far."""
    if op._schema.name.startswith("c10d::"):
        done = torch.futures.Future()
        done.set_result(list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]])
        work = work_from_future(done).boxed()
        returned = [args[0] if "Tensor" in str(one.type) else work for one in op._schema.returns]
        return returned[0] if len(returned) == 1 else tuple(returned)
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return kwargs[argument.name] if argument.name in kwargs else args[position]
    meta = functools.partial(each_tensor, change=lambda one: one.detach().to("meta"))
    shapes = op(*map(meta, args), **{key: meta(value) for key, value in kwargs.items()})
    device = next(tensors_in((*args, *kwargs.values()))).device
    return each_tensor(shapes, lambda one: torch.empty_like(one, device=device))


class EmulatedBackend:
    """Records and repeats on the CPU."""

    on_gpu = False
    device_type = "cpu"
    device = torch.device("cpu")

    def new_pool(self) -> EmulatedPool:
        return EmulatedPool()

    def prepare_capture(self) -> None:
        """Nothing to free before a capture."""

    def in_turn(self) -> contextlib.AbstractContextManager:
        """Streams are what a GPU needs this for."""
        return contextlib.nullcontext()

    def views(self, parameters: list[Tensor], within: bool) -> list[Tensor]:
        """A view of each parameter."""
        return [parameter.view_as(parameter) for parameter in parameters]

    def has_room(self, pools: int) -> bool:
        """Whether an eager call finds as much memory as the graphs' pools hold."""
        return True

    def random_state(self) -> Any:
        return torch.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def capture(
        self,
        run: Callable[[], Any],
        pool: EmulatedPool,
        inputs: list[Tensor],
        generators: list[torch.Generator],
        check: Callable[[Follower, Any], None] | None = None,
        targets: dict[int, Tensor] | None = None,
        split: bool = False,
        script: Script | None = None,
        parts: Parts | None = None,
        made_before: Callable[[int], bool] | None = None,
    ) -> tuple[EmulatedGraph, Any]:
        """Runs `run()` and records it; undoes what it changed in place, since the last of `parts`, if it or
        `check(recorder, result)` fails. `targets`, `script`, `made_before`: see `Follower`; `split`: see
        `CudaBackend`."""
        graph = EmulatedGraph()
        graph.begin((torch.default_generator, *generators))
        recorder = Follower(
            inputs,
            script=script,
            generators=generators,
            graph=graph,
            targets=targets,
            parts=parts,
            made_before=made_before,
        )
        try:
            result = within(no_garbage_collection(), recorder, call=run)
            recorder.check()
            if check is not None:
                check(recorder, result)
        except BaseException:
            graph.discard()
            recorder.finish()
            raise
        graph.seen = recorder.finish()
        if recorder.collectives:  # none of which has run: its first replay is the first time that it runs as a whole
            graph.discard()
            graph._ran, graph._journal = True, None
        lasting = bool(recorder.written or recorder.inputs_written or recorder.collectives)
        graph._is_whole = bool(graph._parts) or (not split and lasting)
        for _, args, kwargs in graph._calls:
            for tensor in tensors_in((*args, *kwargs.values())):
                where = address(tensor)
                if where not in recorder.outside:
                    pool.storages[where] = tensor.untyped_storage().nbytes()
        return graph, result
