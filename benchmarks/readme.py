"""Puts generated Markdown between two markers of README.md, or tells whether it is there. Standard library only."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class BadInput(Exception):
    """The results or the README are not what they should be; the message says how."""


def run_of(result: dict[str, Any]) -> tuple[Any, Any]:
    """What tells whether two results are of one run, and may be compared."""
    return result.get("environment", {}).get("date"), result.get("command")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose first column is text and whose others are numbers."""
    align = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, align, *rows))


def replaced(text: str, block: str, opening: str, closing: str) -> str:
    """`text` with `block` between the markers.

    Raises:
        BadInput: the markers are not there.
    """
    before, opened, rest = text.partition(opening)
    _, closed, after = rest.partition(closing)
    if not opened or not closed:
        raise BadInput(f"no {opening} followed by {closing}")
    return f"{before}{opening}\n\n{block}\n\n{closing}{after}"


def run(
    arguments: list[str] | None,
    script: str,
    about: str,
    results: str,
    markers: tuple[str, str],
    render: Callable[[dict[str, Any]], str],
) -> int:
    """The command of a script that shows the results of a benchmark: rewrites the README, or checks it.

    Args:
        arguments: of the command line; None takes those of the process.
        script, about: its name and its help.
        results: the file in `benchmarks/results` that holds them.
        markers: between which they are shown.
        render: makes Markdown of the file's content.

    Returns:
        The exit status: 0, 1 for a stale README, 2 for files that cannot be used.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / results)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the README is stale")
    options = parser.parse_args(arguments)
    try:
        old = options.readme.read_text(encoding="utf-8")
        new = replaced(old, render(json.loads(options.results.read_text(encoding="utf-8"))), *markers)
    except (OSError, ValueError, KeyError, BadInput) as error:
        print(f"error: {options.results} and {options.readme}: {error!r}", file=sys.stderr)
        return 2
    if options.check:
        if new != old:
            print(f"{options.readme} does not show {options.results}: run python benchmarks/{script}", file=sys.stderr)
        return int(new != old)
    options.readme.write_text(new, encoding="utf-8")
    return 0
