"""Turns SIGINT and SIGTERM into a wish that the loop grants after the step it is in."""

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Aborted(KeyboardInterrupt):
    """A run ended in the middle of a step or of saving, because SIGINT came again.

    Attributes:
        kept: the newest checkpoint of the run; None without one.
    """

    def __init__(self, kept: Path | None) -> None:
        super().__init__(f"aborted; the newest checkpoint is {kept}" if kept else "aborted; no checkpoint was saved")
        self.kept = kept


class StopRequest:
    """While it is entered, the first SIGINT or SIGTERM only sets `signal`, and says so on the standard error; a second
    one acts as it always does.

    Handlers belong to the main thread; entered in another one, it does nothing.

    Args:
        saves: whether the run saves a checkpoint when it stops, for the message.

    Attributes:
        signal: the one that came, or None.
    """

    def __init__(self, saves: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self._saves = saves
        self._before: dict = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        what = "stopping after this step and saving" if self._saves else "stopping after this step; nothing is saved"
        again = "; press Ctrl-C again to abort at once" if number == signal.SIGINT else ""
        # A print might be in the middle of one: the file object would be entered twice.
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), f"\n{self.signal.name}: {what}{again}\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before:
            self._restore()
