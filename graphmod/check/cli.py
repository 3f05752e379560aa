"""The command line of `graphmod check`.

Exit status: 0 would be captured, 1 hazards or ranks that diverge, 2 it could not be asked that way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import pkgutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmod.check.report import Report, of_all_ranks, shortened
from graphmod.errors import ConfigError, GraphmodError
from graphmod.words import ranks_in_words

if TYPE_CHECKING:
    from graphmod.check.meeting import Meeting

_EXAMPLES = """\
what the function may be (FILE.py:function, too):
  a step that takes no arguments           %(prog)s my_loop:step
  a step, and what makes its arguments     %(prog)s my_loop:step --args my_loop:make_batch
  what makes both, and returns (callable, args) or (callable, args, kwargs)
                                           %(prog)s my_loop:make

make_batch returns a tuple of arguments, or (arguments, keyword arguments). The step really runs, --calls times.
exit status: 0: it would be captured; 1: there are hazards, or ranks diverge; 2: it could not be checked
"""


_OTHERS = 5.0  # seconds in which ranks may fail after the first, to be told of with it


def parser(program: str) -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Reports what would keep a step out of a CUDA graph. Captures nothing and needs no GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", metavar="package.module:function", help="what is checked")
    parser.add_argument("--args", metavar="package.module:function", help="what makes its arguments")
    parser.add_argument("--layers", metavar="PATTERN", action="append", help="of a module, check these layers")
    parser.add_argument(
        "--calls", metavar="N", type=int, default=2, help="calls of the step; the last is watched (default: 2)"
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="check a torchrun program as N ranks, and whether all communicate in the same order; what a collective "
        "gives is not computed, so that ranks that diverge do not hang",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=300.0,
        help="how long a rank waits for others (default: 300)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--verbose", action="store_true", help="list each guarded value and the line that reads it")
    return parser


def main(arguments: list[str], program: str = "graphmod check") -> int:
    """Checks what the arguments name and prints the report; returns the exit status."""
    parsing = parser(program)
    if {"-h", "--help"} & {*arguments}:
        return 0 if _print(parsing.format_help().rstrip()) else 1
    given = parsing.parse_args(arguments)
    if given.calls < 1:
        parsing.error(f"--calls must be at least 1, got {given.calls}")
    if given.ranks is not None and given.ranks < 2:
        parsing.error(f"--ranks must be at least 2, got {given.ranks}")
    if given.timeout <= 0:
        parsing.error(f"--timeout must be above 0, got {given.timeout:g}")
    try:
        report = check_as_ranks(given.ranks, arguments) if given.ranks else checked_as_given(given)
    except GraphmodError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    written = _print(report.to_json() if given.json else report.describe(given.verbose))
    return 0 if report.captured and written else 1


def checked_as_given(given: argparse.Namespace, meeting: Meeting | None = None) -> Report:
    """The report of what the arguments name. Without a meeting, of ranks that are processes of this command, those of
    the program itself meet. Raises GraphmodError where it cannot be checked."""
    from graphmod.check.meeting import meeting_of_ranks  # loads PyTorch, which --help need not wait for
    from graphmod.check.run import checked

    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with contextlib.redirect_stdout(sys.stderr):  # what the program prints is no part of the report
        target, args, kwargs, done = _made(given.function, given.args)
        settings = {"calls": max(given.calls - done, 1), "layers": given.layers}
        return _tried(
            given.function,
            lambda: checked(target, args, kwargs, **settings, meeting=meeting or meeting_of_ranks(given.timeout)),
        )


def _print(text: str) -> bool:
    """Whether it could be written; that nobody reads it to its end, as with `| head`, is no error."""
    try:
        print(text, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # else Python complains on its way out
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"error: the standard output cannot be written: {error.strerror or error}", file=sys.stderr)
            return False
    return True


def _made(name: str, name_of_args: str | None) -> tuple[Callable, tuple, dict, int]:
    """What is to be called and with what, and how often it has been called already."""
    target = _found(name)
    if name_of_args is not None:
        made = _tried(name_of_args, _found(name_of_args))
        if isinstance(made, dict):
            return target, (), made, 0
        if not isinstance(made, (tuple, list)):
            raise ConfigError(
                f"{name_of_args} returned a {type(made).__name__}; it must return a tuple of arguments, or "
                "(arguments, keyword arguments)"
            )
        if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
            return target, tuple(made[0]), made[1], 0
        return target, tuple(made), {}, 0
    made = _tried(name, target)
    match made:
        case (call, tuple() | list() as args) if callable(call):
            return call, tuple(args), {}, 0
        case (call, tuple() | list() as args, dict() as kwargs) if callable(call):
            return call, tuple(args), kwargs, 0
    items = made if isinstance(made, (tuple, list)) else [made]
    if any(map(callable, items)):  # which no step returns
        kinds = ", ".join(type(one).__name__ for one in items)
        raise ConfigError(
            f"{name} returned {f'({kinds})' if items is made else f'a {kinds}'}; to make a call, return (callable, "
            "arguments) or (callable, arguments, keyword arguments), with a tuple and a dict"
        )
    return target, (), {}, 1


def _found(name: str) -> Callable:
    module, _, path = name.rpartition(":")
    if not (module and path):
        raise ConfigError(
            f"{name!r} names no function; write package.module:function or FILE.py:function, such as my_loop:step"
        )
    module = _module_of(module)
    try:
        found = pkgutil.resolve_name(f"{module}:{path}")
    except (Exception, SystemExit) as error:
        raise ConfigError(_raised(f"importing {module}:{path}", error)) from None
    if not callable(found):
        raise ConfigError(f"{name} is a {type(found).__name__}, which cannot be called")
    return found


def _module_of(given: str) -> str:
    """The name under which to import what was given: a module, or a file, whose folder then is on the path, as when it
    is run."""
    if os.sep not in given and not given.endswith(".py"):
        return given
    file = Path(given).expanduser()
    file = file if file.suffix == ".py" else file.with_name(f"{file.name}.py")
    if not file.is_file():
        raise ConfigError(
            f"there is no file {file}; write FILE.py:function, or package.module:function, such as my_loop:step"
        )
    inside = Path(os.path.abspath(file)).with_suffix("").parts
    here = Path.cwd().parts
    sys.path.append(str(Path(*inside[:-1])))
    if inside[: len(here)] == here and all(part.isidentifier() for part in inside[len(here) :]):
        return ".".join(inside[len(here) :])  # which its own relative imports may need
    if not inside[-1].isidentifier():
        raise ConfigError(f"{file} cannot be imported: {inside[-1]!r} is no name of a module; rename the file")
    return inside[-1]


def _tried(name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except GraphmodError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(_raised(name, error)) from None


def _raised(what: str, error: BaseException) -> str:
    """One sentence: the error, and the last line of the user's that led to it."""
    from graphmod.trace.lines import is_users

    said = str(error).strip().splitlines()
    text = f"{what} raised {type(error).__name__}" + (f": {said[0]}" if said else "")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if is_users(one.filename)]
    if "env://" in text and "RANK" in text:
        return f"{text}; a program for torchrun is checked with --ranks 2"
    if not frames:
        missing = isinstance(error, TypeError) and "required positional argument" in text
        return f"{text}; add --args MODULE:FUNCTION, which returns a tuple of its arguments" if missing else text
    last = frames[-1]
    return f"{text} at {shortened(f'{last.filename}:{last.lineno} in {last.name}')}"


# -- as N ranks: a process for each, and one report of what they report ------------------------------------------------


def check_as_ranks(count: int, arguments: list[str]) -> Report:
    """The report of so many ranks, for these arguments of the command. Raises ConfigError where a rank could not check
    it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stopping:
        command = [sys.executable, "-m", "graphmod.check.one_rank", folder, *arguments]
        port = free_port()
        processes = []
        for rank in range(count):
            # Its standard output is no part of the report.
            process = subprocess.Popen(command, env=environment(rank, count, port), stdout=sys.stderr)
            stopping.callback(process.wait)
            stopping.callback(process.kill)
            processes.append(process)
        return _gathered(Path(folder), processes)


def outcome_of(folder: Path, rank: int) -> Path:
    """The file in which a rank leaves its report, or in one sentence why there is none."""
    return folder / f"rank{rank}"


def _gathered(folder: Path, processes: list[subprocess.Popen]) -> Report:
    until = None
    while None in (ended := [one.poll() for one in processes]) and (until is None or time.monotonic() < until):
        if until is None and any(ended):
            until = time.monotonic() + _OTHERS  # the others may wait for one that failed
        time.sleep(0.02)
    reports, errors = [], {}
    for rank, process in enumerate(processes):
        file = outcome_of(folder, rank)
        outcome = pickle.loads(file.read_bytes()) if file.exists() else f"ended with status {process.returncode}"
        if isinstance(outcome, Report):
            reports.append(outcome)
        elif file.exists() or process.returncode is not None:  # and not one that waits for those
            errors.setdefault(outcome, []).append(rank)
    if errors:
        whole = len(processes)
        said = [text if len(ranks) == whole else f"{ranks_in_words(ranks)}: {text}" for text, ranks in errors.items()]
        raise ConfigError("; ".join(said))
    return of_all_ranks(reports)


def environment(rank: int, count: int, port: int, threads: int = 1) -> dict[str, str]:
    """What torchrun sets, on one machine, and where this process has the package from, which need not be installed.

    Each rank may use so many threads, where nothing else is said.
    """
    names = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "ROLE_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {"OMP_NUM_THREADS": str(threads), **os.environ, **{name: str(value) for name, value in names.items()}}


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
