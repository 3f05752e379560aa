"""`TrainStep` gives the losses, norms and weights of eager training in every scope."""

import pytest
import torch
from torch import nn

from graphmod.train.step import TrainStep
from tests.support.harness import config, play, twins
from tests.support.sweeps import sweep
from tests.support.train_steps import SCOPES, build, graphs, replays, scopes, stepper

RATES = [0.02 * 0.8**k for k in range(14)]


@sweep(micro=[3, 1], scope=SCOPES)
def test_a_schedule_with_clipping(micro, scope, device):
    settings = {"learning_rates": RATES, "max_grad_norm": 0.5}
    step = stepper(settings, micro=lambda i: micro)
    twins(build, step, device, graph=graphs(scope, **settings), replays=replays(scope, micro))


@scopes
def test_without_schedule_and_clipping(scope, device):
    side = twins(build, stepper({}), device, graph=graphs(scope), replays=replays(scope))
    assert side.run.grad_norm is None


@scopes
def test_under_autocast(scope, device):
    settings = {"autocast_dtype": torch.bfloat16, "max_grad_norm": 1.0}
    twins(build, stepper(settings), device, graph=graphs(scope, **settings), replays=replays(scope))


@scopes
def test_evaluation_between_the_steps(scope, device):
    def between(side, i):
        if i % 2:
            side.model.eval()
            side.note(evaluated=side.run.evaluate(side.tokens(i, 2, 2, 7, key=9)))
            side.model.train()

    step = stepper({}, between=between)
    _, history = play(build, step, device, graph=graphs(scope), steps=18)
    extra = 1 if scope == "full_iteration" else 2 * (2 if "eager" in scope else 7)
    assert history[-1][0] - history[-3][0] == 2 * replays(scope) + extra


@scopes
def test_a_smaller_last_batch(scope, device):
    step = stepper({"max_grad_norm": 1.0}, rows=lambda i: 1 if i % 4 == 3 else 2)
    _, history = play(build, step, device, graph=graphs(scope, max_grad_norm=1.0), steps=24)
    assert history[-1][0] - history[-5][0] == 4 * replays(scope)


@scopes
def test_the_number_of_microbatches_changes(scope, device):
    step = stepper({}, micro=lambda i: 1 + i % 2)
    _, history = play(build, step, device, graph=graphs(scope), steps=20)
    assert history[-1][1] == history[-3][1], "still runs eagerly"


@scopes
def test_reset_gives_the_model_back_and_training_goes_on_eagerly(scope, device):
    def between(side, i):
        if side.graphed and i == 6:
            side.run.reset()
            side.run.reset()

    step = stepper({"learning_rates": RATES}, between=between)
    side, _ = play(build, step, device, graph=graphs(scope, learning_rates=RATES))
    assert all("forward" not in part.__dict__ for part in side.model.modules())


@scopes
def test_training_resumes_from_saved_state(scope, device):
    """Weights, optimizer and schedule go back to what they were some steps ago."""

    def between(side, i):
        if i == 5:
            side.saved = {
                "model": {k: v.clone() for k, v in side.model.state_dict().items()},
                "optimizer": {
                    "state": {
                        k: {n: t.clone() for n, t in values.items()}
                        for k, values in side.optimizer.state_dict()["state"].items()
                    },
                    "param_groups": [
                        {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in group.items()}
                        for group in side.optimizer.state_dict()["param_groups"]
                    ],
                },
                "step": side.run.state_dict(),
            }
        if i == 8:
            side.model.load_state_dict(side.saved["model"])
            side.optimizer.load_state_dict(side.saved["optimizer"])
            side.run.load_state_dict(side.saved["step"])

    settings = {"learning_rates": RATES, "max_grad_norm": 0.5}
    step = stepper(settings, between=between)
    _, history = play(build, step, device, graph=graphs(scope, **settings), steps=20)
    assert history[-1][0] - history[-2][0] == replays(scope)


def smooth(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def smoothed(model, tokens):
    return smooth(model(input_ids=tokens[:, :-1]).logits, tokens[:, 1:])


def smoothed_in_parts(model, tokens, criterion=smooth):
    return criterion(model(input_ids=tokens[:, :-1]).logits, tokens[:, 1:])


def needs_a_criterion(model, tokens, *, criterion=None):
    return smoothed(model, tokens)


def by_position(model, tokens, criterion=smooth, /):
    return smoothed_in_parts(model, tokens, criterion)


SMOOTH = nn.CrossEntropyLoss(label_smoothing=0.1)


def by_method(model, tokens, criterion=SMOOTH.forward):
    return criterion(model(input_ids=tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def by_module(model, tokens, criterion=SMOOTH):
    return by_method(model, tokens, criterion)


EAGER = [(loss, 0) for loss in (smoothed, needs_a_criterion, by_position, by_method)]
LOSSES = [*EAGER, (smoothed_in_parts, 1), (by_module, 1)]


@pytest.mark.parametrize(
    ("loss_fn", "graphed", "scope"),
    [
        *((*one, "per_layer") for one in LOSSES),  # where a loss may have a graph of its own
        *((*LOSSES[-1], scope) for scope in SCOPES[1:]),
        *(pytest.param(*one, scope, marks=pytest.mark.slow) for one in LOSSES[:-1] for scope in SCOPES[1:]),
    ],
)
def test_another_loss_function(loss_fn, graphed, scope, device):
    settings = {"loss_fn": loss_fn}
    expected = replays(scope, loss=graphed)
    twins(build, stepper(settings), device, graph=graphs(scope, **settings), replays=expected)


def test_a_batch_of_another_kind_is_a_clear_error(device):
    parts = build(device)
    run = TrainStep(parts["model"], parts["optimizer"], config=config(scope="none"))
    with pytest.raises(ValueError, match="microbatches, sequences, tokens"):
        run(torch.zeros(2, 7, dtype=torch.int64, device=device))
