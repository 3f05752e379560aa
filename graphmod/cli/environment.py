"""What the environment asks for and no command can do. Standard library only."""

import os

from graphmod.errors import ConfigError


def require_one_process() -> None:
    """Raises ConfigError when a launcher, such as torchrun, has started this as one of several processes."""
    size = os.environ.get("WORLD_SIZE", "").strip()
    if size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"WORLD_SIZE={size} asks for {size} processes that work together, and graphmod works in one process on one "
            "GPU so far; start it without a launcher, or unset WORLD_SIZE"
        )
