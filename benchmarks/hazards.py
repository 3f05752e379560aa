"""What CUDA graphs make of common hazards, in three ways: `torch.cuda.graph`, `make_graphed_callables`, graphmod.

    python benchmarks/hazards.py                  # on a GPU; writes benchmarks/results/hazards.json
    python benchmarks/hazards.py --device cpu     # graphmod's column alone, emulated

Each program of `hazard_programs` runs eagerly and once more in one of these ways, in a process of its own kind, and all
that it returns, and its weights at the end, are compared: the numbers are eager's (`fine`), they are others and nobody
says so (`silent`), there is an error (`raises`), or the process ends or hangs (`dies`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import logging
import os
import queue
import site
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks/results/hazards.json"
WAYS = ("cuda_graph", "make_graphed_callables", "graphmod")
PATIENCE_S = 120  # for one program; the first of a process also imports torch
CAPTURE_AT = 3
_CELL = "cell "


# -- in the process of a way -----------------------------------------------------------------------------------------


def seed() -> None:
    import random

    import numpy
    import torch

    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def play(name: str, device: Any, way: str | None) -> tuple[list, dict[str, Any]]:
    """Runs a program; returns all that it computed, and what is known of its graphs."""
    import torch

    from benchmarks.hazard_programs import CALLS, PROGRAMS

    seed()
    loop = PROGRAMS[name][1](device)
    wrapped, about = _wrap(loop, way, device)
    results = []
    for index in range(CALLS):
        generator = torch.Generator().manual_seed(index)
        x = loop.batch(index, lambda *shape, g=generator: torch.randn(*shape, generator=g).to(device))
        loop.before(index)
        result = wrapped(x)
        results.append(result if loop.keeps else result.clone())
    if device.type == "cuda":
        torch.cuda.synchronize()
    return [*results, *(tensor.detach() for tensor in loop.model.state_dict().values())], about()


def _wrap(loop: Any, way: str | None, device: Any) -> tuple[Any, Any]:
    import torch

    if way is None:
        return (lambda x: loop.body(loop.part, x)), dict
    if way == "cuda_graph":
        return _by_hand(loop), dict
    if way == "make_graphed_callables":
        sample = loop.batch(0, lambda *shape: torch.randn(*shape).to(device))
        part = torch.cuda.make_graphed_callables(loop.part, (sample,))
        return (lambda x: loop.body(part, x)), dict
    from graphmod import CUDAGraphConfig, CUDAGraphModule

    config = CUDAGraphConfig(warmup_steps=2)
    if loop.part is None:
        part = CUDAGraphModule(lambda x: loop.body(None, x), config, name="step")
        return part, lambda: _told(part)
    part = CUDAGraphModule(loop.part, config, name="part")
    return (lambda x: loop.body(part, x)), lambda: _told(part)


def _told(part: Any) -> dict[str, Any]:
    stats = part.stats
    return {
        "state": stats.state,
        "replays": stats.replays,
        "captures": stats.captures,
        "reason": _anywhere(part.last_failure or ""),
    }


def _by_hand(loop: Any) -> Any:
    """The whole iteration in one graph, as the documentation of torch shows it: warm-up on a stream, then capture."""
    import torch

    graph, kept, stream = torch.cuda.CUDAGraph(), {}, torch.cuda.Stream()

    def call(x: Any) -> Any:
        calls = kept["calls"] = kept.get("calls", 0) + 1
        if calls <= CAPTURE_AT:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = loop.body(loop.part, x)
            torch.cuda.current_stream().wait_stream(stream)
            return result
        if "x" not in kept:
            kept["x"] = x.clone()
            with torch.cuda.graph(graph):
                kept["result"] = loop.body(loop.part, kept["x"])
        kept["x"].copy_(x)
        graph.replay()
        return kept["result"]

    return call


def judge(name: str, way: str, device_name: str) -> dict[str, Any]:
    """One cell of the table."""
    import torch

    from benchmarks.hazard_programs import PROGRAMS

    device = torch.device(device_name)
    seed()
    if way == "make_graphed_callables" and PROGRAMS[name][1](device).part is None:
        return {"outcome": "-", "detail": "holds no whole iteration"}
    expected, _ = play(name, device, None)
    lines: list[str] = []
    keeper = logging.Handler()
    keeper.emit = lambda record: lines.append(_anywhere(record.getMessage()))
    logging.getLogger("graphmod").addHandler(keeper)
    try:
        got, about = play(name, device, way)
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        return {"outcome": "raises", "detail": f"{type(error).__name__}: {said[0]}"[:200]}
    finally:
        logging.getLogger("graphmod").removeHandler(keeper)
    exact = way == "graphmod"
    same = len(expected) == len(got) and all(
        a.shape == b.shape and (torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-6))
        for a, b in zip(expected, got, strict=True)
    )
    lines = [line for line in lines if "emulated" not in line]
    if not same:
        return {"outcome": "silent" if not lines else "wrong", "detail": "other numbers than eager's", "log": lines}
    if not exact:
        return {"outcome": "fine", "detail": ""}
    outcome = "captured" if about["state"] == "captured" else "eager"
    return {"outcome": outcome, "detail": lines[0] if lines else "", **about}


def _anywhere(message: str) -> str:
    """A message without the folders in which this machine keeps the code."""
    for folder in (*site.getsitepackages(), str(ROOT)):
        message = message.replace(folder + os.sep, "")
    return message


def serve(way: str, device: str) -> int:
    """Judges the programs whose names come in, one a line."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for line in sys.stdin:
        name = line.strip()
        try:
            found = judge(name, way, device)
        except Exception as error:
            found = {"outcome": "raises", "detail": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(_CELL + json.dumps(found), flush=True)
        if found["outcome"] == "raises" and device == "cuda":
            return 0  # a failed capture may spoil what comes after it
    return 0


# -- in the process that asks ----------------------------------------------------------------------------------------


class Server:
    """A process that judges programs of one way; begun anew when one of them ends it."""

    def __init__(self, way: str, device: str) -> None:
        self._command = [sys.executable, __file__, "--serve", way, "--device", device]
        self._process: subprocess.Popen | None = None
        self._lines: queue.Queue = queue.Queue()

    def judge(self, name: str) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._begin()
        process, cell = self._process, None
        try:
            process.stdin.write(name + "\n")
            process.stdin.flush()
            cell = self._lines.get(timeout=PATIENCE_S)
        except (OSError, queue.Empty):
            cell = {"outcome": "dies", "detail": f"no answer within {PATIENCE_S} s"}
        if cell is None:
            process.wait()
            cell = {"outcome": "dies", "detail": f"the process ended with status {process.returncode}"}
        if cell["outcome"] in ("dies", "raises"):
            self.end()
        return cell

    def _begin(self) -> None:
        self._lines = queue.Queue()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen, lines: queue.Queue) -> None:
        for line in process.stdout:
            if line.startswith(_CELL):
                lines.put(json.loads(line.removeprefix(_CELL)))
        lines.put(None)

    def end(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def measure(device: str, names: list[str], ways: list[str], jobs: int) -> dict[str, Any]:
    """The cells of all programs, by name and way."""
    shares = [(way, names[first::jobs]) for way in ways for first in range(jobs) if names[first::jobs]]
    cells: dict[str, dict[str, Any]] = {name: {} for name in names}

    def work(share: tuple[str, list[str]]) -> None:
        way, own = share
        server = Server(way, device)
        try:
            for name in own:
                cells[name][way] = server.judge(name)
                print(f"{name:32} {way:24} {cells[name][way]['outcome']}", file=sys.stderr, flush=True)
        finally:
            server.end()

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, shares))
    return cells


def main() -> int:
    """Runs what the arguments say; returns 1 if graphmod gave other numbers than eager's anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", help="names of programs, with commas; then nothing is written")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time (default: 4)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(given.serve, given.device)
    import torch

    from benchmarks.hazard_programs import PROGRAMS

    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu runs graphmod's column on the emulated one")
    names = given.only.split(",") if given.only else list(PROGRAMS)
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        parser.error(f"no program {unknown[0]!r}; there are: {', '.join(PROGRAMS)}")
    ways = list(WAYS) if given.device == "cuda" else ["graphmod"]
    cells = measure(given.device, names, ways, given.jobs)
    where = torch.cuda.get_device_name() if given.device == "cuda" else "CPU, emulated"
    found = {
        "device": where,
        "torch": torch.__version__,
        "rows": [{"name": name, "title": PROGRAMS[name][0], **cells[name]} for name in names],
    }
    if given.only:
        print(json.dumps(found, indent=1))
    else:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row["graphmod"]["outcome"] not in ("captured", "eager") for row in found["rows"]))


if __name__ == "__main__":
    sys.exit(main())
