"""Whether libraries of the extras are installed, without loading them."""

import sys
from importlib.util import find_spec

from graphmod.errors import ConfigError


def require_library(name: str, extra: str, why: str) -> None:
    """Checks that a library is installed.

    Args:
        name: what is imported.
        extra: which extra of this package brings it.
        why: the setting that needs it.

    Raises:
        ConfigError: it is not there.
    """
    if name in sys.modules:
        found = sys.modules[name] is not None
    else:
        spec = find_spec(name)
        found = spec is not None and spec.origin is not None  # else a folder of that name, such as W&B leaves behind
    if not found:
        raise ConfigError(f"{why} needs the {name} library: pip install -e '.[{extra}]' in its clone")
