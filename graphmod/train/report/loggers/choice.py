"""Which loggers a run has."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from graphmod.train.report.loggers.logger import Logger
from graphmod.train.schema.train import LogTo


def open_loggers(names: Sequence[str], folder: Path, settings: dict[str, Any], before: int | None) -> list[Logger]:
    """Opens the loggers of a run; where one fails, those before it are closed.

    Args:
        names: of `LogTo`.
        folder: of the run.
        settings: of the run, as nested plain values.
        before: steps that a resumed run had done; None for a new one.

    Raises:
        ConfigError: a library is missing.
        GraphmodError: a service does not begin a run.
        OSError: the folder cannot be written to.
    """
    with ExitStack() as opened:
        loggers = []
        for name in names:
            loggers.append(_open(LogTo(name), folder, settings, before))
            opened.callback(loggers[-1].close)
        opened.pop_all()
    return loggers


def _open(name: LogTo, folder: Path, settings: dict[str, Any], before: int | None) -> Logger:
    # Each library is loaded only where it is used.
    if name is LogTo.tensorboard:
        from graphmod.train.report.loggers.tensorboard_events import TensorBoardLogger

        return TensorBoardLogger(folder, settings, before)
    if name is LogTo.csv:
        from graphmod.train.report.loggers.csv_file import CsvLogger

        return CsvLogger(folder, before)
    from graphmod.train.report.loggers.wandb_run import WandbLogger

    return WandbLogger(folder, settings)
