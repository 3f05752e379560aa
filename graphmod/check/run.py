"""Runs a call under watch and collects every reason against its capture. Captures nothing.

Imports `capture.recording` and what that may, `state.surroundings`, `wrap` for the layers, `guarded` and `report`.
"""

from __future__ import annotations

import contextlib
import copy as copying
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.call.warmup import differentiable
from graphmod.capture.recording import watch
from graphmod.check.guarded import Kinds
from graphmod.check.report import Finding, Report, counted, merged
from graphmod.graph.results import not_to_be_made_again, outline
from graphmod.guards.changes import KEEP, KEEP_ITERATOR, NOT_REPLAYED, Change, all_changes
from graphmod.guards.guards import Guards
from graphmod.guards.hooks import without_gradient_hooks
from graphmod.guards.notes import Notes, noting
from graphmod.signature.flattening import flatten
from graphmod.signature.modes import FOREIGN, difference, key_reader
from graphmod.signature.signature import attributes_of, parameter_names, unusual
from graphmod.signature.structure import unrepeatable
from graphmod.state.surroundings import Surroundings
from graphmod.trace.garbage import no_garbage_collection
from graphmod.trace.recorder import Recorder
from graphmod.wrap.layers import find_layers, match_layers, without_graphs
from graphmod.wrap.target import Target, in_place_of_forward

_KEEP_OUT = "keep this part out of the captured callable"
_DISTRIBUTED = Finding(
    "DistributedDataParallel",
    "reduces gradients in hooks that no replay would run",
    "call it without graphs, or capture layers inside of it that hold no part of it",
)


def check_call(
    target: nn.Module | Callable,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    calls: int = 2,
    copy: bool = False,
    layers: bool | str | list[str] | None = None,
    **kwargs: Any,
) -> Report:
    """Says what would keep `target(*args, **kwargs)` out of a graph, and what would be guarded; captures nothing.

    The call is made for real, `calls` times: weights are updated, counters count, as they do in a step of training.
    The last one is watched. Where its result requires grad, its backward is watched too; no `.grad` changes by that.
    No GPU is needed: on the CPU it is as strict as on a GPU.

    Args:
        target: a module, or a callable such as a whole training step; one that is wrapped already is checked unwrapped.
        args, kwargs: what it is called with. What is to be passed under one of the names below: `functools.partial`.
        loss: maps the result to a scalar, to be differentiated; None takes the sum of what requires grad.
        calls: at least 1; with 1, what a first call makes, such as the state of an optimizer, counts as a hazard.
        copy: work on a deep copy of a module.
        layers: of a module, check its layers one by one, as `graph_layers` captures them: True for those it finds, or
            name patterns as it takes them.

    Returns:
        The report; true where the call would be captured.

    Raises:
        TypeError: `target` cannot be called.
        ConfigError: `layers` match nothing.
        Exception: whatever the call itself raises.
    """
    root = getattr(target, "_root", target) if hasattr(type(target), "_reach_through") else target
    if not callable(root):
        raise TypeError(f"graphmod.check takes a module or a callable, got {type(root).__name__}")
    root = copying.deepcopy(root) if copy else root
    if layers:
        names = find_layers(root) if layers is True else match_layers(root, layers)
        return check_layers(root, names, lambda: root(*args, **kwargs), calls=calls)
    report = Report(_name(root))
    with without_graphs(_modules(root, (args, kwargs))):
        part = _Part(root, loss=loss)
        for _ in range(max(calls, 1)):
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
) -> Report:
    """The same for parts of a model, each of which would have graphs of its own.

    Args:
        model: that has them.
        layers: their names.
        run: calls the model once.
        others: further callables that `run` calls: name -> `(object, attribute)` through which it does.
        name: of the whole, for the report.
    """
    parts = {one: _Part(model.get_submodule(one), one) for one in layers}
    further = {one: _Part(getattr(owner, attribute), one) for one, (owner, attribute) in (others or {}).items()}
    with without_graphs(model.modules()):
        for number in range(max(calls, 1)):
            with contextlib.ExitStack() as stack:
                if number == max(calls, 1) - 1:
                    for part in parts.values():
                        stack.enter_context(in_place_of_forward(part.root, part.within))
                    for one, part in further.items():
                        stack.enter_context(_replaced(*others[one], part.within))
                run()
    report = Report(name or _name(model), parts=[*parts, *further])
    _take_in(report, [*parts.values(), *further.values()])
    return report


@contextlib.contextmanager
def _replaced(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    own = vars(owner).get(attribute, None)
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)


def _name(root: Any) -> str:
    return getattr(root, "__name__", type(root).__name__)


def _modules(root: Any, given: Any) -> list[nn.Module]:
    around = Surroundings(root)
    return [
        module for found in (*around._modules(), given) if isinstance(found, nn.Module) for module in found.modules()
    ]


def _take_in(report: Report, parts: list[_Part]) -> None:
    kinds = Kinds()
    findings: list[Finding] = []
    for part in parts:
        findings += part.findings
        report.operations += part.operations
        report.device = part.device or report.device
        for guards in part.guards:
            kinds.add(guards)
    report.hazards, report.guarded = merged(findings), kinds.told()
    if not any(part.ran for part in parts):
        report.hazards.append(Finding("nothing", "was called", "pass arguments with which it is"))


class _Part:
    """One callable under watch.

    Args:
        root: a module, whose own hooks run around what is watched, or another callable.
        name: of a layer; "" for the whole.
        loss: see `check_call`.

    Attributes:
        findings, guards, operations: of the last call.
    """

    def __init__(self, root: Any, name: str = "", loss: Callable | None = None) -> None:
        self.root, self.name, self._loss = root, name, loss
        self.call = Target(root) if isinstance(root, nn.Module) else root
        self.findings: list[Finding] = []
        self.guards: list[Guards] = []
        self.operations = 0
        self.device = ""
        self.ran = False

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Calls it as its user does."""
        if not isinstance(self.root, nn.Module):
            return self._watched(args, kwargs)
        with in_place_of_forward(self.root, self.within):
            return self.root(*args, **kwargs)

    def within(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in the place of the callable; a backward that runs it again is not watched."""
        if torch._C._current_autograd_node() is not None:
            return self.call(*args, **kwargs)
        return self._watched(args, kwargs)

    def _watched(self, args: tuple, kwargs: dict) -> Any:
        again = self.ran and bool(self.name)  # a layer that one step calls twice
        if not again:
            self.findings, self.guards, self.operations = [], [], 0
        self.ran = True
        leaves: list[Tensor] = []
        structure = flatten((args, kwargs), leaves, {})
        around, names = Surroundings(self.root), parameter_names(self.call)
        around.discover()
        device = around.device(leaves) or torch.device("cpu")
        gpu = device.index if device.type == "cuda" else None
        self.device = "the CPU, as strict as a GPU" if gpu is None else str(device)
        modes_now = key_reader(device.type)
        modes = modes_now()
        unknown = unrepeatable(structure[1], named=names) or unrepeatable(structure[2])
        if unknown is not None:
            self._add("the arguments", f"argument {unknown[0]!r} is {unknown[1]}", "pass tensors, or what it holds")
        if modes[FOREIGN] is not None:
            self._add("the call", f"{modes[FOREIGN]}, and code under that is never captured", _KEEP_OUT)
        result, recorder, notes, given = watch(self.call, args, kwargs, names, gpu, self.root)
        changed = given.changed()
        changes = list(all_changes(notes))
        if changed is not None:  # the same, seen from the code's side, tells the line
            seen: dict[int, Any] = {}
            flatten((args, kwargs), [], seen)
            of_arguments = [one for one in changes if one.owner in seen]
            self._add_said(changed, *(one.where for one in of_arguments[:1]))
            changes = [one for one in changes if one not in of_arguments]
        self._take_in(recorder, notes, changes)
        for said in (given.returned(result), not_to_be_made_again(outline(result)[0])):
            self._add_said(said)
        self._look_at_result(result, leaves)
        modes = difference(modes, modes_now())
        if modes:
            self._add(
                "the call", f"changes a mode of PyTorch ({modes[0]}), which no replay does", "do it around the call"
            )
        around.learn(self.guards[-1])
        if torch.is_grad_enabled() and around.distributed():
            self.findings.append(copying.copy(_DISTRIBUTED))
        if differentiable(result):
            self._watch_backward(result, leaves, gpu)
        return result

    def _watch_backward(self, result: Any, leaves: list[Tensor], gpu: int | None) -> None:
        """Differentiates the result as the capture of a backward does: gradients come out, and nothing takes them."""
        outputs = differentiable(result)
        grads: list[Tensor | None] = [torch.ones_like(tensor) for tensor in outputs]
        if self._loss is not None:
            grads = list(torch.autograd.grad(self._loss(result), outputs, retain_graph=True, allow_unused=True))
            outputs = [tensor for tensor, grad in zip(outputs, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        parameters = [one for one in self.guards[-1].parameters() if one.requires_grad]
        wanted = [*(tensor for tensor in leaves if tensor.requires_grad), *parameters]
        if not wanted or not outputs:
            return
        recorder = Recorder([*outputs, *grads], gpu=gpu, watching=True)
        with contextlib.ExitStack() as watching:
            watching.enter_context(no_garbage_collection())
            watching.enter_context(torch.autograd.set_multithreading_enabled(False))
            watching.enter_context(without_gradient_hooks(parameters))  # they run outside of a graph
            notes = watching.enter_context(noting(outputs, wanted))
            watching.enter_context(recorder)
            torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
        self._take_in(recorder, notes, all_changes(notes), backward=True)

    def _take_in(self, recorder: Recorder, notes: Notes, changes: Iterable[Change], backward: bool = False) -> None:
        self.operations += len(recorder.trace)
        for found, times in zip(recorder.hazards, recorder.times, strict=True):
            where = found.lines
            library = None if where.optimizer is not None else where.library
            self._add(found.operation, found.effect, found.remedy, where.user, library, where.backward, times)
        self.findings += _one_for_each_remedy(changes, backward, self._parts)
        self.guards.append(Guards(notes, recorder.backward))

    def _look_at_result(self, result: Any, given: list[Tensor]) -> None:
        returned: list[Tensor] = []
        flatten(result, returned, {})
        known = {id(tensor) for tensor in (*given, *self.guards[-1].tensors)}
        for tensor in returned:
            if id(tensor) in known:
                continue
            why = unusual(tensor)
            if why is None and attributes_of(tensor):
                why = f"a tensor with the attribute {next(iter(attributes_of(tensor)))!r}"
            if why is None and tensor.requires_grad and tensor.is_leaf:
                why = "a tensor made to require grad inside"
            if why is not None:
                self._add("the result", f"returns {why}, which no replay would return", "return a plain tensor")

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
        count: int = 1,
    ) -> None:
        self.findings.append(Finding(what, effect, remedy, user, library, backward, count, self._parts))

    def _add_said(self, said: str | None, where: tuple[str | None, str | None] = (None, None)) -> None:
        if said is not None:
            effect, _, remedy = said.partition("; ")
            self._add("the call", effect, remedy or _KEEP_OUT, *where)


def _one_for_each_remedy(changes: Iterable[Change], backward: bool, parts: list[str]) -> list[Finding]:
    """All that one step of a scheduler or optimizer changes is one cause, on the line on which most of it is read."""
    groups: dict[tuple, list[Change]] = {}
    for change in changes:
        special = change.remedy not in (KEEP, KEEP_ITERATOR)
        groups.setdefault((change.remedy,) if special else (change.effect, change.where), []).append(change)
    findings = []
    for group in groups.values():
        (user, _), *_ = Counter(change.where[0] for change in group).most_common(1)
        first = next(change for change in group if change.where[0] == user)
        more = f" (and {counted(len(group) - 1, 'more such change')})" if len(group) > 1 else ""
        effect = f"{first.effect}{more}, {NOT_REPLAYED}"
        findings.append(Finding("Python", effect, first.remedy, *first.where, backward, 1, list(parts)))
    return findings
