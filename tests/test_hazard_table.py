"""The programs behind docs/hazards.md: graphmod's column has no silent row, and the page shows the results."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.hazard_programs import PROGRAMS
from benchmarks.hazard_table import render
from benchmarks.hazards import PAGE, RESULTS, judge


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_eagers_numbers_and_a_reason_where_it_stays_eager(name, device):
    cell = judge(name, "graphmod", device.type)
    assert cell["outcome"] in ("captured", "eager"), cell
    assert cell["outcome"] == "captured" or cell["reason"], cell


def test_the_page_shows_the_results():
    assert PAGE.read_text() == render(json.loads(RESULTS.read_text()))


def test_a_program_that_ends_its_process_is_one_cell(monkeypatch, tmp_path):
    from benchmarks import hazards

    (tmp_path / "dies.py").write_text(
        "import sys, json\n"
        "for line in sys.stdin:\n"
        "    if 'bad' in line: sys.exit(11)\n"
        "    print('cell ' + json.dumps({'outcome': 'fine'}), flush=True)\n"
    )
    server = hazards.Server("graphmod", "cpu")
    server._command = [sys.executable, str(tmp_path / "dies.py")]
    assert [server.judge(name)["outcome"] for name in ("one", "bad", "two")] == ["fine", "dies", "fine"]
    server.end()


def test_one_program_can_be_asked_for():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/hazards.py"), "--device", "cpu", "--only", "plain"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["graphmod"]["outcome"] == "captured"
