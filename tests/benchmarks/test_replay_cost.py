"""What replays cost the host is measured without a GPU, too."""

import json

from tests.support.processes import finished
from tests.support.settings import ROOT

BENCHMARK = ROOT / "benchmarks" / "replay_cost.py"


def test_it_measures_layers_and_the_module_around_them(tmp_path):
    sizes = ["--layers", "2", "--width", "64", "--length", "8", "--steps", "2", "--device", "cpu"]
    finished([BENCHMARK, *sizes, "--out", tmp_path / "found.json"], tmp_path).check_returncode()
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("one_thread", "autograd_thread", "body_one_thread", "body_autograd_thread"):
        assert 0 < found[name]["launch_us"] < found[name]["total_us"]
