"""What the benchmarks share: a process for each measurement, and the file that keeps the results."""

import json
import sys

import pytest

from benchmarks.options import in_process, keep
from tests.support.settings import ROOT

WORKER = """
import sys, time
sys.path.insert(0, {root!r})
from benchmarks.options import tell
what = sys.argv[2]
if what == "fails":
    raise RuntimeError("no such kernel")
if what == "hangs":
    time.sleep(60)
print("other lines")
tell({{"step_ms": 1.5, "steps": sys.argv[4]}})
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER.format(root=str(ROOT)))
    return str(path)


def test_a_worker_tells_its_result(script):
    assert in_process(script, ["works"], ["--steps", "7"]) == {"step_ms": 1.5, "steps": "7"}


def test_a_worker_that_fails_or_hangs_is_an_error_in_words(script, capsys):
    assert in_process(script, ["fails"], []) == {"error": "exit status 1: RuntimeError: no such kernel"}
    assert "no such kernel" in capsys.readouterr().err
    assert in_process(script, ["hangs"], [], limit=1.0) == {"error": "still running after 1 s (--timeout)"}


def test_a_result_takes_the_place_of_an_earlier_one_of_its_mode_and_shape(tmp_path, monkeypatch):
    out = tmp_path / "results" / "steps.json"
    monkeypatch.setattr(sys, "argv", ["/a/path/steps.py", "--steps", "9", "--out", str(out)])
    for mode, step in (("eager", 2.0), ("graph", 1.0), ("eager", 3.0)):
        keep(out, {"mode": mode, "shape": "small", "step_ms": step})
    command = "python benchmarks/steps.py --steps 9"
    assert json.loads(out.read_text())["results"] == [
        {"command": command, "mode": "graph", "shape": "small", "step_ms": 1.0},
        {"command": command, "mode": "eager", "shape": "small", "step_ms": 3.0},
    ]
    keep(None, {"mode": "eager", "shape": "small"})
