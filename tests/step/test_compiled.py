"""A model that the user compiled himself, in a step or in layers: the numbers that it has without graphs, from graphs,
and nothing compiled that would not be compiled anyway."""

import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from graphmod import CUDAGraphModule, graph_layers
from graphmod.errors import ConfigError
from graphmod.trace import compiled
from tests.support.harness import config

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
INDUCTOR = pytest.param("inductor", marks=pytest.mark.skipif(not shutil.which("g++"), reason="no g++"))
backends = pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
no_inductor = pytest.mark.parametrize("backend", ["aot_eager"])  # which takes seconds to compile anything
STEPS = 10
SCALE = 1.0


class Block(nn.Module):
    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), dropout
        self.scale, self.calls = 1.0, 0

    def forward(self, x):
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.scale * nn.functional.dropout(self.down(hidden), self.dropout, self.training)


class Broken(Block):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x) * SCALE


class Making(Block):
    def forward(self, x):
        # On a GPU this backend copies the constant on the host, in each call.
        factor = nn.functional.one_hot(x.argmax(-1), 8) if x.is_cuda else torch.tensor(0.5)
        return super().forward(x) * factor


class Counting(Block):
    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Program:
    """A training step around a compiled model, on one device."""

    def __init__(self, device, backend, kind=Block, autocast=False, how="module", **settings):
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.model = nn.Sequential(kind(**settings), kind(**settings)).to(device)
        rate, capturable = torch.tensor(0.01, device=device), device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True, capturable=capturable)
        self.device, self.autocast, self.call = device, autocast, self.model
        if how == "module":
            self.call = torch.compile(self.model, backend=backend)
        elif how == "in place":
            self.model.compile(backend=backend)
        elif how == "function":
            self.call = torch.compile(lambda x: self.model(x) * 2, backend=backend)
        elif how == "layers":
            for index, layer in enumerate(self.model):
                self.model[index] = torch.compile(layer, backend=backend)
        elif how == "layers in place":
            for layer in self.model:
                layer.compile(backend=backend)
        self.step = self._step

    def _step(self, x, y):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = ((self.call(x) - y) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, change=None, at=6, steps=STEPS, rows=None):
        losses = []
        for i in range(steps):
            if change is not None and i == at:
                change(self)
            generator = torch.Generator().manual_seed(i)
            shape = (rows(i) if rows else 4, 8)
            x, y = (torch.randn(shape, generator=generator).to(self.device) for _ in range(2))
            losses.append(self.step(x, y).clone())
        return [*losses, *(parameter.detach().clone() for parameter in self.model.parameters())]


def both(device, backend, wrap=None, run=None, **settings):
    """Runs a program without graphs and with them; returns the wrapper and how often each compiled."""
    results, counts = [], []
    for graphed in (False, True):
        before = counters["frames"]["total"]
        program = Program(device, backend, **settings)
        if graphed:
            wrapper = (wrap or whole)(program)
        torch.manual_seed(1)
        results.append(program.run(**(run or {})))
        counts.append(counters["frames"]["total"] - before)
    for index, (expected, found) in enumerate(zip(*results, strict=True)):
        assert torch.equal(expected, found), f"result {index} differs"
    return wrapper, counts


def whole(program, **settings):
    program.step = wrapper = CUDAGraphModule(program.step, config(**settings))
    return wrapper


@pytest.mark.parametrize(
    "settings, backend",
    [
        *(({"how": how}, "aot_eager") for how in ("module", "in place", "function", "layers")),
        ({"kind": Broken}, "aot_eager"),
        ({"kind": Making}, "aot_eager"),
        ({"autocast": True}, "aot_eager"),
        pytest.param({"kind": Broken, "dropout": 0.5}, "inductor", marks=[*INDUCTOR.marks, pytest.mark.slow]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_a_step_around_compiled_code_is_captured_and_compiles_no_more(settings, backend, device):
    wrapper, counts = both(device, backend, **settings)
    assert wrapper.stats.replays == STEPS - 2 and wrapper.stats.failures == 0, wrapper.last_failure
    assert counts[0] == counts[1]


def _scale(program):
    program.model[1].scale = 0.5


def _weight(program):
    program.model[0].up.weight = nn.Parameter(program.model[0].up.weight.detach() * 2)
    program.optimizer.param_groups[0]["params"] = list(program.model.parameters())


def _evaluation(program):
    program.model.eval()


def _layer(program):
    program.model[1] = Block(dropout=0.5).to(program.device).requires_grad_(False)


def _global(program):
    globals()["SCALE"] = 0.5


def _forgotten(program):
    torch._dynamo.reset()


@no_inductor
@pytest.mark.parametrize(
    "change, kind",
    [
        *((_scale, Broken), (_global, Broken), (_weight, Block), (_forgotten, Block)),
        *(pytest.param(one, Broken, marks=pytest.mark.slow) for one in (_weight, _forgotten, _evaluation, _layer)),
    ],
)
def test_what_compiled_code_read_is_guarded(change, kind, backend, device, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 1.0)

    def run(program):
        globals()["SCALE"] = 1.0
        change(program)

    settings = {"kind": kind, "dropout": 0.5 if change is not _global else 0.0}
    results = []
    for graphed in (False, True):
        globals()["SCALE"] = 1.0
        program = Program(device, backend, **settings)
        if graphed:
            wrapper = whole(program)
        torch.manual_seed(1)
        results.append(program.run(change))
    assert all(map(torch.equal, *results))
    assert wrapper.stats.replays >= 4 and wrapper.stats.state == "captured"


@no_inductor
def test_what_compiled_code_changes_in_python_is_refused(backend, device):
    wrapper, _ = both(device, backend, kind=Counting)
    assert wrapper.stats.replays == 0 and "'calls'" in wrapper.last_failure


@no_inductor
def test_shapes_that_torch_compile_makes_dynamic_are_captured_each(backend, device):
    run = {"rows": lambda i: (4, 6, 7)[i % 3], "steps": 18}
    wrapper, counts = both(device, backend, run=run)
    assert wrapper.stats.replays >= 6 and wrapper.stats.failures == 0, wrapper.last_failure
    assert counts[0] == counts[1]


@no_inductor
def test_with_one_warm_up_call_what_compiles_is_recorded_once_more(backend, device):
    wrapper, _ = both(device, backend, lambda program: whole(program, warmup_steps=1))
    assert wrapper.stats.replays == STEPS - 3 and wrapper.stats.failures == 0, wrapper.last_failure


@backends
def test_compiled_layers_are_captured_one_by_one(backend, device):
    def wrap(program):
        return graph_layers(program.model, layers=["0", "1"], config=config())

    wrappers, _ = both(device, backend, wrap, how="layers")
    for wrapper in wrappers:
        assert wrapper.stats.replays >= 2 * (STEPS - 3) and wrapper.stats.failures == 0, wrapper.last_failure


@pytest.mark.parametrize(
    "how, told",
    [("module", "OptimizedModule"), ("in place", "Sequential"), ("layers in place", "'0' was compiled in place")],
)
def test_layers_that_compiled_code_would_pass_over_are_refused(how, told, device):
    program = Program(device, "eager", how=how)
    model = program.call if how == "module" else program.model
    with pytest.raises(ConfigError, match=told):
        graph_layers(model, layers=["_orig_mod.0", "_orig_mod.1"] if how == "module" else ["0", "1"])


@no_inductor
def test_inference(backend, device):
    torch.manual_seed(0)
    model = Block().to(device).eval()
    made = torch.compile(model, backend=backend)
    graphed = CUDAGraphModule(made, config())
    with torch.inference_mode():
        for i in range(8):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).to(device)
            assert torch.equal(graphed(x), made(x)), i
            if i == 5:
                model.scale = 2.0
    assert graphed.stats.replays >= 3


@pytest.mark.parametrize("kind", ["dict", "list", "nested"])
def test_items_of_what_compiled_code_closes_over_are_watched(kind, device):
    held = {"dict": {"k": 2.0}, "list": [2.0], "nested": {"k": (1.0, [2.0])}}[kind]
    at, key = {"dict": (held, "k"), "list": (held, 0), "nested": (held["k"][1] if kind == "nested" else None, 0)}[kind]

    def function(x):
        return x * (held["k"][1][0] if kind == "nested" else held[key])

    graphed = CUDAGraphModule(torch.compile(function, backend="aot_eager"), config())
    for step in range(STEPS + 4):
        if step == STEPS:
            assert graphed.stats.replays > 3
            at[key] = 3.0
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), function(x)), step


@torch.library.custom_op("graphmod_tests::compiled_for_no_graph", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def for_no_graph(x: torch.Tensor) -> torch.Tensor:
    return x * 3


for_no_graph.register_fake(torch.empty_like)


@pytest.mark.parametrize("where", ["all", "a part"])
def test_code_that_is_compiled_is_an_eager_part_as_a_whole_or_not_at_all(where, device):
    def function(x):
        return for_no_graph(x) * 2

    compiled = torch.compile(function, backend="aot_eager")
    graphed = CUDAGraphModule(compiled if where == "all" else lambda x: compiled(x) + 1, config())
    for step in range(STEPS):
        x = torch.full((3,), float(step), device=device)
        assert torch.equal(graphed(x), function(x) + (where == "a part")), step
    if where == "all":
        assert graphed.stats.captures == 0 and "cudagraph_unsafe" in graphed.last_failure
    else:
        assert graphed.stats.eager_parts == graphed.stats.replays > 1


def _clipped(program):
    @torch.compile(backend="aot_eager")
    def clipped(weights):
        for weight in weights:
            weight.grad.clamp_(-0.1, 0.1)

    weights = list(program.model.parameters())
    return lambda: clipped(weights)


def _update_in_hooks(program):
    @torch.compile(backend="aot_eager")
    @torch.no_grad()
    def update(weight):
        weight.sub_(weight.grad, alpha=0.01)

    for weight in program.model.parameters():
        weight.register_post_accumulate_grad_hook(update)
    return lambda: None


def _momentum(program):
    weights = program.model.parameters()
    program.optimizer = torch.optim.SGD(weights, torch.tensor(0.01, device=program.device), momentum=0.9)
    program.optimizer.step = torch.compile(program.optimizer.step, backend="aot_eager")
    return lambda: None


@pytest.mark.parametrize("change", [_clipped, _update_in_hooks, _momentum])
def test_compiled_code_finds_gradients_that_the_call_has_made(change, device):
    def run(graphed):
        program = Program(device, "aot_eager", how="none")
        between = change(program)

        def step(x, y):
            loss = ((program.model(x) - y) ** 2).mean()
            loss.backward()
            between()
            program.optimizer.step()
            program.optimizer.zero_grad()
            return loss.detach()

        program.step = CUDAGraphModule(step, config()) if graphed else step
        return program.run(steps=STEPS + 4), program.step

    (expected, _), (found, wrapper) = run(False), run(True)
    assert all(map(torch.equal, expected, found))
    assert wrapper.stats.replays >= STEPS - 4 and wrapper.stats.failures == 0, wrapper.last_failure


@no_inductor
@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_a_stance_inside_the_call_is_the_users(stance, backend, device):
    def wrap(program):
        def call(x):
            with torch.compiler.set_stance(stance):
                return made(x)

        made, program.call = program.call, call
        return whole(program)

    wrapper, _ = both(device, backend, wrap)
    assert wrapper.stats.replays == STEPS - 2 and wrapper.stats.failures == 0, wrapper.last_failure


def test_arguments_that_are_marked_as_dynamic_are_of_one_kind(device):
    made = torch.compile(Block().to(device), backend="aot_eager")
    graphed = CUDAGraphModule(made, config())
    with torch.no_grad():
        for _ in range(STEPS):
            x = torch.randn(4, 8, device=device)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
            assert torch.equal(graphed(x), made(x))
    assert graphed.stats.replays == STEPS - 2, graphed.last_failure


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[*INDUCTOR.marks, pytest.mark.slow])])
def test_an_optimizer_that_is_compiled(backend, device):
    results = []
    for graphed in (False, True):
        program = Program(device, backend, how="none")
        program.optimizer = torch.optim.AdamW(
            program.model.parameters(), lr=torch.tensor(0.01, device=device), capturable=device.type == "cuda"
        )
        update = torch.compile(program.optimizer.step, backend=backend)

        def step(x, y, program=program, update=update):
            loss = ((program.model(x) - y) ** 2).mean()
            loss.backward()
            update()
            program.optimizer.zero_grad()
            return loss.detach()

        program.step = CUDAGraphModule(step, config()) if graphed else step
        results.append(program.run())
    assert all(map(torch.equal, *results))


@pytest.mark.gpu
def test_on_a_gpu_code_with_graphs_of_its_own_is_told_about():
    program = Program(torch.device("cuda"), "inductor", how="none")
    program.call = torch.compile(program.model, mode="reduce-overhead")
    wrapper = whole(program)
    program.run()
    assert "reduce-overhead" in wrapper.last_failure


def test_an_error_of_torch_compile_leaves_nothing_behind(device):
    def skipped(x):
        return x * 2

    broken = torch.compile(torch._dynamo.disable(skipped), backend="eager", fullgraph=True)

    def step(x):
        try:
            return broken(x)
        except Exception:
            return skipped(x)

    graphed = CUDAGraphModule(step, config())
    for _ in range(5):
        assert graphed(torch.ones(3, device=device)).tolist() == [2.0] * 3
        assert torch._C._len_torch_dispatch_stack() == 0
    assert not compiled.regions() and graphed.stats.state != "eager"
