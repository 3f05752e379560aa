"""The life of `serve.py`: it starts, drains on SIGTERM, ends at once on a second one, and starts after a kill."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue

import pytest

from graphmod.cli import decode as run
from graphmod.cli.serve import SERVE, main
from graphmod.decode.types import EngineConfig
from graphmod.errors import ConfigError
from graphmod.serve.engine_side import FrontProcess
from tests.support.processes import Python
from tests.support.served import chat_model, tokenizer
from tests.support.settings import ROOT, typed

LONG = {"prompt": "a", "max_tokens": 480, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    chat_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class Client:
    """Asks the server on `port`."""

    port = 0

    def ask(self, path: str, body: dict | None = None, key: str = "") -> tuple[int, dict]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            headers = {"authorization": f"Bearer {key}"}
            connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def metrics(self) -> str:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

    def wait_until_running(self) -> None:
        while "graphmod_running 0.0" in self.metrics():
            time.sleep(0.01)


class Process(Client):
    """`python serve.py` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        words = [ROOT / "serve.py", f"model.path={folder}", "model.device=cpu", *arguments]
        self.process = Python(words, Path.cwd(), os.environ | {"OMP_NUM_THREADS": "1"})

    def wait_until_ready(self) -> None:
        line = self.process.stdout.readline()
        found = re.search(r"serving tiny at http://[0-9.]+:(\d+)$", line)
        assert found, line + self.process.communicate()[1]
        self.port = int(found[1])

    def front(self) -> int:
        """The process that answers HTTP."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())

    def ended(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=60)[1]
        return self.process.returncode, said


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextlib.contextmanager
def started(folder, *arguments):
    one = Process(folder, *arguments)
    try:
        one.wait_until_ready()
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


@pytest.mark.slow
def test_after_a_kill_the_same_port_serves_again_and_sigterm_lets_what_runs_finish(saved):
    with started(saved, "serve.port=0") as killed, ThreadPoolExecutor(1) as pool:
        port, front = killed.port, killed.front()
        running = pool.submit(killed.ask, "/v1/completions", {**LONG, "n": 16})
        killed.wait_until_running()
        killed.process.kill()
        status, body = running.result()
        assert status == 500 and "its process has ended" in body["error"]["message"]
        assert killed.ended()[1].endswith("nothing gets faster\n")  # the front said nothing
        until = time.monotonic() + 5
        while runs(front):
            assert time.monotonic() < until
            time.sleep(0.01)
    with started(saved, f"serve.port={port}", "serve.api_key=secret") as one, ThreadPoolExecutor(1) as pool:
        assert one.port == port and one.ask("/v1/completions", LONG)[0] == 401
        running = pool.submit(one.ask, "/v1/completions", {**LONG, "n": 4}, "secret")
        one.wait_until_running()
        one.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionError):  # it may have ended by now
            while one.ask("/health")[0] == 200:
                time.sleep(0.01)
            assert one.ask("/v1/completions", LONG, "secret")[0] == 503
        status, body = running.result()
        assert status == 200 and body["usage"]["completion_tokens"] == 4 * 480
        code, said = one.ended()
        assert code == 0 and said.rstrip().endswith("stopped"), said


def test_without_the_process_that_answers_the_other_one_ends_too(saved):
    with started(saved, "serve.port=0") as one, ThreadPoolExecutor(1) as pool:
        running = pool.submit(one.ask, "/v1/completions", LONG)
        one.wait_until_running()
        os.kill(one.front(), signal.SIGINT)  # as Ctrl-C in a terminal, which is for the other one
        os.kill(one.front(), signal.SIGTERM)
        assert one.ask("/health")[0] == 200
        os.kill(one.front(), signal.SIGKILL)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            running.result()
        code, said = one.ended()
        assert code == 1 and said.endswith(
            "error: the process that answers HTTP has ended by SIGKILL, and so does this one; start the server again\n"
        )


@pytest.mark.parametrize(
    "place", ["graphmod.cli.decode.load_model", "transformers.AutoModelForCausalLM.from_pretrained"]
)
def test_a_front_that_ends_while_the_model_is_loaded_is_noticed_then(place, saved, monkeypatch, capsys):
    def load(*_, **__):
        front.pop().kill()
        time.sleep(60)

    front, made = [], FrontProcess.__init__
    monkeypatch.setattr(FrontProcess, "__init__", lambda self, *given: front.append(self) or made(self, *given))
    monkeypatch.setattr(place, load)
    handler, began = signal.getsignal(signal.SIGCHLD), time.monotonic()
    assert main([f"model.path={saved}", "model.device=cpu", "serve.port=0"]) == 1
    assert time.monotonic() - began < 40 and signal.getsignal(signal.SIGCHLD) is handler
    assert "error: the process that answers HTTP has ended by SIGKILL" in capsys.readouterr().err


@pytest.fixture
def signals():
    """The handlers of signals are afterwards those of before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_takes_too_long_is_ended(saved, signals, monkeypatch, capsys):
    one, said = Client(), Queue()
    monkeypatch.setattr(run, "tell", said.put)

    def interrupt():
        one.port = int(said.get(timeout=60).rpartition(":")[2])
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(one.ask, "/v1/completions", {**LONG, "n": 16})
            one.wait_until_running()
            os.kill(os.getpid(), signal.SIGINT)
            return running.result()

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(interrupt)
        code = main([f"model.path={saved}", "model.device=cpu", "serve.port=0", "serve.drain_seconds=0"])
        status, body = answer.result()
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    assert code == 128 + signal.SIGINT and "1 request cut off" in capsys.readouterr().err


@pytest.mark.slow
def test_a_second_signal_ends_at_once(saved):
    with (
        started(saved, "serve.port=0", "serve.enforce_eager=true", "serve.host=0.0.0.0") as one,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(one.ask, "/v1/completions", {**LONG, "n": 16})
        one.wait_until_running()
        assert "graphmod_replays_total 0.0" in one.metrics()
        one.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        began = time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        code, said = one.ended()
        assert code == 128 + signal.SIGTERM and time.monotonic() - began < 3
        assert "set serve.api_key=KEY to require a key" in said
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            running.result()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("serve.prot=1", "did you mean 'serve.port'?"),
        ("serve.port=70000", "serve.port must be"),
        ("serve.max_waiting=-1", "serve.max_waiting must be at least 0"),
        ("serve.api_key=", "serve.api_key"),
        ("decode.max_batch_size=0", "max_batch_size"),
        ("decode.max_adapters=2", "decode.max_adapters=2 is for adapters that clients load, with serve.manage=true"),
        ("graph=per_layer", "there is no choice 'per_layer' for 'graph'\n  choices of 'graph': decode, none"),
        ("model.path=nowhere", "nowhere"),
        ("tokenizer=nowhere", "tokenizer=nowhere is not a folder"),
        ("serve.host=256.1.1.1", "serve.host=256.1.1.1"),
    ],
)
def test_wrong_settings_are_one_clear_error(saved, capsys, argument, said):
    path = [] if argument.startswith("model.path") else [f"model.path={saved}"]
    assert main([*path, "model.device=cpu", "serve.port=0", argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and len(error.splitlines()) <= 3


def test_a_port_that_is_taken_is_one_clear_error(saved, capsys):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert main([f"model.path={saved}", f"serve.port={port}"]) == 2
    assert f"serve.port={port}" in capsys.readouterr().err


def test_settings_reach_the_engine(saved):
    arguments = ["model.path=x/Tiny", "decode.max_batch_size=3", "decode.cache_tokens=640", "serve.enforce_eager=true"]
    config = typed(SERVE, *arguments)
    of_server = {"keep_prefixes": True, "frozen": True, "compile_in_background": True}
    assert config.engine() == EngineConfig(max_batch_size=3, cache_tokens=640, graphs=False, **of_server)
    adapters = "decode.max_adapters=2", "decode.max_adapter_rank=8", "serve.manage=true"
    assert typed(SERVE, *arguments, *adapters).engine() == replace(config.engine(), max_adapters=2, max_adapter_rank=8)
    assert config.name == "Tiny" and typed(SERVE, *arguments, "serve.model_name=other").name == "other"
    with pytest.raises(ConfigError, match=r"model\.path=FOLDER is missing"):
        typed(SERVE).check()
