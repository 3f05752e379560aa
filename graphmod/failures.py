"""What a failed capture or replay leads to (rule R7): it is counted and explained once, and after some in a row the
signature stays eager. May import `errors`, `trace` and `lifecycle`; knows `module` by its attributes only.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from graphmod.errors import CaptureRefused
from graphmod.lifecycle import Entry
from graphmod.trace import place_of

if TYPE_CHECKING:
    from graphmod.module import CUDAGraphModule

log = logging.getLogger("graphmod")

_NUMBER = re.compile(r"-?\d[\d.e+-]*")


def capture_failed(module: CUDAGraphModule, entry: Entry, error: BaseException, what: str) -> None:
    """Counts a failure and says once why.

    Args:
        what: that failed, in words.
    """
    reason = _reason(error)
    module._counters.failures += 1
    module.last_failure = reason
    log.debug("%s: %s", module.graph_name, reason, exc_info=error)
    message = f"{module.graph_name!r} runs eagerly, because {what} could not be captured: {reason}"
    module._log_once(message, key=_NUMBER.sub("", message))  # which may be another each time
    most = module._config.max_failures
    if entry.failed(reason, most):
        module._drop(*{graph.tape for graph in entry.graphs})
        module._log_once(
            f"{module.graph_name!r} stays eager after {most} failures in a row; the last: {reason}. "
            "force_enable() tries again"
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
