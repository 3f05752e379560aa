"""The generated comparison with Megatron-core, and the script that measures it where it is not there."""

import json
from importlib import util

import pytest

from benchmarks import megatron as benchmark
from benchmarks import megatron_table as table
from tests.support.processes import finished
from tests.support.settings import ROOT

SHAPE = {"shape": "small", "layers": 12, "width": 768, "batch": 1, "length": 256}
ENVIRONMENT = {"gpu": "Some GPU", "torch": "2.13.0", "megatron_core": "0.19.2", "date": "2026-01-02"}
NUMBERS = {"free_ms": 7.5, "host_ms": 1.25, "busy_ms": 4.5, "reserved_gib": 3.0, "environment": ENVIRONMENT}


def measured(mode, step_ms, **more):
    command = "python benchmarks/megatron.py --shapes small"
    return {"command": command, "mode": mode, **SHAPE, "step_ms": step_ms, **NUMBERS, **more}


RESULTS = [
    measured("megatron_eager", 40.0),
    measured("megatron_graphs", 10.0, losses_equal_eager=False, largest_loss_difference=0.25),
    measured("megatron_graphmod", 8.0, losses_equal_eager=True, largest_loss_difference=0.0),
    {"command": "-", "mode": "megatron_graphmod", "shape": "wide", "error": "exit status 1: RuntimeError: something"},
    measured("megatron_eager", 80.0) | {"shape": "wide", "layers": 24, "width": 2048, "length": 1024},
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A page, results, and the arguments for both; the speed-ups of the first table are in a file beside them."""
    training = tmp_path / "training.json"
    ours = [{"mode": mode, "shape": "small", "step_ms": step} for mode, step in (("eager", 30.0), ("per_layer", 10.0))]
    training.write_text(json.dumps({"results": ours}))
    monkeypatch.setattr(table, "TRAINING", training)
    page, results = tmp_path / "docs" / "benchmarks.md", tmp_path / "megatron.json"
    page.parent.mkdir()
    page.write_text("# A title\n\n<!-- table: megatron -->\nold\n<!-- end megatron -->\n\nmore\n")
    results.write_text(json.dumps({"results": RESULTS}))
    return page, results, ["--root", str(tmp_path), "--results", str(results)]


def test_the_page_shows_steps_ratios_and_losses_and_nothing_else_changes(files):
    page, _, arguments = files
    assert table.main([*arguments, "--check"]) == 1
    assert table.main(arguments) == 0
    text = page.read_text()
    assert text.startswith("# A title\n") and text.endswith("\nmore\n") and "old" not in text
    for words in (
        "|  | 12 layers, width 768, 1 x 256 tokens | 24 layers, width 2048, 1 x 1024 tokens |",
        "| Megatron-core, eager | 40.00 | 80.00 |",
        "| Megatron-core, its graphs of layers | 10.00 (4.00x) | - |",
        "| Megatron-core, graphmod around its layers | 8.00 (5.00x) | failed |",
        "| speed-up of `graph=per_layer` on the H200, above | 3.00x | - |",
        "| losses, Megatron-core, its graphs of layers | up to 0.25 apart | - |",
        "| losses, Megatron-core, graphmod around its layers | bitwise eager's | - |",
        "Some GPU, torch 2.13.0, Megatron-core 0.19.2. 2026-01-02 `python benchmarks/megatron.py --shapes small`",
    ):
        assert words in text
    assert table.main([*arguments, "--check"]) == 0


def test_results_without_a_step_are_an_error(files):
    page, results, arguments = files
    before = page.read_text()
    results.write_text(json.dumps({"results": RESULTS[3:4]}))
    assert table.main(arguments) == 2
    assert page.read_text() == before


@pytest.mark.skipif(util.find_spec("megatron") is not None, reason="Megatron-core is installed")
def test_without_megatron_core_the_benchmark_says_how_to_install_it(tmp_path):
    out = tmp_path / "megatron.json"
    done = finished([ROOT / "benchmarks" / "megatron.py", "--shapes", "small", "--out", out], tmp_path)
    assert done.returncode == 0
    assert "pip install --no-deps megatron-core" in done.stdout
    assert not out.exists()


def test_a_mode_that_is_none_is_named(tmp_path):
    done = finished([ROOT / "benchmarks" / "megatron.py", "--modes", "megatron_egaer"], tmp_path)
    assert done.returncode == 2
    assert "--modes: megatron_egaer is none of megatron_eager, megatron_graphs, megatron_graphmod" in done.stderr


def test_losses_are_compared_bit_for_bit():
    eager = {"losses": [1.0, 2.0]}
    assert benchmark.compare_losses(eager, eager) == {}
    same = benchmark.compare_losses({"losses": [1.0, 2.0]}, eager)
    assert same == {"losses_equal_eager": True, "largest_loss_difference": 0.0}
    other = benchmark.compare_losses({"losses": [1.0, 2.5]}, eager)
    assert other == {"losses_equal_eager": False, "largest_loss_difference": 0.5}
    broken = benchmark.compare_losses({"losses": [1.0, float("nan")]}, eager)
    assert broken == {"losses_equal_eager": False, "largest_loss_difference": None}
