"""The script that measures Megatron-core, where that is not there."""

from importlib import util

import pytest

from benchmarks import megatron as benchmark
from tests.support.processes import finished
from tests.support.settings import ROOT


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
