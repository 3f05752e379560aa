"""Where a saved model comes from is said in words."""

from graphmod.cli.decode import trained
from graphmod.train.run import train
from tests.support.processes import shell


def test_a_checkpoint_tells_its_steps_and_its_loss(on_text, tmp_path, stop_after):
    stop_after(5)
    result = train(on_text("train.ema_decay=0.9"), tmp_path)
    folder = tmp_path / result.checkpoint
    loss = result.losses[-1]
    manifest = folder / "checkpoint.json"
    assert trained(folder) == f"trained for 5 of 8 steps, loss {loss:.3f}"
    assert trained(folder / "ema") == trained(folder)
    manifest.write_text("{")
    assert trained(folder) is None and trained(tmp_path) is None


def test_sampling_says_how_the_newest_run_was_trained(on_text, tmp_path):
    train(on_text("model.max_positions=64"), tmp_path / "runs" / "train" / "mine")
    sampling = ["model.path=runs/train", "prompt=x", "decode.max_new_tokens=3"]
    process = shell(tmp_path, *sampling, script="generate.py")
    _, complained = process.communicate(timeout=120)
    (said,) = [line for line in complained.splitlines() if line.startswith("model: ")]
    assert process.returncode == 0
    assert "runs/train/mine/checkpoints/step_00000008, trained for 8 of 8 steps, loss " in said
