"""The loss of a step is the mean over all targets of its microbatches, however the rows are cut into them."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphmod.train import compile as compile_module
from graphmod.train.batches import PADDING, packed_next_token_loss, padded_next_token_loss
from graphmod.train.fused_loss import fused_loss
from graphmod.train.loss import causal_lm_loss, count_targets_of, next_token_loss
from graphmod.train.run import Evaluation
from graphmod.train.settings import TrainGraphConfig
from graphmod.train.step import TrainStep
from tests.support.harness import assert_same, twins
from tests.support.sweeps import sweep
from tests.support.train_steps import SCOPES, build, graphs, language_model, replays

CPU = torch.device("cpu")
EAGER = TrainGraphConfig(scope="none")
scopes = pytest.mark.parametrize("scope", SCOPES)


def padded(rows):
    """(A, B, S + 1) int64 of rows of tokens with targets as many as told, padded to the longest."""
    rows = torch.as_tensor(rows)
    generator = torch.Generator().manual_seed(int(rows.sum()))
    width = int(rows.max()) + 1
    tokens = torch.randint(0, 32, (*rows.shape, width), generator=generator)
    return tokens.masked_fill(torch.arange(width) > rows[..., None], PADDING)


def by_hand(model, rows):
    """The sum of the cross entropy over each row's real tokens, by the number of targets; each row without padding."""
    total, count = 0.0, 0
    for row in rows:
        tokens = row[row != PADDING]
        if len(tokens) < 2:
            continue
        shares = torch.log_softmax(model(input_ids=tokens[None, :-1]).logits[0].float(), dim=-1)
        total = total - shares.gather(1, tokens[1:, None]).sum()
        count += len(tokens) - 1
    return total / count


def twin_model():
    torch.manual_seed(3)
    model = language_model(CPU)
    model.config.attention_dropout = 0.0
    return model.eval()  # without dropout


def trained(batch, loss_fn, fused=False, **settings):
    """The loss of a step, and by how much it changed each weight, which with plain SGD of rate 1 is the gradient."""
    model = twin_model()
    loss_fn = fused_loss(model, loss_fn) if fused else loss_fn
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn=loss_fn, config=EAGER, **settings)
    loss = step(batch)
    return loss, [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]


UNEVEN = [[9, 9], [1, 2], [4, 1]]
CUTS = [(1, 6), (2, 3), (3, 2), (6, 1)]


def reference(rows):
    model = twin_model()
    loss = by_hand(model, rows)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_padded_rows_have_one_loss_and_gradient_however_they_are_cut(cut):
    rows = padded(UNEVEN).view(6, -1)
    loss, gradients = reference(rows)
    got, changes = trained(rows.view(*cut, -1), padded_next_token_loss)
    torch.testing.assert_close(got, loss)
    torch.testing.assert_close(changes, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_so_have_batches_with_labels(cut):
    rows = padded(UNEVEN).view(6, -1)
    inputs, labels = rows.clamp(min=0), rows.masked_fill(rows == PADDING, -100)
    batch = {"input_ids": inputs.view(*cut, -1), "labels": labels.view(*cut, -1), "logits_to_keep": 0}
    loss, gradients = reference(rows)
    got, changes = trained(batch, causal_lm_loss)
    torch.testing.assert_close(got, loss)
    torch.testing.assert_close(changes, gradients, rtol=1e-4, atol=1e-6)


def test_so_have_packed_documents():
    tokens = torch.randint(0, 32, (2, 1, 12), generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([[[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]], [[0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 9]]])
    documents = [row[number == k] for row, number in zip(tokens[:, 0], numbers[:, 0], strict=True) for k in range(10)]
    loss, gradients = reference(documents)
    got, changes = trained(torch.cat([tokens, numbers], dim=1), packed_next_token_loss)
    torch.testing.assert_close(got, loss)
    torch.testing.assert_close(changes, gradients, rtol=1e-4, atol=1e-6)


def test_a_microbatch_without_targets_weighs_nothing():
    rows = padded([[5, 3], [0, 0]])
    loss, gradients = reference(rows.view(4, -1))
    got, changes = trained(rows, padded_next_token_loss)
    torch.testing.assert_close(got, loss)
    torch.testing.assert_close(changes, gradients, rtol=1e-4, atol=1e-6)
    nothing = torch.full_like(rows, PADDING)
    assert trained(nothing, padded_next_token_loss)[0].isnan(), "a mean of nothing"


def test_a_loss_scale_changes_neither_loss_nor_gradient():
    rows = padded(UNEVEN)
    loss, gradients = reference(rows.view(6, -1))
    model = twin_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    step = TrainStep(model, optimizer, loss_fn=padded_next_token_loss, scale_loss=True, config=EAGER)
    torch.testing.assert_close(step(rows), loss)
    changes = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(changes, gradients, rtol=1e-4, atol=1e-6)


def own_loss(model, tokens):
    return padded_next_token_loss(model, tokens)


def test_a_loss_of_ones_own_weighs_what_it_is_told_to():
    rows = padded(UNEVEN)
    parts = [by_hand(twin_model(), part).item() for part in rows]
    assert trained(rows, own_loss)[0].item() == pytest.approx(sum(parts) / 3), "each microbatch alike"
    counted = trained(rows, own_loss, count_targets=lambda tokens: (tokens[:, 1:] >= 0).sum())[0]
    torch.testing.assert_close(counted, reference(rows.view(6, -1))[0])
    first = trained(rows, padded_next_token_loss, count_targets=lambda tokens: (tokens[0, 0] == rows[0, 0, 0]).float())
    assert first[0].item() == pytest.approx(parts[0]), "what is given comes before the loss function's own"


@pytest.mark.parametrize(
    ("count", "said"),
    [(lambda tokens: 3, "returned int 3; expected a 0-d tensor on cpu"), (lambda tokens: tokens, r"shape \(2, 10\)")],
    ids=["a number", "a matrix"],
)
def test_a_count_that_is_none_is_a_clear_error(count, said):
    with pytest.raises(TypeError, match=said):
        trained(padded(UNEVEN), own_loss, count_targets=count)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda loss: None, "NoneType None"),
        (lambda loss: loss.item(), r"float \d\."),
        (lambda loss: loss.expand(2), "2,"),
    ],
    ids=["nothing", "a number", "a vector"],
)
@pytest.mark.parametrize("method", ["__call__", "evaluate"])
def test_a_loss_that_is_none_is_a_clear_error(method, result, said):
    model = twin_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = TrainStep(model, optimizer, loss_fn=lambda *of: result(own_loss(*of)), config=EAGER)
    with pytest.raises(TypeError, match=f"loss_fn returned .*{said}.*expected the mean over the targets"):
        getattr(step, method)(padded(UNEVEN))


@pytest.mark.parametrize("nonfinite", ["ignore", "skip"])
@pytest.mark.parametrize("scale_loss", [False, True])
def test_a_loss_may_have_dimensions_of_one_number(nonfinite, scale_loss):
    def stepped(shape):
        model = twin_model()
        step = TrainStep(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0, fused=True),
            loss_fn=lambda *of: padded_next_token_loss(*of).reshape(shape),
            count_targets=count_targets_of(padded_next_token_loss),
            nonfinite=nonfinite,
            scale_loss=scale_loss,
            config=EAGER,
        )
        rows = padded(UNEVEN)
        return [step(rows), step(rows[:1]), step.evaluate(rows[:1]), step.skipped, *model.parameters()]

    assert_same(stepped(()), stepped((1, 1)), "losses and weights")


def test_where_the_count_of_a_loss_is_found():
    count = count_targets_of(padded_next_token_loss)
    assert count(padded([[3, 1]])[0]).item() == 4
    assert count_targets_of(functools.partial(functools.partial(padded_next_token_loss), criterion=None)) is count
    assert count_targets_of(next_token_loss) is None, "each position is a target"


PADDED = [padded(torch.randint(1, 7, (3, 2), generator=torch.Generator().manual_seed(i))) for i in range(14)]
PADDED = [nn.functional.pad(tokens, (0, 7 - tokens.shape[2]), value=PADDING) for tokens in PADDED]


def feeder(batch_of, **settings):
    """A step of the twins on `batch_of(side, i)`, with an evaluation of the same batch."""

    def step(side, i):
        if side.run is None:
            side.run = TrainStep(side.model, side.optimizer, config=EAGER, **settings)
        side.note(loss=side.run(batch_of(side, i)), norm=side.run.grad_norm)

    return step


@sweep(scope=SCOPES, more=[{}, {"nonfinite": "stop", "scale_loss": True}])
def test_graphs_compute_eagers_bits(scope, more, device):
    settings = {"loss_fn": padded_next_token_loss, "max_grad_norm": 0.5, **more}
    step = feeder(lambda side, i: PADDED[i].to(side.device), **settings)
    twins(build, step, device, graph=graphs(scope, **settings), replays=replays(scope, 3))


@scopes
def test_so_they_do_in_evaluation(scope, device):
    settings = {"loss_fn": padded_next_token_loss}

    def step(side, i):
        if side.run is None:
            side.run = TrainStep(side.model, side.optimizer, config=EAGER, **settings)
        side.model.eval()
        loss = side.run.evaluate(PADDED[i])
        if not side.graphed:
            torch.testing.assert_close(loss, by_hand(side.model, PADDED[i].to(side.device).view(6, -1)).detach())
        side.note(loss=loss)

    each = 1 if scope == "full_iteration" else 3 * (2 if "eager" in scope else 7)
    twins(build, step, device, graph=graphs(scope, **settings), replays=each)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_so_they_do_compiled(device, fresh_dynamo, monkeypatch, backend):
    if backend != "inductor":  # which takes seconds
        monkeypatch.setattr(compile_module, "_how", lambda how, device: {"backend": backend})
    settings = {"loss_fn": padded_next_token_loss, "compile": "default"}
    sides = []
    for scope in ("none", "full_iteration"):
        torch.manual_seed(0)
        parts = build(device, layers=1)  # each of a step's sizes takes a second to compile
        parts["model"].eval()
        run = TrainStep(parts["model"], parts["optimizer"], config=TrainGraphConfig(scope=scope), **settings)
        sides.append([[run(batch) for batch in PADDED[:6]], list(parts["model"].parameters())])
    assert_same(*sides, "compiled")
    assert run.stats.replays > 0 and run.stats.failures == 0


def test_evaluation_batches_weigh_as_many_targets_as_they_have():
    batches = [padded([[8, 8]]), padded([[1, 2]]), torch.full((1, 2, 5), PADDING)]
    model = twin_model()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn=padded_next_token_loss, config=EAGER)
    evaluation = Evaluation(batches, padded_next_token_loss, CPU)
    assert evaluation and not Evaluation([], padded_next_token_loss, CPU)
    expected = by_hand(model, [row for batch in batches for row in batch[0]]).detach()
    torch.testing.assert_close(evaluation(model, step)["eval/loss"], expected)


def test_evaluation_batches_may_be_dicts():
    batches = [padded([[8, 8]]), padded([[1, 2]])]
    made = [{"input_ids": b.clamp(min=0), "labels": b.masked_fill(b == PADDING, -100)} for b in batches]
    model = twin_model()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn=causal_lm_loss, config=EAGER)
    expected = by_hand(model, [row for batch in batches for row in batch[0]]).detach()
    torch.testing.assert_close(Evaluation(made, causal_lm_loss, CPU)(model, step)["eval/loss"], expected)


class Launches(TorchDispatchMode):
    """Counts operations by the bytes of their results; views have none."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if not op.is_view and isinstance(result, torch.Tensor):
            self.bytes.append(result.nbytes)
        return result


def launches(loss_fn, tokens):
    model = twin_model()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn=loss_fn, config=EAGER)
    step(tokens)
    with Launches() as seen:
        step(tokens)
    return seen.bytes


def test_one_microbatch_costs_nothing_more_and_several_a_few_bytes():
    tokens = padded([[8, 8], [8, 8], [8, 8]])
    assert launches(padded_next_token_loss, tokens[:1]) == launches(own_loss, tokens[:1])
    plain, weighted = launches(own_loss, tokens), launches(padded_next_token_loss, tokens)
    assert len(weighted) - len(plain) <= 4 * 3 + 8
    # The targets that are real, one byte each, are the most there is.
    assert sum(size for size in weighted) - sum(plain) <= tokens[:, :, 1:].numel() + 200


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)])
        self.head = nn.Linear(4, 5)

    def forward(self, images):
        for layer in self.layers:
            images = nn.functional.gelu(layer(images))
        return self.head(images.mean((2, 3)))


def build_images(device):
    model = Images().to(device)
    rate = torch.tensor(0.01, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=device.type == "cuda")
    return {"model": model, "optimizer": optimizer, "run": None}


def image_loss(model, batch):
    return nn.functional.cross_entropy(model(batch["images"]), batch["labels"], ignore_index=-100)


def nested_loss(model, batch):
    (images, (labels,)), smoothing = batch
    return nn.functional.cross_entropy(model(images), labels, label_smoothing=smoothing)


def images_of(side, i):
    labels = side.tokens(i, 2, 4, vocabulary=5).masked_fill(side.tokens(i, 2, 4, vocabulary=3, key=1) == 0, -100)
    return {"images": side.batch(i, 2, 4, 3, 8, 8), "labels": labels}


@scopes
def test_an_image_model_trains_on_dicts(scope, device):
    settings = {"loss_fn": image_loss, "count_targets": lambda batch: (batch["labels"] != -100).sum()}
    parts = 2 if "eager" in scope else 3
    expected = 1 if scope == "full_iteration" else 2 * 2 * parts + ("eager" not in scope)
    twins(build_images, feeder(images_of, **settings), device, graph=graphs(scope, **settings), replays=expected)


def test_images_however_they_are_cut_have_one_loss():
    side = type("Side", (), {"device": CPU})()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, 8, 8, generator=generator)
    labels = torch.tensor([0, -100, -100, -100, 3, 1])
    losses = []
    for cut in [(1, 6), (2, 3), (6, 1)]:
        torch.manual_seed(0)
        side = build_images(CPU)
        step = TrainStep(
            side["model"],
            side["optimizer"],
            loss_fn=image_loss,
            count_targets=lambda batch: (batch["labels"] != -100).sum(),
            config=EAGER,
        )
        losses.append(step({"images": images.unflatten(0, cut), "labels": labels.view(cut)}))
    torch.testing.assert_close(losses[1:], losses[:1] * 2)


def test_a_batch_may_be_nested_and_hold_what_is_no_tensor(device):
    def batch(side, i):
        return (side.batch(i, 2, 4, 3, 8, 8), [side.tokens(i, 2, 4, vocabulary=5)]), 0.1 * (1 + i // 6)

    settings = {"loss_fn": nested_loss}
    side = twins(
        build_images,
        feeder(batch, **settings),
        device,
        graph=graphs("full_iteration", **settings),
        replays=1,
        settled=3,
    )
    assert side.run.captures == 2, "another smoothing is another graph"


def test_of_a_batch_that_requires_grad_the_values_count(device):
    parts = build_images(device)
    step = TrainStep(
        parts["model"], parts["optimizer"], loss_fn=lambda model, x: model(x).square().mean(), config=EAGER
    )
    images = torch.ones(1, 2, 3, 8, 8, requires_grad=True)
    losses = [step(images).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2] and images.grad is None


@pytest.mark.parametrize(
    ("batch", "error", "said"),
    [
        ({"images": torch.zeros(2, 3), "labels": torch.zeros(3)}, ValueError, r"microbatches.*\(2, 3\), \(3,\)"),
        ({"images": torch.tensor(1.0)}, ValueError, "unsqueeze"),
        (torch.zeros(0, 3), ValueError, "at least one"),
        ({"images": [1, 2]}, TypeError, "got dict without tensors"),
        (torch.zeros(2, 3).to_sparse(), ValueError, "dense"),
    ],
    ids=["two counts", "no dimension", "no microbatch", "no tensor", "sparse"],
)
def test_a_batch_that_cannot_be_is_a_clear_error(batch, error, said):
    parts = build_images(CPU)
    with pytest.raises(error, match=said):
        TrainStep(parts["model"], parts["optimizer"], loss_fn=image_loss, config=EAGER)(batch)
