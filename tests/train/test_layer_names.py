"""Kernels of a replayed iteration get the layers of an eager one, where both have the same kernels in one order."""

import json
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from graphmod.train.report.layer_names import DIFFERENTIATE, UPDATE, name_replays
from graphmod.train.run.loop import train

HOST, DEVICE, STREAM = 11, 0, 7
RUN, EAGER = "step of the run", "eager step"
LAYERS = ["layers.0", "layers.1"]
FORWARD = ["embed", ("layers.0", "mm"), ("layers.0", "gelu"), ("layers.1", "mm"), ("layers.1", "gelu"), "loss"]
# In the order of a backward, with the kernel that adds to a gradient behind the node that made it.
BACKWARD = [
    (None, "loss'"),
    ("layers.1", "gelu'"),
    ("layers.1", "mm'"),
    ("add", "accumulate"),
    ("layers.0", "gelu'"),
    ("layers.0", "mm'"),
    (None, "embed'"),
]
KERNELS = ["embed", "mm", "gelu", "mm", "gelu", "loss", *(name for _, name in BACKWARD), "norm", "adam"]


class Trace:
    """Writes events as the profiler does: host ranges, launches in them, and kernels that run after their launch."""

    def __init__(self):
        self.events, self.clock, self.correlation, self.sequence = [], 0.0, 0, 100

    def range(self, category, name, inside, **args):
        begin = self.clock
        self.clock += 1
        inside()
        self.clock += 1
        event = {"ph": "X", "cat": category, "name": name, "pid": HOST, "tid": HOST, "ts": begin, "args": args}
        self.events.append(event | {"dur": self.clock - begin})

    def annotated(self, name, inside):
        self.range("user_annotation", name, inside)

    def launch(self, *kernels, how="cudaLaunchKernel"):
        self.correlation += 1
        args = {"correlation": self.correlation}
        self.range("cuda_runtime", how, lambda: None, **args)
        for index, name in enumerate(kernels):
            category = "gpu_memset" if name.startswith("Memset") else "kernel"
            place = {"pid": DEVICE, "tid": STREAM, "ts": self.clock + 3 * index + 5, "dur": 2.5}
            self.events.append({"ph": "X", "cat": category, "name": name, **place, "args": args})

    def operation(self, name):
        """A forward operation that makes an autograd node, with another before it that only sees the same number."""
        seen = {"Sequence number": self.sequence}
        self.range("cpu_op", "aten::t", lambda: None, **seen)
        self.range("cpu_op", f"aten::{name}", lambda: self.launch(name), **seen)
        self.sequence += 1
        return self.sequence - 1

    def remember(self, numbers, layer, name):
        numbers[layer, name + "'"] = self.operation(name)

    def node(self, name, kernel, **args):
        title = f"autograd::engine::evaluate_function: {name}"
        self.range("cpu_op", title, lambda: self.launch(kernel), **args)

    def eager_step(self):
        numbers = {}

        def forward():
            for entry in FORWARD:
                layer, name = entry if isinstance(entry, tuple) else (None, entry)
                # The first operation of a layer sees the number that the last one before the layer saw too.
                self.range("cpu_op", "aten::view", lambda: None, **{"Sequence number": self.sequence})
                numbered = partial(self.remember, numbers, layer, name)
                numbered() if layer is None else self.annotated(layer, numbered)
            for layer, name in BACKWARD:
                if layer == "add":
                    self.node("AccumulateGrad", name)
                else:
                    self.node(name, name, **{"Sequence number": numbers[layer, name]})

        def step():
            self.launch("copy of the batch")
            self.annotated(DIFFERENTIATE, forward)
            self.annotated(UPDATE, lambda: [self.launch(name) for name in ("norm", "adam")])

        self.annotated(EAGER, step)
        self.clock += 100

    def replay(self, kernels=KERNELS, cut=3):
        """As two graphs, since a capture is cut where its first write is."""

        def step():
            self.launch("copy of the batch")
            self.launch(*kernels[:cut], how="cudaGraphLaunch")
            self.clock += 30
            self.launch(*kernels[cut:], how="cudaGraphLaunch_v10000")

        self.annotated(RUN, step)
        self.clock += 100

    def named(self):
        return name_replays(self.events, RUN, EAGER, LAYERS)


@pytest.fixture
def trace():
    trace = Trace()
    for _ in range(2):
        trace.replay()
    for _ in range(2):
        trace.eager_step()
    return trace


def covered(trace, named):
    """The names around each replayed kernel, outermost first, by the name of the kernel."""
    ranges = [e for e in named.events if e["ph"] == "X"]
    found = []
    for kernel in trace.events:
        if kernel["cat"] == "kernel":
            end = kernel["ts"] + kernel["dur"]
            around = [e for e in ranges if e["ts"] <= kernel["ts"] and end <= e["ts"] + e["dur"]]
            if around:
                found.append((kernel["name"], [e["name"] for e in sorted(around, key=lambda e: -e["dur"])]))
    return found


def test_every_kernel_of_a_replay_gets_its_phase_and_layer(trace):
    named = trace.named()
    one, two = ["forward", "layers.0"], ["forward", "layers.1"]
    first, second = ["backward", "layers.1"], ["backward", "layers.0"]
    forward = [["forward"], one, one, two, two, ["forward"]]
    backward = [["backward"], first, first, first, second, second, ["backward"]]
    labels = [*forward, *backward, ["optimizer"], ["optimizer"]]
    assert covered(trace, named) == 2 * list(zip(KERNELS, labels, strict=True))
    assert "15 kernels" in named.note and "9 of them" in named.note
    assert named.phase_us == {"forward": 6 * 2.5, "backward": 7 * 2.5, "optimizer": 2 * 2.5}


def test_the_names_have_a_track_of_their_own_on_the_device(trace):
    named = trace.named()
    assert {e["pid"] for e in named.events} == {DEVICE}
    (track,) = {e["tid"] for e in named.events}
    assert track not in {e["tid"] for e in trace.events if e["pid"] == DEVICE}
    assert [e["args"] for e in named.events if e["name"] == "thread_name"] == [{"name": "layers of replays"}]


def test_ranges_of_kernels_that_overlap_do_not(trace):
    for event in trace.events:
        if event["cat"] == "kernel":
            event["dur"] = 3.5  # longer than to the start of the next
    ranges = sorted((e for e in trace.named().events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
    open_ends = []
    for event in ranges:
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1], event
        open_ends.append(event["ts"] + event["dur"])


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (KERNELS[:-1], "a replay has 14 kernels and an eager step 15; number 15 is nothing in the replay and adam"),
        ([*KERNELS, "more"], "number 16 is more in the replay and nothing"),
        ([*KERNELS[:4], "gelu_fast", *KERNELS[5:]], "number 5 is gelu_fast in the replay and gelu in the eager step"),
        ([*KERNELS[1::-1], *KERNELS[2:]], "number 1 is mm in the replay and embed"),
    ],
)
def test_where_the_kernels_differ_nothing_is_named_and_the_note_says_how(trace, kernels, reason):
    trace.replay(kernels)
    named = trace.named()
    assert named.events == [] and named.phase_us == {}
    assert "no layer names" in named.note and reason in named.note


@pytest.mark.parametrize("inside", ["Memset (Unknown)", "void vectorized_elementwise_kernel<4, FillFunctor<int> >"])
def test_memory_is_set_under_another_name_in_a_graph_and_that_is_no_difference(inside):
    trace = Trace()
    trace.replay([inside if name == "norm" else name for name in KERNELS])
    trace.eager_step()
    for event in trace.events:
        if event["name"] == "norm":
            event.update(cat="gpu_memset", name="Memset (Device)")
    assert "15 kernels" in trace.named().note


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([], "there is no GPU"),
        (["replay"], "no eager step"),
        (["eager_step"], "launched no graph"),
    ],
)
def test_a_trace_without_what_it_takes_is_left_alone(steps, reason):
    trace = Trace()
    for step in steps:
        getattr(trace, step)()
    assert trace.named().events == [] and reason in trace.named().note


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_a_real_eager_step_tells_the_layers_of_its_backward(tmp_path, again):
    """Each operation of a CPU trace that does work is given a launch and a kernel, as a GPU would have."""
    layers = torch.nn.ModuleList(Block() for _ in range(3))
    head, x = torch.nn.Linear(8, 5), torch.randn(4, 8)

    def differentiate():
        hidden = x
        for index, layer in enumerate(layers):
            run = partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False) if again else layer
            with record_function(f"layers.{index}"):
                hidden = run(hidden)
        with torch.autograd.set_multithreading_enabled(False):
            head(hidden).logsumexp(-1).sum().backward()

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            with record_function(EAGER):
                with record_function(DIFFERENTIATE):
                    differentiate()
                with record_function(UPDATE):
                    torch._foreach_mul_([p.data for p in layers.parameters()], 0.5)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    work = {"aten::addmm", "aten::mm", "aten::gelu", "aten::gelu_backward", "aten::native_layer_norm", "aten::add"}
    work |= {"aten::native_layer_norm_backward", "aten::_foreach_mul_", "aten::sum"}
    spans = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == EAGER]
    launched = [e for e in events if e.get("cat") == "cpu_op" and e["name"] in work]
    outer = [o for o in launched if o["name"] in ("aten::add", "aten::sum")]
    launched = [e for e in launched if not any(o is not e and o["ts"] <= e["ts"] < o["ts"] + o["dur"] for o in outer)]
    added = []
    for number, op in enumerate(launched):
        args = {"correlation": number}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": args, "dur": 0.0}
        added.append(op | launch | {"ts": op["ts"] + op["dur"] / 2})
        kernel = {"ph": "X", "cat": "kernel", "name": op["name"], "pid": DEVICE, "tid": STREAM, "dur": 1.0}
        added.append(kernel | {"ts": op["ts"] + 1e6, "args": args})
    end = max(e["ts"] for e in added) + 1e6
    begin = spans[-1]["ts"]
    names = [op["name"] for op in sorted(launched, key=lambda e: e["ts"]) if op["ts"] >= begin]
    host = {"ph": "X", "pid": HOST, "tid": HOST, "ts": end, "dur": 10.0, "args": {"correlation": -1}}
    added += [host | {"cat": "user_annotation", "name": RUN}, host | {"cat": "cuda_runtime", "name": "cudaGraphLaunch"}]
    place = {"ph": "X", "cat": "kernel", "pid": DEVICE, "tid": STREAM, "dur": 1.0, "args": {"correlation": -1}}
    added += [place | {"name": name, "ts": end + 2.0 * index} for index, name in enumerate(names)]
    named = name_replays([*events, *added], RUN, EAGER, [f"layers.{index}" for index in range(3)])
    ranges = [e for e in named.events if e["ph"] == "X"]
    counts = [(e["name"], e["args"]["kernels"]) for e in ranges if e["name"].startswith("layers")]
    # Forward: norm, two matrices, gelu, sum of the two branches. Backward: two matrices and a bias for each matrix,
    # gelu, norm; where layers run again, also their forward but for its last sum, which saves nothing.
    backward = dict(counts[3:])
    assert [name for name, _ in counts[:3]] == list(backward)[::-1]
    assert [count for _, count in counts[:3]] == [5, 5, 5], named.note
    assert set(backward.values()) == {8 + 4 if again else 8}, counts
    assert [e["name"] for e in ranges if not e["name"].startswith("layers")] == ["forward", "backward", "optimizer"]


def test_a_run_on_the_cpu_says_why_there_are_no_names(tiny, tmp_path):
    result = train(tiny("graph=full_iteration", "data.max_bytes=20000", "train.profile=true"), tmp_path / "whole")
    assert "there is no GPU" in result.profile["run"]["layers"] and "no layer names" in result.report()
    layered = train(tiny("graph=per_layer", "data.max_bytes=20000", "train.profile=true"), tmp_path / "layered")
    assert "layers" not in layered.profile["run"]


def test_a_profile_of_a_compiled_run_compiles_nothing_while_it_records(tiny, tmp_path):
    settings = ["graph=full_iteration", "graph.compile=default", "data.max_bytes=20000", "train.profile=true"]
    train(tiny(*settings), tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert not [e["name"] for e in events if "compile_id" in e.get("name", "")]


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["llama_tiny", "gpt2_tiny"])
def test_on_a_gpu_the_kernels_of_a_replayed_iteration_are_named(tiny, tmp_path, model):
    settings = ["graph=full_iteration", "train.device=cuda", "data.max_bytes=20000", "train.profile=true"]
    result = train(tiny(*settings, f"model={model}", "train.deterministic=true"), tmp_path)
    found = result.profile["run"]
    assert "kernels of a replay named" in found["layers"], found["layers"]
    assert all(found[f"{phase}_ms"] > 0 for phase in ("forward", "backward", "optimizer"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = [e["name"] for e in events if e.get("cat") == "graph_layers"]
    layer = "model.layers.1" if model == "llama_tiny" else "transformer.h.1"
    assert ranges.count(layer) == 2 * ranges.count("optimizer") == 2 * 3
