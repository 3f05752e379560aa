"""Records steps from graphs and eager steps in one trace and sums up how busy the GPU was.

Once a profiler has been attached to a process, every later launch of a graph in it costs more. So this is the last
thing a run does, and no time is taken after it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from graphmod.train.settings import Scope
from graphmod.train.step import TrainStep
from graphmod.wrap.layers import find_layers
from graphmod.wrap.target import in_place_of_forward

TRACE_FILE = "trace.json"
RUN_STEP, EAGER_STEP = "step of the run", "eager step"
_STEPS, _SETTLING = 3, 2
_COMMUNICATES = "nccl"  # is in the name of each kernel of NCCL, in upper or lower case


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals, which may overlap and come in any order."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def communication_us(kernels: list[tuple[str, float, float]]) -> tuple[float, float]:
    """How long kernels (name, start and end of each, in any order) communicate, and how much of that other kernels run
    meanwhile."""
    sends = [(start, end) for name, start, end in kernels if _COMMUNICATES in name.lower()]
    others = [(start, end) for name, start, end in kernels if _COMMUNICATES not in name.lower()]
    total = busy_us(sends)
    return total, total + busy_us(others) - busy_us(sends + others)


# One cycle has nothing to add up, but torch 2.11 warns of every one that does not say what becomes of the others.
_recording = partial(profile, acc_events=True)


def _ranged(forward: Callable, name: str, /, *args: Any, **kwargs: Any) -> Any:
    with record_function(name):
        return forward(*args, **kwargs)


def _nameable(model: nn.Module, step: TrainStep) -> list[str]:
    """The layers whose forward can be named, or the module around them whose graph serves in their place: inside of a
    graph, another forward is what it is captured anew for. Layers that are compiled as a part of the whole have none
    of their own, and to wrap them would compile everything anew."""
    scope = step.config.scope
    if scope is Scope.full_iteration or (step.compile != "none" and scope is not Scope.per_layer):
        return []
    layers = find_layers(model)
    captured = [graph.graph_name for graph in step.graphs if graph.stats.state == "captured"]
    return [name for name in captured if any(layer.startswith(f"{name}.") for layer in layers)] or layers


def _named_layers(model: nn.Module, names: list[str]) -> ExitStack:
    """Inside, the forward of each layer has its name in a trace; around its graph, if it has one."""
    stack = ExitStack()
    for name in names:
        layer = model.get_submodule(name)
        stack.enter_context(in_place_of_forward(layer, partial(_ranged, layer.forward, name)))
    return stack


def _steps(step: TrainStep, batches: list[Tensor], name: str) -> None:
    with record_function(f"phase: {name}"):
        for batch in batches:
            with record_function(name):
                step(batch)
        if step.device.type == "cuda":
            torch.cuda.synchronize(step.device)


def _summary(profiler: profile, name: str, steps: int) -> dict[str, Any]:
    """Milliseconds a step from the first range of that name until all it launched was done, and the GPU's part of it.
    The phase ends with a synchronisation, so that every kernel that starts within it is its own."""
    events = profiler.events() or []
    cuda = torch.autograd.DeviceType.CUDA
    (phase,) = [e.time_range for e in events if e.name == f"phase: {name}" and e.device_type != cuda]
    kernels = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in events
        # Ranges are repeated on the device's side of the trace; they are no work.
        if e.device_type == cuda and not e.is_user_annotation and phase.start <= e.time_range.start < phase.end
    ]
    length = phase.end - phase.start
    found: dict[str, Any] = {"step_ms": length / steps / 1e3}
    if kernels:
        busy = busy_us([(start, end) for _, start, end in kernels])
        sent, hidden = communication_us(kernels)
        found |= {
            "busy_ms": busy / steps / 1e3,
            "idle_ms": (length - busy) / steps / 1e3,
            "busy_share": busy / length,
            "kernels": len(kernels) / steps,
        }
        if sent:
            found |= {"comm_ms": sent / steps / 1e3, "comm_hidden_ms": hidden / steps / 1e3}
    return found


def profile_briefly(step: TrainStep, batches: list[Tensor]) -> dict[str, Any]:
    """What `profile_steps` returns under `run`, from steps as the run did them, without a trace. The weights are others
    afterwards, and launching graphs costs more."""
    chosen = [batches[index % len(batches)] for index in range(_STEPS)]
    _steps(step, chosen[:_SETTLING], "settling")
    with _recording(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _steps(step, chosen, RUN_STEP)
    return _summary(profiler, RUN_STEP, _STEPS)


def profile_steps(
    model: nn.Module, step: TrainStep, eager: Callable[[Scope], TrainStep], batches: list[Tensor], folder: Path
) -> dict[str, dict[str, Any]]:
    """Writes `trace.json` (for Perfetto or chrome://tracing): some steps as the run did them, then as many eager ones,
    with the layers named. These are steps too: the weights are others afterwards, and `step` has no graphs any more.

    Args:
        step: of the run, warmed up and captured for the shape of `batches`.
        eager: builds a step of a scope around the same model.
        batches: at least two, of one shape; they are used in turn.

    Returns:
        Under `run` and `eager`: milliseconds a step (`step_ms`), and on a GPU also `busy_ms`, `idle_ms`, `busy_share`
        and the number of `kernels`; of several ranks, also `comm_ms`, in which kernels of NCCL run, waits for other
        ranks included, and `comm_hidden_ms`, the part of it in which others run as well. Recording makes the host
        slower: compare shares, and take times from elsewhere.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if step.device.type == "cuda" else [])]
    chosen = [batches[index % len(batches)] for index in range(_STEPS)]
    settling = chosen[:_SETTLING]
    _steps(step, settling, "settling")
    with _recording(activities=activities) as profiler:
        with _named_layers(model, _nameable(model, step)):
            _steps(step, chosen, RUN_STEP)
        state = step.state_dict()
        step.reset()
        plain = eager(Scope.none)
        plain.load_state_dict(state)
        _steps(plain, settling, "settling")
        with _named_layers(model, _nameable(model, plain)):
            _steps(plain, chosen, EAGER_STEP)
    profiler.export_chrome_trace(str(folder / TRACE_FILE))
    return {key: _summary(profiler, name, _STEPS) for key, name in (("run", RUN_STEP), ("eager", EAGER_STEP))}
