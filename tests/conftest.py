"""What several tests share: devices, and settings of training runs small enough for two CPU cores."""

import copy
import functools
import gc
import logging
import os
import signal
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, before the first use of cuBLAS

import processes
import pytest
import stream_rules
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from graphmod.cli.app import TRAIN, parse
from graphmod.cli.errors import explain
from graphmod.errors import ConfigError
from graphmod.train.step import TrainStep

ROOT = Path(__file__).parent.parent


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background, whose children would have it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
if torch.cuda.is_available():
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

TINY = [
    "train.device=cpu",
    "data.cache=null",
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
DROPOUT = ["model=gpt2_tiny", "model.dropout=0.2"]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests are made here, and none dies: the collector would look through all of them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


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


@pytest.fixture(autouse=True)
def rules_of_streams(monkeypatch: pytest.MonkeyPatch):
    """No capture of any test may break what `stream_rules` tells; a list of what did."""
    if torch.cuda.is_available():  # where the streams themselves do
        yield []
        return
    broken = stream_rules.watch(monkeypatch)
    yield broken
    assert not broken


def composed(*overrides: str):
    """The composed, unparsed settings for these arguments."""
    try:
        readable = TRAIN.readable(list(overrides))
    except OverrideParseException as error:
        raise ConfigError(explain(error)) from error
    return TRAIN.compose(readable)


def typed(app, *arguments: str):
    """The typed settings of a command for these arguments."""
    return app.typed(app.compose(app.readable(list(arguments))))


@functools.cache
def chosen(*choices: str):
    return TRAIN.compose([*choices])


def filled(*overrides: str):
    """What `composed` gives. Hydra takes long to read the files of their choices, which it does once here; what
    arguments say of single settings is put in by the part of it that does so after that."""
    try:
        readable = TRAIN.readable(list(overrides))
        asked = {one.get_key_element(): one for one in OverridesParser.create().parse_overrides(readable)}
        single = {key for key in asked if "." in key}
        config = copy.deepcopy(chosen(*(asked[key].input_line for key in asked if key not in single)))
        ConfigLoaderImpl._apply_overrides_to_config([asked[key] for key in asked if key in single], config)
    except (ConfigError, HydraException, OmegaConfBaseException):
        config = composed(*overrides)  # which says it in other words
    return config


def parsed(*overrides: str):
    """The checked settings for these arguments."""
    return parse(filled(*overrides))


def shell(folder: Path, *arguments: str, script: str = "train.py", **variables: str) -> processes.Python:
    """`python train.py ARGUMENTS`, started in `folder`; `variables` are added to the environment."""
    # One thread, as in this process: several divide sums differently.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return processes.Python([ROOT / script, *arguments], folder, environment)


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled yet, and nothing that is stays."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quiet():
    """Nothing below errors is logged: programs that are refused, and do not matter for what they say."""
    logger = logging.getLogger("graphmod")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture
def settings():
    """`settings("train.steps=5")` is the checked RunConfig for these overrides; `tiny` ones come first with `TINY`."""
    return lambda *overrides: parse(composed(*overrides))


@pytest.fixture
def tiny():
    """Like `settings`, for a run of a second or two on a small text that is made for it."""
    return lambda *overrides: parsed(*TINY, *overrides)


@pytest.fixture
def text(tmp_path):
    """A text file of a few thousand bytes."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} of a text about nothing in particular\n" for n in range(200)))
    return path


@pytest.fixture
def on_text(tiny, text):
    """Like `tiny`, on the file of `text`."""
    return lambda *overrides: tiny("data=text", f"data.path={text}", *overrides)


@pytest.fixture
def stop_after(monkeypatch):
    """`stop_after(5)` sends this process SIGTERM in the middle of the fifth step."""

    def arrange(steps: int, number: int = signal.SIGTERM) -> None:
        original, calls = TrainStep.__call__, []

        def step(self, batch):
            calls.append(batch)
            if len(calls) == steps:
                os.kill(os.getpid(), number)
            return original(self, batch)

        monkeypatch.setattr(TrainStep, "__call__", step)

    return arrange
