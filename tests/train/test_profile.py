"""The trace shows steps of the run beside eager ones, and the summary counts what the GPU did."""

import json

import pytest
import torch

from graphmod.train.report.profile import busy_us
from graphmod.train.run.loop import train


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
    # A whole iteration replays without any Python of the layers.
    assert names.count("model.layers.1") == (3 if scope == "full_iteration" else 6)
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
