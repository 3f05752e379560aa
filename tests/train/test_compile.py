"""Compiled code is what a capture holds, and graphs of it compute what it computes without them."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_compiler
from torch._dynamo.backends.common import aot_autograd

from graphmod import CUDAGraphModule
from graphmod.errors import ConfigError
from graphmod.trace import recorder as recorder_module
from graphmod.trace.dispatch import is_recording
from graphmod.trace.operations import facts
from graphmod.trace.recorder import Recorder
from graphmod.train import compile as compile_module
from graphmod.train.activations import Recomputed, recompute_activations
from graphmod.train.compile import compiled
from graphmod.train.run import train
from graphmod.train.step import TrainStep
from graphmod.words import warn_once
from tests.support.harness import assert_same, play
from tests.support.harness import config as graph_config
from tests.support.train_steps import build, replays

SCOPES = ["per_layer", "full_iteration"]
# Both compile the same layers, which takes long; `make test-all` has both.
scopes = pytest.mark.parametrize("scope", [pytest.param("per_layer", marks=pytest.mark.slow), "full_iteration"])


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def ran(monkeypatch):
    """What ran of compiled code, as (forward, backward or update, whether under a recorder); also what was compiled."""
    seen = []

    def compiler(kind):
        def compile_graph(graph, inputs):
            seen.append((f"compiled {kind}", is_recording()))

            def run(*args):
                seen.append((kind, is_recording()))
                return graph(*args)

            # What it counts is nothing that a step reads: code of the package's own, for the guards.
            run.__code__ = run.__code__.replace(co_filename=recorder_module.__file__)
            return run

        return make_boxed_compiler(compile_graph)

    compilers = {"fw_compiler": "forward", "bw_compiler": "backward", "inference_compiler": "update"}
    backend = aot_autograd(**{name: compiler(kind) for name, kind in compilers.items()})
    monkeypatch.setattr(compile_module, "_how", lambda how, device: {"backend": backend})
    return seen


@scopes
def test_a_capture_holds_compiled_code_and_compiles_nothing(scope, ran):
    torch.manual_seed(0)
    parts = build(torch.device("cpu"))
    run = TrainStep(parts["model"], parts["optimizer"], compile="default", config=graph_config(scope=scope))
    batch = torch.randint(0, 30, (1, 2, 7))
    per_step = 2 if scope == "per_layer" else 1
    for _ in range(3):
        run(batch)
    assert {("compiled forward", False), ("compiled backward", False), ("compiled update", False)} <= set(ran)
    assert not any(kind.startswith("compiled") and recorded for kind, recorded in ran)
    ran.clear()
    run(batch)  # captures
    assert ran.count(("forward", True)) == per_step
    assert ran.count(("update", True)) >= 1
    assert ran.count(("backward", True)) == per_step, "it writes over what its forward saved"
    assert not any(kind.startswith("compiled") for kind, _ in ran)
    ran.clear()
    run(batch)
    assert ran == [], "a replay ran Python"
    assert run.stats.failures == 0


@pytest.mark.parametrize("warmup_steps", [1, 3])
@pytest.mark.slow
def test_the_step_that_captures_is_not_measured(warmup_steps, tiny, tmp_path, monkeypatch):
    captures, original = [], TrainStep.__call__

    def step(self, batch):
        loss = original(self, batch)
        captures.append(self.captures)
        return loss

    monkeypatch.setattr(TrainStep, "__call__", step)
    settings = ["graph.compile=default", f"graph.warmup_steps={warmup_steps}", "data.max_bytes=20000"]
    result = train(tiny(*settings), tmp_path)
    captured_in = captures.index(1)
    assert result.measured_from_step == captured_in + 2, "the step after it may still grow memory"
    assert captures[-1] == 1


@scopes
def test_losses_and_weights_are_those_of_compiled_code_without_graphs(scope, device):
    settings = {"compile": "default", "max_grad_norm": 1.0}

    def graph(side):
        side.run = TrainStep(side.model, side.optimizer, config=graph_config(scope=scope), **settings)
        side.graphs = [side.run]

    def step(side, i):
        if side.run is None:
            side.run = TrainStep(side.model, side.optimizer, config=graph_config(scope="none"), **settings)
            if scope == "per_layer":
                side.run.iteration.loss_fn = side.run._loss_fn
                compile_module.compile_layers(side.model, side.run._layers(), "default", device)
        side.note(loss=side.run(side.tokens(i, 1, 2, 7)), norm=side.run.grad_norm)

    _, history = play(build, step, device, graph=graph)
    assert history[-1][0] - history[-2][0] == replays(scope) and history[-1][3] == 0
    assert history[-1][1] == history[-2][1], "it runs eagerly"


def test_arguments_that_only_compiled_code_reads_are_brought_to_the_graph(device):
    """Generated kernels are launched past the dispatcher: without help a graph would think nobody reads them."""
    module = torch.nn.LayerNorm(8, device=device)
    call = compiled(lambda x, y: module(x) * y, "default", device)
    graphed = CUDAGraphModule(call, graph_config())
    for i in range(6):
        generator = torch.Generator().manual_seed(i)
        x, y = (torch.randn(4, 8, generator=generator).to(device) for _ in range(2))
        with torch.no_grad():
            assert torch.equal(graphed(x, y), call(x, y)), i
    assert graphed.stats.replays == 4


def test_reset_takes_compiled_code_out_of_the_layers(device):
    parts = build(device)
    run = TrainStep(parts["model"], parts["optimizer"], compile="default", config=graph_config(scope="per_layer"))
    assert any("forward" in part.__dict__ for part in parts["model"].modules())
    run.reset()
    assert not any("forward" in part.__dict__ for part in parts["model"].modules())


@pytest.mark.slow
def test_many_layers_compile_once_not_once_each(ran, tiny, tmp_path):
    counts = []
    for layers in (3, 6):
        torch._dynamo.reset()
        ran.clear()
        settings = [f"model.layers={layers}", "graph.compile=default", "train.steps=3", "data.max_bytes=20000"]
        train(tiny(*settings), tmp_path / str(layers))
        assert ran.count(("compiled forward", False)) <= 2
        counts.append(ran.count(("compiled update", False)))
    assert all(0 < count <= 6 for count in counts), counts


@scopes
@pytest.mark.slow
def test_a_run_compiles_on_request_and_evaluates(tiny, tmp_path, scope):
    settings = ["graph.compile=default", "data.max_bytes=20000", "train.eval_every=2", "train.eval_batches=2"]
    graphed = train(tiny(*settings, f"graph={scope}"), tmp_path / scope)
    assert graphed.graph["failures"] == 0 and graphed.graph["replays"] > 0
    if scope == "full_iteration":  # which compiles the same piece of code as `none` does
        plain = train(tiny(*settings, "graph=none"), tmp_path / "none")
        assert graphed.losses == plain.losses and graphed.eval_losses == plain.eval_losses


AGAIN = ["graph.compile=default", "train.activation_checkpointing=true", "data.max_bytes=20000"]


@pytest.mark.slow
def test_layers_that_run_again_are_compiled_one_by_one_in_every_scope(tiny, tmp_path):
    plain = train(tiny(*AGAIN, "model=llama_tiny", "graph=none"), tmp_path / "none")
    for scope in SCOPES:
        graphed = train(tiny(*AGAIN, "model=llama_tiny", f"graph={scope}"), tmp_path / scope)
        assert graphed.losses == plain.losses, scope
        assert graphed.graph["failures"] == 0 and graphed.graph["replays"] > 0


@scopes
def test_a_capture_holds_the_compiled_layers_twice(scope, ran):
    torch.manual_seed(0)
    parts = build(torch.device("cpu"))
    parts["model"].config.attention_dropout = 0.0
    for layer in parts["model"].model.layers:
        layer.self_attn.attention_dropout = 0.0
    recompute_activations(parts["model"], compiled=True)
    run = TrainStep(parts["model"], parts["optimizer"], compile="default", config=graph_config(scope=scope))
    batch = torch.randint(0, 30, (1, 2, 7))
    for _ in range(3):
        run(batch)
    layers = len(run.model.model.layers)
    assert ran.count(("forward", False)) + ran.count(("forward", True)) >= 3 * 2 * layers
    ran.clear()
    run(batch)  # captures
    assert ran.count(("forward", True)) >= 2 * layers and ran.count(("backward", True)) >= layers
    assert not any(kind.startswith("compiled") for kind, _ in ran)
    ran.clear()
    run(batch)
    assert ran == [] and run.stats.failures == 0
    run.reset()
    for layer in run.model.model.layers:
        again = layer.__dict__["forward"]
        assert isinstance(again, Recomputed) and again.forward.__func__ is type(layer).forward, "it is still compiled"


def test_compiling_layers_with_dropout_that_run_again_is_a_clear_error(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"draw other numbers for dropout.*graph.compile=none"):
        tiny(*AGAIN, "model=gpt2_tiny", "model.dropout=0.1")
    saved = train(tiny("model=gpt2_tiny", "train.steps=1", "data.max_bytes=20000"), tmp_path / "saved")
    sizes = ("layers", "hidden_size", "heads", "intermediate_size")
    local = ["model=local", f"model.path={tmp_path / 'saved' / saved.checkpoint}", *(f"model.{n}=null" for n in sizes)]
    with pytest.raises(ConfigError, match="draw other numbers for dropout"):
        train(tiny(*AGAIN, *local), tmp_path / "local")
    assert not list((tmp_path / "local").rglob("events*")), "work was done before the error"


@pytest.mark.gpu
@scopes
def test_on_a_gpu_compiled_layers_that_run_again_have_the_losses_of_no_graphs(tiny, tmp_path, scope):
    settings = [*AGAIN, "train.device=cuda", "train.deterministic=true", "train.precision=bf16_mixed"]
    plain = train(tiny(*settings, "graph=none"), tmp_path / "none")
    graphed = train(tiny(*settings, f"graph={scope}"), tmp_path / scope)
    assert graphed.losses == plain.losses
    assert graphed.graph["failures"] == 0 and graphed.graph["replays"] > 0


@pytest.mark.parametrize("scope", ["none", *SCOPES])
def test_where_torch_compile_is_switched_off_nothing_is_compiled(scope, device, caplog):
    warn_once.cache_clear()
    made = build(device)["model"]
    weights = []
    for how in ("none", "default"):
        model = copy.deepcopy(made)
        rate, capturable = torch.tensor(0.01, device=device), device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=capturable)
        torch.manual_seed(1)
        with torch._dynamo.config.patch(disable=True):
            step = TrainStep(model, optimizer, compile=how, max_grad_norm=1.0, config=graph_config(scope=scope))
            for index in range(6):
                step(torch.randint(0, 30, (1, 2, 7), generator=torch.Generator().manual_seed(index)))
        assert step.stats.failures == 0 and (scope == "none" or step.stats.replays > 0)
        weights.append(dict(model.named_parameters()))
    assert_same(*weights, "")
    assert [record.message for record in caplog.records if "TORCH_COMPILE_DISABLE" in record.message]


def test_inductor_is_told_to_make_no_graphs_of_its_own():
    assert compile_module.options("default") == {"triton.cudagraphs": False}
    tuned = compile_module.options("max")
    assert tuned["max_autotune"] and tuned["coordinate_descent_tuning"] and not tuned["triton.cudagraphs"]


def test_what_inductor_compiled_is_one_operation():
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4))
    made = torch.compile(layer, dynamic=False, options=compile_module.options("default"))
    x = torch.randn(2, 4, requires_grad=True)
    made(x).sum().backward()
    expected, x.grad = x.grad, None
    loss = made(x).sum()
    with Recorder([x]) as recorder:
        loss.backward()
    assert torch.equal(x.grad, expected)
    names = [facts(step.op).name for step in recorder.trace]
    assert names.count("compiled code") == 1 and not {"aten::mm", "aten::native_layer_norm_backward"} & set(names)


@pytest.mark.parametrize(
    ("rate", "attention"), [(0.5, False), (0.5, True), (0.0, False), pytest.param(0.0, True, marks=pytest.mark.slow)]
)
def test_random_numbers_that_compiled_code_draws_are_known_of(rate, attention):
    def call(x):
        if attention:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=rate)
        return torch.nn.functional.dropout(x * 2, rate)

    made = torch.compile(call, dynamic=False, options=compile_module.options("default"))
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    made(x).sum().backward()
    with Recorder([x]) as forward:
        loss = made(x).sum()
    with Recorder([x]) as backward:
        loss.backward()
    assert forward.random is (rate > 0) and not backward.random


@pytest.mark.gpu
@scopes
@pytest.mark.parametrize("how", ["default", "max"])
def test_on_a_gpu_generated_kernels_are_captured(tiny, tmp_path, scope, how):
    settings = [f"graph.compile={how}", "data.max_bytes=20000", "train.device=cuda", "train.deterministic=true"]
    settings += ["train.eval_every=4", "train.eval_batches=2", "train.steps=16", "train.grad_accumulation=2"]
    graphed = train(tiny(*settings, f"graph={scope}"), tmp_path / scope)
    assert graphed.graph["failures"] == 0 and graphed.graph["state"] == "captured"
    if scope == "full_iteration":
        plain = train(tiny(*settings, "graph=none"), tmp_path / "none")
        assert graphed.losses == plain.losses and graphed.eval_losses == plain.eval_losses
    else:
        first, last = (graphed.losses[index] for index in (0, -1))
        assert last < first
