"""Puts generated Markdown between two markers of a page, or checks that it is there. Standard library only."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class BadInput(Exception):
    """The results or a page are not what they should be; the message says how."""


@dataclass
class Part:
    """What is generated from the content of a file of results, and where it belongs.

    Attributes:
        page: relative to the repository.
        opening, closing: the markers it goes between.
        render: makes Markdown of the results.
        results: the file in `benchmarks/results` that holds them, where it is not that of the script; the part stays as
            it is where `--results` names others.
    """

    page: str
    opening: str
    closing: str
    render: Callable[[dict[str, Any]], str]
    results: str | None = None


def host_of(result: dict[str, Any]) -> Any:
    """What tells whether two results are of one host, and may be compared; in older results, whether of one run."""
    return result.get("environment", {}).get("host") or run_of(result)


def run_of(result: dict[str, Any]) -> tuple[Any, Any]:
    """The day and the command that made a result."""
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
    parts: list[Part],
) -> int:
    """The command of a script that shows the results of a benchmark: rewrites the pages, or checks them.

    Args:
        arguments: of the command line; None takes those of the process.
        script, about: its name and its help.
        results: the file in `benchmarks/results` that holds them.
        parts: what is shown of them.

    Returns:
        The exit status: 0, 1 for a stale page, 2 for files that cannot be used.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ROOT / "benchmarks" / "results" / results
    parser.add_argument("--results", type=Path, default=usual)
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md and docs/")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is stale")
    options = parser.parse_args(arguments)
    pages: dict[Path, str] = {}
    try:
        own = json.loads(options.results.read_text(encoding="utf-8"))
        for part in parts:
            content = own
            if part.results is not None:
                if options.results != usual:
                    continue
                content = json.loads((usual.parent / part.results).read_text(encoding="utf-8"))
            path = options.root / part.page
            old = pages[path] if path in pages else path.read_text(encoding="utf-8")
            pages[path] = replaced(old, part.render(content), part.opening, part.closing)
    except (OSError, ValueError, KeyError, BadInput) as error:
        print(f"error: {options.results} and {options.root}: {error!r}", file=sys.stderr)
        return 2
    stale = [path for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    if options.check:
        for path in stale:
            print(f"{path} does not show {options.results}: run python benchmarks/{script}", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
    return 0
