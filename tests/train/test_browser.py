"""What a person sees who opens TensorBoard on a comparison: the runs of all scopes in the same charts."""

import re
import shutil
import subprocess
import time
import urllib.request

import pytest
from tensorboard import program

from graphmod.train.compare import compare, write_report
from graphmod.train.result import RunResult
from graphmod.train.run import train

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCOPES = ("none", "per_layer", "full_iteration")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: apt-get install chromium)")


@pytest.fixture
def served(tiny, tmp_path):
    """The address of TensorBoard on a folder with a run of each scope and their comparison."""
    settings = ["data.max_bytes=20000", "train.steps=12"]
    for scope in SCOPES:
        train(tiny(*settings, f"graph={scope}"), tmp_path / scope)
    results = {scope: RunResult.read(tmp_path / scope) for scope in SCOPES}
    write_report(tmp_path, compare(results), results)
    board = program.TensorBoard()
    board.configure(argv=[None, "--logdir", str(tmp_path), "--port", "0", "--load_fast", "false"])
    url = board.launch()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}data/runs") as answer:
            if all(scope in answer.read().decode() for scope in SCOPES):
                break
        time.sleep(0.2)
    return url


def page(address: str, profile) -> str:
    """The page as a browser has it once its scripts have run."""
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1500,1100"]
    command = [BROWSER, *quiet, "--virtual-time-budget=30000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_tensorboard_shows_the_three_runs_in_one_chart(served, tmp_path_factory):
    shown = page(f"{served}#timeseries", tmp_path_factory.mktemp("browser"))
    for scope in SCOPES:
        assert re.search(rf">\s*{scope}\s*<", shown), f"the run {scope} is not on the page"
    for tag in ("graph/captures", "graph/replays"):
        assert tag in shown
    # A card lists the runs that it draws below the chart.
    card = shown[shown.index("graph/replays") :]
    assert all(scope in card for scope in SCOPES)
