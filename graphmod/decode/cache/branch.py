"""A second chain of work in a captured graph, such as copies that run while others compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphmod.wrap.extension import is_capturing, stream_for


class Branch:
    """Runs things beside the rest of a captured step. Outside of a capture everything runs in its order, on the
    caller's stream: what a process launches on a second one slows all graphs that it captures.

    What is launched beside must not allocate memory, and must be waited for before the step ends.

    Args:
        device: of what runs. On a CPU everything runs at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = stream_for(self, device) if device.type == "cuda" else None

    def here(self) -> Any:
        """The place that the step has reached, for `run` to come after."""
        if not self._captures():
            return None
        place = torch.cuda.Event()
        place.record()
        return place

    def run(self, act: Callable[[], None], after: Any) -> Any:
        """Does it beside the step, after a place in it and what was given here before.

        Returns:
            Its end, for `wait`.
        """
        if not self._captures():
            act()
            return None
        self._stream.wait_event(after)
        end = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            act()
            end.record()
        return end

    def wait(self, end: Any) -> None:
        """Lets the step go on only after it."""
        if end is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(end)

    def _captures(self) -> bool:
        return self._stream is not None and is_capturing()
