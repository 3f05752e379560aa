"""The console command, alone and installed: what it answers before PyTorch is loaded, and from where it runs."""

import gc
import os
import shutil
import subprocess
import sys
import time
import zipfile

import pytest

import graphmod
from graphmod.cli import main as command
from graphmod.cli import start
from graphmod.cli.start import shown, words
from tests.support.processes import search_first
from tests.support.settings import ROOT, TINY

WITHOUT_TORCH = """
import sys
from graphmod.cli.main import check, compare, generate, main, train

def answered(run, *arguments):
    try:
        return run(list(arguments))
    except SystemExit as end:
        return end.code

sys.argv = ["graphmod"]
statuses = [
    main(),
    answered(train, "--help"), answered(train, "--version"), answered(train, "--cfg", "job"),
    answered(check, "--help"),
    answered(generate, "--help"), answered(generate, "--version"), answered(generate, "--cfg", "job"),
    answered(train, "train.stepz=3"), answered(train, "=3"), answered(train, "+train.stepz=3"),
    answered(train, "train.steps=abc"), answered(train, "graph=per_layr"), answered(train, "--steps=3"),
    answered(compare, "trian.steps=3"),
    answered(generate, "=3"), answered(generate, "decode.temprature=1"), answered(generate, "prompt=a"),
]
assert statuses == [0] * 8 + [2] * 10, statuses
loaded = {"torch", "transformers", "tensorboard", "numpy"} & set(sys.modules)
assert not loaded, loaded
"""


def test_help_and_errors_of_settings_need_no_torch(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 10 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.count(f"graphmod {graphmod.__version__}\n") == 2
    assert list(tmp_path.iterdir()) == []


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["graphmod", *arguments])
    return command.main()


def test_the_command_names_its_version_its_commands_and_the_nearest_of_them(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"graphmod {graphmod.__version__}\n"
    assert run(monkeypatch) == run(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(shown.count(f"  graphmod {name} ") == 2 for name in command.COMMANDS), shown
    assert run(monkeypatch, "trian") == 2
    assert "there is no command 'trian'; did you mean 'train'?" in capsys.readouterr().err
    assert run(monkeypatch, "train.steps=3") == 2
    assert "a command comes first: graphmod train train.steps=3" in capsys.readouterr().err


def test_each_command_is_given_the_arguments_behind_it(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "COMMANDS", dict.fromkeys(command.COMMANDS, seen.append))
    for name in command.COMMANDS:
        run(monkeypatch, name, "a=1", "--flag")
    assert seen == [["a=1", "--flag"]] * len(command.COMMANDS)


def test_comparing_sweeps_the_scopes_unless_told_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "train", seen.append)
    command.compare(["model=llama_tiny,gpt2_tiny"])
    command.compare(["graph=none,auto", "train.deterministic=false"])
    sweep = "graph=none,per_layer,full_iteration"
    assert seen == [
        ["--multirun", sweep, "train=measure", "train.deterministic=true", "model=llama_tiny,gpt2_tiny"],
        ["--multirun", "train=measure", "graph=none,auto", "train.deterministic=false"],
    ]


def test_compare_says_what_it_compares_and_shows_examples(monkeypatch, capsys):
    assert run(monkeypatch, "compare", "--help") == 0
    shown = capsys.readouterr().out
    for said in ("graph=none (plain PyTorch)", "Examples:", "--multirun graph=none,per_layer,full_iteration"):
        assert said in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_a_command_is_shown_the_way_it_was_started(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert (words("train"), shown("train")) == (["bin/python", "train.py"], "python train.py")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin" / "graphmod"), "train"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert (words("train"), shown("train")) == (["bin/graphmod", "train"], "graphmod train")
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / "bin" / "graphmod"))
    assert words("train") == ["graphmod", "train"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the content of the wheel, and nothing of the clone."""
    pytest.importorskip("hatchling")
    clone, wheels, folder = (tmp_path_factory.mktemp(name) for name in ("clone", "wheels", "installed"))
    for name in ("graphmod", "configs"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    code = f"from hatchling.build import build_wheel; build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=clone, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_brings_a_command_its_settings_types_and_license(installed):
    (about,) = installed.glob("*.dist-info")
    assert "graphmod = graphmod.cli.main:main" in (about / "entry_points.txt").read_text()
    assert (about / "licenses" / "LICENSE").exists() and (installed / "graphmod" / "py.typed").exists()
    assert "Project-URL" not in (about / "METADATA").read_text()
    settings = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")]
    assert len(settings) > 20 and all((installed / "graphmod" / path).exists() for path in settings)
    assert all((installed / path.relative_to(ROOT)).exists() for path in (ROOT / "graphmod").rglob("*.py"))
    assert not (installed / "configs").exists()


@pytest.fixture
def installed_command(installed, tmp_path):
    """Runs the command of the wheel in `tmp_path`."""

    def run(*arguments):
        code = "import sys; from graphmod.cli.main import main; sys.argv[0] = 'graphmod'; sys.exit(main())"
        process = [sys.executable, "-c", code, *arguments]
        return subprocess.run(process, cwd=tmp_path, env=search_first(installed), capture_output=True, text=True)

    return run


def test_an_installed_command_finds_its_settings_in_any_folder(installed_command):
    shown = installed_command("generate", "--cfg", "job")
    assert shown.returncode == 0 and "generation_config: auto" in shown.stdout, shown.stderr


@pytest.mark.slow
def test_an_installed_command_trains_in_any_folder(installed_command, tmp_path):
    trained = installed_command("train", *TINY, "train.steps=3", "data.max_bytes=20000")
    assert trained.returncode == 0, trained.stderr
    assert list(tmp_path.glob("runs/train/*/result.json"))


def test_make_does_not_take_settings_for_its_own_variables():
    done = subprocess.run(
        ["make", "serve", "serve.port=1", "graph.ahead=true"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "write: make serve ARGS=" in done.stderr
    assert "serve.port=1" in done.stderr and "graph.ahead=true" in done.stderr


def test_make_tests_another_torch_in_an_environment_of_its_own():
    done = subprocess.run(["make", "-n", "test", "TORCH=2.99.1"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "s/^torch==.*/torch==2.99.1/" in done.stdout
    for runs in ("pip install", "pytest"):
        assert f".venv-torch-2.99.1/bin/python -m {runs}" in done.stdout


def test_a_library_that_is_not_there_is_one_line(tmp_path):
    missing = "raise ModuleNotFoundError('no omegaconf', name='omegaconf')"
    (tmp_path / "omegaconf.py").write_text(missing)
    done = subprocess.run(
        [sys.executable, ROOT / "serve.py", "model.path=x"],
        env=search_first(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "has no omegaconf; install graphmod for it" in done.stderr


@pytest.mark.parametrize(
    ("terminal", "silent", "slow"),
    [(True, False, True), (True, True, True), (False, False, True), (True, False, False)],
)
def test_a_terminal_is_told_what_takes_seconds(terminal, silent, slow, monkeypatch, capsys):
    monkeypatch.setattr(start, "_SILENCE", 0.05 if slow else 30)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with start.loading(silent):
        assert not gc.isenabled()  # it would look through all that is imported, for a fifth of the time
        time.sleep(0.3)
    assert gc.isenabled()
    assert capsys.readouterr().err == ("loading PyTorch and transformers\n" if terminal and slow and not silent else "")


@pytest.mark.parametrize("prompt", ["def main(", 'say "no"; it\'s $HOME, $(PYTHON) `x` \\n', "'"])
def test_make_generate_goes_on_from_a_prompt_as_it_is_written(prompt, tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nfor one; do printf '%s\\n' \"$one\" >> said; done\n")
    python.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", "env/.installed"):
        (tmp_path / name).touch()
    command = ["make", "-f", ROOT / "Makefile", "generate", "VENV=env", f"PROMPT={prompt}"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert f"prompt={prompt}" in (tmp_path / "said").read_text().splitlines()
