"""What a failed capture or replay leads to (rule R7): it is counted and explained once, and after some in a row the
signature stays eager. May import `errors`, `trace`, `recorder` and `lifecycle`; knows `module` by its attributes only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from graphmod.errors import CaptureRefused
from graphmod.state.entry import Entry
from graphmod.trace.operations import place_of

if TYPE_CHECKING:
    from graphmod.trace.recorder import Recorder
    from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")


def capture_failed(module: CUDAGraphModule, entry: Entry, error: BaseException, what: str) -> None:
    """Counts a failure and says once why.

    Args:
        what: that failed, in words.
    """
    reason = _reason(error)
    module._counters.failures += 1
    module.last_failure = reason
    log.debug("%s: %s", module.graph_name, reason, exc_info=error)
    module._log_once(f"{module.graph_name!r} runs eagerly, because {what} could not be captured: {reason}")
    most = module._config.max_failures
    if entry.failed(reason, most):
        module._drop(*{graph.tape for graph in entry.graphs})
        module._log_once(
            f"{module.graph_name!r} stays eager after {most} such failures in a row; force_enable() tries again"
        )


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    place = None if isinstance(error, CaptureRefused) else place_of(error)  # a refusal names its place itself
    if place is not None:
        reason = f"{place}: {reason}"
    if "capturable is False" in reason:
        reason += " Build the optimizer with fused=True, capturable=True."
    return reason


def refuse_unseen(seen: Recorder, unseen: Iterable[int]) -> None:
    """Refuses tensors that a graph would read by address although no guard leads to them: nobody would notice if the
    code found another in their place.

    Args:
        seen: the record of the capture.
        unseen: their addresses.

    Raises:
        CaptureRefused: naming the first of them.
    """
    for where in unseen:
        tensor, index = seen.outside[where], seen.first_seen.get(where)
        if index is None:
            continue  # returned as it is, and never read
        step = seen.trace[index]
        if seen.seen_until is not None and index >= seen.seen_until:
            continue  # compiled code may have made it
        if step.op is torch.ops.aten.lift_fresh.default or where in seen.static:
            continue  # a number in the code; or promised to stay
        kind = f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
        raise CaptureRefused(
            f"reads a {kind} at {step.place} that was found neither among its arguments nor in an attribute, variable "
            "or item that its code reads, so that another in its place would go unnoticed. Pass it as an argument, or "
            "mark_static(tensor) if it stays for good"
        )
