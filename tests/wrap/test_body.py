"""One graph of the module that runs the layers, with the layers' graphs in its place where it has none."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graphmod import CUDAGraphModule, graph_layers, ungraph
from graphmod.train.settings import TrainGraphConfig
from graphmod.train.step import TrainStep
from tests.support.harness import Side, config, loss_of, play

STEPS = 14


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale, self.dropout = 0.5, nn.Dropout(0.1)

    def forward(self, x, weights=False):
        inner = self.up(self.norm(x)).tanh()
        out = x + self.dropout(self.down(inner)) * self.scale
        return (out, inner.softmax(-1)) if weights else out


class Trunk(nn.Module):
    """Embeds, and runs the layers."""

    drops = None

    def __init__(self, layers, width):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.checkpoints: bool | None = None  # reentrant ones

    def forward(self, tokens, hidden=False, weights=False):
        x, all_hidden, all_weights = self.embed(tokens), [], []
        for layer in self.layers:
            if self.training and self.drops is not None and self.drops() < 0.3:
                continue
            all_hidden.append(x)
            if self.training and self.checkpoints is not None:
                x = checkpoint(layer, x, use_reentrant=self.checkpoints)
            elif weights:
                x, found = layer(x, weights=True)
                all_weights.append(found)
            else:
                x = layer(x)
        return (self.norm(x), *((all_hidden,) if hidden else ()), *((all_weights,) if weights else ()))


class Model(nn.Module):
    def __init__(self, layers=3, width=8, tied=False):
        super().__init__()
        self.trunk, self.head = Trunk(layers, width), nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.trunk.embed.weight

    def forward(self, tokens, **asked):
        first, *others = self.trunk(tokens, **asked)
        return self.head(first), others


def build(device, **sizes):
    return Model(**sizes).to(device)


def tied(device):
    return build(device, tied=True)


def bodied(**settings):
    """Graphs the model's layers and the module around them."""

    def graph(side):
        side.graphs = graph_layers(side.model, config(**{"body": True, **settings}))

    return graph


def step(side: Side, index: int, length: int = 6, key: int = 0, **asked):
    """The plainest training step."""
    forward(side, index, length, key, **asked).backward()
    return finish(side)


def forward(side, index, length=6, key=0, **asked):
    output, others = side.model(side.tokens(index, 2, length, key=key), **asked)
    loss = loss_of([output, others]) if others else loss_of(output)
    side.note(output=output, loss=loss)
    return loss


def finish(side):
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad()


# -- what one graph serves ---------------------------------------------------------------------------------------------


def accumulated(side, index):
    for key in range(3):
        (forward(side, index, key=key) / 3).backward()
    finish(side)


def gradients_kept(side, index):
    forward(side, index).backward()
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=False)


def several_pending(side, index):
    losses = [forward(side, index, key=key) for key in range(2)]
    for loss in reversed(losses):
        loss.backward()
    finish(side)


def summed_up(side, index):
    sum(forward(side, index, key=key) for key in range(2)).backward()
    finish(side)


def two_lengths(side, index):
    step(side, index, 4 + 2 * (index % 2))


def evaluated(side, index):
    step(side, index)
    if index % 3 == 1:
        side.model.eval()
        with torch.no_grad():
            forward(side, index, key=7)
        side.model.train()


def autocast(side, index):
    with torch.autocast(side.device.type, torch.bfloat16):
        loss = forward(side, index)
    loss.backward()
    finish(side)


def held_results(side, index):
    side.held = [*getattr(side, "held", ())[-2:], side.model(side.tokens(index, 2, 6))[0]]
    loss_of(side.held[-1]).backward()
    side.note(held=side.held, detached=[one.detach() * 1 for one in side.held])
    side.held[-1] = side.held[-1].detach()
    finish(side)


def kept_gradients(side, index):
    forward(side, index).backward()
    side.kept = [*getattr(side, "kept", ())[-1:], [one.grad for one in side.model.parameters()]]
    side.note(kept=side.kept)
    finish(side)


def retained(side, index):
    loss = forward(side, index)
    loss.backward(retain_graph=True)
    side.note_gradients()
    loss.backward()
    finish(side)


def skipped_backward(side, index):
    loss = forward(side, index)
    if index % 4 != 2:
        loss.backward()
    finish(side)


def checkpointed(side, index):
    side.model.trunk.checkpoints = False
    step(side, index)


SERVED = {
    "plain": step,
    "accumulation": accumulated,
    "gradients kept in place": gradients_kept,
    "two microbatches in flight": several_pending,
    "two microbatches in one backward": summed_up,
    "two lengths": two_lengths,
    "hidden states": lambda side, index: step(side, index, hidden=True),
    "attention weights": lambda side, index: step(side, index, weights=True),
    "evaluation in between": evaluated,
    "held logits": held_results,
    "kept gradients": kept_gradients,
    "skipped backwards": skipped_backward,
}


@pytest.mark.parametrize("made", [build, tied], ids=["untied", "tied"])
@pytest.mark.parametrize("name", SERVED)
def test_one_graph_serves_with_the_numbers_of_eager(name, made, device):
    side, history = play(made, SERVED[name], device, graph=bodied(), steps=STEPS)
    body, *layers = side.graphs
    assert body.stats.captures and body.stats.replays > STEPS, body.last_failure
    assert not any(layer.stats.captures for layer in layers)
    assert history[-1][0] > history[-4][0] and history[-1][1] == history[-4][1], "the last steps were replayed"


# -- what the layers serve, or nobody ----------------------------------------------------------------------------------


def reentrant(side, index):
    side.model.trunk.checkpoints = True
    step(side, index)


def twice_differentiable(side, index):
    loss = forward(side, index)
    grads = torch.autograd.grad(loss, list(side.model.parameters()), create_graph=True)
    (loss + sum(grad.square().sum() for grad in grads)).backward()
    finish(side)


def stepping_in_hooks(side, index):
    if index == 0:
        side.hooks = [p.register_post_accumulate_grad_hook(descend) for p in side.model.parameters()]
    forward(side, index).backward()


def descend(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.05)
    parameter.grad = None


def looking(side, index):
    if index == 0:
        side.model.trunk.layers[1].register_forward_hook(doubled_if_negative)
    step(side, index)


def doubled_if_negative(module, args, out):
    return out * (1 if out.sum().item() > 0 else 2)


def dropped(draw):
    def program(side, index):
        side.model.trunk.drops = draw
        random.seed(index)
        torch.manual_seed(index)
        step(side, index)

    return program


BY_LAYER = {
    "reentrant checkpoints": (reentrant, True),
    "checkpoints that draw": (checkpointed, True),
    "gradients of gradients": (twice_differentiable, False),
    "an optimizer in the backward": (stepping_in_hooks, True),
    "a hook that looks at a value": (looking, True),
}


@pytest.mark.parametrize("name", BY_LAYER)
def test_layers_serve_where_one_graph_cannot(name, device):
    program, captured = BY_LAYER[name]
    side, _ = play(build, program, device, graph=bodied(), steps=STEPS)
    body, *layers = side.graphs
    assert body.stats.captures == 0 and body.stats.state == "eager" and body.stats.failures == 0
    assert all((layer.stats.replays > 0) is captured for layer in layers), layers[0].last_failure


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand([])], ids=["random", "torch"])
def test_layers_are_dropped_as_in_eager(draw, device):
    side, _ = play(build, dropped(draw), device, graph=bodied(), steps=24)
    assert side.graphs[0].stats.replays and side.graphs[0].stats.state == "captured"


# -- what changes on the way -------------------------------------------------------------------------------------------


def frozen_for_a_while(side, index):
    side.model.trunk.layers[1].requires_grad_(not 6 <= index < 10)
    step(side, index)


def layer_hook_for_a_while(side, index):
    if index == 6:
        side.handle = side.model.trunk.layers[1].register_forward_hook(lambda module, args, out: out * 2)
    if index == 10:
        side.handle.remove()
    step(side, index)


def gradient_hook_for_a_while(side, index):
    if index == 6:
        side.handle = side.model.trunk.layers[1].up.weight.register_hook(lambda grad: grad * 2)
    if index == 10:
        side.handle.remove()
    step(side, index)


def looked_at_for_a_while(side, index):
    if index == 6:
        side.handle = side.model.trunk.layers[1].register_forward_hook(doubled_if_negative)
    if index == 8:
        side.handle.remove()
    step(side, index)


def stepping_for_a_while(side, index):
    if index == 6:
        layer = side.model.trunk.layers[1]
        side.hooks = [p.register_post_accumulate_grad_hook(descend) for p in layer.parameters()]
    if index == 10:
        for hook in side.hooks:
            hook.remove()
    step(side, index)


def exchanged_data(side, index):
    if index in (6, 10):
        weight = side.model.trunk.layers[1].up.weight
        weight.data = weight.data.clone() * 0.5
    step(side, index)


def exchanged_scale(side, index):
    side.model.trunk.layers[2].scale = 0.25 if 6 <= index < 10 else 0.5
    step(side, index)


def of_another_dtype(side, index):
    if index in (6, 10):
        side.optimizer.state.clear()
        side.model.to(torch.bfloat16 if index == 6 else torch.float32)
    step(side, index)


CHANGES = [frozen_for_a_while, layer_hook_for_a_while, gradient_hook_for_a_while, looked_at_for_a_while]
CHANGES += [stepping_for_a_while, exchanged_data, exchanged_scale, of_another_dtype]


@pytest.mark.parametrize("program", CHANGES)
def test_one_graph_serves_again_after_a_change(program, device):
    side, history = play(build, program, device, graph=bodied(), steps=20)
    assert side.graphs[0].stats.state == "captured"
    assert [after[0] - before[0] for before, after in zip(history[-4:], history[-3:], strict=False)] == [2, 2, 2]
    assert [after[1] - before[1] for before, after in zip(history[-4:], history[-3:], strict=False)] == [0, 0, 0]


def test_a_refused_module_is_tried_again_later(device):
    def program(side, index):
        if index == 0:
            side.handle = side.model.trunk.layers[1].register_forward_hook(doubled_if_negative)
        if index == 20:
            side.handle.remove()
        step(side, index)

    side, history = play(build, program, device, graph=bodied(), steps=144)
    layers = side.graphs[1:]
    assert history[40][0] - history[39][0] == 6, "the layers serve"
    assert history[-1][0] - history[-2][0] == 2, "one graph does"
    assert not any(graph for layer in layers for entry in layer._context.entries for graph in entry.graphs)
    assert {layer.stats.state for layer in layers} == {"nested"}


# -- what users see ----------------------------------------------------------------------------------------------------


def trained(model, steps=6, step=step):
    side = Side({"model": model}, next(model.parameters()).device, True)
    side.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for index in range(steps):
        step(side, index)


def test_wrappers_tell_who_serves(device):
    model = build(device)
    body, *layers = wrappers = graph_layers(model, warmup_steps=2)
    assert [one.graph_name for one in wrappers] == ["trunk", *(f"trunk.layers.{index}" for index in range(3))]
    assert {one.stats.state for one in wrappers} == {"eager"}
    trained(model, steps=1)
    assert body.stats.state == "warm-up" and {layer.stats.state for layer in layers} == {"nested"}
    trained(model)
    assert body.stats.state == "captured" and {layer.stats.state for layer in layers} == {"nested"}
    assert sum(one.stats for one in wrappers).state == "captured"
    body.reset()
    assert body.stats.state == "eager"
    trained(model)
    assert body.stats.state == "captured"


def test_the_log_says_who_serves_instead(device, caplog):
    model = build(device)
    model.trunk.layers[0].register_forward_hook(doubled_if_negative)
    body, *layers = graph_layers(model, warmup_steps=2)
    trained(model, steps=12)
    said = [record.message for record in caplog.records if record.message.startswith("'trunk'")]
    assert len(said) == 2 and all(message.endswith("its layers then run from graphs of their own") for message in said)
    assert "reads a value on the host" in body.last_failure and layers[0].stats.state == "captured"
    body.force_enable()
    trained(model, steps=1)
    assert body.stats.failures == 4


def test_a_setting_leaves_the_layers_alone(device):
    model = build(device)
    assert [one.graph_name for one in graph_layers(model, body=False)] == [f"trunk.layers.{i}" for i in range(3)]
    assert "forward" not in model.trunk.__dict__


def test_the_model_itself_is_never_captured(device):
    trunk = Trunk(3, 8).to(device)
    assert len(graph_layers(trunk)) == 3 and "forward" not in trunk.__dict__


def test_layers_that_are_called_by_themselves_have_graphs(device):
    model = build(device)
    layers = graph_layers(model, warmup_steps=2)[1:]
    trained(model)
    for _ in range(5):
        x = torch.randn(2, 6, 8, device=device, requires_grad=True)
        for layer in model.trunk.layers:
            x = layer(x)
        x.sum().backward()
    assert all(layer.stats.state == "captured" for layer in layers)


def test_the_model_stays_what_it_was(device):
    plain, model = build(device), build(device)
    model.load_state_dict(plain.state_dict())
    graph_layers(model, warmup_steps=2)
    assert type(model.trunk) is Trunk and model.state_dict().keys() == plain.state_dict().keys()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    trained(model)
    ungraph(model)
    assert not any("forward" in module.__dict__ or "_graphmod" in module.__dict__ for module in model.modules())


def test_a_copy_has_a_graph_of_its_own(device):
    model = build(device)
    graph_layers(model, warmup_steps=2)
    trained(model)
    torch.manual_seed(0)
    copied = copy.deepcopy(model)
    plain = ungraph(copy.deepcopy(model))
    for one in (copied, plain):
        torch.manual_seed(1)
        trained(one)
    assert all(map(torch.equal, copied.parameters(), plain.parameters()))
    wrappers = [module._graphmod.graphed for module in copied.modules() if "_graphmod" in module.__dict__]
    assert [one.stats.state for one in wrappers] == ["captured", "nested", "nested", "nested"]
    assert len({id(one._context.group.gradients) for one in wrappers}) == 1


def test_it_is_a_part_of_a_step_that_is_captured(device):
    def graph(side):
        layers = graph_layers(side.model, config(body=True))
        side.whole = CUDAGraphModule(lambda tokens: iteration(side, tokens), config())
        side.graphs = [side.whole, *layers]

    def iteration(side, tokens):
        loss = loss_of(side.model(tokens)[0])
        loss.backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss.detach()

    def program(side, index):
        tokens = side.tokens(index, 2, 6)
        return side.whole(tokens) if side.graphed else iteration(side, tokens)

    side, _ = play(build, program, device, graph=graph, steps=8)
    assert side.whole.stats.replays and not any(one.stats.captures for one in side.graphs[1:])


def test_verified_calls_are_those_that_were_captured(device):
    side, _ = play(build, step, device, graph=bodied(verify="always"), steps=8)
    assert side.graphs[0].stats.verified == 5


@pytest.mark.parametrize("tied", [False, True])
def test_a_training_step_by_layers_has_one_graph_for_all(tied, device):
    losses = []
    for scope in ("none", "per_layer"):
        torch.manual_seed(0)
        model = build(device, tied=tied)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        made = TrainGraphConfig(scope=scope, warmup_steps=2)
        step = TrainStep(model, optimizer, loss_fn=loss_of_tokens, max_grad_norm=1.0, config=made)
        torch.manual_seed(1)
        tokens = [torch.randint(0, 32, (2, 2, 6), device=device) for _ in range(10)]
        losses.append([step(batch).item() for batch in tokens] + [step.evaluate(tokens[0]).item() for _ in range(5)])
    assert losses[0] == losses[1]
    names = {graph.graph_name: graph.stats for graph in step.graphs}
    assert names["trunk"].state == names["optimizer step"].state == names["head"].state == "captured"
    assert {stats.captures for name, stats in names.items() if name.startswith("trunk.")} == {0}
    assert step.stats.state == "captured" and step.stats.failures == 0


def loss_of_tokens(model, tokens):
    return nn.functional.cross_entropy(model(tokens)[0].flatten(0, 1), tokens.flatten())


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs Gloo")
@pytest.mark.parametrize("late", [False, True])
def test_layers_serve_where_there_may_be_other_ranks(late, device):
    model = build(device)
    wrappers = graph_layers(model, warmup_steps=2) if late else []
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrappers = wrappers or graph_layers(model, warmup_steps=2)
        assert wrappers[0].graph_name == ("trunk" if late else "trunk.layers.0")
        trained(model)
    finally:
        torch.distributed.destroy_process_group()
    assert all(one.stats.captures for one in wrappers[-3:]) and wrappers[0].stats.captures == (0 if late else 2)


def test_what_verification_refused_is_not_tried_again_by_itself(device):
    model = build(device)
    body = graph_layers(model, warmup_steps=2)[0]
    trained(model)
    (entry,) = body._context.entries
    body._context.out_of_date(entry, "a file that it reads has changed")
    captures = body.stats.captures
    trained(model, steps=70)
    assert body.stats.captures == captures and body.stats.state == "eager" and body.stats.failures == 1
    body.force_enable()
    trained(model)
    assert body.stats.state == "captured"


def test_named_layers_are_wrapped_alone(device):
    model = build(device)
    named = graph_layers(model, layers=["layers.*"])
    assert [one.graph_name for one in named] == [f"trunk.layers.{i}" for i in range(3)]
    assert graph_layers(model, layers=["trunk"])[0].graph_name == "trunk"
