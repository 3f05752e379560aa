"""`check_call` and `check_layers`. Import `part`, `guarded`, `report`, `meeting`, `step.surroundings` and `wrap`."""

from __future__ import annotations

import contextlib
import copy as copying
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from graphmod.check.guarded import Kinds
from graphmod.check.meeting import Meeting, Parted, meeting_of_ranks
from graphmod.check.order import divergences
from graphmod.check.part import Part
from graphmod.check.report import Finding, Report, merged
from graphmod.errors import ConfigError
from graphmod.ranks.data_parallel import Borrowed
from graphmod.step.surroundings import Surroundings
from graphmod.wrap.layers import find_layers, match_layers, without_graphs
from graphmod.wrap.module import CUDAGraphModule
from graphmod.wrap.target import in_place_of_forward

_SETTLING = 2  # more calls, at most, in which a DistributedDataParallel gets its reducer


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
        target: a module, or a callable such as a whole training step; one that is wrapped already is checked unwrapped.
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
        ConfigError: `layers` match nothing, or `target` is no module.
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
    """The same with arguments as they are, and where the ranks meet; None where this process is alone."""
    root = target._root if isinstance(target, CUDAGraphModule) else target
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
        part = Part(root, borrowed, loss=loss, meeting=meeting)
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
    """The same for parts of a model, each of which would have graphs of its own.

    Args:
        model: that has them.
        layers: their names.
        run: calls the model once.
        others: further callables that `run` calls: name -> `(object, attribute)` through which it does.
        name: of the whole, for the report.
        meeting: of the ranks, which compare what these parts communicate.
    """
    borrowed, others = Borrowed(), others or {}
    parts = {one: Part(model.get_submodule(one), borrowed, one, meeting=meeting) for one in layers}
    further = {
        one: Part(getattr(owner, attribute), borrowed, one, meeting=meeting)
        for one, (owner, attribute) in others.items()
    }
    report = Report(name or _name(model), parts=[*parts, *further])
    with borrowed, without_graphs(model.modules()), _compared(report, meeting):
        for number in range(max(calls, 1)):
            with contextlib.ExitStack() as stack:
                if number == max(calls, 1) - 1:
                    for part in parts.values():
                        stack.enter_context(in_place_of_forward(part.root, part.within))
                    for one, part in further.items():
                        stack.enter_context(_replaced(*others[one], part.within))
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


def _take_in(report: Report, parts: list[Part]) -> None:
    kinds = Kinds()
    findings: list[Finding] = []
    for part in parts:
        findings += part.findings
        report.operations += part.operations
        report.device = part.device or report.device
        for guards in part.guards:
            kinds.add(guards)
    report.hazards, report.guarded = merged(findings), kinds.told()
    report.on_gpu = merged([finding for part in parts for finding in part.on_gpu])
    if not any(part.ran for part in parts):
        report.hazards.append(Finding("the call", "runs none of its parts", "pass arguments with which it does"))
