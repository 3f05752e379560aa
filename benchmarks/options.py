"""What scripts that measure share, without PyTorch: options, a process for each measurement, the file of results."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception|Interrupt)\b.*)")  # a traceback's last line
_RESULT = "RESULT "


def chosen(parser: argparse.ArgumentParser, text: str, known: Iterable[str], flag: str) -> list[str]:
    """The names in `text`, which commas part; one that is not known ends the script."""
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"{flag}: {', '.join(unknown)} is none of {', '.join(known)}")
    return names


def gpu_is_there() -> bool:
    """Whether there is one; if not, says so. Results of earlier runs are then left alone."""
    import torch

    if not torch.cuda.is_available():
        print("error: needs a GPU, and torch sees none", file=sys.stderr)
        return False
    return True


def tell(result: dict[str, Any]) -> int:
    """Hands the result of a worker to the process that started it; returns the exit status."""
    print(_RESULT + json.dumps(result), flush=True)
    return 0


def in_process(
    script: str, worker: Sequence[str], more: Sequence[str], limit: float | None = None, **environment: str
) -> dict[str, Any]:
    """The result of `SCRIPT --worker ...` in a process of its own.

    Args:
        script: its file.
        worker: what is measured.
        more: further arguments.
        limit: seconds it may take.
        environment: variables that it gets.

    Returns:
        What it told; else an `error`, after the end of what it printed was shown.
    """
    command = [sys.executable, script, "--worker", *worker, *more]
    settings: dict[str, Any] = {"env": {**os.environ, **environment}, "timeout": limit, "errors": "replace"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **settings)
        out, printed, end = done.stdout, done.stderr, f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:  # what it holds is bytes, whatever was asked for
        out, printed = ((stream or b"").decode(errors="replace") for stream in (error.stdout, error.stderr))
        end = f"still running after {limit:g} s (--timeout)"
    line = next((one for one in out.splitlines() if one.startswith(_RESULT)), None)
    if line is not None:  # also where the process could not end after that
        return json.loads(line.removeprefix(_RESULT))
    lines = printed.strip().splitlines()
    print("\n".join(f"    {line[:300]}" for line in lines[-20:]), file=sys.stderr, flush=True)
    found = next(filter(None, map(_ERROR.match, reversed(lines))), None)
    return {"error": end if found is None else f"{end}: {found[1]}"}


def keep(
    out: Path | None,
    result: dict[str, Any],
    key: Sequence[str] = ("mode", "shape"),
    flags: Sequence[str] = ("shapes", "modes", "steps"),
) -> None:
    """Writes a result, with the command that made it, into the file at once, so that nothing is lost.

    Args:
        out: the file, if results are wanted.
        result: takes the place of an earlier one of the same measurement; others stay.
        key: what tells measurements apart.
        flags: options that belong to the command.
    """
    if out is None:
        return
    results = json.loads(out.read_text())["results"] if out.exists() else []
    results = [one for one in results if any(one.get(name) != result[name] for name in key)]
    given = [f"--{name} {sys.argv[i + 1]}" for i, arg in enumerate(sys.argv) for name in flags if arg == f"--{name}"]
    results.append({"command": " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *given]), **result})
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"results": results}, indent=1) + "\n")
