"""The whole log of typical mistakes, read as a user would: one line for one cause, his line, a remedy that exists."""

import logging
import random
import sys

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from graphmod import CUDAGraphModule, graph_layers
from graphmod.step.log import cause_of, ranges, reason_of
from tests.support.harness import config, mlp

CPU = torch.device("cpu")
EAGER = " stays eager after 3 such failures in a row; force_enable() tries again"
PROGRAMS = {}


def says(*lines):
    """The program's log has these lines and no other; each line is the words it must hold, in order."""

    def keep(program):
        PROGRAMS[program.__name__] = program, lines
        return program

    return keep


def whole(optimizer, also=None, **settings):
    model = mlp(CPU)
    chosen = optimizer(model.parameters())

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        chosen.step()  # of the optimizer
        chosen.zero_grad()
        if also is not None:
            also(loss)
        return loss.detach()

    return CUDAGraphModule(step, config(**settings)), chosen


def run(step, times=10):
    for _ in range(times):
        step(torch.randn(4, 8))


class Stack(nn.Module):
    def __init__(self, layer, count=6):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))
        graph_layers(self, config())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale, self.calls = nn.Linear(8, 8), 0.0, 0


@says(
    [
        "'lr' of AdamW was 0.0",
        "# of the optimizer",
        "/torch/optim/",
        "; build AdamW with lr=torch.tensor(...) on the device, and change that in place: lr.fill_(...)",
        "recorded and captured again",
    ]
)
def a_rate_that_changes_every_tenth_step():
    step, optimizer = whole(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True))
    for index in range(60):
        if index % 10 == 0:
            optimizer.param_groups[0]["lr"] *= 0.9
        step(torch.randn(4, 8))


@says(
    ["'step' runs eagerly: 'lr' of AdamW was 0.0", "# of the optimizer", "lr.fill_(...)", "there is no graph yet"],
    ["'step' stays eager", "with hardly a replay in between, because 'lr' of AdamW was", "force_enable() tries again"],
)
def a_rate_that_changes_at_each_step():
    step, optimizer = whole(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True))
    for _ in range(40):
        step(torch.randn(4, 8))
        optimizer.param_groups[0]["lr"] *= 0.9


@says()
def nothing_is_said_where_gradients_are_zeroed_first():
    model = mlp(CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run(CUDAGraphModule(step, config()))


@says(
    ["# of the optimizer", "nadam.py", "the step of NAdam reads", "; keep optimizer.step() outside"], ["'step'" + EAGER]
)
def an_optimizer_without_a_fused_step():
    run(whole(torch.optim.NAdam, eager_parts=False)[0])


@says(["'step' calls AdamW.step between its graphs", "# of the optimizer", "adam.py", "build AdamW with fused=True"])
def an_optimizer_that_could_be_fused():
    run(whole(torch.optim.AdamW)[0])


@says(
    [
        "'layers.0' (said once for all like it: layers.0-5)",
        "# asks for a value",
        "a replay reads nothing; use torch.where",
    ],
    ["'layers.0' (said once for all like it: layers.0-5)" + EAGER],
)
def a_host_read_in_each_layer():
    class Reads(Layer):
        def forward(self, x):
            x = self.inner(x)
            return x if x.sum().item() > 0 else -x  # asks for a value

    model = Stack(Reads)
    run(lambda x: model(x).sum().backward())


@says(
    ["layers.0-5", "changes 'calls' from 1 to 2 as it runs", "# counts", "keep it in a tensor"],
    ["'layers.0' (said once for all like it: layers.0-5)" + EAGER],
)
def a_counter_in_each_layer():
    class Counts(Layer):
        def forward(self, x):
            self.calls += 1  # counts
            return self.inner(x)

    model = Stack(Counts)
    run(lambda x: model(x).sum().backward())


@says(
    [
        "layers.0-5",
        "'scale' was 0.0 when it was recorded and is 1.0 (read at",
        "# scales",
        "; pass it as a tensor argument, or keep it fixed. It is recorded and captured again, as after each",
    ]
)
def a_setting_of_each_layer_that_changes_now_and_then():
    class Scales(Layer):
        def forward(self, x):
            return self.inner(x) * self.scale  # scales

    model = Stack(Scales)
    for index in range(24):
        for layer in model.layers:
            layer.scale = float(index // 6)
        model(torch.randn(4, 8)).sum().backward()


@says(
    [
        "'both' calls SGD.step, LambdaLR.step between its graphs at each replay",
        "changes '_step_count' from",
        "# of the scheduler",
        "lr_scheduler.py",
        "keep the scheduler's step() outside",
    ]
)
def a_scheduler_stepped_inside():
    model = mlp(CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.9**epoch)

    def both(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()  # of the scheduler
        optimizer.zero_grad()
        return loss.detach()

    run(CUDAGraphModule(both, config()))


@says(
    [
        "'scaled' calls GradScaler.step, GradScaler.update between its graphs",
        "# of the scaler",
        "grad_scaler.py",
        "; keep the GradScaler's step() and update() outside",
    ]
)
def a_loss_scale_inside():
    model = mlp(CPU)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def scaled(x):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # of the scaler
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    run(CUDAGraphModule(scaled, config()))


@says(
    ["changes '_scale' of GradScaler from None", "# scales the loss", "scaler.scale(torch.ones((), device=...))"],
)
def a_loss_scale_made_inside():
    model, scaler = mlp(CPU), torch.amp.GradScaler("cpu")

    def scaled(x):
        scaler.scale(model(x).square().mean()).backward()  # scales the loss

    run(CUDAGraphModule(scaled, config(warmup_steps=1)))


@says(
    [
        "'scaled' calls GradScaler.unscale_ between its graphs",
        "a defaultdict of GradScaler",
        "# unscales",
        "keep the GradScaler's unscale_(), step() and update() outside",
    ]
)
def gradients_unscaled_inside_and_used_outside():
    model = mlp(CPU)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu")

    def scaled(x):
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)  # unscales

    def step(x):
        graphed(x)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    graphed = CUDAGraphModule(scaled, config())
    run(step)


@says(
    [
        "'scaled' calls GradScaler.step, GradScaler.update between its graphs",
        "a defaultdict of GradScaler",
        "# a step that asks nothing",
        "keep the GradScaler's unscale_(), step() and update()",
    ]
)
def a_loss_scale_around_a_fused_optimizer():
    model = mlp(CPU)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=True), torch.amp.GradScaler("cpu")

    def scaled(x):
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)  # a step that asks nothing
        scaler.update()
        optimizer.zero_grad()

    run(CUDAGraphModule(scaled, config()))


@says(["switches requires_grad of 'weight' as it runs", "# lends its gradient", "; make two steps"], ["'step'" + EAGER])
def requires_grad_switched_inside():
    lent = mlp(CPU)

    def step(x):
        loss = lent(x.requires_grad_()).mean()  # lends its gradient
        lent.requires_grad_(not lent[0].weight.requires_grad)
        return loss.detach()

    run(CUDAGraphModule(lambda x: step(x.clone()), config(), name="step"))


@says(["draws random numbers on the host (random)", "# rolls dice", "draw them outside"], ["'step'" + EAGER])
def chance_on_the_host():
    def dice(_):
        return random.random() * 2  # rolls dice

    run(whole(lambda p: torch.optim.SGD(p, lr=0.1), dice)[0])


@says(
    ["'step' calls keep between its graphs", "changes the items of a list", "# keeps losses", "do that after the call"]
)
def losses_kept_in_a_list():
    seen = []

    def keep(loss):
        seen.append(loss.detach())  # keeps losses

    run(whole(lambda p: torch.optim.SGD(p, lr=0.1), keep)[0])


@says(
    ["'Sequential' is called with other inputs", "input: was (2, 8) float32 on cpu, is (3, 8)", "pad to a few lengths"],
    ["'Sequential' runs eagerly for some arguments: all 2 graphs (max_graphs) are in use for others. Raise max_graphs"],
)
def more_shapes_than_graphs():
    graphed = CUDAGraphModule(mlp(CPU), config(max_graphs=2))
    with torch.no_grad():
        for index in range(30):
            graphed(torch.randn(2 + index % 5, 8))


@says(["calls wait for their backward", "captured once that has come. Keep results of earlier calls with detach()"])
def results_kept_with_their_history():
    graphed, held = CUDAGraphModule(mlp(CPU), config()), []
    for _ in range(30):
        held.append(graphed(torch.randn(4, 8)))


@says(["# takes a mask", "indexes with a boolean mask", "use torch.where or masked_fill"], ["'masked'" + EAGER])
def a_boolean_mask():
    model = mlp(CPU)

    def masked(x):
        x = model(x)
        return x[x > 0].sum()  # takes a mask

    run(CUDAGraphModule(masked, config()))


@says(["takes items from a list_iterator", "# takes a batch", "pass them as an argument"], ["'fetches'" + EAGER])
def batches_taken_inside():
    model, data = mlp(CPU), iter([torch.randn(4, 8) for _ in range(20)])

    def fetches(_):
        return model(next(data)).detach()  # takes a batch

    run(CUDAGraphModule(fetches, config()))


@says(
    ["# makes a distribution", "distributions/", "; build the distribution with validate_args=False"], ["'f'" + EAGER]
)
def a_distribution_that_checks_its_values():
    torch.distributions.Distribution.set_default_validate_args(True)  # which torch.compile turns off for good
    model, calls = mlp(CPU), torch.zeros(())

    def f(x):
        calls.add_(1)  # no replay could stop there any more
        return torch.distributions.Categorical(logits=model(x)).entropy()  # makes a distribution

    run(CUDAGraphModule(f, config()))


@says(["changes 'training' from", "# sets the mode", "call train() and eval() outside"], ["'flips'" + EAGER])
def a_mode_set_inside():
    model = mlp(CPU)

    def flips(x):
        model.train(not model.training)  # sets the mode
        return model(x).detach()

    run(CUDAGraphModule(flips, config()))


class Finder:
    def __init__(self):
        self.asked = []

    def find_spec(self, name, *_):
        self.asked.append(name)


@says()
def an_import_inside_whose_finders_keep_count():
    finder, model = Finder(), mlp(CPU)

    def imports(x):
        try:
            import nowhere_to_be_found  # noqa: F401
        except ImportError:
            return model(x).detach()

    sys.meta_path.insert(0, finder)
    try:
        run(CUDAGraphModule(imports, config()))
    finally:
        sys.meta_path.remove(finder)


@says(
    ["'Sequential' runs eagerly: 'weight', a tensor it reads, has moved to another address; change it in place"],
    ["'Sequential' stays eager", "with hardly a replay in between, because 'weight'", "force_enable() tries again"],
)
def weights_that_are_exchanged():
    model = mlp(CPU)
    graphed, held = CUDAGraphModule(model, config()), []  # so that no address comes again
    with torch.no_grad():
        for _ in range(40):
            held.append(model[0].weight.data)
            model[0].weight.data = model[0].weight.data.clone()
            graphed(torch.randn(4, 8))


@says(
    ["'center' is another Tensor than when it was recorded", "in centers)", "change it in place (copy_, add_)"],
    ["'centers' stays eager", "with hardly a replay in between, because 'center'"],
)
def a_buffer_that_is_exchanged_between_calls():
    model = mlp(CPU)
    model.register_buffer("center", torch.zeros(8))

    def centers(x):
        return (model(x) - model.center).detach()

    graphed = CUDAGraphModule(centers, config())
    for _ in range(40):
        model.center = 0.9 * model.center + 0.1 * graphed(torch.randn(4, 8)).mean(0)


def place_of(mark):
    with open(__file__) as file:
        return next(
            f"test_messages.py:{number} in"
            for number, line in enumerate(file, start=1)
            if line.rstrip().endswith(mark) and "says(" not in line
        )


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_log_of_a_mistake_names_its_cause_once(name, caplog):
    program, expected = PROGRAMS[name]
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, logger="graphmod"):
        program()
    lines = [record.getMessage() for record in caplog.records if "graphs are emulated" not in record.getMessage()]
    assert len(lines) == len(expected), "\n".join(lines)
    for line, words in zip(lines, expected, strict=True):
        for word in words:
            wanted = place_of(word) if word.startswith("# ") else word
            assert wanted in line, f"{wanted!r} is not in: {line}"
        assert "tensor(" not in line.replace("tensor(...)", "") and len(line) < 700


@pytest.mark.parametrize("warmup", [1, 3])
def test_a_value_that_changes_in_each_call_is_told_within_a_few(warmup, caplog):
    model = Layer()

    def scaled(x):
        return model.inner(x) * model.scale

    step = CUDAGraphModule(scaled, config(warmup_steps=warmup))
    with torch.no_grad():
        for index in range(2 * warmup + 1):
            assert not any("'scale'" in record.getMessage() for record in caplog.records)
            assert ("'scale' was" in step.last_failure) == (index > warmup)
            model.scale = float(index)
            step(torch.randn(4, 8))
    assert sum("'scale' was" in record.getMessage() for record in caplog.records) == 1
    with torch.no_grad():
        for _ in range(3 * warmup):
            step(torch.randn(4, 8))
    assert step.stats.state == "captured" and step.last_failure == ""


def test_a_cause_is_the_same_whatever_the_values():
    text = "'t' was {} when it was recorded and is {}. It is recorded"
    assert cause_of(text.format(0.5, None)) == cause_of(text.format("'a b'", [1, 2])) != cause_of("'u' was 1")
    assert cause_of("x.py:12 in f") != cause_of("x.py:13 in f")


def test_names_are_told_as_ranges():
    assert ranges(["model.layers.0", "model.layers.1", "model.layers.3", "head"]) == "model.layers.0-1,3, head"


def test_what_was_said_is_said_again_after_force_enable(caplog):
    step, _ = whole(torch.optim.NAdam, eager_parts=False)
    run(step)
    step.force_enable()
    run(step)
    assert sum("the step of NAdam reads" in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize(
    ("optimizer", "remedy"),
    [
        ("AdamW", "Build AdamW with fused=True, capturable=True."),
        ("NAdam", "Build NAdam with capturable=True."),
        ("Adafactor", "Keep its step() outside of the captured callable."),
        ("Mine", "Keep its step() outside of the captured callable."),
    ],
)
def test_a_flag_is_named_only_where_the_optimizer_has_it(optimizer, remedy):
    said = (
        f"Attempting CUDA graph capture of step() for an instance of {optimizer} but param_groups' capturable is False."
    )
    assert reason_of(RuntimeError(said)).endswith(f"capturable is False. {remedy}")


def test_a_read_in_a_mask_of_transformers_has_a_remedy_of_its_own():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = torch.ones(1, 4, dtype=torch.long)

    def refusals(**settings):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **sizes, **settings))

        calls = torch.zeros(())

        def call(mask):
            calls.add_(1)  # no replay could stop there any more
            mask = mask * (model.lm_head.weight.sum() > -1e9)  # a mask of arguments alone is no hazard
            return model(tokens, attention_mask=mask, use_cache=False).logits

        step = CUDAGraphModule(call, config())
        run(lambda _: step(torch.ones_like(tokens)), 6)
        return step.last_failure

    said = refusals(attn_implementation="sdpa")
    assert "test_messages.py" in said and "masking_utils.py" in said
    assert said.endswith("or load the model with attn_implementation='eager'")
    assert refusals(attn_implementation="eager") == ""
