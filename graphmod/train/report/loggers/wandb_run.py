"""`train.log=wandb`: a run of Weights & Biases, through its library (the extra `wandb`)."""

import html
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphmod.errors import GraphmodError, reason
from graphmod.train.report.loggers.logger import Logger, named
from graphmod.train.settings import require_library

ID_FILE = "wandb_id.txt"
_PROJECT = "graphmod"


class WandbLogger(Logger):
    """The library's environment variables hold: `WANDB_MODE`, without which nothing leaves this machine (`offline`),
    `WANDB_PROJECT`, and what else it knows.

    Args:
        folder: of the run. The library writes there, and the run's identifier is kept there: who resumes in this folder
            goes on with the same run of W&B.
        settings: of the run, as nested plain values; W&B has them by full name.

    Raises:
        ConfigError: the library is not installed.
        GraphmodError: W&B does not begin a run, for example because nobody is logged in.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        require_library("wandb", "wandb", "train.log=wandb")
        import wandb

        self._html = wandb.Html
        kept = folder / ID_FILE
        if not kept.exists():
            kept.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=os.environ.get("WANDB_NAME", folder.name),
                id=kept.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(folder),
                config=named(settings),
                allow_val_change=True,  # a resumed run may have other settings
                mode=os.environ.get("WANDB_MODE", "offline"),
            )
        except Exception as error:  # the library raises its own, and those of its server
            raise GraphmodError(
                f"train.log=wandb: W&B does not begin a run: {reason(error)} WANDB_MODE=offline needs no server"
            ) from error
        self._failed = True

    def scalars(self, values: Mapping[str, float], done: int) -> None:
        """Logs the values; W&B keeps what it has of a step that comes again, and the numbers are the same."""
        self._run.log(dict(values), step=done)

    def text(self, tag: str, text: str, done: int) -> None:
        """Logs a text as preformatted HTML."""
        self._run.log({tag: self._html(f"<pre>{html.escape(text)}</pre>")}, step=done)

    def end(self) -> None:
        """The run will be listed as finished."""
        self._failed = False

    def close(self) -> None:
        """Waits until the library has written, and in `online` mode sent, everything."""
        self._run.finish(exit_code=int(self._failed))
