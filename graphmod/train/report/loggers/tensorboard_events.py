"""`train.log=tensorboard`: an event file in the folder of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from graphmod.train.report.loggers.logger import Logger, named

_RESULTS = ("train/loss", "eval/loss", "perf/step_ms", "perf/tokens_per_s")  # by which HParams lists runs


class TensorBoardLogger(Logger):
    """TensorBoard shows the settings as text and under HParams.

    Args:
        folder: where the events go.
        settings: of the run, as nested plain values.
        before: steps that a resumed run had done; what TensorBoard shows of later ones is replaced. None: a new run.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], before: int | None) -> None:
        # At the start, too: what was killed in this folder before it had saved anything left points of the same steps.
        self._writer = SummaryWriter(str(folder), purge_step=0 if before is None else before + 1)
        if before is None:
            text = OmegaConf.to_yaml(OmegaConf.create(settings))
            self._writer.add_text("config", "```yaml\n" + text + "\n```")
        experiment, start, self._end = hparams(named(settings), dict.fromkeys(_RESULTS))
        assert self._writer.file_writer is not None
        self._events = self._writer.file_writer
        for summary in (experiment, start):
            self._events.add_summary(summary)

    def scalars(self, values: Mapping[str, float], done: int) -> None:
        """Writes a point of each tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, done)

    def text(self, tag: str, text: str, done: int) -> None:
        """Writes a text as a block of code, since TensorBoard reads Markdown."""
        self._writer.add_text(tag, "    " + text.replace("\n", "\n    "), done)

    def flush(self) -> None:
        """Waits until the events are on the disk."""
        self._writer.flush()

    def end(self) -> None:
        """Notes under HParams that the run went through."""
        self._events.add_summary(self._end)

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
