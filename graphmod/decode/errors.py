"""The exceptions of decode."""

from graphmod.errors import GraphmodError


class DecodeError(GraphmodError, RuntimeError):
    """Decoding cannot go on, or the model cannot be decoded with; the message says why and what helps."""


class RequestError(GraphmodError, ValueError):
    """One request cannot be served: an empty or too long prompt, an unknown stop, a setting out of range."""
