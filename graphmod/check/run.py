"""`check_call` and `check_layers`: calls under watch, and the backwards of their results; and in words what will be
guarded: the values that a recorded call read, by the kind of object that holds them. Captures nothing."""

from __future__ import annotations

import contextlib
import copy as copying
import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from graphmod.check.meeting import Meeting, Parted, meeting_of_ranks
from graphmod.check.order import divergences
from graphmod.check.report import Finding, Guarded, Report, merged
from graphmod.config import CUDAGraphConfig
from graphmod.errors import ConfigError
from graphmod.guards.changes import (
    KEEP,
    KEEP_COUNT,
    KEEP_ITEMS,
    KEEP_ITERATOR,
    NOT_REPLAYED,
    Change,
    all_changes,
    keepers,
    line_of,
    lines_of,
    tensor_rate,
)
from graphmod.guards.guards import Guards
from graphmod.guards.hooks import without_gradient_hooks
from graphmod.guards.notes import Notes
from graphmod.guards.values import Cell, describe, dict_of, is_plain
from graphmod.layers.context import refused_with_backward
from graphmod.layers.recorded import BackwardOfCall
from graphmod.ranks.data_parallel import Borrowed
from graphmod.signature.call import Call
from graphmod.signature.flattening import unrepeatable
from graphmod.signature.modes import FOREIGN, changed_mode, key_reader
from graphmod.signature.signature import path_of
from graphmod.step.dispatch import PARTS_OF_RANKS, STALE
from graphmod.step.eager_parts import RecordedPart, RecordedParts
from graphmod.step.found_parts import FoundParts
from graphmod.step.recording import BACKWARD_OUTSIDE, keep_as_found, late_hazards, record_reads
from graphmod.step.results import bind, not_returned, not_to_be_made_again, outline
from graphmod.step.surroundings import Surroundings
from graphmod.torch_private import current_node
from graphmod.trace.garbage import no_garbage_collection
from graphmod.trace.lines import is_users
from graphmod.trace.operations import is_stale
from graphmod.trace.recorder import Recorder
from graphmod.words import counted
from graphmod.wrap.layers import find_layers, match_layers, require_called, train_without_cache, without_graphs
from graphmod.wrap.module import CUDAGraphModule
from graphmod.wrap.target import Target, in_place_of_forward

_KEEP_OUT = "keep this part out of the captured callable"


class Part:
    """One callable under watch.

    Args:
        root: a module, whose own hooks run around what is watched, or another callable.
        name: of a layer; "" for the whole.
        loss: see `check_call`.
        borrowed: takes in which DistributedDataParallels are taken over.
        meeting: where this rank tells others what it communicates; None where there are none.
        eager_parts: as in `CUDAGraphConfig`.

    Attributes:
        findings, eager, guards, operations: of the last call; `eager` has its eager parts, in words.
        eager_for: what of the calls that nobody marked as eager parts made them such.
        on_gpu: what would keep it out of a graph on a GPU, if it ran on the CPU.
        settled: whether the last call left each DistributedDataParallel the reducer that it found, and has not only
            found what are eager parts from the next one on.
    """

    def __init__(
        self,
        root: Any,
        borrowed: Borrowed,
        name: str = "",
        loss: Callable | None = None,
        meeting: Meeting | None = None,
        eager_parts: bool = False,
    ) -> None:
        self.root, self.name, self._loss, self._borrowed = root, name, loss, borrowed
        self._before_collective = None if meeting is None else meeting.before
        self._found = FoundParts(eager_parts)
        self._earlier: tuple[Guards | None, list[RecordedPart]] = (None, [])
        self.eager_for: list[Finding] = []
        self.call = Target(root) if isinstance(root, nn.Module) else root
        self.findings: list[Finding] = []
        self.eager: list[str] = []
        self.on_gpu: list[Finding] = []
        self.guards: list[Guards] = []
        self.operations = 0
        self.device = ""
        self.ran, self.settled = False, True

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Calls it as its user does."""
        if not isinstance(self.root, nn.Module):
            return self._watched(args, kwargs)
        with in_place_of_forward(self.root, self.within):
            return self.root(*args, **kwargs)

    def within(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in the place of the callable; a backward that runs it again is not watched."""
        if current_node() is not None:
            return self.call(*args, **kwargs)
        return self._watched(args, kwargs)

    def _watched(self, args: tuple, kwargs: dict) -> Any:
        first = not self.ran
        again = self.ran and bool(self.name)  # a layer that one step calls twice
        if not again:
            self.findings, self.on_gpu, self.guards, self.operations = [], [], [], 0
        self.ran = True
        call = Call(self.call, args, kwargs)
        around, structure = Surroundings(self.root), call.flat.structure
        around.discover()
        if around.not_to_be_recorded is not None:
            self._add_said(around.not_to_be_recorded)
            return call()
        self._borrowed.note(around.parallel())
        around.take_over()
        reducers = around.reducers()
        device = around.device(call.leaves) or torch.device("cpu")
        gpu = device.index if device.type == "cuda" else None
        self.device = "the CPU, as strict as a GPU" if gpu is None else str(device)
        modes_now = key_reader(device.type)
        modes = modes_now()
        unknown = unrepeatable(structure)
        if unknown is not None:
            effect, _, remedy = unknown.why.partition("; ")
            path = path_of(unknown, structure, call.names)
            self._add("the arguments", f"argument {path!r} is {effect}", remedy or "pass tensors, or what it holds")
        if any(map(is_stale, call.leaves)):
            self._add_said(STALE)
        if modes[FOREIGN] is not None:
            self._add("the call", f"{modes[FOREIGN]}, and code under that is never captured", _KEEP_OUT)
        how: dict[str, Any] = {"found": self._found, "follows": True, "earlier": self._earlier}
        recorder, notes, given = record_reads(call, gpu, self.root, before_collective=self._before_collective, **how)
        self._add_said(keep_as_found(call, notes))
        result = call.result
        changed = given.changed()
        bound, _ = bind(notes, result, recorder)
        changes = list(all_changes(notes, bound))
        if changed is not None:  # the same, seen from the code's side, tells the line
            of_arguments = [one for one in changes if one.owner in call.flat.seen]
            self._add_said(changed, next((one.where[:2] for one in of_arguments), (None, None)))
            changes = [one for one in changes if one not in of_arguments]
        parts = recorder.parts
        assert isinstance(parts, RecordedParts), "made by record_reads"
        self._add_said(parts.finish(recorder, bool(result.differentiable)))
        self.eager = list(map(str, parts.made))
        if self.eager and self._before_collective is not None and recorder.collectives:
            self._add_said(PARTS_OF_RANKS)
        known, searches = bool(self._found), False
        # The first may have made what others use; and no part has arguments of the call.
        if (recorder.hazards or changes) and not (first or result.differentiable or changed):
            searches = self._found.learn(recorder, list(all_changes(notes)), bound, "")
        recorder.hazards += late_hazards(call, recorder, notes)
        before = len(self.findings)
        self._take_in(recorder, changes)
        if not known:
            self.eager_for = self.findings[before:] if searches else []
        if recorder.unfinished:
            self._add_said(BACKWARD_OUTSIDE)
        judged = self._earlier[0] is not None or not known  # what parts change is seen beside a call that had them
        guards = Guards(notes, recorder.backward, bound)
        others = searches or known != bool(self._found)  # are parts in the next call
        self._earlier = (None, []) if others else (guards, parts.made)
        self.guards.append(guards)
        self._look_at_optimizers(notes, recorder, gpu)
        for said in (given.returned(result), not_to_be_made_again(outline(result)[0])):
            self._add_said(said)
        self._look_at_result(call)
        self._add_said(changed_mode(modes, modes_now()))
        around.learn(self.guards[-1])
        self._add_said(around.not_to_be_recorded)
        if result.differentiable or recorder.backward:
            self._add_said(around.kept_accumulators(self.guards[-1], recorder.backward))
        self._borrowed.note(around.parallel())
        not_averaged = around.take_over() if torch.is_grad_enabled() else None
        self.settled = around.reducers() == reducers and judged and not others
        if not_averaged is not None:
            self._add("DistributedDataParallel", not_averaged, "use its defaults, or call it without graphs")
        if result.differentiable:
            self._record_backward(call, gpu, recorder.random, recorder.collectives > 0)
        return result.value

    def _record_backward(self, call: Call, gpu: int | None, random: bool, communicates: bool) -> None:
        """Differentiates the result as the capture of a backward does: gradients come out, and nothing takes them."""
        outputs, leaves = call.result.differentiable, call.leaves
        why = refused_with_backward(call, self.guards[-1], random, communicates)
        if why is not None:
            self._add_said(why, backward=True)
            return
        grads = [torch.ones_like(tensor) for tensor in outputs]
        if self._loss is not None:
            loss = self._loss(call.result.value)
            of_loss = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
            outputs = [tensor for tensor, grad in zip(outputs, of_loss, strict=True) if grad is not None]
            grads = [grad for grad in of_loss if grad is not None]
        parameters = [one for one in self.guards[-1].parameters() if one.requires_grad]
        wanted = [*(one for one in leaves if one.requires_grad and not is_stale(one)), *parameters]
        if not wanted or not outputs:
            return
        recorder = Recorder([*outputs, *grads], gpu=gpu, before_collective=self._before_collective)
        found = BackwardOfCall(call, outputs, lambda _: None)
        before = [parameter.grad for parameter in parameters]
        with contextlib.ExitStack() as watching:
            watching.enter_context(no_garbage_collection())
            watching.enter_context(torch.autograd.set_multithreading_enabled(False))
            watching.enter_context(without_gradient_hooks(parameters))  # they run outside of a graph
            watching.enter_context(recorder)
            try:
                for parameter in parameters:
                    parameter.grad = None  # to which a backward inside of this one would add
                torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                if _TWICE not in str(error):
                    raise
                return  # the call ran the backward of its result itself; nobody runs it again
            finally:
                for parameter, grad in zip(parameters, before, strict=True):
                    parameter.grad = grad
        self._take_in(recorder, found.changes, backward=True)
        for said in found.refused[:1]:  # the others follow from it
            self._add_said(said, backward=True)
        self.guards += found.guards

    def _take_in(self, seen: Recorder, changes: Iterable[Change], backward: bool = False) -> None:
        self.operations += len(seen.trace)
        for found in seen.hazards:
            where = found.lines
            library = None if where.optimizer is not None else where.library
            self._add(found.operation, found.effect, found.remedy, where.user, library, where.backward)
        self.findings += _one_for_each_remedy(changes, backward, self._parts)

    def _look_at_optimizers(self, notes: Notes, recorder: Recorder, gpu: int | None) -> None:
        """Those that can be made capturable and are not, which only a capture on a GPU minds."""
        kept_by, known = keepers(notes), set()
        if gpu is not None:  # those whose step is a hazard as it is
            known = {id(found.lines.optimizer) for found in recorder.hazards}
        for note in notes.notes.values():
            optimizer = kept_by.get(id(note.owner))
            if note.key != "capturable" or note.now() or optimizer is None or id(optimizer) in known:
                continue
            known.add(id(optimizer))
            name = type(optimizer).__name__
            effect = f"{name} was built without capturable=True, so that torch does not let a GPU capture its step()"
            remedy = f"build {name} with capturable=torch.cuda.is_available(), for a model that is then on the GPU"
            found = Finding("the optimizer", effect, remedy, *lines_of(note.where)[:2], parts=self._parts)
            (self.on_gpu if gpu is None else self.findings).append(found)

    def _look_at_result(self, call: Call) -> None:
        known = {id(tensor) for tensor in (*call.leaves, *self.guards[-1].tensors)}
        for tensor in call.result.leaves:
            if id(tensor) in known:
                continue
            why = not_returned(tensor)
            if why is not None:
                self._add("the result", why, "return a plain tensor")

    @property
    def _parts(self) -> list[str]:
        return [self.name] if self.name else []

    def _add(
        self,
        what: str,
        effect: str,
        remedy: str,
        user: str | None = None,
        library: str | None = None,
        backward: bool = False,
    ) -> None:
        self.findings.append(Finding(what, effect, remedy, user, library, backward, parts=self._parts))

    def _add_said(
        self, said: str | None, where: tuple[str | None, str | None] = (None, None), backward: bool = False
    ) -> None:
        if said is not None:
            effect, _, remedy = said.partition("; ")
            self._add("the call", effect, remedy or _KEEP_OUT, *where, backward=backward)


_TWICE = "backward through the graph a second time"  # of PyTorch


def _one_for_each_remedy(changes: Iterable[Change], backward: bool, parts: list[str]) -> list[Finding]:
    """All that one step of a scheduler or optimizer changes is one cause, on the line on which most of it is read."""
    groups: dict[tuple, list[Change]] = {}
    for change in changes:
        special = change.remedy not in (KEEP, KEEP_COUNT, KEEP_ITEMS, KEEP_ITERATOR)
        groups.setdefault((change.remedy,) if special else (change.effect, change.where), []).append(change)
    findings = []
    for group in groups.values():
        (user, _), *_ = Counter(change.where.user for change in group).most_common(1)
        first = next(change for change in group if change.where.user == user)
        more = f" (and {counted(len(group) - 1, 'more such change')})" if len(group) > 1 else ""
        effect = f"{first.effect}{more}, {NOT_REPLAYED}"
        findings.append(Finding("Python", effect, first.remedy, *first.where[:2], backward, 1, list(parts)))
    return findings


_SETTLING = 6  # more calls, at most, until nothing but the call itself counts; see `Part.settled`


def check_call(
    target: nn.Module | Callable,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    calls: int = 2,
    copy: bool = False,
    layers: bool | str | list[str] | None = None,
    timeout: float = 300.0,
    **kwargs: Any,
) -> Report:
    """Says what would keep `target(*args, **kwargs)` out of a graph, and what would be guarded; captures nothing.

    The call is made for real, `calls` times: weights are updated, counters count, as they do in a step of training.
    The last one is watched. Where its result requires grad, its backward is watched too; no `.grad` changes by that.
    No GPU is needed: on the CPU it is as strict as on a GPU.

    In a program of several ranks (torchrun) all make the check, and learn whether they communicate in the same order. A
    rank that would wait in a collective to which another does not come is stopped before it.

    Args:
        target: a module, or a callable such as a whole training step; one that is wrapped already is checked unwrapped,
            with its setting of `eager_parts`.
        args, kwargs: what it is called with. What is to be passed under one of the names below: `functools.partial`.
        loss: maps the result to a scalar, to be differentiated; None takes the sum of what requires grad.
        calls: at least 1; with 1, what a first call makes, such as the state of an optimizer, counts as a hazard.
        copy: work on a deep copy of a module.
        layers: of a module, check its layers one by one, as `graph_layers` captures them: True for those it finds, or
            name patterns as it takes them.
        timeout: seconds that a rank waits for others in each collective, and at the end; 0: ranks are not compared.

    Returns:
        The report; true where the call would be captured.

    Raises:
        TypeError: `target` cannot be called.
        ConfigError: `layers` match nothing, or none of them is called; or `target` is no module.
        RanksMissing: other ranks did not come in time.
        Exception: whatever the call itself raises.
    """
    meeting = meeting_of_ranks(timeout)
    return checked(target, args, kwargs, loss=loss, calls=calls, copy=copy, layers=layers, meeting=meeting)


def checked(
    target: nn.Module | Callable,
    args: tuple,
    kwargs: dict,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    calls: int = 2,
    copy: bool = False,
    layers: bool | str | list[str] | None = None,
    meeting: Meeting | None = None,
) -> Report:
    """The report of `check_call` on `target(*args, **kwargs)`; without a meeting this process is alone."""
    wrapped = isinstance(target, CUDAGraphModule)
    root, eager_parts = (
        (target._root, target._context.config.eager_parts) if wrapped else (target, CUDAGraphConfig.eager_parts)
    )
    if not callable(root):
        raise TypeError(f"graphmod.check takes a module or a callable, got {type(root).__name__}")
    root = copying.deepcopy(root) if copy else root
    if layers:
        if not isinstance(root, nn.Module):
            raise ConfigError(
                f"layers (--layers) are those of a module, and {_name(root)!r} is a {type(root).__name__}; check the "
                f"model that it calls, or leave layers out to check all of {_name(root)!r}"
            )
        names = find_layers(root) if layers is True else match_layers(root, layers)
        return check_layers(root, names, lambda: root(*args, **kwargs), calls=calls, meeting=meeting)
    report = Report(_name(root))
    with Borrowed() as borrowed, without_graphs(_modules(root, (args, kwargs))), _compared(report, meeting):
        part = Part(root, borrowed, loss=loss, meeting=meeting, eager_parts=eager_parts)
        for number in range(max(calls, 1) + _SETTLING):
            if number < calls or not number or not part.settled:
                if meeting is not None:
                    meeting.begin_call()
                part.run(args, kwargs)
    _take_in(report, [part])
    return report


def check_layers(
    model: nn.Module,
    layers: Iterable[str],
    run: Callable[[], Any],
    *,
    calls: int = 2,
    others: dict[str, tuple[Any, str]] | None = None,
    name: str = "",
    meeting: Meeting | None = None,
) -> Report:
    """Says what would keep parts of a model out of graphs, each of which would have graphs of its own.

    Args:
        layers: their names.
        run: calls the model once.
        others: further callables that `run` calls: name -> `(object, attribute)` through which it does.
        name: of the whole, for the report.
        meeting: of the ranks, which compare what these parts communicate.
    """
    borrowed, others = Borrowed(), others or {}
    for one in layers:
        require_called(model, one)
    parts = {one: Part(model.get_submodule(one), borrowed, one, meeting=meeting) for one in layers}
    further = {
        one: Part(getattr(owner, attribute), borrowed, one, meeting=meeting)
        for one, (owner, attribute) in others.items()
    }
    report = Report(name or _name(model), parts=[*parts, *further])
    with contextlib.ExitStack() as undoing, borrowed, without_graphs(model.modules()), _compared(report, meeting):
        for hook in train_without_cache(model):
            undoing.callback(hook.remove)
        for number in range(max(calls, 1)):
            with contextlib.ExitStack() as stack:
                if number == max(calls, 1) - 1:
                    for part in parts.values():
                        stack.enter_context(in_place_of_forward(part.root, part.within))
                    for one, part in further.items():
                        stack.enter_context(patch.object(*others[one], part.within))
                run()
    _take_in(report, [*parts.values(), *further.values()])
    return report


@contextlib.contextmanager
def _compared(report: Report, meeting: Meeting | None) -> Iterator[None]:
    """Takes into the report how the calls of all ranks compare, where this is one of several."""
    if meeting is None:
        yield
        return
    try:
        yield
    except Parted:
        report.stopped = True  # the comparison says where
    except BaseException as error:
        meeting.finish(error)
        raise
    ways = meeting.finish()
    report.collectives, report.divergences = [way.count for way in ways], divergences(ways)


def _name(root: Any) -> str:
    return getattr(root, "__name__", type(root).__name__)


def _modules(root: Any, given: Any) -> list[nn.Module]:
    around = Surroundings(root)
    return [
        module for found in (*around._modules(), given) if isinstance(found, nn.Module) for module in found.modules()
    ]


def _take_in(report: Report, parts: list[Part]) -> None:
    if not report.stopped and not any(part.ran for part in parts):
        raise ConfigError("the call runs none of its parts; pass arguments with which it does")
    kinds = Kinds()
    findings: list[Finding] = []
    for part in parts:
        findings += part.findings
        report.eager_parts += part.eager
        report.eager_for += merged(part.eager_for)
        report.operations += part.operations
        report.device = part.device or report.device
        for guards in part.guards:
            kinds.add(guards)
    report.hazards, report.guarded = merged(findings), kinds.told()
    report.on_gpu = merged([finding for part in parts for finding in part.on_gpu])


# -- what will be guarded, in words ------------------------------------------------------------------------------------


class Kinds:
    """Takes in guards, and sorts what they compare."""

    def __init__(self) -> None:
        self._values: dict[str, dict[tuple, tuple[str, str, str]]] = {}
        self._tensors: dict[int, Tensor] = {}
        self._modules: dict[int, nn.Module] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._references: set[tuple] = set()

    def add(self, guards: Guards) -> None:
        """Takes in the guards of one recorded call."""
        self._optimizers.update((id(one), one) for one in guards.optimizers)
        self._modules.update((id(one), one) for one in guards.modules)
        self._tensors.update((id(one), one) for one in guards.tensors)
        groups = {id(group): one for one in guards.optimizers for group in one.param_groups}
        told = list(guards.told())
        holders = {id(dict_of(owner)): owner for owner, _, _, _ in told if not isinstance(owner, (dict, type))}
        for owner, key, value, where in told:
            owner = holders.get(id(owner), owner) if key is None else owner
            held = dict_of(owner) if key is None and not isinstance(owner, dict) else owner
            if key is None and isinstance(held, dict) and value is None:
                for name, item in held.items():
                    if isinstance(name, str) and is_plain(item):
                        self._set(_kind(owner, groups), (id(owner), name), name, item, where)
                continue
            place = (id(owner), str(key))
            if not is_plain(value) or callable(value) or isinstance(key, Tensor) or _is_torchs(owner):
                self._references.add(place)
            elif isinstance(key, (str, int)):
                self._set(_kind(owner, groups), place, str(key), value, where)
            elif isinstance(owner, (Cell, types.CellType)):
                self._set(_kind(owner, groups), place, "a variable", value, where)

    def _set(self, kind: str, place: tuple, name: str, value: Any, where: tuple) -> None:
        self._values.setdefault(kind, {})[place] = (name, describe(value), line_of(where))

    def told(self) -> list[Guarded]:
        """What is compared, in the order in which people look for it."""
        found = []
        for optimizer in self._optimizers.values():
            found += _of_optimizer(optimizer, self._values.pop(_settings_of(optimizer), {}).values())
        for kind, values in sorted(self._values.items(), key=lambda one: one[0] == _OF_LIBRARIES):
            found.append(Guarded(kind, len(values), list(values.values())))
        parameters = sum(isinstance(one, nn.Parameter) for one in self._tensors.values())
        others = {
            "modules (their classes, modes and hooks)": len(self._modules),
            "parameters (by address, shape and strides)": parameters,
            "other tensors (by address, shape and strides)": len(self._tensors) - parameters,
            "references (to objects and functions, by identity)": len(self._references),
        }
        return found + [Guarded(what, count) for what, count in others.items() if count]


def _is_torchs(owner: Any) -> bool:
    return isinstance(owner, type) and owner.__module__.partition(".")[0] == "torch"


def _settings_of(optimizer: torch.optim.Optimizer) -> str:
    return f"settings of {type(optimizer).__name__}"


def _kind(owner: Any, groups: dict[int, torch.optim.Optimizer]) -> str:
    if id(owner) in groups:
        return _settings_of(groups[id(owner)])
    if isinstance(owner, dict):
        if any(owner is one.defaults for one in groups.values()):
            return "defaults of optimizers"
        name = dict.get(owner, "__name__") if dict.__contains__(owner, "__builtins__") else None
        return _of_module(name) if isinstance(name, str) else "items of dicts"
    if isinstance(owner, list):
        return "items of lists"
    if isinstance(owner, (Cell, types.CellType)):
        return "variables of closures"
    if isinstance(owner, type):
        return f"class attributes of {owner.__name__}" if _is_users(owner.__module__) else _OF_LIBRARIES
    if inspect.ismodule(owner):
        return _of_module(owner.__name__)
    return f"settings of {type(owner).__name__}"


_OF_LIBRARIES = "global variables and class attributes of libraries"


def _of_module(name: str) -> str:
    return f"global variables of {name}" if _is_users(name) else _OF_LIBRARIES


def _is_users(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and is_users(file)


def _of_optimizer(optimizer: torch.optim.Optimizer, values: Iterable[tuple]) -> list[Guarded]:
    values = sorted(values, key=lambda one: one[0] != "lr")
    rates = [group.get("lr") for group in optimizer.param_groups]
    number = next((rate for rate in rates if isinstance(rate, float)), None)
    note, driven = "", False
    if number is not None and any(name == "lr" for name, _, _ in values):
        driven = hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")
        note = "the rate is a Python number: when it changes, the step is recorded and captured again. "
        if driven:
            note += "A scheduler changes it, so that the step would be eager most of the time: "
        else:
            note += "Under a scheduler, "
        note += tensor_rate(optimizer)
    count = len(values)
    return [Guarded(_settings_of(optimizer), count, values, note, driven)] if count else []
