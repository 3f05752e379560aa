"""What holds for all tests, and the fixtures of several rooms: devices, settings, and what stops a run."""

import collections
import gc
import logging
import os
import signal
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, before the first use of cuBLAS

import pytest
import torch

import tests.support.without_waits  # noqa: F401
from graphmod.train.step import TrainStep
from tests.support import stream_rules
from tests.support.settings import TINY, parsed

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background, whose children would have it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
HERE = Path(__file__).parent
torch.set_num_threads(1)
gc.set_threshold(5_000, 10, 100)  # to look through thousands of tests takes a second: of itself, only now and then
if torch.cuda.is_available():
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session):
    """Thousands of tests are made here, and none dies: the collector would look through all of them again and again.

    On a clean checkout, half of the time is spent on writing the bytecode of files. Of several processes each begins
    with others, and finds written what another began with; the tests are put into one order below.
    """
    config = session.config
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        places = sorted({HERE / path.relative_to(HERE).parts[0] for path in HERE.rglob("test_*.py")})
        number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
        first = number % count * len(places) // count
        config.args = [str(place) for place in (*places[first:], *places[:first])]
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores: many tests wait, for a process, a socket, or a disk."""
    return (yield) + 1


# Files that take half a minute or more, with few tests.
LONG = {"test_browser", "test_compiled", "test_experts", "test_parallel_commands", "test_random_programs"}
LONG |= {"test_sharded_layers", "test_split_layers", "test_split_models", "test_update"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config) -> None:
    """Files are started in the order of their tests, below; of itself, xdist would start those with few tests last."""
    config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """The process ends: pytest and Python would look through all that is left eight times more."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes: none shall be left with a long file at the end
        tests = collections.Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path.stem not in LONG, -tests[item.path], item.path))
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
    return parsed


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
