"""What the log says: why something failed, and what helps. Each cause is said once: not again for each like layer of a
model, nor for each value that a setting takes.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re

import torch

from graphmod.errors import CaptureRefused
from graphmod.trace.lines import location_of

log = logging.getLogger("graphmod")

_VALUES = re.compile(r"(?<=was ).+?(?= when it was recorded)|(?<=recorded and is ).+?(?=\. [A-Z]|; | \(read|$)")
_CHANGE = re.compile(r"(?<=from ).+? to .+?(?= as it runs)")
_NUMBER = re.compile(r"(?<=[ (\[,])-?\d[\d.e+-]*")  # and not that of a line or a device


def cause_of(message: str) -> str:
    """What a message says beside values, which may be others each time."""
    return _NUMBER.sub("", _CHANGE.sub("", _VALUES.sub("", message)))


class Said:
    """What the wrappers of one group have said.

    Attributes:
        like: class of a layer -> the names of the layers of that class.
    """

    def __init__(self) -> None:
        self.like: dict[type, list[str]] = {}
        self._causes: dict[tuple, str] = {}  # and which wrapper has said it

    def join(self, kind: type, name: str) -> None:
        """Takes in a layer: what it says counts for all that are like it."""
        names = self.like.setdefault(kind, [])
        if name not in names:
            names.append(name)

    def once(self, kind: type, name: str, message: str, key: str | None = None) -> None:
        """Logs a message that begins with the name in quotes, if its cause is new.

        Args:
            key: of the cause, where the message does not tell it.
        """
        cause = (kind if kind in self.like else name, cause_of((key or message).replace(repr(name), "")))
        if cause in self._causes:
            return
        self._causes[cause] = name
        others = [other for other in self.like.get(kind, ()) if other != name]
        if others:
            message = message.replace(repr(name), f"{name!r} (said once for all like it: {ranges([name, *others])})", 1)
        log.warning(message)

    def forget(self, name: str) -> None:
        """Lets all that a wrapper has said be said again."""
        self._causes = {cause: who for cause, who in self._causes.items() if who != name}


def ranges(names: list[str]) -> str:
    """Names in words, with those that differ in one number as a range: `layers.0-11`."""
    grouped: dict[tuple, list[int]] = {}
    others = []
    for name in names:
        pieces = name.split(".")
        at = next((i for i in reversed(range(len(pieces))) if pieces[i].isdigit()), None)
        if at is None:
            others.append(name)
        else:
            grouped.setdefault((tuple(pieces[:at]), tuple(pieces[at + 1 :])), []).append(int(pieces[at]))
    told = []
    for (before, after), numbers in grouped.items():
        runs = []
        for _, group in itertools.groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0]):
            run = [number for _, number in group]
            runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
        told.append(".".join([*before, ",".join(runs), *after]))
    return ", ".join([*told, *others])


def reason_of(error: BaseException) -> str:
    """What an error says, with the line of the user's code where it arose."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    place = None if isinstance(error, CaptureRefused) else location_of(error)  # a refusal names its place itself
    if place is not None:
        reason = f"{place}: {reason}"
    if "Cannot copy between CPU and CUDA tensors" in reason:
        reason += " It makes a GPU tensor of Python values: create it once, outside."
    if "capturable is False" in reason:
        reason += f" {_capturable(reason)}"
    return reason


def _capturable(reason: str) -> str:
    """What helps where torch says that an optimizer is not built to be captured."""
    name = re.search(r"instance of (\w+)", reason)
    kind = getattr(torch.optim, name[1], None) if name else None
    known = () if kind is None else inspect.signature(kind.__init__).parameters
    flags = ", ".join(f"{flag}=True" for flag in ("fused", "capturable") if flag in known)
    if name is None or not flags:
        return "Keep its step() outside of the captured callable."
    return f"Build {name[1]} with {flags}."
