"""Frames of any code are followed, and following them breaks nothing."""

import os

import pytest
import torch
from harness import config

from graphmod import CUDAGraphModule
from graphmod.capture.recording import record
from graphmod.decode.step.compile import compiled_code
from graphmod.guards import frames
from graphmod.guards.library import TORCH


def test_code_that_dynamo_wrote_is_followed_as_any_other(device):
    scale = [2.0]

    def run(x):
        return x * scale[0] * len("here")

    constants = tuple({"a": 1, "b": 2} if one == "here" else one for one in run.__code__.co_consts)
    run.__code__ = run.__code__.replace(co_consts=constants)
    wrapper, x = CUDAGraphModule(run, config()), torch.ones(3, device=device)
    for step in range(12):
        scale[0] = 2.0 if step < 6 else 3.0
        assert wrapper(x).tolist() == [scale[0] * 2] * 3
    assert wrapper.stats.replays > 4


def test_an_error_in_following_code_is_no_error_of_the_program(device, monkeypatch):
    def fails(code):
        raise LookupError("no such thing")

    monkeypatch.setattr(frames, "_reads_of", fails)
    wrapper, x = CUDAGraphModule(lambda x: x * 2, config()), torch.ones(3, device=device)
    for _ in range(6):
        assert wrapper(x).tolist() == [2.0] * 3
    assert wrapper.stats.replays == 0 and wrapper.last_failure


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_is_compiled_in_the_recorded_call_is_no_change(backend, fresh_dynamo):
    compiled = torch.compile(lambda x: x.sin() * 2 + 1, backend=backend)

    def run(x):
        with compiled_code():
            return compiled(x)

    with torch.inference_mode():
        _, recording = record(run, (torch.ones(8),), {}, ["x"], None)
    assert recording.refused is None


@pytest.mark.parametrize("whose", ["torch", "user"])
def test_the_environment_is_looked_at_for_users_and_not_for_torch(whose, device, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHMOD_TEST", "1")
    source = """
import os
def lookup():
    found = os.environ.get("GRAPHMOD_TEST")
    os.environ["GRAPHMOD_TEST"] = found + "1"
    return os.getenv("GRAPHMOD_TEST")
"""
    folder = os.path.join(TORCH, "_made_up") if whose == "torch" else str(tmp_path)
    made: dict = {}
    exec(compile(source, os.path.join(folder, "lookup.py"), "exec"), made)

    def run(x):
        made["lookup"]()
        return x * 2

    wrapper, x = CUDAGraphModule(run, config()), torch.ones(3, device=device)
    for _ in range(8):
        assert wrapper(x).tolist() == [2.0] * 3
    assert (wrapper.stats.replays > 0) == (whose == "torch")
    assert (wrapper.last_failure == "") == (whose == "torch")
