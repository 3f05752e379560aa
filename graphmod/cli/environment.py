"""What the environment asks for: whether a launcher started this process as one of several. Standard library only."""

import os

from graphmod.errors import ConfigError


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdigit() else default


def ranks_started() -> int:
    """How many processes a launcher, such as torchrun, has started to work together; 1 without one."""
    return _number("WORLD_SIZE", 1)


def own_rank() -> int:
    """Which of them this is, from 0."""
    return _number("RANK", 0)


def require_one_process(why: str) -> None:
    """Raises ConfigError when a launcher has started this as one of several processes; `why` says what is against it,
    and what else could be done."""
    if (count := ranks_started()) > 1:
        raise ConfigError(
            f"WORLD_SIZE={count} asks for {count} processes that work together, and {why}, start it without a "
            "launcher, or unset WORLD_SIZE"
        )
