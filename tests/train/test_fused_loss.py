"""The fused loss is that of the logits, which it never holds all at once."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

from graphmod.errors import ConfigError
from graphmod.train import fused_loss as module
from graphmod.train.activations import recompute_activations
from graphmod.train.batches import padded_next_token_loss
from graphmod.train.fused_loss import LossHead, fused_loss
from graphmod.train.loss import causal_lm_loss, next_token_loss
from graphmod.train.run import train
from graphmod.train.settings import TrainGraphConfig
from graphmod.train.step import TrainStep
from tests.support.train_steps import language_model
from tests.train.test_loss_by_tokens import CUTS, UNEVEN, padded, reference, trained

CPU = torch.device("cpu")
VOCABULARY = 32


@pytest.fixture(autouse=True)
def rows_at_once(monkeypatch):
    """Logits of five tokens at a time, so that the last ones are fewer."""
    monkeypatch.setattr(module, "_AT_ONCE", 5 * VOCABULARY)


def by_hand(head, hidden, targets):
    """The mean over targets of log(sum(exp(logits))) - the target's logit, in float64."""
    logits = linear(hidden.double(), head.weight.double(), None if head.bias is None else head.bias.double())
    terms = [
        row.exp().sum().log() - row[int(target)]
        for row, target in zip(logits.flatten(0, 1), targets.flatten(), strict=True)
        if target != -100
    ]
    return sum(terms) / len(terms)


def made(bias=False, dtype=torch.float32, rows=(2, 8), ignored=()):
    generator = torch.Generator().manual_seed(0)
    head = LossHead(16, VOCABULARY, bias=bias).to(dtype)
    hidden = torch.randn(*rows, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, rows, generator=generator)
    targets.view(-1)[list(ignored)] = -100
    return head, hidden, targets


@pytest.mark.parametrize("ignored", [(), (0, 3, 15), range(5, 12)], ids=["all", "some", "a part without targets"])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_are_those_of_the_formula(bias, ignored):
    head, hidden, targets = made(bias, ignored=ignored)
    given = [hidden, *head.parameters()]
    expected = by_hand(head, hidden, targets)
    found = head(hidden, targets)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=0)
    slopes = torch.autograd.grad(3 * found, given)
    torch.testing.assert_close(slopes, torch.autograd.grad(3 * expected, given), rtol=1e-5, atol=1e-7)


def test_it_is_differentiated_once_but_as_often_as_one_likes():
    head, hidden, targets = made()
    loss = head(hidden, targets)
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="differentiated once only; leave out create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_without_any_target_it_is_nan_and_has_no_gradient():
    head, hidden, targets = made(ignored=range(16))
    loss = head(hidden, targets)
    loss.backward()
    assert loss.isnan() and not hidden.grad.any() and not head.weight.grad.any()


@pytest.mark.parametrize("target", [-1, VOCABULARY])
def test_a_target_that_is_no_token_is_an_error_as_without_it(target):
    head, hidden, targets = made()
    targets[0, 0] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        head(hidden, targets)


def test_losses_of_bfloat16_are_added_up_in_float32():
    head, hidden, targets = made(dtype=torch.bfloat16, rows=(4, 250))
    plain = nn.functional.cross_entropy(linear(hidden, head.weight).float().flatten(0, 1), targets.flatten())
    found = head(hidden, targets)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=0)
    for one, other in zip(*(torch.autograd.grad(loss, (hidden, head.weight)) for loss in (found, plain)), strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation gave."""

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, torch.Tensor):
                self.elements = max(self.elements, one.numel())
        return found


@pytest.mark.parametrize("graded", [True, False], ids=["training", "evaluation"])
def test_the_logits_of_all_tokens_are_never_there(graded):
    head, hidden, targets = made(rows=(4, 16))
    with Largest() as seen, torch.set_grad_enabled(graded):
        loss = head(hidden, targets)
        if graded:
            loss.backward()
    assert seen.elements == 4 * 16 * 16, "the hidden states"
    assert loss.requires_grad == graded


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_loss_is_the_mean_over_targets_however_rows_are_cut(cut):
    rows = padded(UNEVEN).view(6, -1)
    loss, gradients = reference(rows)
    got, changes = trained(rows.view(*cut, -1), padded_next_token_loss, fused=True)
    torch.testing.assert_close(got, loss)
    torch.testing.assert_close(changes, gradients, rtol=1e-4, atol=1e-6)


KINDS = {
    "float32": {},
    "microbatches": {"micro": 2},
    "autocast": {"autocast_dtype": torch.bfloat16},
    "checkpoints": {"checkpoints": True},
    "frozen head": {"frozen": True},
    "labels": {"loss_fn": causal_lm_loss},
}


def losses(scope, fused, micro=1, checkpoints=False, frozen=False, loss_fn=next_token_loss, **settings):
    torch.manual_seed(3)
    model = language_model(CPU)
    model.eval()  # without dropout
    if checkpoints:
        recompute_activations(model)
    model.lm_head.requires_grad_(not frozen)
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(0.01), fused=True)
    if fused:
        settings["loss_fn"] = fused_loss(model, loss_fn)
    step = TrainStep(
        model, optimizer, **{"loss_fn": loss_fn, **settings}, max_grad_norm=1.0, config=TrainGraphConfig(scope=scope)
    )
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(7):
        tokens = torch.randint(VOCABULARY, (micro, 2, 9), generator=generator)
        if loss_fn is causal_lm_loss:
            tokens = {"input_ids": tokens, "labels": tokens.where(tokens > 3, -100)}
        found.append(step(tokens).item())
    found.append(step.evaluate(tokens).item())
    assert step.stats.failures == 0 and (scope == "none" or step.stats.replays > 0)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    step.reset()
    return torch.tensor(found), weights


@pytest.mark.parametrize("kind", KINDS)
def test_steps_have_the_numbers_of_the_plain_loss_and_graphs_those_of_eager(kind):
    plain, eager = (losses("none", fused, **KINDS[kind]) for fused in (False, True))
    # Autocast rounds the gradient of logits before it is divided by the number of targets, and not after.
    near = {"rtol": 1e-3, "atol": 5e-3} if kind == "autocast" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(eager, plain, **near)
    for scope in ("per_layer", "full_iteration"):
        assert all(map(torch.equal, losses(scope, True, **KINDS[kind]), eager)), scope


def test_compiled_steps_have_the_numbers_of_the_plain_loss_and_graphs_those_of_eager(fresh_dynamo, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 9 * VOCABULARY)  # each part takes seconds
    eager, graphed = (losses(scope, True, compile="default") for scope in ("none", "full_iteration"))
    torch.testing.assert_close(eager, losses("none", False), rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, graphed, eager))


RUNS = {
    "windows": [],
    "packing": ["data.packing=true"],
    "buckets": ["data.buckets=[8,16]", "graph.max_graphs=4"],
    "attention in windows": ["model.architecture=mistral", "model.options.sliding_window=4"],
    "tied": ["model=gpt2_tiny", "model.intermediate_size=64", "model.tie_embeddings=true"],
    "samples": ["train.sample_every=4", "train.sample_tokens=2"],
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_has_the_losses_of_the_plain_one(on_text, tmp_path, kind):
    settings = ["train.eval_every=4", "train.eval_batches=1", *RUNS[kind]]
    plain = train(on_text("graph=none", *settings), tmp_path / "plain")
    fused = train(on_text("train.loss=fused", *settings), tmp_path / "fused")
    torch.testing.assert_close(fused.losses, plain.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.eval_losses, plain.eval_losses, rtol=1e-5, atol=1e-5)
    assert fused.graph["failures"] == 0 and fused.graph["replays"] > 0


def capped():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=None))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (capped, "Gemma2ForCausalLM: its logits are scaled or capped"),
        (lambda: nn.Linear(4, 4), "got Linear: it has none"),
        (lambda: language_model(CPU).model, "got LlamaModel: it has none"),
    ],
)
def test_other_logits_are_refused(build, why):
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match=f"train.loss=fused needs .*{why}.*; leave it out"):
        fused_loss(build())


def test_it_is_for_the_model_it_was_made_for():
    first, second = language_model(CPU), language_model(CPU)
    with pytest.raises(ValueError, match="made for another LlamaForCausalLM"):
        fused_loss(first)(second, torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.gpu
def test_on_a_gpu_it_saves_the_memory_of_the_logits(monkeypatch):
    monkeypatch.undo()
    peaks = []
    for fused in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        head = LossHead(256, 100_000, bias=False, device="cuda", dtype=torch.bfloat16)
        hidden = torch.randn(4, 2048, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(100_000, (4, 2048), device="cuda")
        if fused:
            head(hidden, targets).backward()
        else:
            nn.functional.cross_entropy(head(hidden).float().flatten(0, 1), targets.flatten()).backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del head, hidden, targets
    assert peaks[1] < 0.3 * peaks[0]
