"""What several tests of the training run share: settings small enough for two CPU cores."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from graphmod.train.config import parse, register

ROOT = Path(__file__).parent.parent

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
