"""`train.log`: the same points in TensorBoard, in a CSV file and in W&B, each step once."""

import csv
import os
import shutil
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from graphmod import errors
from graphmod.errors import ConfigError, GraphmodError
from graphmod.train.metrics import CSV_FILE, ID_FILE, CsvLogger, by_full_name
from graphmod.train.run import train
from graphmod.train.settings import plain_config

EVERY = ["train.log_every=1", "train.checkpoint_every=3", "train.eval_every=4", "train.eval_batches=1"]


def lines(folder):
    with (folder / CSV_FILE).open(newline="") as file:
        return list(csv.DictReader(file))


def points(folder):
    """{tag: {step: value}} as TensorBoard has them."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


class FakeWandb(types.ModuleType):
    """Keeps what it is told. As the real one, it merges what comes for one step and drops steps of before."""

    class Html(str):
        pass

    class Run:
        def __init__(self, given, history):
            self.given, self.history, self.exit_code = given, history, None

        def log(self, values, step):
            if step >= max(self.history, default=0):
                self.history.setdefault(step, {}).update(values)

        def finish(self, exit_code):
            self.exit_code = exit_code

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.histories = [], {}

    def init(self, **given):
        self.runs.append(self.Run(given, self.histories.setdefault(given["id"], {})))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_all_loggers_have_the_same_points(on_text, tmp_path, wandb):
    config = on_text(*EVERY, "train.log=[tensorboard,csv,wandb]")
    train(config, tmp_path)
    shown = points(tmp_path)
    assert len(shown["train/loss"]) == 8 and set(shown["eval/loss"]) == {4, 8}
    table = lines(tmp_path)
    assert [int(line["step"]) for line in table] == list(range(1, 9)) and set(table[0]) == {"step", *shown}
    of_csv = {tag: {int(line["step"]): float(line[tag]) for line in table if line[tag]} for tag in shown}
    (run,) = wandb.runs
    of_wandb = {tag: {step: had[tag] for step, had in run.history.items() if tag in had} for tag in shown}
    assert of_csv == of_wandb
    for tag, values in shown.items():
        assert values == pytest.approx(of_csv[tag]), tag  # TensorBoard has 32 bits of each
    assert run.given["config"] == by_full_name(plain_config(config)) and run.exit_code == 0


def test_wandb_is_offline_unless_its_own_variables_say_otherwise(on_text, tmp_path, wandb, monkeypatch):
    config = on_text("train.log=wandb", "train.steps=1", "train.checkpoint=false")
    train(config, tmp_path / "mine")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "texts")
    train(config, tmp_path / "other")
    first, second = (run.given for run in wandb.runs)
    assert (first["mode"], first["project"], first["name"]) == ("offline", "graphmod", "mine")
    assert (second["mode"], second["project"], second["name"]) == ("online", "texts", "other")
    assert first["id"] != second["id"] and first["dir"] == str(tmp_path / "mine")


@pytest.mark.parametrize("place", ["csv", "wandb"])
def test_a_resumed_run_goes_on_without_doubled_steps(on_text, tmp_path, wandb, stop_after, place):
    train(on_text(*EVERY, "train.log=csv"), tmp_path / "whole")
    settings, folder = [*EVERY, f"train.log={place}"], tmp_path / "stopped"
    stop_after(5)
    train(on_text(*settings), folder)
    shutil.rmtree(folder / "checkpoints" / "step_00000005")  # as if it had been killed: steps 4 and 5 come again
    train(on_text(*settings, "train.resume=auto"), folder)
    whole = {int(line["step"]): float(line["train/loss"]) for line in lines(tmp_path / "whole")}
    if place == "csv":
        table = lines(folder)
        assert [int(line["step"]) for line in table] == list(whole)
        assert {int(line["step"]): float(line["train/loss"]) for line in table} == whole
        assert [int(line["step"]) for line in table if line["eval/loss"]] == [4, 8]
    else:
        assert len({run.given["id"] for run in wandb.runs}) == 1 and len(wandb.runs) == 2
        assert all(run.given["resume"] == "allow" for run in wandb.runs)
        assert (folder / ID_FILE).read_text().strip() == wandb.runs[0].given["id"]
        assert {step: had["train/loss"] for step, had in wandb.runs[1].history.items()} == whole


def test_a_run_resumed_elsewhere_or_with_another_logger_begins_anew(on_text, tmp_path, wandb, stop_after):
    stop_after(5)
    train(on_text(*EVERY, "train.log=wandb"), tmp_path / "first")
    settings = [*EVERY, "train.log=[csv,wandb]", f"train.resume={tmp_path / 'first'}"]
    from graphmod.train.resume import claimed

    config = on_text(*settings)
    with claimed(config, tmp_path / "second", named=True) as point:
        train(config, tmp_path / "second", point)
    assert [int(line["step"]) for line in lines(tmp_path / "second")] == [6, 7, 8]
    assert wandb.runs[0].given["id"] != wandb.runs[1].given["id"]


def test_csv_columns_and_values_may_come_later(tmp_path):
    logger = CsvLogger(tmp_path, None)
    logger.scalars({"a": 0.1}, 1)
    logger.flush()
    logger.scalars({"b": 2.0}, 1)  # of the same step, after it was written
    logger.scalars({"a": float("nan")}, 2)
    logger.close()
    assert (tmp_path / CSV_FILE).read_bytes() == b"step,a,b\r\n1,0.1,2.0\r\n2,nan,\r\n"


def test_a_line_that_a_killed_process_left_half_is_dropped(tmp_path):
    (tmp_path / CSV_FILE).write_bytes(b"step,a,b\r\n1,0.1,2.0\r\n2,0.3,4.0\r\n3,0.5")
    logger = CsvLogger(tmp_path, 5)
    logger.scalars({"a": 1.0, "c": 3.0}, 6)
    logger.close()
    assert (tmp_path / CSV_FILE).read_bytes() == b"step,a,b,c\r\n1,0.1,2.0,\r\n2,0.3,4.0,\r\n6,1.0,,3.0\r\n"


def test_a_run_that_fails_closes_what_it_logs_to_as_failed(on_text, tmp_path, wandb):
    with pytest.raises(GraphmodError, match="NaN or infinite"):
        train(on_text("train.log=wandb", "optim.learning_rate=1e30", "train.log_every=1"), tmp_path)
    assert wandb.runs[0].exit_code == 1


def test_no_logger_at_all(on_text, tmp_path):
    train(on_text("train.log=[]", "train.steps=1", "train.checkpoint=false"), tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        ".lock",
        "result.json",
        "train.log",
        "text.txt",
    }


def test_a_logger_that_is_not_there_or_not_installed_is_said_at_once(tiny, monkeypatch):
    with pytest.raises(ConfigError, match=r"train.log=tensorbord is not a logger; write one of tensorboard, csv"):
        tiny("train.log=tensorbord")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"train.log=wandb needs the wandb library: pip install -e '.\[wandb\]'"):
        tiny("train.log=[csv,wandb]")
    monkeypatch.setattr(errors, "CLONE", None)  # as in a wheel
    with pytest.raises(ConfigError, match=r"train.log=wandb needs the wandb library: pip install 'graphmod\[wandb\]'"):
        tiny("train.log=[csv,wandb]")


def test_what_wandb_raises_is_one_sentence(on_text, tmp_path, wandb, monkeypatch):
    def refused(**given):
        raise RuntimeError("api_key not configured (no-tty).\ncall wandb.login()")

    monkeypatch.setattr(wandb, "init", refused)
    with pytest.raises(GraphmodError, match=r"W&B does not begin a run: api_key not configured \(no-tty\)\. WANDB_"):
        train(on_text("train.log=[csv,wandb]", "train.steps=1"), tmp_path)
