"""Why something failed, in words, and what helps."""

import inspect
import re

import torch

from graphmod.errors import CaptureRefused
from graphmod.trace.lines import place_of


def reason_of(error: BaseException) -> str:
    """What an error says, with the line of the user's code where it arose."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    place = None if isinstance(error, CaptureRefused) else place_of(error)  # a refusal names its place itself
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
    if not flags:
        return "Keep its step() outside of the captured callable."
    return f"Build {name[1]} with {flags}."
