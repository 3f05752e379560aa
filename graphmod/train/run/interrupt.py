"""Turns SIGINT, SIGTERM and SIGHUP into a wish that the loop grants after the step it is in."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KNOWN = (None, *SIGNALS)  # by the number that ranks tell each other


class Aborted(KeyboardInterrupt):
    """A run ended in the middle of a step or of saving, because SIGINT came again.

    Attributes:
        kept: the newest checkpoint of the run; None without one.
    """

    def __init__(self, kept: Path | None) -> None:
        super().__init__(f"aborted; the newest checkpoint is {kept}" if kept else "aborted; no checkpoint was saved")
        self.kept = kept


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a run: not that of a closed terminal where `nohup` has it ignored."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN)


class StopRequest:
    """While it is entered, the first SIGINT, SIGTERM or SIGHUP only sets `signal`, and says so on the standard error; a
    second one acts as it always does.

    Handlers belong to the main thread; entered in another one, it does nothing.

    Args:
        saves: whether the run saves a checkpoint when it stops, for the message.
        says: whether to say so.

    Attributes:
        signal: the one that came to this process, or None.
        agreed: the one that came to any rank when they last agreed, or None.
    """

    def __init__(self, saves: bool = True, says: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self.agreed: signal.Signals | None = None
        self._saves, self._says = saves, says
        self._before: dict = {}

    def agree(self, most: Callable[[int], int]) -> None:
        """Finds out whether a signal came to any rank; what comes meanwhile counts the next time.

        Args:
            most: the greatest number of all ranks.
        """
        found = _KNOWN[most(_KNOWN.index(self.signal))]
        if found is not None and self.signal is None and self.agreed is None:
            self._say(found)
        self.agreed = self.agreed or found

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()
        if self.agreed is None:
            self._say(self.signal)

    def _say(self, came: signal.Signals) -> None:
        if not self._says:
            return
        what = "stopping after this step and saving" if self._saves else "stopping after this step; nothing is saved"
        again = "; press Ctrl-C again to abort at once" if came == signal.SIGINT else ""
        # A print might be in the middle of one: the file object would be entered twice.
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), f"\n{came.name}: {what}{again}\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in stop_signals()}
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before:
            self._restore()
