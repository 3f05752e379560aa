"""What a run asks of each place that its points are written to."""

import json
from collections.abc import Mapping
from typing import Any


class Logger:
    """One such place; this one does nothing. Steps never go back, and one step may come in several calls: a log point
    and an evaluation."""

    def scalars(self, values: Mapping[str, float], done: int) -> None:
        """Writes values by tag (`train/loss`), measured when `done` steps were done."""

    def text(self, tag: str, text: str, done: int) -> None:
        """Writes a text, line breaks and signs of markup as they are. Where there is no place for texts, nothing."""

    def flush(self) -> None:
        """Returns when everything is where a killed process leaves it."""

    def end(self) -> None:
        """Notes that the run went through; without it, `close` means that it failed."""

    def close(self) -> None:
        """Gives back files and threads. The last call."""


def named(settings: Mapping[str, Any], path: str = "") -> dict[str, float | str]:
    """Nested settings by full name, such as `optim.learning_rate`; what is neither number nor text is JSON."""
    found: dict[str, float | str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= named(value, f"{path}{name}.")
        else:
            plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
            found[path + name] = value if plain else json.dumps(value, default=str)
    return found
