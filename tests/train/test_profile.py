"""The trace shows steps of the run beside eager ones, and the summary counts what the GPU did."""

import json
from types import SimpleNamespace

import pytest
import torch

from graphmod.cli.job import gpu_busy_ms
from graphmod.train import run as loop
from graphmod.train.compare import compare, table
from graphmod.train.profile import busy_us, communication_us
from graphmod.train.result import RunResult
from graphmod.train.run import train
from graphmod.train.settings import plain_config


def test_overlapping_intervals_count_once():
    assert busy_us([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == 3 + 3
    assert busy_us([]) == 0


@pytest.mark.parametrize("scope", ["none", "per_layer", "full_iteration"])
@pytest.mark.slow
def test_the_trace_names_the_steps_and_the_layers(tiny, tmp_path, scope):
    settings = [f"graph={scope}", "data.max_bytes=20000"]
    plain = train(tiny(*settings), tmp_path / "plain")
    result = train(tiny(*settings, "train.profile=true"), tmp_path / "profiled")
    assert result.losses == plain.losses
    assert all(result.graph[name] == plain.graph[name] for name in ("captures", "replays", "eager_calls"))
    events = json.loads((tmp_path / "profiled" / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("step of the run") == names.count("eager step") == 3
    # From a graph of the whole iteration, or of all layers, no Python of the layers runs.
    assert names.count("model.layers.1") == (6 if scope == "none" else 3)
    assert names.count("model") == (3 if scope == "per_layer" else 0)
    assert set(result.profile) == {"run", "eager"} and all(part["step_ms"] > 0 for part in result.profile.values())
    assert "profile, eager" in result.report()


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["none", "per_layer", "full_iteration"])
def test_on_a_gpu_busy_and_idle_make_up_the_step(tiny, tmp_path, scope):
    result = train(tiny(f"graph={scope}", "train.device=cuda", "data.max_bytes=20000", "train.profile=true"), tmp_path)
    for part in result.profile.values():
        assert part["busy_ms"] + part["idle_ms"] == pytest.approx(part["step_ms"])
        assert 0 < part["busy_share"] <= 1 and part["kernels"] > 10
    assert torch.cuda.is_available()


def test_communication_is_hidden_as_far_as_other_kernels_run_meanwhile():
    send, gemm = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gemm"
    kernels = [(gemm, 0, 10), (send, 5, 20), (gemm, 12, 14), (send, 18, 22), ("void NCCL_copy", 30, 31)]
    assert communication_us(kernels) == (17 + 1, 5 + 2)
    assert communication_us([(gemm, 0, 10)]) == (0, 0)


def test_the_report_and_the_comparison_tell_how_long_ranks_communicate():
    times = {"busy_ms": [9.0, 9.0], "comm_ms": [4.0, 2.0], "comm_hidden_ms": [2.0, 1.0]}
    result = RunResult("none", device="NVIDIA H200", ranks=2, step_ms=[10.0] * 3, host_ms=[1.0] * 3, rank_profile=times)
    assert result.summary()["comm_ms"] == 3.0 and result.summary()["comm_hidden_share"] == 0.5
    assert "communication takes 3.00 ms of a step" in result.report()
    (row,) = compare({"run": result}, {"run": gpu_busy_ms(result)})
    assert (row.comm_ms, row.comm_hidden_share, row.gpu_busy_share) == (3.0, 0.5, 0.9)
    assert "comm hidden" in table([row]) and "50%" in table([row])


def test_a_run_of_a_multirun_is_looked_at_again_in_a_few_steps_whatever_it_was_told(tiny, monkeypatch):
    config, again = tiny("train.epochs=2", "train.sample_every=1", "data.max_bytes=20000"), []
    monkeypatch.setattr("graphmod.cli.job.train", lambda config, *_, **__: again.append(config.train))
    assert gpu_busy_ms(RunResult("none", device="NVIDIA H200", config=plain_config(config))) is None
    (told,) = again
    assert (told.steps, told.epochs, told.sample_every, told.checkpoint) == (8, None, 0, False)


def test_a_run_on_several_gpus_records_some_steps_at_its_end_and_logs_what_ranks_communicate(settings, monkeypatch):
    logged = {}
    found = {"busy_ms": 9.0, "comm_ms": 4.0, "comm_hidden_ms": 1.0, "kernels": 5}
    monkeypatch.setattr("graphmod.train.profile.profile_briefly", lambda step, batches: found)
    run = SimpleNamespace(
        config=settings(),
        ranks=SimpleNamespace(count=2, first=True, all=lambda value: [value, value]),
        device=torch.device("cuda"),
        step=None,
        batches=SimpleNamespace(sampler=lambda step: torch.zeros(1)),
        metrics=SimpleNamespace(log_numbers=logged.update),
    )
    result = RunResult("none", ranks=2)
    loop.add_profile(run, result)
    assert result.rank_profile == {"busy_ms": [9.0] * 2, "comm_ms": [4.0] * 2, "comm_hidden_ms": [1.0] * 2}
    assert logged == {"perf/comm_ms": 4.0, "perf/comm_hidden_share": 0.25}
