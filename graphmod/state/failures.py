"""Why something failed, in words. Imports `errors` and `trace`."""

from graphmod.errors import CaptureRefused
from graphmod.trace.operations import place_of


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
        reason += " Build the optimizer with fused=True, capturable=True."
    return reason
