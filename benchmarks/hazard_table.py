"""The page docs/hazards.md from the results of `benchmarks/hazards.py`. Imports the standard library only."""

import re
from typing import Any

WAYS = {
    "cuda_graph": "`torch.cuda.graph`",
    "make_graphed_callables": "`make_graphed_callables`",
    "graphmod": "graphmod",
}

_HEAD = """# Hazards

What CUDA graphs make of common patterns in training loops. Each row is a small program of 12 calls; its results and
final weights are compared with those of plain PyTorch. `python benchmarks/hazards.py` runs them and
`python benchmarks/hazards.py --table` writes this page.

- **fine**: eager's numbers. **silent**: other numbers, without a message. **raises**: an error. **dies**: the process
  ends or hangs. **-**: not possible for a whole iteration.
- graphmod: **captured** (and captured again where something changed), or **eager**, with the reason in the log. In both
  cases the numbers are eager's, bit for bit.

[graphmod check](check.md) reports which of these are in your own step, before anything is captured.

"""
_OPERATION = re.compile(r"^\S+ at .* in [\w<>]+( \(in the backward pass\))?: ")
_PLACE = re.compile(r" \(\S+\.py:\d+ in .*?\)(?=,|$)")
_ASIDE = re.compile(r" \(\.item\(\).*slice bound\)|, (and a replay|which (a|no) replay).*$")


def _reason(cell: dict[str, Any]) -> str:
    """What it does, without the place, the remedy and what a replay would make of it."""
    text = (cell.get("reason") or cell.get("detail") or "").partition("; ")[0]
    for beside in (_OPERATION, _PLACE, _ASIDE):
        text = beside.sub("", text)
    return " ".join(text.replace("|", "\\|").split())[:120]


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    outcome = cell["outcome"]
    if outcome in ("fine", "-", "captured"):
        return outcome
    if outcome in ("silent", "wrong"):
        return f"**{outcome}**"
    reason = _reason(cell)
    return f"{outcome}: {reason}" if reason else outcome


def render(found: dict[str, Any]) -> str:
    """The Markdown of the page.

    Args:
        found: what `benchmarks/hazards.py` wrote.
    """
    ways = [way for way in WAYS if any(way in row for row in found["rows"])]
    lines = [f"| program | {' | '.join(WAYS[way] for way in ways)} |", "|---" * (len(ways) + 1) + "|"]
    for row in found["rows"]:
        lines.append(f"| {row['title']} | {' | '.join(_cell(row.get(way)) for way in ways)} |")
    return _HEAD + "\n".join(lines) + f"\n\n{found['device']}, torch {found['torch']}.\n"
