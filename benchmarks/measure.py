"""Timing of training steps: medians with and without a synchronisation a step, host time, memory, GPU busy time."""

import hashlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """What a result depends on besides the code."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "host": _host(),
    }


def _host() -> str:
    """Names the machine since it started, and nothing else: times of different machines are not to be compared."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        started = platform.node()
    return hashlib.sha256(started.encode()).hexdigest()[:8]


def save(out: Path | None, results: Any) -> None:
    """Writes results as JSON, with the command and what they depend on, if they are wanted."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:]
    if "--out" in given:  # a path of whoever ran it
        place = given.index("--out")
        del given[place : place + 2]
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given])
    out.write_text(json.dumps({"command": command, "environment": environment(), "results": results}, indent=1) + "\n")


def show(results: list[dict[str, Any]]) -> None:
    """Prints a line for each result."""
    for result in results:
        shown = {key: f"{one:.4g}" if isinstance(one, float) else one for key, one in result.items()}
        print("  ".join(f"{key} {one}" for key, one in shown.items()))


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def time_steps(step: Callable[[int], Any], steps: int) -> dict[str, float]:
    """Milliseconds a step: `step_ms` with a synchronisation after each (median; also p95), `host_ms` until the call
    returned in those same steps, `free_ms` over as many steps with a synchronisation at the end only."""
    walls, hosts = [], []
    torch.cuda.synchronize()
    for index in range(steps):
        began = time.perf_counter()
        step(index)
        hosts.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - began)
    began = time.perf_counter()
    for index in range(steps):
        step(index)
    torch.cuda.synchronize()
    free = (time.perf_counter() - began) / steps
    return {
        "step_ms": statistics.median(walls) * 1e3,
        "step_p95_ms": _quantile(walls, 0.95) * 1e3,
        "host_ms": statistics.median(hosts) * 1e3,
        "free_ms": free * 1e3,
    }


def gpu_busy_ms(step: Callable[[int], Any], steps: int = 5) -> dict[str, float]:
    """In how much of a step's time a kernel or copy runs, and their number. Attaches CUPTI, which slows every later
    graph launch in the process: measure time before."""
    from torch.profiler import ProfilerActivity, profile

    from graphmod.train.profile import busy_us

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
        for index in range(steps):
            step(index)
        torch.cuda.synchronize()
    device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    device = [e for e in device if not e.name.startswith(("ProfilerStep", "Optimizer."))]
    return {
        "busy_ms": busy_us([(e.time_range.start, e.time_range.end) for e in device]) / steps / 1e3,
        "kernels": len(device) / steps,
    }


def memory() -> dict[str, float]:
    """Peaks since the process began, in GiB."""
    return {
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_now_gib": torch.cuda.memory_reserved() / 2**30,
    }
