"""Values that are not finite, loss scaling, averaged weights and recomputed activations: in every scope as in eager."""

import math

import pytest
import torch
from harness import config as graph_config
from harness import play, twins
from test_train_step import build, graphs, replays, scopes, stepper
from torch import nn

from graphmod.errors import ConfigError
from graphmod.train.loop import NonFiniteError, train
from graphmod.train.step import TrainStep, next_token_loss

SCOPES = ["none", "per_layer", "full_iteration"]
POISON = 31  # a token whose presence makes the loss NaN


def poisoned(model, tokens):
    """The usual loss, NaN where the first token is POISON: decided on the device, as real overflows are."""
    loss = next_token_loss(model, tokens)
    return loss * torch.where(tokens[0, 0] == POISON, math.nan, 1.0)


def poisoning(settings, bad):
    def step(side, i):
        if side.run is None:
            side.run = TrainStep(side.model, side.optimizer, config=graph_config(scope="none"), **settings)
        batch = side.tokens(i, 1, 2, 7).clamp(max=POISON - 1)
        if i in bad:
            batch[0, 0, 0] = POISON
        loss = side.run(batch)
        side.note(loss=loss.nan_to_num(-1.0), norm=side.run.grad_norm.nan_to_num(-1.0))  # NaN is not equal to itself
        side.note(first=side.run.first_nonfinite, skipped=side.run.skipped)
        side.note(steps=[state["step"] for state in side.optimizer.state.values()])

    return step


@scopes
@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize("clip", [1.0, None])
def test_a_step_that_is_not_finite_does_the_same_as_in_eager(nonfinite, clip, scope, device):
    settings = {"nonfinite": nonfinite, "max_grad_norm": clip, "loss_fn": poisoned}
    side, _ = play(build, poisoning(settings, {3, 8, 9}), device, graph=graphs(scope, **settings))
    assert all(torch.isfinite(parameter).all() for parameter in side.model.parameters())
    assert int(side.run.first_nonfinite) == 3
    assert int(side.run.skipped) == (3 if nonfinite == "skip" else 12 - 3)


def test_a_skipped_update_leaves_weights_moments_and_step_count_alone(device):
    parts = build(device)
    run = TrainStep(
        parts["model"], parts["optimizer"], nonfinite="skip", loss_fn=poisoned, config=graph_config(scope="none")
    )
    good = torch.ones(1, 2, 7, dtype=torch.int64, device=device)
    bad = good.clone()
    bad[0, 0, 0] = POISON
    run(good)
    state = parts["optimizer"].state
    before = [t.clone() for t in (*parts["model"].parameters(), *(v for s in state.values() for v in s.values()))]
    run(bad)
    after = [*parts["model"].parameters(), *(v for s in state.values() for v in s.values())]
    assert all(map(torch.equal, before, after))


def test_an_optimizer_that_cannot_leave_out_an_update_is_refused(device):
    parts = build(device)
    plain = torch.optim.AdamW(parts["model"].parameters(), lr=0.01, foreach=True)
    with pytest.raises(ValueError, match="fused=True"):
        TrainStep(parts["model"], plain, nonfinite="skip")


@scopes
def test_a_loss_scale_grows_and_shrinks_as_in_eager(scope, device, monkeypatch):
    monkeypatch.setattr("graphmod.train.iteration._GROWTH_INTERVAL", 3)
    settings = {"scale_loss": True, "nonfinite": "stop", "autocast_dtype": torch.float16}
    scales = []

    def between(side, i):
        if i == 5:
            side.run.loss_scale.fill_(1e38)  # the next gradients overflow
        side.note(scale=side.run.loss_scale)
        scales.append(float(side.run.loss_scale))

    side, _ = play(build, stepper(settings, between=between), device, graph=graphs(scope, **settings))
    assert scales[2 * 2] == 2 * 65536.0, "three finite steps double it"
    assert int(side.run.skipped) >= 1, "nothing overflowed"
    assert int(side.run.first_nonfinite) == -1, "an overflow is no fault of the run"
    assert float(side.run.loss_scale) < 1e38


def test_scaling_is_that_of_torchs_own_scaler(device):
    """The same weights as GradScaler, autocast and AdamW written by hand, overflows included."""

    def batches():
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(0, 30, (1, 2, 7), generator=generator).to(device) for _ in range(6)]

    torch.manual_seed(0)
    parts = build(device)
    run = TrainStep(
        parts["model"],
        parts["optimizer"],
        scale_loss=True,
        max_grad_norm=1.0,
        autocast_dtype=torch.float16,
        config=graph_config(scope="none"),
    )
    run.loss_scale.fill_(1e38)
    torch.manual_seed(5)
    for batch in batches():
        run(batch)
    torch.manual_seed(0)
    other = build(device)
    model, optimizer = other["model"], other["optimizer"]
    scaler = torch.amp.GradScaler(device.type, init_scale=1e38)
    torch.manual_seed(5)
    for batch in batches():
        with torch.autocast(device.type, torch.float16):
            loss = next_token_loss(model, batch[0])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert float(run.loss_scale) == scaler.get_scale() < 1e38
    assert all(map(torch.equal, parts["model"].parameters(), model.parameters()))


@scopes
def test_averaged_weights_are_those_of_eager(scope, device):
    settings = {"ema_decay": 0.9, "max_grad_norm": 1.0}

    def between(side, i):
        with side.run.ema_weights():
            side.note(average=[parameter.detach().clone() for parameter in side.model.parameters()])

    step = stepper(settings, between=between)
    side = twins(build, step, device, graph=graphs(scope, **settings), replays=replays(scope))
    assert not torch.equal(side.run._iteration.ema[0], side.model.lm_head.weight)


@pytest.fixture
def on_text(tiny, text):
    return lambda *overrides: tiny("data=text", f"data.path={text}", *overrides)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_run_that_blows_up_stops_and_names_the_step(on_text, tmp_path, scope, monkeypatch):
    monkeypatch.setattr("graphmod.train.assembly.learning_rates", lambda *args: [1e-3] * 4 + [1e30] * 96)
    with pytest.raises(NonFiniteError, match="step 6: the loss or a gradient"):
        train(on_text(f"graph={scope}", "train.steps=100", "train.log_every=7"), tmp_path)


@pytest.mark.parametrize("scope", ["per_layer", "full_iteration"])
def test_fp16_trains_with_the_losses_of_eager(on_text, tmp_path, scope):
    settings = ["train.precision=fp16_mixed", "optim.learning_rate=0.01"]
    plain = train(on_text(*settings, "graph=none"), tmp_path / "none")
    graphed = train(on_text(*settings, f"graph={scope}"), tmp_path / scope)
    assert graphed.losses == plain.losses
    assert float.fromhex(plain.losses[-1]) < float.fromhex(plain.losses[0])


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("model", ["llama_tiny", "gpt2_tiny"])
def test_activation_checkpointing_changes_no_number(on_text, tmp_path, scope, model):
    settings = [f"graph={scope}", f"model={model}", *(["model.dropout=0"] if model == "gpt2_tiny" else [])]
    kept = train(on_text(*settings), tmp_path / "kept")
    again = train(on_text(*settings, "train.activation_checkpointing=true"), tmp_path / "again")
    assert again.losses == kept.losses
    assert again.graph["captures"] == kept.graph["captures"] and again.graph["failures"] == 0


def test_activation_checkpointing_runs_each_layer_twice(on_text, tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    calls, original = [], LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: (calls.append(self), original(self, x))[1])
    train(on_text("graph=none", "train.steps=1", "train.activation_checkpointing=true"), tmp_path)
    assert len(calls) == 2 * 2


def test_activation_checkpointing_with_dropout_in_graphs_is_a_clear_error(on_text, tmp_path):
    settings = ["model=gpt2_tiny", "train.activation_checkpointing=true"]
    with pytest.raises(ConfigError, match=r"dropout.*graph=none"):
        train(on_text(*settings), tmp_path)
    plain = train(on_text("model=gpt2_tiny", "graph=none"), tmp_path / "plain")
    assert train(on_text(*settings, "graph=none"), tmp_path / "again").losses == plain.losses
