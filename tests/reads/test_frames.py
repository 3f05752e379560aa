"""Frames of any code are followed, and following them breaks nothing."""

import collections
import dis
import inspect
import os
import sys

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from graphmod.reads import frames
from graphmod.reads.frames import noting
from graphmod.reads.reading import Reading
from graphmod.signature.call import Call
from graphmod.step.recording import record
from graphmod.trace.lines import CORE, TORCH
from graphmod.trace.untraced import identity
from tests.support.harness import config


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


def test_a_read_in_a_library_is_told_with_the_users_line_that_led_there():
    one, two = collections.UserDict(a=1), collections.UserDict(a=2)

    def step():
        first = one["a"]
        return first + two["a"]  # by the same code, in a frame that may lie where the other lay

    with noting(step) as notes:
        step()
    lines = {note.owner["a"]: note.where[2][1] for note in notes.notes.values() if note.key == "a"}
    first = step.__code__.co_firstlineno + 1
    assert lines == {1: first, 2: first + 1}


def test_an_error_in_following_code_is_no_error_of_the_program(device, monkeypatch):
    def fails(code):
        raise LookupError("no such thing")

    monkeypatch.setattr(frames, "_plan_of", fails)
    wrapper, x = CUDAGraphModule(lambda x: x * 2, config()), torch.ones(3, device=device)
    for _ in range(6):
        assert wrapper(x).tolist() == [2.0] * 3
    assert wrapper.stats.replays == 0 and wrapper.last_failure


def test_each_turn_of_a_loop_on_one_line_is_told(device):
    class Node:
        def __init__(self, scale, following):
            self.scale, self.following = scale, following

    class Cursor:
        def __init__(self, node):
            self.node = node

    last = Node(4.0, None)
    first = Node(2.0, Node(3.0, last))

    def run(x):
        found, cursor = [], Cursor(first)
        while cursor.node is not None: found.append(cursor.node.scale); cursor.node = cursor.node.following  # fmt: skip  # noqa: E701, E702
        for scale in found:
            x = x * scale
        return x

    wrapper, x = CUDAGraphModule(run, config()), torch.ones(3, device=device)
    for step in range(12):
        last.scale = 4.0 if step < 6 else 5.0
        assert wrapper(x).tolist() == [6.0 * last.scale] * 3
    assert wrapper.stats.replays > 4


def test_an_operation_is_followed_on_its_way_to_the_recorder_at_most(monkeypatch):
    told = collections.Counter()

    def counted(owner, name):
        original = getattr(owner, name)

        def count(self, frame, *more):
            told[frame.f_code] += 1
            return original(self, frame, *more)

        monkeypatch.setattr(owner, name, count)

    for owner, name in ((frames.Frames, "entered"), (frames.Frames, "left"), (Reading, "step")):
        counted(owner, name)
    scale = [1.0]

    def run(x, operations):
        for _ in range(operations):
            x = x * scale[0]
        return x

    seen = []
    for operations in (1, 101):
        told.clear()
        with torch.inference_mode():
            record(Call(run, (torch.ones(8), operations), {}), None)
        seen.append(told.copy())
    few, many = seen
    # Not what is told now and then, as of a weak reference whose object goes.
    often = {code: many[code] - few[code] for code in many if many[code] - few[code] >= 100}
    ours = [code for code in often if code.co_filename.startswith(CORE)]
    # Three functions lead there, up to torch 2.12 by way of a fourth. Later Pythons tell of each once.
    assert len(ours) <= (4 if _BY_TRACE else 0) and all(often[code] < 150 for code in ours), ours
    assert run.__code__ in often


_BY_TRACE = sys.version_info < (3, 12)


@pytest.mark.skipif(_BY_TRACE, reason="sys.monitoring came with Python 3.12")
def test_nothing_is_asked_of_the_interpreter_after_a_recorded_call():
    def run(x):
        return x * len(str(x.shape))

    with torch.inference_mode():
        record(Call(run, (torch.ones(8),), {}), None)
    monitoring = sys.monitoring
    assert not any(monitoring.get_tool(place) == "graphmod" for place in range(6))
    assert not any(monitoring.get_local_events(place, run.__code__) for place in range(6) if monitoring.get_tool(place))
    assert sys.gettrace() is None


def test_a_tracer_that_was_there_is_put_back():
    def follow(*_):
        return None

    sys.settrace(follow)
    try:
        record(Call(lambda x: x * 2, (torch.ones(8),), {}), None)
        assert sys.gettrace() is follow
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_is_compiled_in_the_recorded_call_is_no_change(backend, fresh_dynamo):
    compiled = torch.compile(lambda x: x.sin() * 2 + 1, backend=backend)

    def run(x):
        return compiled(x)

    with torch.inference_mode():
        recording = record(Call(run, (torch.ones(8),), {}), None)
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


def test_what_torchs_optimizers_read_of_a_group_is_known():
    codes = [
        inspect.unwrap(one._init_group).__code__ for one in vars(torch.optim).values() if hasattr(one, "_init_group")
    ]
    assert {identity(code) for code in codes} == frames._groups
    for code in codes:
        read = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_ATTR", "LOAD_METHOD")]
        assert code.co_varnames[:2] == ("self", "group") and {"grad", "state"} <= set(read) <= frames._NAMES


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("change", ["gradient", "state of a parameter", "state", "parameter", "setting"])
def test_what_a_step_reads_of_a_group_is_guarded(kind, change):
    model = nn.Linear(4, 4)
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=torch.tensor(0.1), fused=True, **settings)
    group = optimizer.param_groups[0]

    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        recording = record(Call(step, (torch.ones(2, 4),), {}), None)
    guards = recording.guards
    assert recording.refused is None and guards.changed() is None and guards.moved() is None
    if change == "gradient":
        model.weight.grad = torch.ones(4, 4)
    elif change == "state of a parameter":
        state = optimizer.state[model.weight]
        state.update((key, value.clone()) for key, value in state.items())
    elif change == "state":
        optimizer.state[model.bias] = dict(optimizer.state[model.bias], more=1)
    elif change == "parameter":
        group["params"] = [nn.Parameter(one.detach()) for one in group["params"]]
    else:
        group["maximize"] = True
    assert guards.changed() is not None or guards.moved() is not None


def backend_setting():
    torch.backends.mha.set_fastpath_enabled(True)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval()
    return lambda x: encoder(x.expand(2, 3, 8)), lambda: torch.backends.mha.set_fastpath_enabled(False)


def future_setting():
    torch.__future__.set_swap_module_params_on_conversion(False)
    read = torch.__future__.get_swap_module_params_on_conversion
    return lambda x: x * (2 if read() else 3), lambda: torch.__future__.set_swap_module_params_on_conversion(True)


def sequence():
    engine = torch.quasirandom.SobolEngine(1)
    return lambda x: x * engine.draw(1).to(x.device), engine.reset


def seed():
    torch.manual_seed(3)
    return lambda x: x * (torch.initial_seed() % 97), lambda: torch.manual_seed(4)


def seed_of_a_generator():
    generator = torch.Generator().manual_seed(3)
    return lambda x: x * (generator.initial_seed() % 97), lambda: generator.manual_seed(4)


@pytest.mark.parametrize("kind", [backend_setting, future_setting, sequence, seed, seed_of_a_generator])
def test_what_torch_keeps_in_python_is_a_programs_own(kind, device):
    def run(graphed):
        torch.manual_seed(0)
        read, change = kind()
        call, found = CUDAGraphModule(read, config()) if graphed else read, []
        for index in range(12):
            if index == 6:
                change()
            with torch.no_grad():
                found.append(call(torch.full((8,), index / 8)).clone())
        return found, call

    try:
        (expected, _), (found, call) = run(False), run(True)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(map(torch.equal, expected, found))
    assert call.stats.replays > 4 if kind in (backend_setting, future_setting, sequence) else call.last_failure
