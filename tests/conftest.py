"""What several tests share: devices, and settings of training runs small enough for two CPU cores."""

import os
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, before the first use of cuBLAS

import pytest
import torch
from hydra import compose, initialize_config_dir

from graphmod.train.config import parse, register

ROOT = Path(__file__).parent.parent

torch.set_num_threads(1)
if torch.cuda.is_available():
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

TINY = [
    "train.device=cpu",
    "train.steps=8",
    "train.log_every=3",
    "train.eval_every=0",
    "model.layers=2",
    "model.hidden_size=32",
    "model.heads=2",
    "model.intermediate_size=64",
    "data.seq_len=16",
    "data.batch_size=2",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test of the core runs on the emulated backend, and on a GPU where there is one."""
    return torch.device(request.param)


def composed(*overrides: str):
    """The composed, unparsed config for these overrides."""
    register()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.fixture
def settings():
    """`settings("train.steps=5")` is the checked RunConfig for these overrides; `tiny` ones come first with `TINY`."""
    return lambda *overrides: parse(composed(*overrides))


@pytest.fixture
def tiny(settings):
    """Like `settings`, for a run of a second or two on a small text that is made for it."""
    return lambda *overrides: settings(*TINY, *overrides)


@pytest.fixture
def text(tmp_path):
    """A text file of a few thousand bytes."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} of a text about nothing in particular\n" for n in range(200)))
    return path
