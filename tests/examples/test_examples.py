"""The programs in examples/: short, and with the losses that they have without graphs, bit for bit."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
NEEDS = {
    "accelerate_loop": ["accelerate"],
    "lightning_callback": ["lightning"],
    "peft_lora": ["peft"],
    "transformers_trainer": ["accelerate"],
    "trl_dpo": ["datasets", "trl"],
    "trl_grpo": ["datasets", "trl"],
    "trl_sft": ["datasets", "trl"],
}
LINES = 80

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def without_global_state():
    """Neither Accelerate's, which its Accelerator and every Trainer leave behind, nor that of random numbers."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


def example(name):
    """The example as a module; skips the test where a library that it needs is not installed."""
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library)
    if name == "compiled_model" and not torch.cuda.is_available() and not shutil.which("g++"):
        pytest.skip("no g++")
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_the_losses_of_eager_from_graphs(name, capsys):
    main = example(name).main
    expected = main(graphs=False)
    eager = capsys.readouterr().out
    losses = main(graphs=True)
    graphed = capsys.readouterr().out
    assert losses == expected and len(set(losses)) > 8
    assert "Stats(" not in eager
    stats = re.findall(r"GraphStats\(state='([\w-]+)', captures=\d+, replays=(\d+), eager_calls=(\d+)", graphed)
    stats += re.findall(r"BucketStats\(state='(\w+)', launches=(\d+), .*?eager_steps=(\d+)", graphed)
    assert stats and all(state in ("captured", "valid") for state, _, _ in stats), graphed
    assert all(int(replays) > int(eager_calls) for _, replays, eager_calls in stats), graphed
    assert re.findall(r"failures=(\d+)", graphed) == ["0"] * len(stats)


def test_the_reward_of_grpo_rises_and_its_engine_captures_once(capsys):
    example("grpo").main()
    said = capsys.readouterr().out
    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", said)]
    assert sum(rewards[:5]) / 5 < 0.6 and sum(rewards[-5:]) / 5 > 0.9
    assert re.findall(r"\bcaptures=(\d+)", said) == ["1"] * 3  # the step that trains, decode steps, prefill


@pytest.mark.parametrize("name", NAMES)
def test_an_example_takes_a_number_of_steps_and_is_short(name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len(lines) <= LINES
    assert any('"--steps"' in line for line in lines)


def test_each_example_has_a_row_in_the_docs():
    page = (FOLDER.parent / "docs" / "loops.md").read_text()
    assert sorted(set(re.findall(r"\(\.\./examples/(\w+)\.py\)", page))) == NAMES
