"""Records steps from graphs and eager steps in one trace and sums up how busy the GPU was.

Once a profiler has been attached to a process, every later launch of a graph in it costs more. So this is the last
thing a run does, and no time is taken after it.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from graphmod.train.report.layer_names import DIFFERENTIATE, UPDATE, name_replays
from graphmod.train.settings import Scope
from graphmod.train.step import TrainStep
from graphmod.wrap.layers import find_layers

TRACE_FILE = "trace.json"
RUN_STEP, EAGER_STEP = "step of the run", "eager step"
_STEPS, _SETTLING = 3, 2


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals, which may overlap and come in any order."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


@contextmanager
def _without_marks() -> Iterator[None]:
    """Keeps from standard error the lines with which kineto marks the start and the stop of a recording.

    They are of its highest level, so that a level which silences them silences errors too. They are written by C++,
    which holds the GIL. A process that passes all else on loses nothing, even if this one dies in between.
    """
    try:
        kept = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    try:
        with _passing_on(kept) as passing:
            if passing is not None:
                os.dup2(passing, 2)
            try:
                yield
            finally:
                os.dup2(kept, 2)
    finally:
        os.close(kept)


@contextmanager
def _passing_on(output: int) -> Iterator[int | None]:
    """A descriptor whose lines arrive in `output`, save for kineto's marks; None where there is no grep."""
    command = ["grep", "--line-buffered", "--text", "-v", "^USDT:"]
    try:
        # Ctrl-C is for the run; grep ends when nobody can write to it any more.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, start_new_session=True)
    except OSError:
        yield None
        return
    try:
        yield process.stdin.fileno() if process.poll() is None else None
    finally:
        process.stdin.close()
        # A child that was started meanwhile may hold the other end for as long as it lives.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)


@contextmanager
def _recording(activities: list[ProfilerActivity]) -> Iterator[profile]:
    # One cycle has nothing to add up, but torch 2.11 warns of every one that does not say what becomes of the others.
    profiler = profile(activities=activities, acc_events=True)
    with _without_marks():
        profiler.start()
    try:
        yield profiler
    finally:
        with _without_marks():
            profiler.stop()


def _ranged(forward: Callable, name: str, /, *args: Any, **kwargs: Any) -> Any:
    with record_function(name):
        return forward(*args, **kwargs)


def _nameable(model: nn.Module, step: TrainStep) -> list[str]:
    """The layers whose forward can be named. Compiled as a part of the whole they have none of their own, and to wrap
    them would compile everything anew."""
    whole = step.compile != "none" and step.config.scope is not Scope.per_layer
    return [] if whole else find_layers(model)


@contextmanager
def _named_parts(step: TrainStep) -> Iterator[None]:
    """Names forward with backward, and update, in steps that run no graph."""
    iteration = step.iteration
    try:
        iteration.differentiate = partial(_ranged, iteration.differentiate, DIFFERENTIATE)
        iteration.update = partial(_ranged, iteration.update, UPDATE)
        yield
    finally:
        del iteration.differentiate, iteration.update


@contextmanager
def _named_layers(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Names the forward of each layer in a trace; around its graph, if it has one."""
    before = []
    try:
        for name in names:
            layer = model.get_submodule(name)
            before.append((layer, layer.__dict__.get("forward")))
            layer.__dict__["forward"] = partial(_ranged, layer.forward, name)
        yield
    finally:
        for layer, forward in before:
            del layer.__dict__["forward"]
            if forward is not None:
                layer.__dict__["forward"] = forward


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
    events = profiler.events()
    cuda = torch.autograd.DeviceType.CUDA
    (phase,) = [e.time_range for e in events if e.name == f"phase: {name}" and e.device_type != cuda]
    kernels = [
        (e.time_range.start, e.time_range.end)
        for e in events
        # Ranges are repeated on the device's side of the trace; they are no work.
        if e.device_type == cuda and not e.is_user_annotation and phase.start <= e.time_range.start < phase.end
    ]
    length = phase.end - phase.start
    found: dict[str, Any] = {"step_ms": length / steps / 1e3}
    if kernels:
        busy = busy_us(kernels)
        found |= {
            "busy_ms": busy / steps / 1e3,
            "idle_ms": (length - busy) / steps / 1e3,
            "busy_share": busy / length,
            "kernels": len(kernels) / steps,
        }
    return found


def _name_replayed_layers(path: Path, layers: list[str]) -> dict[str, Any]:
    """Adds the layers of replayed iterations to the trace in `path`; returns what the summary says of them."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    named = name_replays(trace["traceEvents"], RUN_STEP, EAGER_STEP, layers)
    if named.events:
        trace["traceEvents"] += named.events
        partial_path = path.with_name(f".{path.name}.partial")
        partial_path.write_text(json.dumps(trace), encoding="utf-8")
        os.replace(partial_path, path)
    return {"layers": named.note} | {f"{phase}_ms": us / 1e3 for phase, us in named.phase_us.items()}


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
        and the number of `kernels`. Recording makes the host slower: compare shares, and take times from elsewhere.
        Under `run` of a whole iteration from a graph also `layers`: how many kernels were named, or why none; and the
        kernel time of a replay in milliseconds by phase (`forward_ms`, `backward_ms`, `optimizer_ms`) if they were.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if step.device.type == "cuda" else [])]
    chosen = [batches[index % len(batches)] for index in range(_STEPS)]
    settling = chosen[:_SETTLING]
    whole = step.config.scope is Scope.full_iteration
    _steps(step, settling, "settling")
    with _recording(activities) as profiler:
        # Another `forward` is what a graph of the whole would be captured anew for.
        with _named_layers(model, [] if whole else _nameable(model, step)):
            _steps(step, chosen, RUN_STEP)
        state = step.state_dict()
        step.reset()
        plain = eager(Scope.none)
        plain.load_state_dict(state)
        _steps(plain, settling, "settling")
        layers = _nameable(model, plain)
        with _named_layers(model, layers), _named_parts(plain):
            _steps(plain, chosen, EAGER_STEP)
    path = folder / TRACE_FILE
    profiler.export_chrome_trace(str(path))
    found = {key: _summary(profiler, name, _STEPS) for key, name in (("run", RUN_STEP), ("eager", EAGER_STEP))}
    if whole:
        found["run"] |= _name_replayed_layers(path, layers)
    return found
