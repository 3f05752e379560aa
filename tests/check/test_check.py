"""`graphmod.check`: hazards are told before anything is captured, each once, with lines and remedies."""

import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import graphmod
from graphmod import CUDAGraphModule, graph_layers
from graphmod.check.cli import main as command
from graphmod.check.report import shortened
from graphmod.errors import ConfigError
from graphmod.trace import dispatch
from tests.support.harness import mlp
from tests.support.processes import finished


def whole_step(**optimizer):
    model = mlp(torch.device("cpu"))
    adam = torch.optim.AdamW(model.parameters(), **{"lr": 0.001, "fused": True, **optimizer})

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss.detach()

    return step, adam


X = torch.ones(4, 8)


def line_with(text):
    """The line of this file that holds `text` first."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, start=1) if text in line and "line_with" not in line)


def only(report):
    assert len(report.hazards) == 1, str(report)
    return report.hazards[0]


def test_a_clean_step_would_be_captured_and_what_is_guarded_is_told():
    step, adam = whole_step(capturable=True)
    report = graphmod.check(step, X)
    assert report.captured and report and not report.hazards and not report.on_gpu, str(report)
    assert "'step' would be captured" in str(report) and "4 parameters" in str(report)
    assert len(str(report).splitlines()) <= 3, str(report)
    text = report.describe(verbose=True)
    assert "lr = 0.001" in text
    rate = "the rate is a Python number: when it changes, the step is recorded and captured again"
    assert rate in " ".join(text.split())
    assert report.operations > 10
    LambdaLR(adam, lambda epoch: 0.9**epoch)  # which would keep the step eager
    assert rate in " ".join(str(graphmod.check(step, X)).split())


def test_an_optimizer_that_a_gpu_could_not_capture_is_told_and_no_hazard_without_a_gpu():
    step, _ = whole_step()
    report = graphmod.check(step, X)
    assert report.captured and not report.eager_parts
    (found,) = report.on_gpu
    assert "AdamW was built without capturable=True" in found.effect
    assert "capturable=torch.cuda.is_available()" in found.remedy
    assert found.user.endswith(" in step") and f":{line_with('adam.step()')} " in found.user
    assert "On a GPU also:" in str(report) and json.loads(report.to_json())["on_gpu"][0]["effect"] == found.effect


def test_an_optimizer_that_a_gpu_can_capture_or_that_steps_outside_needs_no_word():
    assert not graphmod.check(whole_step(capturable=True)[0], X).on_gpu
    between_graphs = graphmod.check(whole_step(fused=False)[0], X)
    assert between_graphs.eager_parts and not between_graphs.on_gpu
    model = mlp(torch.device("cpu"))
    adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        adam.zero_grad()
        model(x).square().mean().backward()
        sgd.step()

    assert not graphmod.check(step, X).on_gpu


@pytest.mark.gpu
def test_on_a_gpu_an_optimizer_that_cannot_be_captured_is_a_hazard():
    model = mlp(torch.device("cuda"))
    adam = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x):
        model(x).square().mean().backward()
        adam.step()
        adam.zero_grad()

    found = only(graphmod.check(step, X.cuda()))
    assert "AdamW was built without capturable=True" in found.effect


def test_a_tensor_as_rate_needs_no_word():
    step, _ = whole_step(lr=torch.tensor(0.001))
    assert "Python number" not in str(graphmod.check(step, X))


def test_a_scheduler_beside_a_step_is_the_trap_it_says():
    step, adam = whole_step()
    LambdaLR(adam, lambda epoch: 0.9**epoch)
    text = " ".join(str(graphmod.check(step, X)).split())
    assert "A scheduler changes it, so that the step would be eager most of the time" in text


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        x = self.inner(x)
        self.calls += 1
        for _ in range(3):
            x = x * 1 if x.sum().item() > 0 else x * 2  # a branch on values
        return x * random.random()


def test_all_hazards_are_listed_each_once_with_how_often():
    report = graphmod.check(Reads(), X)
    assert [one.count for one in report.hazards] == [3, 1, 1], str(report)
    branch, drawn, counter = report.hazards
    assert f"test_check.py:{line_with('# a branch on values')} in forward" in branch.user
    assert "torch.where" in branch.remedy
    assert "draws random numbers on the host (random)" in drawn.effect
    assert "changes 'calls' from 1 to 2" in counter.effect
    assert not report.captured


def test_nothing_is_captured_and_gradients_stay_as_they_were():
    module = mlp(torch.device("cpu"))
    module(X).sum().backward()
    before = [(p.grad, p.grad.clone()) for p in module.parameters()]
    assert graphmod.check(module, X).captured
    for parameter, (grad, values) in zip(module.parameters(), before, strict=True):
        assert parameter.grad is grad and torch.equal(grad, values)
    assert "forward" not in vars(module)


class HostInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if grad.max() > 5 else grad  # a branch in a backward


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return HostInBackward.apply(self.inner(x))


def test_a_hazard_in_the_backward_of_a_module_is_found():
    found = only(graphmod.check(Layer(), X))
    assert found.backward
    assert f"test_check.py:{line_with('# a branch in a backward')} in backward" in found.user


class Picks(nn.Linear):
    def forward(self, x):
        return super().forward(x)[x[:, 0] > 0].sum()


class Knows(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(self.known.sum())


def picks(folder):
    return Picks(8, 8)


def knows_its_argument(folder):
    model = Knows(8, 8)
    model.known = X
    return model


def on_ranks(folder):
    distributed.init_process_group("gloo", store=distributed.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(nn.Linear(8, 8))


def compiled_with_ranks(folder):
    return torch.compile(on_ranks(folder), backend="eager")


def with_a_hook_on_an_accumulator(folder):
    model = nn.Linear(8, 8)
    model.kept = [model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]]
    model.kept[0].register_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "make", [picks, knows_its_argument, on_ranks, compiled_with_ranks, with_a_hook_on_an_accumulator]
)
def test_what_a_wrapper_refuses_is_a_hazard(tmp_path, make):
    model = make(tmp_path)
    try:
        effect = only(graphmod.check(model, X)).effect
        wrapped = CUDAGraphModule(model)
        for _ in range(4):
            wrapped(X).sum().backward()
        assert wrapped.stats.captures == 0 and effect in str(wrapped.last_failure)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))])

    def forward(self, x):
        return checkpoint(self.layers[0], x, use_reentrant=False, preserve_rng_state=False)


def test_a_layer_that_a_checkpoint_has_draw_anew_is_a_hazard():
    model, x = Checkpointed(), torch.ones(4, 8, requires_grad=True)
    effect = only(graphmod.check(model, x, layers="layers.*", loss=torch.sum)).effect
    (layer,) = graph_layers(model, layers="layers.*")
    for _ in range(4):
        model(x).sum().backward()
    assert layer.stats.captures == 0 and effect in layer.last_failure


def test_an_argument_that_a_wrapper_refuses_is_a_hazard():
    x = torch.ones(4, 8)
    with torch.no_grad():
        view = x[:]
    x.mul_(torch.ones(1, requires_grad=True))
    with torch.no_grad():
        effect = only(graphmod.check(nn.Linear(8, 8), view)).effect
        wrapped = CUDAGraphModule(nn.Linear(8, 8))
        wrapped(view)
    assert effect in str(wrapped.last_failure)


def test_a_loss_decides_what_is_differentiated():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.odd = nn.Linear(8, 8), Layer()

        def forward(self, x):
            return self.plain(x), self.odd(x)

    assert not graphmod.check(Two(), X).captured
    assert graphmod.check(Two(), X, loss=lambda result: result[0].sum()).captured


def test_layers_are_checked_one_by_one_and_what_they_share_is_one_line():
    model = nn.Sequential()
    model.layers = nn.ModuleList(Layer() for _ in range(4))
    model.forward = lambda x: [x := layer(x) for layer in model.layers][-1].sum().item()
    found = only(graphmod.check(model, X, layers=True))  # what is between the layers is none of theirs
    assert found.parts == [f"layers.{index}" for index in range(4)]
    assert "in layers.0-3" in str(graphmod.check(model, X, layers=True))


class Caching(nn.Module):
    """A causal LM, called with or without a cache."""

    def __init__(self, cache=None):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 16}
        self.lm, self._cache = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)), cache

    def forward(self, tokens):
        return self.lm(tokens, labels=tokens, use_cache=self._cache).loss


@pytest.mark.parametrize("cache", [None, True], ids=["as it is", "asked for"])
def test_layers_are_judged_as_they_would_run_once_they_are_wrapped(cache):
    model, tokens = Caching(cache), torch.ones(1, 4, dtype=torch.int64)
    assert graphmod.check(model, tokens, layers=True).captured is (cache is None)
    assert model.lm(tokens).past_key_values is not None  # as before the check
    graphs = graph_layers(model, body=False)
    for _ in range(5):
        model(tokens).backward()
    assert all((graph.stats.state == "captured") is (cache is None) for graph in graphs)


def test_layers_that_cannot_be_wrapped_cannot_be_checked():
    model = mlp(torch.device("cpu"))
    for refused in (
        lambda model: graphmod.check(model, X, layers="layers"),
        lambda model: graph_layers(model, layers="layers"),
    ):
        with pytest.raises(ConfigError, match=r"'layers' is a ModuleList, which nobody calls; .*'layers\.\*'"):
            refused(nn.ModuleDict({"layers": nn.ModuleList([model])}))
    with pytest.raises(ConfigError, match="is compiled, and compiled code passes over the graphs of layers"):
        graphmod.check(torch.compile(nn.ModuleDict({"mlp": model})), X, layers="mlp")


def test_layers_that_the_call_does_not_reach_cannot_be_checked():
    model = nn.Sequential()
    model.layers = nn.ModuleList(Layer() for _ in range(2))
    model.forward = lambda x: x * 2
    with pytest.raises(ConfigError, match="runs none of its parts"):
        graphmod.check(model, X, layers="layers.*")


def test_a_wrapped_model_is_checked_unwrapped():
    model = nn.Sequential()
    model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    model.forward = lambda x: [x := layer(x) for layer in model.layers][-1]
    graphs = graph_layers(model)
    assert graphmod.check(model, X).captured
    assert all(graph.stats.eager_calls == graph.stats.captures == 0 for graph in graphs)
    wrapper = CUDAGraphModule(Reads())
    assert len(graphmod.check(wrapper, X).hazards) == 3
    assert wrapper.stats.eager_calls == 0


def test_what_a_scheduler_changes_inside_is_one_cause_on_its_line():
    step, adam = whole_step(lr=0.1)
    scheduler = LambdaLR(adam, lambda epoch: 0.9**epoch)

    def both(x):
        loss = step(x)
        scheduler.step()  # stepped inside
        return loss

    found = only(graphmod.check(CUDAGraphModule(both, eager_parts=False), X))
    assert f":{line_with('# stepped inside')} in both" in found.user
    assert "lr_scheduler.py" in found.library
    assert found.remedy == "keep the scheduler's step() outside of the captured call"


def test_marked_parts_are_told():
    @graphmod.eager
    def tell(loss):
        return loss.item()

    def step(x):
        tell(x.sum())
        return x * 2

    report = graphmod.check(step, X)
    assert report.captured
    (part,) = report.eager_parts
    assert "tell" in part and "in step)" in part
    assert "Called between its graphs, at each replay:" in str(report)
    assert json.loads(report.to_json())["eager_parts"] == report.eager_parts

    def uses(x):
        return x * tell(x.sum())

    assert "returns one float" in only(graphmod.check(uses, X)).effect


def test_a_marked_part_that_changes_what_is_read_later_is_a_hazard():
    holder = SimpleNamespace(scale=1.0, told=0)

    @graphmod.eager
    def part():
        holder.scale += 0.5

    def step(x):
        part()
        return x * holder.scale

    found = only(graphmod.check(step, X))
    assert "changes what code after it reads: 'scale' was 1.5" in found.effect and "in step" in found.user

    @graphmod.eager
    def last():
        holder.told += 1

    assert graphmod.check(lambda x: (x * holder.scale, last())[0], X).captured


def test_a_part_that_returns_other_values_in_each_call_is_a_hazard():
    counted = []

    @graphmod.eager
    def count():
        counted.append(0)
        return len(counted)

    assert "returns other values" in only(graphmod.check(lambda x: x * count(), X)).effect
    assert graphmod.check(lambda x: x * min(count(), 1), X, calls=1).captured


def test_a_part_that_is_given_a_tensor_with_a_history_is_a_hazard():
    model = mlp(torch.device("cpu"))
    tell = graphmod.eager(lambda loss: None)

    def step(x):
        loss = model(x).sum()
        tell(loss)
        loss.backward()
        model.zero_grad()

    assert "is given a tensor that requires grad" in only(graphmod.check(step, X)).effect


def counting_step():
    model = mlp(torch.device("cpu"))
    adam = torch.optim.RAdam(model.parameters(), lr=0.01, foreach=True)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss.detach()

    return step, adam


@pytest.mark.parametrize("calls", [2, 3, 5])
def test_methods_that_would_be_eager_parts_are_told(calls):
    step, adam = counting_step()
    report = graphmod.check(CUDAGraphModule(step, eager_parts=False), X, calls=calls)
    assert not report.captured and not report.eager_for and not report.eager_parts, str(report)
    report = graphmod.check(step, X, calls=calls)
    assert report.captured and json.loads(report.to_json())["eager_for"][0]["user"]["file"] == __file__, str(report)
    assert [part.partition(" ")[0] for part in report.eager_parts] == ["RAdam.step"]
    assert "keep optimizer.step() outside" in str(report).partition("No graph can repeat what these do:")[2]
    assert "step" not in vars(adam)


def test_methods_are_not_told_where_more_than_these_keeps_the_step_eager():
    step, _ = counting_step()
    report = graphmod.check(lambda x: float(step(x)), X)
    assert not report.captured and not report.eager_for and not report.eager_parts


@pytest.mark.parametrize("trains", [False, True])
def test_a_container_that_was_there_is_a_result_as_for_a_wrapper(trains):
    linear, held = nn.Linear(8, 8), [torch.ones(3)]

    def step(x):
        y = linear(x)
        return held, y if trains else y.detach()

    wrapper, report = CUDAGraphModule(step), graphmod.check(step, X)
    for _ in range(8):
        wrapper(X)
    assert report.captured is (wrapper.stats.replays > 0) is not trains
    if trains:
        assert "returns a container of tensors that was there before the call" in only(report).effect


def test_results_and_arguments_that_no_replay_makes_are_hazards():
    class Odd:
        pass

    assert "returns a Odd" in only(graphmod.check(lambda x: (x * 2, Odd()), X)).effect
    seen = []
    found = only(graphmod.check(lambda x, into: into.append(1) or x * 2, X, seen))
    assert "changes its argument 'into'" in found.effect and f":{line_with('into.append(1)')} in" in found.user
    assert "iterator" in graphmod.check(lambda x, items: x * 2, X, iter([1])).hazards[0].effect


def test_a_copy_leaves_the_module_alone():
    module = Reads()
    graphmod.check(module, X, copy=True)
    assert module.calls == 0
    graphmod.check(module, X)
    assert module.calls == 2


def test_what_cannot_be_called_is_a_type_error():
    with pytest.raises(TypeError, match="takes a module or a callable, got int"):
        graphmod.check(3)


def test_json_has_files_and_lines_apart():
    found = json.loads(graphmod.check(Reads(), X).to_json())
    assert found["captured"] is False
    assert found["hazards"][0]["user"]["line"] == line_with("# a branch on values")
    assert found["hazards"][0]["user"]["file"].endswith("test_check.py")
    assert {"what", "count", "values", "note"} <= set(found["guarded"][0])


# -- the command line ----------------------------------------------------------------------------------------------

PROGRAM = """
import torch
from torch import nn
model = nn.Linear(4, 4)
print("noise of the program")
def clean(): return model(torch.ones(2, 4)).detach()
def reads(): return clean() * clean().sum().item()
def make(): return model, (torch.ones(2, 4),)
def step(x, scale=1.0): return model(x).detach() * scale
def arguments(): return (torch.ones(2, 4),), {"scale": 2.0}
def no_tuple(): return model, torch.ones(2, 4)
def alone(): return model
def raises():
    raise ValueError("no data")
number = 3
"""


@pytest.fixture
def ask(tmp_path, monkeypatch, capsys):
    """`ask(*arguments)` is the command, in this process: its status, and what it said on each of the two outputs."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def asked(*arguments):
        status = command([*arguments])
        return status, *capsys.readouterr()

    yield asked
    sys.modules.pop("program", None)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["program:clean"], 0), (["program:reads"], 1), (["program:make"], 0)],
)
def test_the_exit_status_is_the_verdict(ask, arguments, status):
    returned, said, _ = ask(*arguments)
    assert returned == status
    assert ("would stay eager" in said) == bool(status)


def test_json_stands_alone_on_the_standard_output(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = finished(["-m", "graphmod.check", "program:step", "--args", "program:arguments", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["captured"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere:step"], "importing nowhere:step raised ModuleNotFoundError: No module named 'nowhere'"),
        (["program:stap"], "module 'program' has no attribute 'stap'"),
        (["program:number"], "program:number is a int, which cannot be called"),
        (["program"], "write package.module:function"),
        (["program:step"], "argument: 'x'; add --args MODULE:FUNCTION"),
        (["program:raises"], "program:raises raised ValueError: no data at program.py:14 in raises"),
        (
            ["program:no_tuple"],
            "program:no_tuple returned (Linear, Tensor); to make a call, return (callable, ",
        ),
        (["program:alone"], "program:alone returned a Linear; to make a call, return (callable, arguments)"),
        (["program:step", "--args", "program:clean"], "program:clean returned a Tensor; it must return a tuple"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_sentence(ask, arguments, words):
    returned, _, said = ask(*arguments)
    lines = [line for line in said.splitlines() if not line.startswith("noise")]
    assert returned == 2 and len(lines) == 1 and words in lines[0], said


def test_no_line_of_the_command_counts_as_the_users(tmp_path):
    (tmp_path / "program.py").write_text(
        "import torch\nsgd = torch.optim.SGD([torch.ones(1)], lr=0.1)\n"
        "def make(): return torch.optim.lr_scheduler.StepLR(sgd, 2).step, ()\n"
    )
    started = "import sys; from graphmod.cli.main import main; sys.argv[1:] = ['check', 'program:make']; main()"
    (tmp_path / "script").write_text(started)  # as a console script
    done = finished(["script"], tmp_path)
    assert "1. torch/optim/lr_scheduler.py:" in done.stdout and "script" not in done.stdout, done.stdout + done.stderr


# -- a training run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["full_iteration", "per_layer"])
@pytest.mark.slow
def test_a_run_with_graph_check_only_says(tmp_path, scope):
    from tests.support.settings import ROOT, TINY

    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "train.py"),
            *TINY,
            "data=synthetic",
            f"graph={scope}",
            "graph.check=true",
            "hydra.run.dir=run",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "'train step'" in done.stdout and "would be captured" in done.stdout
    found = json.loads((tmp_path / "run" / "check.json").read_text())
    assert found["captured"] is True and found["hazards"] == []
    assert bool(found["parts"]) == (scope == "per_layer")
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_check_of_a_run_without_graphs_is_an_error(tmp_path):
    from tests.support.settings import ROOT, TINY

    given = [*TINY, "data=synthetic", "graph=none", "graph.check=true", "hydra.run.dir=run"]
    done = finished([ROOT / "train.py", *given], tmp_path)
    assert done.returncode == 2
    assert "error: graph.check=true with graph=none: nothing is captured" in done.stderr


def test_a_check_of_several_runs_is_an_error(tmp_path):
    from tests.support.settings import ROOT, TINY

    given = ["--multirun", *TINY, "graph=per_layer,none", "graph.check=true"]
    done = finished([ROOT / "train.py", *given], tmp_path)
    assert done.returncode == 2 and "drop --multirun" in done.stderr and not list(tmp_path.iterdir())


def test_both_ways_to_the_package_are_one():
    from graphmod import check

    assert check is graphmod.check is sys.modules["graphmod.check"]
    assert check.Report is type(check(lambda x: x * 2, X))


def test_a_loss_with_its_history_is_returned_by_a_step_that_ran_the_backward_itself():
    model = mlp(torch.device("cpu"))

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    assert graphmod.check(step, X).captured


def test_a_list_that_grows_and_a_count_say_where_they_belong():
    kept, count = [], 0

    def step(x):
        nonlocal count
        count += 1
        kept.append(x.sum())

    remedies = [one.remedy for one in graphmod.check(step, X).hazards]
    assert any(said.startswith("do that after the call, with what the call returns") for said in remedies), remedies
    assert any("call optimizer.step() outside" in said for said in remedies), remedies


def test_a_short_report_only_counts_what_nobody_sets():
    report = graphmod.check(whole_step()[0], X)
    assert "(a verbose report lists them)" in str(report) and "by address" not in str(report)
    assert "4 parameters (by address, shape and strides)" in report.describe(verbose=True)


def test_who_reads_a_value_by_way_of_a_library_is_told_with_his_own_line():
    report = graphmod.check(whole_step()[0], X)
    line = line_with("adam.step()")
    assert f"read at {shortened(f'{__file__}:{line} in step')}, by way of torch/optim/" in report.describe(verbose=True)
    read = [one["read"] for guarded in json.loads(report.to_json())["guarded"] for one in guarded["values"]]
    assert {"file": __file__, "line": line, "function": "step"} in read


def test_a_check_never_names_what_watches_it(device):
    """Dynamo's comparisons in Python, and whoever asks who watches, lead to the recorder."""
    held = SimpleNamespace(watcher=None)
    made = {}
    exec(
        "def guard(L):\n    G['held'].watcher = G['current']()\n    return True\n",
        {"G": {"held": held, "current": dispatch.current}},
        made,
    )

    def by_dynamo(x):
        made["guard"]({"x": x})
        return x * 2

    def by_itself(x):
        held.watcher = dispatch.current()
        return x * 2

    for step in (by_dynamo, by_itself):
        report = graphmod.check(step, torch.ones(2, device=device))
        assert not any("Recorder" in finding.effect for finding in report.hazards), report


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(x), grad)
        return None, x.grad


class _Within(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.a, self.b, self.run = nn.Linear(8, 4), nn.Linear(4, 4), run

    def forward(self, x):
        return self.run(self.b, self.a(x))


@pytest.mark.parametrize(
    "run", [lambda inner, x: checkpoint(inner, x, use_reentrant=True), _ByHand.apply], ids=["reentrant", "by hand"]
)
def test_a_backward_inside_of_a_backward_stays_eager_and_leaves_gradients_alone(run):
    model = _Within(run)
    model(X).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    report = graphmod.check(model, X)
    found = only(report)
    assert "plain .backward()" in found.effect or "another backward" in found.effect
    assert found.backward
    assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
