"""What replays cost the host is measured without a GPU, too."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "replay_cost.py"


def test_it_measures_layers_and_the_module_around_them(tmp_path):
    sizes = ["--layers", "2", "--width", "64", "--length", "8", "--steps", "2", "--device", "cpu"]
    subprocess.run([sys.executable, BENCHMARK, *sizes, "--out", tmp_path / "found.json"], check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("one_thread", "autograd_thread", "body_one_thread", "body_autograd_thread"):
        assert 0 < found[name]["launch_us"] < found[name]["total_us"]
