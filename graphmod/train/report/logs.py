"""What is said while a progress bar is shown, by the log of graphmod and by threads."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger("graphmod")

# What batches of another shape lead to: another signature, and gradients at other addresses until it is captured.
_OF_LENGTHS = (
    " is called with other inputs",
    "runs eagerly: the gradients it accumulates into or reads differ from those at capture",
)


class RunFilter(logging.Filter):
    """Lets through what is news: what was asked for is not said.

    Args:
        lengths: the batches come in several lengths, so that calls with other inputs are expected.
    """

    def __init__(self, lengths: bool) -> None:
        super().__init__()
        self._lengths = lengths

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show the record."""
        text = record.getMessage()
        return not (self._lengths and any(words in text for words in _OF_LENGTHS))


@contextmanager
def events_fail_once() -> Iterator[None]:
    """The thread that writes TensorBoard's events hands an error such as a full disk on to the run, which words it; a
    traceback of the thread would only say it before."""
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        handed_on = isinstance(failed.exc_value, OSError) and type(failed.thread).__module__.startswith("tensorboard.")
        if not handed_on:
            before(failed)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def beside_bar(lengths: bool, bar: bool = True) -> Iterator[None]:
    """Inside, messages stand on lines of their own above the bar, if there is one; `lengths`: see `RunFilter`."""
    chosen = RunFilter(lengths)
    log.addFilter(chosen)
    try:
        with logging_redirect_tqdm() if bar else nullcontext():
            yield
    finally:
        log.removeFilter(chosen)
