"""The exceptions of decode, and how it words those of others."""

from graphmod.errors import GraphmodError


class DecodeError(GraphmodError, RuntimeError):
    """Decoding cannot go on, or the model cannot be decoded with; the message says why and what helps."""


class OutputError(GraphmodError, OSError):
    """What was generated cannot be written: a full disk, a device that takes nothing."""


def reason(error: BaseException) -> str:
    """What an exception of a library says, in one line: its first, and those after it that a colon announces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1] or [type(error).__name__]
    for line in lines[1:]:
        if not said[-1].endswith(":"):
            break
        said.append(line)
    return " ".join(said)


class RequestError(GraphmodError, ValueError):
    """One request cannot be served: an empty or too long prompt, an unknown stop, a setting out of range."""
