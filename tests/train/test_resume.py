"""A run that was killed, stopped or damaged goes on with the bits of one that never was."""

import json
import random
import re
import shutil
import signal
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from graphmod.errors import ConfigError
from graphmod.train.folders import checkpoints
from graphmod.train.resume import other_ranks
from graphmod.train.run import train
from graphmod.train.settings import plain_config
from tests.support.processes import shell
from tests.support.settings import DROPOUT, TINY

SCOPES = ["none", "per_layer", "full_iteration"]
scopes = pytest.mark.parametrize("scope", SCOPES)


@scopes
@pytest.mark.parametrize("stopped_at", [2, 6])
def test_a_stopped_run_goes_on_with_the_same_bits(on_text, tmp_path, monkeypatch, stop_after, scope, stopped_at):
    settings = [*DROPOUT, f"graph={scope}", "train.eval_every=4", "train.eval_batches=1", "train.ema_decay=0.9"]
    whole = train(on_text(*settings), tmp_path / "whole")
    stop_after(stopped_at)
    stopped = train(on_text(*settings), tmp_path / "run")
    assert stopped.status == "interrupted" and stopped.error == "SIGTERM"
    assert len(stopped.losses) == stopped_at
    monkeypatch.undo()
    resumed = train(on_text(*settings, "train.resume=auto"), tmp_path / "run")
    assert resumed.losses == whole.losses and resumed.eval_losses == whole.eval_losses
    assert resumed.status == "finished" and resumed.resumed_at_step == stopped_at
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / whole.checkpoint) for name in ("whole", "run")
    )
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    averages = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / whole.checkpoint / "ema") for name in ("whole", "run")
    )
    for mean, other, last in zip(*(model.parameters() for model in averages), first.parameters(), strict=True):
        assert torch.equal(mean, other) and not torch.equal(mean, last)


def test_runs_killed_at_any_moment_go_on_with_the_same_bits(on_text, text, tmp_path):
    settings = [*DROPOUT, "train.steps=150", "train.checkpoint_every=2", "data=text", f"data.path={text}"]
    whole = train(on_text(*settings, "graph=none", "train.checkpoint=false"), tmp_path / "whole")
    processes = {
        scope: shell(tmp_path, *TINY, *settings, f"graph={scope}", f"hydra.run.dir={tmp_path / scope}")
        for scope in SCOPES
    }
    due, deadline = {}, time.monotonic() + 120
    while len(due) < 3 or any(process.poll() is None for process in processes.values()):
        assert time.monotonic() < deadline, "no checkpoint appeared"
        for scope, process in processes.items():
            if scope not in due and checkpoints(tmp_path / scope / "checkpoints"):
                due[scope] = time.monotonic() + random.uniform(0, 0.4)  # in a step, or in the middle of saving
            if process.poll() is None and time.monotonic() > due.get(scope, deadline):
                process.kill()
            assert scope in due or process.poll() is None, process.communicate()
        time.sleep(0.005)
    for scope, process in processes.items():
        _, said = process.communicate()
        assert process.returncode == -signal.SIGKILL, (scope, said)
    for scope in SCOPES:
        resumed = train(on_text(*settings, f"graph={scope}", f"train.resume={tmp_path / scope}"), tmp_path / "unused")
        assert 0 < resumed.resumed_at_step < 150, scope
        assert resumed.losses == whole.losses, scope
        left = sorted(path.name for path in (tmp_path / scope / "checkpoints").iterdir())
        assert left == ["step_00000148", "step_00000150"]
    assert not (tmp_path / "unused").exists()


def test_sigterm_saves_says_how_to_go_on_and_that_command_does(text, tmp_path):
    arguments = [*TINY, "train.steps=4000", "data=text", f"data.path={text}", "train.log_every=100"]
    process = shell(tmp_path, *arguments)
    runs = tmp_path / "runs" / "train"
    while not (runs.is_dir() and list(runs.glob("*/events.out.*"))) and process.poll() is None:
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    said, complained = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, complained
    assert "Traceback" not in complained
    assert "stopped by SIGTERM after step" in said and "saved in" in said
    (run,) = runs.iterdir()
    (command,) = [line.partition(": ")[2] for line in said.splitlines() if "to resume" in line]
    assert command.startswith(f"{sys.executable} ") and command.endswith(f"train.resume={run.relative_to(tmp_path)}")
    again = shell(tmp_path, *arguments, "train.resume=auto")
    while (line := again.stdout.readline()) and "resuming from step" not in line:
        pass
    time.sleep(1)
    again.send_signal(signal.SIGINT)
    said, complained = again.communicate(timeout=60)
    assert again.returncode == 130, complained
    assert list(runs.iterdir()) == [run], "the resumed run left a folder of its own"
    assert len(json.loads((run / "result.json").read_text())["losses"]) > int(line.split("step ")[1].split()[0]) > 0


def test_a_run_that_may_not_go_on_does_not_say_that_it_does(on_text, text, tmp_path, stop_after):
    stop_after(3)
    train(on_text(), tmp_path / "run")
    process = shell(tmp_path, *TINY, "data=text", f"data.path={text}", "train.resume=run", "train.seed=3")
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 2 and "train.seed was 0 and is now 3" in complained
    assert said == ""


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.slow
def test_a_job_with_a_folder_of_its_own_does_not_go_on_with_the_one_beside_it(
    on_text, text, tmp_path, stop_after, seed
):
    stop_after(3)
    train(on_text(), tmp_path / "jobs" / "one")
    settings = [*TINY, "data=text", f"data.path={text}", f"train.seed={seed}", "train.resume=auto"]
    process = shell(tmp_path, *settings, "hydra.run.dir=jobs/two")
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 0 and "resuming" not in said and "starts from the beginning" in complained
    assert (tmp_path / "jobs" / "two" / "checkpoints").is_dir()
    assert [path.name for path in checkpoints(tmp_path / "jobs" / "one" / "checkpoints")] == ["step_00000003"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optim.learning_rate=0.5", "optim.learning_rate was 0.003 and is now 0.5"),
        ("train.seed=3", "train.seed was 0 and is now 3"),
        ("data.max_bytes=5000", "different data"),
    ],
)
def test_resuming_with_settings_that_matter_changed_is_a_clear_error(on_text, tmp_path, stop_after, change, said):
    stop_after(3)
    train(on_text(), tmp_path / "run")
    for resume in ("auto", tmp_path / "run"):
        with pytest.raises(ConfigError, match=said):
            train(on_text(change, f"train.resume={resume}"), tmp_path / "run")


def test_a_run_whose_optimizer_keeps_nothing_is_resumed(on_text, tmp_path, stop_after):
    settings = ["optim=sgd", "optim.momentum=0", "optim.nesterov=false"]
    whole = train(on_text(*settings), tmp_path / "whole")
    stop_after(3)
    train(on_text(*settings), tmp_path / "run")
    assert train(on_text(*settings, "train.resume=auto"), tmp_path / "run").losses == whole.losses


def test_resuming_in_another_scope_is_allowed_and_changes_no_number(on_text, tmp_path, stop_after):
    whole = train(on_text(*DROPOUT, "graph=none"), tmp_path / "whole")
    stop_after(3)
    train(on_text(*DROPOUT, "graph=per_layer"), tmp_path / "run")
    resumed = train(
        on_text(*DROPOUT, "graph=full_iteration", "train.resume=auto", "train.log_every=1"), tmp_path / "run"
    )
    assert resumed.losses == whole.losses


def test_auto_with_nothing_to_resume_starts_at_the_beginning_and_says_so(on_text, tmp_path, caplog):
    result = train(on_text("train.resume=auto"), tmp_path)
    assert len(result.losses) == 8 and "starts from the beginning" in caplog.text


def test_resuming_a_finished_run_gives_its_result_again(on_text, tmp_path):
    first = train(on_text(), tmp_path)
    assert train(on_text(f"train.resume={tmp_path}"), tmp_path / "other") == first


def test_a_new_run_in_the_folder_of_an_old_one_is_a_clear_error(on_text, tmp_path):
    train(on_text(), tmp_path)
    with pytest.raises(ConfigError, match=r"resume that one \(train\.resume=/.*hydra\.run\.dir=FOLDER"):
        train(on_text(), tmp_path)


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_new_run_does_not_replace_a_result_that_has_no_checkpoints(on_text, tmp_path, resume):
    train(on_text("train.checkpoint=false"), tmp_path)
    kept = (tmp_path / "result.json").read_bytes()
    with pytest.raises(ConfigError, match=r"holds the result of an earlier run .*hydra\.run\.dir=FOLDER"):
        train(on_text("train.seed=1", f"train.resume={resume}"), tmp_path)
    assert (tmp_path / "result.json").read_bytes() == kept


def test_a_run_that_was_stopped_without_checkpoints_may_be_done_again(on_text, tmp_path, monkeypatch, stop_after):
    stop_after(3)
    assert train(on_text("train.checkpoint=false"), tmp_path).status == "interrupted"
    monkeypatch.undo()
    assert train(on_text("train.checkpoint=false"), tmp_path).status == "finished"


def test_tensorboard_goes_on_in_the_same_folder_without_doubled_steps(on_text, tmp_path, stop_after):
    settings = ["train.log_every=1", "train.checkpoint_every=3"]
    stop_after(5)
    train(on_text(*settings), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000005")  # as if it had been killed: steps 4 and 5 come again
    train(on_text(*settings, "train.resume=auto"), tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))
    assert len(events.Tensors("config/text_summary")) == 1


def test_a_job_that_was_killed_before_its_first_checkpoint_starts_again_without_doubled_steps(on_text, tmp_path):
    settings = ["train.log_every=1", "train.resume=auto"]
    whole = train(on_text(*settings), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "result.json").unlink()
    time.sleep(1.1)  # the names of event files, by which TensorBoard orders them, have seconds
    assert train(on_text(*settings), tmp_path).losses == whole.losses
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 9))


@pytest.mark.gpu
@scopes
def test_on_a_gpu_a_stopped_run_goes_on_with_the_same_bits(on_text, tmp_path, monkeypatch, stop_after, scope):
    settings = [*DROPOUT, f"graph={scope}", "train.device=cuda", "train.deterministic=true", "train.ema_decay=0.9"]
    settings += ["train.steps=12", "train.precision=bf16_mixed"]
    whole = train(on_text(*settings), tmp_path / "whole")
    stop_after(7)
    stopped = train(on_text(*settings), tmp_path / "run")
    assert stopped.status == "interrupted"
    monkeypatch.undo()
    resumed = train(on_text(*settings, "train.resume=auto"), tmp_path / "run")
    assert resumed.losses == whole.losses and resumed.resumed_at_step == 7


@pytest.mark.parametrize(
    ("before", "arranged", "ranks", "said"),
    [
        ((2, "parallel=fsdp on 2 ranks"), "parallel=fsdp on 2 ranks", 2, None),
        (
            (2, "parallel=ddp on 2 ranks"),
            "parallel=fsdp on 2 ranks",
            2,
            "the numbers differ only by rounding and dropout",
        ),
        (
            (2, "parallel=fsdp on 2 ranks"),
            "parallel=tp on 2 ranks",
            1,
            "with parallel=tp on 2 ranks, after parallel=fsdp on 2 ranks: .* a step has 1/2 of the sequences it had",
        ),
        ((1, "parallel=tp on 2 ranks"), "parallel=ddp on 2 ranks", 2, "a step has 2 times the sequences it had"),
        (
            (2, "parallel=ddp on 2 ranks"),
            "parallel=ddp on 3 ranks",
            3,
            "with parallel=ddp on 3 ranks, after parallel=ddp on 2 ranks: .* a step has 3/2 times the sequences",
        ),
    ],
)
def test_other_ranks_are_told_by_how_they_share_the_model(settings, before, arranged, ranks, said):
    config = settings()
    manifest = {"ranks": before[0], "arrangement": before[1], "config": plain_config(config)}
    found = other_ranks(manifest, config, ranks, arranged)
    assert found is None if said is None else re.search(said, found)
