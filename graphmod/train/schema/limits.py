"""What settings are compared with; each function raises ConfigError, which names the setting and what was given."""

import math

from graphmod.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with that message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def at_least(group: str, part: object, least: float, *names: str) -> None:
    """Checks that settings of a group are null or at least that."""
    for name in names:
        value = getattr(part, name)
        require(value is None or value >= least, f"{group}.{name} must be at least {least}, got {value}")


def share(group: str, part: object, *names: str) -> None:
    """Checks that settings of a group are from 0 to 1."""
    for name in names:
        value = getattr(part, name)
        require(0 <= value <= 1, f"{group}.{name} is a share and must be from 0 to 1, got {value}")


def positive(group: str, part: object, *names: str) -> None:
    """Checks that settings of a group are null, or above 0 and finite."""
    for name in names:
        value = getattr(part, name)
        require(value is None or 0 < value < math.inf, f"{group}.{name} must be above 0 and finite, got {value}")
