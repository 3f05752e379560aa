"""The exceptions of decode."""

from graphmod.errors import GraphmodError


class DecodeError(GraphmodError, RuntimeError):
    """Decoding cannot continue, or is impossible with this model; the message gives the reason and what helps."""


class RequestError(GraphmodError, ValueError):
    """One request cannot be served: an empty or too long prompt, an unknown stop, a setting out of range."""
