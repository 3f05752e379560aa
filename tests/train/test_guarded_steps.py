"""Values that are not finite, loss scaling, averaged weights and recomputed activations: in every scope as in eager."""

import math

import pytest
import torch
import transformers
from torch import nn

from graphmod.train.activations import draws_random_numbers
from graphmod.train.draws import kept_draws
from graphmod.train.run import NonFiniteError, train
from graphmod.train.step import TrainStep, next_token_loss
from tests.support import train_steps
from tests.support.harness import config as graph_config
from tests.support.harness import play, twins
from tests.support.sweeps import sweep
from tests.support.train_steps import build, graphs, replays, scopes, stepper

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


@sweep(pairs=True, nonfinite=["skip", "stop"], clip=[1.0, None], scope=train_steps.SCOPES)
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


def test_a_guard_that_tripped_does_not_block_the_steps_of_an_iteration_without_one(device):
    parts = build(device)
    batch = torch.randint(0, 30, (1, 2, 7), generator=torch.Generator().manual_seed(0))
    settings = {"config": graph_config(scope="none")}
    guarded = TrainStep(parts["model"], parts["optimizer"], nonfinite="stop", **settings)
    guarded(batch)
    guarded.iteration.first_bad.fill_(0)
    before = [p.detach().clone() for p in parts["model"].parameters()]
    guarded(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, parts["model"].parameters(), strict=True))
    TrainStep(parts["model"], parts["optimizer"], **settings)(batch)
    assert not any(torch.equal(a, b) for a, b in zip(before, parts["model"].parameters(), strict=True))


def test_an_optimizer_that_cannot_leave_out_an_update_is_refused(device):
    parts = build(device)
    plain = torch.optim.AdamW(parts["model"].parameters(), lr=0.01, foreach=True)
    with pytest.raises(ValueError, match="fused=True"):
        TrainStep(parts["model"], plain, nonfinite="skip")


@scopes
def test_a_loss_scale_grows_and_shrinks_as_in_eager(scope, device, monkeypatch):
    monkeypatch.setattr("graphmod.train.step._GROWTH_INTERVAL", 3)
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
    assert not torch.equal(side.run.iteration.ema[0], side.model.lm_head.weight)


@pytest.fixture
def on_text(tiny, text):
    return lambda *overrides: tiny("data=text", f"data.path={text}", *overrides)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_run_that_blows_up_stops_and_names_the_step(on_text, tmp_path, scope, monkeypatch):
    monkeypatch.setattr("graphmod.train.run.learning_rates", lambda *args: [1e-3] * 4 + [1e30] * 96)
    with pytest.raises(NonFiniteError, match="step 6: the loss or a gradient"):
        train(on_text(f"graph={scope}", "train.steps=100", "train.log_every=7"), tmp_path)


@pytest.mark.parametrize("scope", ["per_layer", "full_iteration"])
def test_fp16_trains_with_the_losses_of_eager(on_text, tmp_path, scope):
    settings = ["train.precision=fp16_mixed", "optim.learning_rate=0.01"]
    plain = train(on_text(*settings, "graph=none"), tmp_path / "none")
    graphed = train(on_text(*settings, f"graph={scope}"), tmp_path / scope)
    assert graphed.losses == plain.losses
    assert plain.losses[-1] < plain.losses[0]
    graphed.skipped_steps = 3
    assert "3 updates skipped (including overflows of the loss scale)" in graphed.report()


@sweep(scope=SCOPES, model=["llama_tiny", "gpt2_tiny"])
def test_activation_checkpointing_changes_no_number(on_text, tmp_path, scope, model):
    settings = [f"graph={scope}", f"model={model}", *(["model.dropout=0"] if model == "gpt2_tiny" else [])]
    kept = train(on_text(*settings), tmp_path / "kept")
    again = train(on_text(*settings, "train.activation_checkpointing=true"), tmp_path / "again")
    assert again.losses == kept.losses
    assert again.graph["captures"] == kept.graph["captures"] and again.graph["failures"] == 0


def test_activation_checkpointing_runs_each_layer_twice(on_text, tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    calls, original = [], LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: (calls.append(self.training), original(self, x))[1])
    train(on_text("graph=none", "train.steps=1", "train.activation_checkpointing=true"), tmp_path)
    assert sum(calls) == 2 * 2


DROPOUT = ["model=gpt2_tiny", "model.dropout=0.2"]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="plain", marks=pytest.mark.slow),
        pytest.param(["train.precision=bf16_mixed", "train.grad_accumulation=2"], id="autocast and microbatches"),
        pytest.param(["train.eval_every=3", "train.eval_batches=2"], id="with evaluation"),
    ],
)
def test_activation_checkpointing_repeats_the_dropout_of_the_forward(on_text, tmp_path, scope, more):
    plain = train(on_text(*DROPOUT, *more, "graph=none"), tmp_path / "plain")
    again = [*DROPOUT, *more, "train.activation_checkpointing=true", f"graph={scope}"]
    result = train(on_text(*again), tmp_path / "again")
    assert result.losses == plain.losses and result.eval_losses == plain.eval_losses
    assert result.graph["failures"] == 0 and (scope == "none" or result.graph["replays"] > 0)


def test_activation_checkpointing_around_graphs_with_dropout(on_text, tmp_path):
    """The layers run again, and from inside them the graphs of their parts."""
    plain = train(on_text(*DROPOUT, "graph=none"), tmp_path / "plain")
    again = [*DROPOUT, "train.activation_checkpointing=true", "graph=per_layer", "graph.layers=[h.*.mlp]"]
    result = train(on_text(*again), tmp_path / "again")
    assert result.losses == plain.losses
    assert result.graph["failures"] == 0 and result.graph["replays"] > 0


class TestKeptDraws:
    @staticmethod
    def twice(code):
        """What two runs of `code` give, of which only the first draws; and the random state's change in the second."""
        first, later = kept_draws()
        with first:
            before = code()
        state = torch.get_rng_state()
        for _ in range(2):  # two backwards over one forward
            with later:
                after = code()
        assert torch.equal(torch.get_rng_state(), state), "the second run drew"
        return before, after

    @pytest.mark.parametrize(
        "code",
        [
            lambda x: torch.native_dropout(x, 0.5, True),
            lambda x: (nn.functional.dropout(x, 0.5), torch.rand_like(x)),
            lambda x: torch.rand(3).mul_(2),
            lambda x: torch.rand_like(x).mul_(2),
            lambda x: nn.functional.rrelu(x, training=True),
            lambda x: (torch.empty_like(x).normal_(), torch.bernoulli(x.abs().clamp(max=1))),
            lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
        ],
    )
    def test_a_second_run_has_the_numbers_of_the_first(self, code):
        x = torch.randn(2, 3, 4, 5)
        before, after = self.twice(lambda: code(x))
        torch.testing.assert_close(after, before, rtol=0, atol=0)

    def test_attention_without_dropout_is_computed_again_and_not_kept(self):
        first, _ = kept_draws()
        x = torch.randn(2, 3, 4, 5)
        with first:
            nn.functional.scaled_dot_product_attention(x, x, x)
        assert not first._kept

    def test_another_operation_in_the_second_run_is_an_error(self):
        first, later = kept_draws()
        with first:
            torch.rand(3)
        with later, pytest.raises(RuntimeError, match="must do the same"):
            torch.randn(3)

    def test_a_result_changed_in_place_is_an_error(self):
        first, later = kept_draws()
        x = torch.full((3,), 0.5)
        with first:
            torch.bernoulli(x).mul_(2)
        with later, pytest.raises(RuntimeError, match="changed in place"):
            torch.bernoulli(x)


@pytest.mark.parametrize(
    ("name", "settings", "draws"),
    [
        ("OPT", {"dropout": 0.1}, True),  # called as a function
        ("OPT", {"dropout": 0.0}, False),
        ("GPT2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, False),  # its summary head is not used
        ("Llama", {"attention_dropout": 0.2}, True),
        ("Llama", {}, False),
    ],
)
def test_dropout_is_found_wherever_a_model_has_it(name, settings, draws):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    small |= {"word_embed_proj_dim": 16} if name == "OPT" else {}
    config = getattr(transformers, f"{name}Config")(**small, **settings)
    assert draws_random_numbers(transformers.AutoModelForCausalLM.from_config(config)) is draws


@pytest.mark.gpu
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
def test_on_a_gpu_activation_checkpointing_repeats_the_dropout(on_text, tmp_path, scope, precision):
    settings = [*DROPOUT, "train.device=cuda", "train.deterministic=true", f"train.precision={precision}"]
    plain = train(on_text(*settings, "graph=none"), tmp_path / "plain")
    again = train(on_text(*settings, "train.activation_checkpointing=true", f"graph={scope}"), tmp_path / "again")
    assert again.losses == plain.losses
    assert again.graph["failures"] == 0 and (scope == "none" or again.graph["replays"] > 0)
