"""The programs behind docs/hazards.md: graphmod's column has no silent row."""

import json
import sys

import pytest
import torch

import graphmod
from benchmarks.hazard_programs import PROGRAMS
from benchmarks.hazards import judge
from tests.support.processes import finished
from tests.support.settings import ROOT


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_eagers_numbers_and_a_reason_where_it_stays_eager(name, device):
    cell = judge(name, "graphmod", device.type)
    assert cell["outcome"] in ("captured", "eager"), cell
    assert cell["outcome"] == "captured" or cell["reason"], cell


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_check_says_beforehand_what_becomes_of_a_program(name, caplog):
    loop = PROGRAMS[name][1](torch.device("cpu"))
    x = loop.batch(0, lambda *shape: torch.randn(*shape))
    report = graphmod.check(loop.part if loop.part is not None else (lambda x: loop.body(None, x)), x)
    assert report.captured == (judge(name, "graphmod", "cpu")["outcome"] == "captured"), str(report)
    effects = [one.effect for one in report.hazards]
    assert len(effects) == len(set(effects)) <= 2, str(report)
    assert all(one.user and one.remedy for one in report.hazards), str(report)


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


@pytest.mark.slow
def test_one_program_can_be_asked_for():
    done = finished([ROOT / "benchmarks/hazards.py", "--device", "cpu", "--only", "plain"], ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["graphmod"]["outcome"] == "captured"
