"""`train.log=csv`: `metrics.csv` in the folder of the run, a line a step and a column a tag."""

import csv
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from graphmod.train.report.loggers.logger import Logger

CSV_FILE = "metrics.csv"
_STEP = "step"


class CsvLogger(Logger):
    """Lines are added at the end. Where a tag comes that had no column yet, the file is written anew with one more.

    Args:
        folder: of the run.
        before: steps that a resumed run had done; lines of later ones are dropped, because they come again. None: a new
            run, which begins a new file.
    """

    def __init__(self, folder: Path, before: int | None) -> None:
        self._path = folder / CSV_FILE
        self._columns: list[str] = [_STEP]
        self._line: dict[str, float] = {}  # of the last step, to which more values may come
        self._written = True  # that line
        if before is None or not self._path.exists():
            self._rewrite([_STEP], lambda step: False)
        else:
            self._rewrite(self._header(), lambda step: step <= before)

    def _header(self) -> list[str]:
        with self._path.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), None) or [_STEP]

    def _rewrite(self, columns: list[str], keep: Callable[[int], bool]) -> None:
        """Writes the file anew, with these columns and the lines of the steps to keep, or leaves it as it is."""
        partial = self._path.with_name(f".{CSV_FILE}.partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            for line in self._lines():
                if keep(int(line[_STEP])):
                    writer.writerow(line)
        os.replace(partial, self._path)
        self._columns = columns

    def _lines(self) -> list[dict[str, str]]:
        if not self._path.exists():
            return []
        with self._path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        # A killed process may have left half a last line; whole ones have a value or nothing for each column.
        return [line for line in lines if line[_STEP].isdigit() and None not in line.values()]

    def scalars(self, values: Mapping[str, float], done: int) -> None:
        """Adds the values to the line of that step, which is written when it is whole."""
        if self._line.get(_STEP) != done:
            self.flush()
            self._line = {_STEP: done}
        elif self._written:  # `flush` was in between
            self._rewrite(self._columns, lambda step: step < done)
        self._line |= values
        self._written = False

    def flush(self) -> None:
        """Writes the last line, too; between lines the file is closed."""
        if self._written:
            return
        more = [tag for tag in self._line if tag not in self._columns]
        if more:
            self._rewrite([*self._columns, *more], lambda step: True)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(self._line)
        self._written = True

    close = flush
