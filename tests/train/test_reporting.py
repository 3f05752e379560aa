"""What a run tells: at its start, at each point, at its end, and in its files."""

import errno
import io
import json
import logging
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.plugins.hparams.api_pb2 import Status
from transformers import AutoConfig, AutoModelForCausalLM

import graphmod
from graphmod.train.display import LOG_FILE, Display, Journal
from graphmod.train.model import build_model, model_config
from graphmod.train.result import (
    RunResult,
    commit,
    flops_per_token,
    multiplied_parameters,
    peak_flops,
    utilization,
)
from graphmod.train.run import NonFiniteError, train
from graphmod.train.step import TrainStep

CPU = torch.device("cpu")
EVALUATED = ["train.eval_every=4", "train.eval_batches=2"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def built(tiny, *overrides):
    config = tiny(*overrides)
    dims = model_config(config.model, 256, config.data.seq_len)
    return build_model(config.model, dims, config.train.precision, CPU, 0), dims


def test_flops_of_a_token_are_counted_by_hand(tiny):
    model, dims = built(tiny)  # two layers of width 32, two heads of 16, an MLP of 64
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    head = 256 * 32
    assert multiplied_parameters(model) == 2 * layer + 32 + head, "the embedding is only looked up"
    assert flops_per_token(model, dims, 16) == 6 * (2 * layer + 32 + head) + 12 * 2 * 2 * 16 * 16


def test_a_tied_embedding_is_multiplied_and_positions_are_not(tiny):
    model, _ = built(tiny, "model=gpt2_tiny", "model.tie_embeddings=true")
    positions = model.transformer.wpe.weight.numel()
    assert multiplied_parameters(model) == sum(p.numel() for p in model.parameters()) - positions


def test_a_model_of_experts_has_no_known_flops():
    config = AutoConfig.for_model(
        "mixtral",
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "vocab_size": 32, "num_local_experts": 2},
    )
    assert flops_per_token(AutoModelForCausalLM.from_config(config), config, 16) is None


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", None),
        ("CPU, 2 threads", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(device, tflops):
    assert peak_flops(device) == (None if tflops is None else tflops * 1e12)


def test_utilization_is_what_the_model_takes_of_what_there_is(tiny):
    model, dims = built(tiny)
    assert utilization(model, dims, 16, "NVIDIA H100 PCIe") == (flops_per_token(model, dims, 16), 756e12)
    assert utilization(model, dims, 16, "NVIDIA H100 PCIe", 2) == (flops_per_token(model, dims, 16), 1512e12)
    assert utilization(model, dims, 16, "CPU") is None
    result = RunResult("none", tokens_per_step=100, step_ms=[2.0], host_ms=[1.0], flops_per_token=2e9, peak_flops=1e15)
    assert result.mfu == pytest.approx(0.1) and "50,000 tokens/s, MFU 10.0%" in result.report()
    result.peak_flops = None
    assert result.mfu is None and "MFU" not in result.report()


POINT = {"train/loss": 2.5, "train/lr": 1e-3, "train/grad_norm": 0.5, "perf/step_ms": 500.0}
POINT |= {"perf/tokens_per_s": 12345.6, "perf/mfu": 0.412}
LINE = "step 40/100: loss 2.5000, lr 1.00e-03, gradient norm 0.5, step 500.0 ms, 12,346 tokens/s, MFU 41.2%, 00:30 left"
EVALUATION = "step 40/100: evaluation loss 2.2500, with averaged weights 2.1250"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_terminal_has_a_bar_and_a_file_has_lines(tmp_path, monkeypatch, kind):
    shown = kind()
    monkeypatch.setattr(sys, "stderr", shown)
    with Display(Journal(tmp_path), 30, 100) as display:
        display.state("captured")
        display.point(40, POINT)
        display.point(40, {"eval/loss": 2.25, "eval/ema_loss": 2.125})
        display.point(50, {**POINT, "train/lr": None, "perf/mfu": None})
        display.advance()
    lines = shown.getvalue().replace("\r", "\n").split("\n")
    assert EVALUATION in lines, "evaluations are shown everywhere"
    assert (LINE in lines) == (kind is io.StringIO)
    assert any("graph=captured, loss=2.500, tokens/s=12,346, MFU=41%" in line for line in lines) == (kind is Terminal)
    written = (tmp_path / LOG_FILE).read_text().splitlines()
    assert [line[20:] for line in written[:2]] == [LINE, EVALUATION]
    assert written[2][20:] == "step 50/100: loss 2.5000, gradient norm 0.5, step 500.0 ms, 12,346 tokens/s, 00:25 left"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_run_goes_on_where_nobody_reads_its_lines(tmp_path, monkeypatch, kind):
    class Unread(kind):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    shown = kind()
    monkeypatch.setattr(sys, "stderr", shown)
    with Display(Journal(tmp_path), 30, 100) as display:
        shown.write = Unread().write
        display.point(40, {"eval/loss": 2.25})
        display.advance()
        display.point(50, {"eval/loss": 2.0})
    lines = [line[20:] for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    warning = "warning: the standard error output cannot be written: Broken pipe; the run goes on"
    assert lines == ["step 40/100: evaluation loss 2.2500", warning, "step 50/100: evaluation loss 2.0000"]


def test_the_log_file_has_messages_of_graphmod_and_is_added_to(tmp_path):
    journal = Journal(tmp_path)
    journal.write("first")
    with journal.recording():
        logging.getLogger("graphmod").warning("of two\nlines")
    logging.getLogger("graphmod").warning("outside")
    Journal(tmp_path).write("later")
    assert [line[20:] for line in (tmp_path / LOG_FILE).read_text().splitlines()] == [
        "first",
        "warning: of two",
        "lines",
        "later",
    ]


def test_a_log_file_that_cannot_be_written_is_an_error_of_the_run_and_not_of_logging(tmp_path, capsys):
    journal = Journal(tmp_path / "missing")
    with journal.recording():
        logging.getLogger("graphmod").warning("a message")
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        journal.write("a line")


def test_a_run_says_what_it_trains_then_how_it_goes_then_how_it_went(tiny, tmp_path, capfd):
    said = []
    settings = [*EVALUATED, "train.ema_decay=0.5", "data.max_bytes=20000", "train.grad_accumulation=2"]
    result = train(tiny(*settings, "graph=full_iteration"), tmp_path, say=said.append)
    (opening,) = said
    assert opening.splitlines()[0] == "model:   LlamaForCausalLM, 37,024 parameters, precision fp32"
    assert opening.splitlines()[2:] == [
        "batches: 8 steps, each of 2 microbatches of 2 x 16 tokens; 512 tokens in all",
        "device:  CPU, 1 thread, graph=full_iteration",
        f"folder:  {tmp_path}",
    ]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 3/8", "step 4/8", "step 6/8", "step 8/8", "step 8/8"]
    assert lines[0].startswith(f"step 3/8: loss {result.losses[2]:.4f}, lr ")
    evaluated = (
        f"step 8/8: evaluation loss {result.eval_losses[-1][1]:.4f}, with averaged weights {result.ema_loss:.4f}"
    )
    assert lines[-1] == evaluated
    written = [line[20:] for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert [line for line in written if line.startswith("step ")] == lines
    assert written[:5] == opening.splitlines() and "\n".join(written).endswith(result.report())
    last = result.report().splitlines()[-1]
    assert last.endswith(f"evaluation with averaged weights {result.ema_loss:.3f} nats per token")
    own_loss = replace(result, config={"train": {"loss": {"_target_": "my.loss"}}})
    assert last == f"{own_loss.report().splitlines()[-1]} nats per token"
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("eval/ema_loss")[-1].value == pytest.approx(result.ema_loss)


def hparams(folder, kind):
    events = EventAccumulator(str(folder))
    events.Reload()
    content = events.PluginTagToContent("hparams")
    return plugin_data_pb2.HParamsPluginData.FromString(content[f"_hparams_/{kind}"])


def test_tensorboard_has_the_settings_as_hparams(tiny, tmp_path):
    train(tiny("data.max_bytes=20000", "train.steps=1", "graph=none", "optim.learning_rate=0.25"), tmp_path)
    found = hparams(tmp_path, "session_start_info").session_start_info.hparams
    assert found["optim.learning_rate"].number_value == 0.25 and found["graph.scope"].string_value == "none"
    assert found["train.deterministic"].string_value == "false" and found["data.buckets"].string_value == "null"
    named = {info.name.tag for info in hparams(tmp_path, "experiment").experiment.metric_infos}
    assert named == {"train/loss", "eval/loss", "perf/step_ms", "perf/tokens_per_s"}
    assert hparams(tmp_path, "session_end_info").session_end_info.status == Status.Value("STATUS_SUCCESS")


@pytest.mark.parametrize("scope", ["none", "per_layer", "full_iteration"])
def test_graphs_of_evaluation_are_counted_apart(tiny, tmp_path, scope):
    settings = ["data.max_bytes=20000", "train.steps=12", f"graph={scope}"]
    plain = train(tiny(*settings), tmp_path / "plain")
    evaluated = train(tiny(*settings, *EVALUATED), tmp_path / "evaluated")
    names = ("captures", "replays", "eager_calls", "failures")
    assert [plain.graph[name] for name in names] == [evaluated.graph[name] for name in names]
    if scope == "full_iteration":
        assert evaluated.graph["replays"] + evaluated.graph["eager_calls"] == 12, "one a step"
        counters = evaluated.evaluation_graph
        assert counters["replays"] + counters["eager_calls"] == 6 and counters["captures"] == 1
    counted = scope != "none"
    assert ("  evaluation: captures " in evaluated.report()) == counted
    assert "  evaluation: captures " not in plain.report() and "  training: captures " in plain.report()


def test_losses_are_decimal_and_exact_and_what_is_no_number_is_a_string(tmp_path):
    third = torch.tensor(1 / 3).item()
    result = RunResult("none", losses=[third, math.inf], eval_losses=[[1, third], [2, math.nan]], ema_loss=-math.inf)
    result.write(tmp_path)

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    written = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert written["losses"] == [third, "inf"] and written["eval_losses"] == [[1, third], [2, "nan"]]
    again = RunResult.read(tmp_path)
    assert again.losses == [third, math.inf] and again.ema_loss == -math.inf
    assert again.eval_losses[0] == [1, third] and math.isnan(again.eval_losses[1][1])


def test_why_a_run_failed_stands_in_its_log(tiny, tmp_path, monkeypatch):
    original = TrainStep.__call__

    def fails(step, batch):
        step.first_nonfinite.zero_()  # in the first step
        return original(step, batch) * math.nan

    monkeypatch.setattr(TrainStep, "__call__", fails)
    with pytest.raises(NonFiniteError) as error:
        train(tiny("data.max_bytes=20000", "graph=none"), tmp_path)
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert lines[-1][20:] == f"error: {error.value}" and "step 1: the loss or a gradient" in lines[-1]


def test_skipped_updates_are_told_in_words():
    result = RunResult("none", skipped_steps=19, first_nonfinite_step=2, losses=[1.0])
    assert "  19 updates skipped; first non-finite step: 2\n" in result.report()
    assert "skipped" not in RunResult("none", losses=[1.0]).report()


@pytest.mark.parametrize(
    ("resumed", "steps", "said"),
    [
        (0, 3, "no step times: timing starts at step 6, after warm-up and capture; the run ended at step 3"),
        (40, 1, "no step times: timing starts at step 46, after warm-up and capture; the run ended at step 41"),
        (40, 0, "no step was left to train: all 40 had been done before the run was resumed"),
        (40, 6, "step 1.00 ms (median from step 46 on)"),
    ],
)
def test_a_run_without_step_times_says_why(resumed, steps, said):
    times = [1.0] * steps
    result = RunResult("none", resumed_at_step=resumed, measured_from_step=5, step_ms=times, host_ms=times)
    assert said in result.report()


def test_a_report_of_emulated_graphs_says_that_nothing_gets_faster():
    result = RunResult("per_layer", device="CPU, 2 threads", graph={"captures": 1, "state": "captured"})
    assert "captured on CPU, 2 threads, where graphs are emulated: the numbers are right" in result.report()
    assert "emulated" not in RunResult("none", device="CPU, 2 threads", graph={"captures": 0}).report()


def test_the_result_names_versions_and_commit(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("graphmod.train.run.commit", lambda: "a" * 40)
    train(tiny("data.max_bytes=20000", "train.steps=1", "graph=none"), tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["versions"]["graphmod"] == graphmod.__version__ and written["commit"] == "a" * 40
    assert written["versions"]["torch"] == torch.__version__ and set(written["versions"]) == {
        *("graphmod", "torch", "transformers", "python")
    }


class TestCommit:
    def git(self, folder, *words):
        who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        ran = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
        return ran.stdout.strip()

    def test_of_a_branch_packed_or_not_of_no_branch_and_of_a_worktree(self, tmp_path):
        main, side = tmp_path / "main", tmp_path / "side"
        main.mkdir()
        assert commit(main) is None
        self.git(main, "init", "--initial-branch=main")
        assert commit(main) is None, "no commit yet"
        inside = main / "inside"
        inside.mkdir()
        for change in ("commit", "pack-refs --all", "checkout --detach"):
            self.git(main, *change.split(), *(("--allow-empty", "-m", "a") if change == "commit" else ()))
            assert commit(main) == self.git(main, "rev-parse", "HEAD"), change
            assert commit(inside) is None, "a folder of somebody else's clone"
        self.git(main, "worktree", "add", "-b", "side", str(side))
        self.git(side, "commit", "--allow-empty", "-m", "b")
        assert commit(side) == self.git(side, "rev-parse", "HEAD") != commit(main)

    def test_is_none_without_git(self, tmp_path, monkeypatch):
        self.git(tmp_path, "init")
        self.git(tmp_path, "commit", "--allow-empty", "-m", "a")
        assert commit(tmp_path) is not None
        monkeypatch.setenv("PATH", "")
        assert commit(tmp_path) is None
