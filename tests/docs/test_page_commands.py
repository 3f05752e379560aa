"""Each command of the pages runs: with the settings that the page gives, on a small model, data and number of steps."""

import itertools
import json
import re
import shlex
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from datetime import datetime, timedelta
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import hydra.core.utils
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod.cli import main as cli
from tests.docs.test_pages import PAGES, commands
from tests.support.made_tokenizers import CHAT_TEMPLATE, llama_like
from tests.support.settings import ROOT

pytestmark = pytest.mark.slow

ROWS = "".join(f'{{"text": "row {n} of rows about nothing"}}\n' for n in range(200))
CHATS = "".join(f'{{"prompt": "what is {n}?", "completion": "a number, as {n + 1} is"}}\n' for n in range(200))
STEP = """
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)


def train_step(x=torch.ones(2, 8)):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


step = train_step


def batch():
    return (torch.ones(2, 8),)
"""
SIZES = {"layers": 2, "hidden_size": 32, "heads": 4, "intermediate_size": 64}
# Settings that decide how long a command takes -> what they are here.
SHORT = {"train.steps": "20", "decode.max_new_tokens": "8", "train.epochs": "1", "train.sample_every": "10"}
STEPS_OF_A_RUN = 20


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """`folder_of(page)`: a folder with everything that the pages name, in which its commands run one after another."""
    made = {}

    def folder_of(page):
        if page not in made:
            made[page] = tmp_path_factory.mktemp(page.stem)
            furnish(made[page])
        return made[page]

    return folder_of


def furnish(folder):
    words = llama_like([ROWS, CHATS], vocabulary=300)
    words.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=512, **sizes))
    for name in ("my_model", "FOLDER"):
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    words.save_pretrained(folder / "my_tokenizer")
    for name in ("my_texts", "parquet_folder"):
        (folder / name).mkdir()
    texts = {
        "my_texts/a.txt": ROWS,
        "notes.txt": ROWS,
        "rows.jsonl": ROWS,
        "chats.jsonl": CHATS,
        "prompts.txt": "a\nb\n",
    }
    own = (ROOT / "docs" / "own_parts.md").read_text().partition("```python\n")[2].partition("```")[0]
    page = (ROOT / "docs" / "configure.md").read_text()
    experiment = textwrap.dedent(page[page.index("    # @package") :].partition("\n\n")[0])
    (folder / "mine" / "experiment").mkdir(parents=True)
    texts["mine/experiment/small.yaml"] = experiment
    for name, content in {**texts, "train.py": STEP, "my_loop.py": STEP, "my_package.py": own}.items():
        (folder / name).write_text(content)
    pandas = pytest.importorskip("pandas")
    for name, column in {"parquet_folder/rows": "body", "a": "text", "b": "text"}.items():
        pandas.DataFrame({column: ["some text of a row"] * 200}).to_parquet(folder / f"{name}.parquet")


def shortened(arguments, number):
    """The arguments of a page with smaller numbers, and whatever else makes a run of a second on a CPU. The command of
    this number on its page is the one to make a resumed run so much longer."""
    given = dict(argument.partition("=")[::2] for argument in arguments if "=" in argument)
    added = {"train.device": "cpu", "train.log_every": "10"}
    modes = given.get("parallel", "none").split(",")
    if modes != ["none"] and "parallel.gpus" not in given:
        added["parallel.gpus"] = "4" if modes == ["fsdp_tp"] else "2"
    if given.get("train.resume", "none") not in ("none", "auto"):
        added["train.steps"] = str(STEPS_OF_A_RUN + number)
    else:
        own_model, own_data = "model._target_" in given, "data._target_" in given
        added |= {"train.eval_batches": "1", "data.batch_size": "2"}
        if not {"train.steps", "train.epochs"} & {*given}:
            added["train.steps"] = str(STEPS_OF_A_RUN)
        if given.get("model") != "local" and not own_model:
            added |= {f"model.{name}": str(size) for name, size in SIZES.items()}
        if given.get("model") == "llama_124m":
            added["model.kv_heads"] = "2"
        if not own_data:
            added["data.cache"] = "null"
        if given.get("data") != "hf" and not own_data:
            added["data.max_bytes"] = "20000"
        if "data.buckets" not in given and not own_data:
            added["data.seq_len"] = "16"
        if given.get("graph") == "auto":  # a shorter run has nothing to choose from
            added["train.steps"] = "100"
    short = {**SHORT, "hydra/launcher": given.get("hydra/launcher", "").replace("slurm", "local")}  # which is not here
    kept = [f"{key}={short[key]}" if (key := one.partition("=")[0]) in short else one for one in arguments]
    return [*kept, *(f"{key}={value}" for key, value in added.items())]


NUMBERED = [(page, number) for page in PAGES for number, _ in enumerate(commands(page))]


_MINUTES = itertools.count()


@pytest.fixture
def names_of_runs(monkeypatch):
    """Folders of runs are named after the second in which they begin, of which these runs take a part."""
    began = datetime.now() + timedelta(minutes=next(_MINUTES))
    monkeypatch.setattr(hydra.core.utils, "datetime", SimpleNamespace(now=lambda: began))


@pytest.mark.parametrize(("page", "number"), NUMBERED, ids=lambda value: getattr(value, "stem", value))
def test_a_command_runs(page, number, folder_of, monkeypatch, capfd, fresh_dynamo, names_of_runs):
    _, command, *arguments = commands(page)[number]
    name = command.removesuffix(".py")
    monkeypatch.chdir(folder_of(page))
    monkeypatch.setattr(sys, "argv", ["graphmod"])
    if any("runs/train" in argument for argument in arguments) and not Path("runs/train/DATE_TIME").exists():
        ranks = ["parallel=ddp"] if page.stem == "parallel" else []
        assert cli.train(shortened([*ranks, "hydra.run.dir=runs/train/DATE_TIME"], number)) == 0
    if name in ("train", "compare"):
        status = cli.COMMANDS[name](shortened(arguments, number + 1))
    elif name == "generate":
        short = ["decode.max_new_tokens=8", *(one for one in arguments if not one.startswith("decode.max_new_tokens"))]
        status = cli.generate([*short, "model.device=cpu"])
    elif name == "check":
        status = subprocess.run([sys.executable, "-m", "graphmod", name, *arguments]).returncode
    else:
        status = served(arguments)
    assert status == 0, capfd.readouterr().err


def served(arguments):
    """The exit status of a server that answers, and is then asked to end."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    given = [one for one in arguments if not one.startswith("serve.port")]
    command = [sys.executable, "-m", "graphmod", "serve", *given, f"serve.port={port}", "model.device=cpu"]
    with subprocess.Popen(command) as server:
        try:
            ask(port)
        finally:
            server.terminate()
        return server.wait(timeout=60)


def ask(port):
    """Sends what docs/serve.md has curl send, as soon as the server is there."""
    (line,) = re.findall(r"^    (curl .*)$", (ROOT / "docs" / "serve.md").read_text(), flags=re.M)
    _, url, flag, body = shlex.split(line)
    place = urlsplit(url)
    assert flag == "-d" and place.port == 8000
    for _ in range(600):
        with suppress(OSError):
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/health")
            if connection.getresponse().read() and connection.sock is not None:
                connection.request("POST", place.path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                if answer.status != 503:
                    break
        time.sleep(0.1)
    assert answer.status == 200 and json.loads(answer.read())["choices"][0]["finish_reason"] in ("stop", "length")


def lines_of(pattern):
    return sorted(
        {line for page in PAGES for line in re.findall(rf"^    ({pattern}.*)$", page.read_text(), flags=re.M)}
    )


@pytest.mark.parametrize("line", lines_of("make "))
def test_make_has_the_target(line):
    assert subprocess.run(["make", "-n", *shlex.split(line, comments=True)[1:]], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("line", lines_of(r"python (?:benchmarks|examples)/"))
def test_a_script_takes_the_arguments(line, capfd):
    """Those of benchmarks need a GPU and time, those of examples have tests of their own."""
    _, script, *arguments = shlex.split(line, comments=True)
    assert (ROOT / script).is_file()
    if flags := [argument for argument in arguments if argument.startswith("--")]:
        subprocess.run([sys.executable, ROOT / script, "--help"], check=True)
        shown = capfd.readouterr().out
        assert all(flag in shown for flag in flags)
