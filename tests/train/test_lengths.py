"""Documents of different lengths: in buckets with a graph each, or packed so that none sees another."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from graphmod.errors import ConfigError
from graphmod.train.batches import (
    BucketSampler,
    block_mask,
    cut,
    document_numbers,
    packed_next_token_loss,
    padded_next_token_loss,
    positions,
)
from graphmod.train.loss import PADDING, next_token_loss
from graphmod.train.model import build_model, model_config
from graphmod.train.run import train

CPU = torch.device("cpu")
SCOPES = ["per_layer", "full_iteration"]


@pytest.fixture
def lines(tiny, tmp_path):
    """`lines("graph=none")`: a run on a text whose lines, of 2 to 40 bytes, are the documents."""
    path = tmp_path / "lines.txt"
    rng = np.random.default_rng(0)
    path.write_text("\n".join("abcdefgh"[n % 8] * int(rng.integers(2, 41)) for n in range(400)))
    settings = ["data=text", f"data.path={path}", "data.documents=line", "train.steps=24"]
    return lambda *overrides: tiny(*settings, *overrides)


@pytest.fixture
def model(tiny):
    """`model("llama_tiny")`: a small model in evaluation mode."""

    def make(name):
        config = tiny(f"model={name}", *(["model.dropout=0"] if name == "gpt2_tiny" else []))
        dims = model_config(config.model, 256, 32)
        return build_model(config.model, dims, config.train.precision, CPU, 0).eval()

    return make


def test_cutting_keeps_every_prediction_once():
    starts = np.array([0, 3, 4, 20])
    begins, lengths = cut(starts, 29, longest=8)
    ends = {3, 4, 20, 29}
    predicted = sorted(b + i for b, n in zip(begins, lengths, strict=True) for i in range(1, n))
    assert predicted == [i for i in range(1, 29) if i not in starts]
    assert lengths.max() == 9 and all(b + n in ends or n == 9 for b, n in zip(begins, lengths, strict=True))


def test_a_batch_is_a_function_of_seed_and_step_and_fits_its_bucket():
    tokens = torch.arange(1, 1001) % 200 + 1
    starts = torch.tensor([0, 5, 40, 50, 200, 210, 600])
    sampler, again = (BucketSampler(tokens, starts, [8, 16, 64], (2, 3), seed) for seed in (1, 1))
    shapes = set()
    for step in range(60):
        batch = sampler(step)
        assert torch.equal(batch, again(step))
        assert batch.shape[2] - 1 in sampler.buckets
        shapes.add(tuple(batch.shape))
        real = batch != PADDING
        assert bool((real[..., :-1] >= real[..., 1:]).all()), "padding is not at the end"
        assert bool(real[..., 1].all()), "a row with nothing to predict"
        longer = real.sum(-1) - 1
        smaller = [bucket for bucket in (0, 8, 16, 64) if bucket < batch.shape[2] - 1][-1]
        assert bool((longer > smaller).all()), "a row that fits a smaller bucket"
    assert shapes == {(2, 24, 9), (2, 12, 17), (2, 3, 65)}, "not the same number of tokens in each bucket"


def test_each_piece_is_as_likely_as_any_other():
    lengths = [4] * 30 + [12] * 10
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    tokens = torch.repeat_interleave(torch.arange(40), torch.tensor(lengths))
    sampler = BucketSampler(tokens, starts, [3, 11], (1, 2), seed=0)
    seen = torch.cat([sampler(step)[0, :, 0] for step in range(3000)]).bincount(minlength=40).float()
    assert (seen / seen.mean() - 1).abs().max() < 0.2


def test_an_epoch_trains_on_each_piece_in_whatever_bucket():
    lengths = [4] * 31 + [12] * 9
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    tokens = torch.repeat_interleave(torch.arange(40), torch.tensor(lengths))
    sampler = BucketSampler(tokens, starts, [3, 11], (1, 2), seed=0)
    assert sampler.steps(1) == 5 + 5  # of 7 rows and of 2
    for epoch in range(3):
        seen = torch.cat([sampler(epoch * 10 + step)[0, :, 0] for step in range(10)]).bincount(minlength=40)
        assert seen.min() == 1 and seen.sum() == 5 * 7 + 5 * 2


def test_pieces_with_nothing_to_train_on_are_left_out():
    tokens = torch.tensor([1, 2, ~3, ~4, 5, ~6, ~7])
    sampler = BucketSampler(tokens, torch.tensor([0, 2, 5]), [2], (1, 2), seed=0)
    seen = {tuple(row) for step in range(4) for row in sampler(step)[0].tolist()}
    assert seen == {(1, 2, PADDING), (~3, ~4, 5)}


def test_only_what_is_not_read_alone_counts_in_the_loss(model):
    net = model("llama_tiny")
    tokens = torch.randint(1, 256, (1, 12))
    marked = tokens.clone()
    marked[:, :7] = ~marked[:, :7]
    logits = net(input_ids=tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits[0, 6:], tokens[0, 7:])
    torch.testing.assert_close(padded_next_token_loss(net, marked), expected)
    packed = packed_next_token_loss(net, torch.cat([marked, torch.zeros_like(tokens)]))
    torch.testing.assert_close(packed, expected)


def test_the_waste_is_counted_and_less_than_with_one_bucket():
    tokens, starts = torch.zeros(100), torch.tensor([0, 5, 14])  # of 5, 9 and 86 tokens: 4, 8 and 85 predictions
    waste = BucketSampler(tokens, starts, [8, 100], (1, 1), seed=0).waste()
    assert waste["8"] == {"pieces": 2, "padding": 1 - 12 / 16} and waste["100"] == {
        "pieces": 1,
        "padding": 1 - 85 / 100,
    }
    assert waste["all"]["padding"] == 1 - 97 / 116 < waste["one bucket"]["padding"] == 1 - 97 / 300


@pytest.mark.parametrize("name", ["llama_tiny", "gpt2_tiny"])
def test_padding_changes_neither_loss_nor_gradient(model, name):
    net = model(name)
    tokens = torch.randint(0, 256, (1, 20))
    alone = next_token_loss(net, tokens)
    padded = padded_next_token_loss(net, torch.nn.functional.pad(tokens, (0, 12), value=PADDING))
    torch.testing.assert_close(padded, alone)


def test_positions_start_over_and_the_mask_is_causal_within_documents():
    documents = torch.tensor([[0, 0, 1, 1, 1, 4]])
    assert positions(documents).tolist() == [[0, 1, 0, 1, 2, 0]]
    expected = [
        [int(i >= j and a == b) for j, b in enumerate([0, 0, 1, 1, 1, 4])] for i, a in enumerate([0, 0, 1, 1, 1, 4])
    ]
    assert block_mask(documents)[0, 0].int().tolist() == expected
    assert document_numbers(torch.tensor([0, 2, 5]), 7).tolist() == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("name", ["llama_tiny", "gpt2_tiny"])
def test_packed_documents_are_as_if_each_were_alone(model, name):
    net = model(name)
    parts = [torch.randint(0, 256, (1, n)) for n in (7, 12, 4)]
    tokens = torch.cat(parts, dim=1)
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([7, 12, 4]))[None]
    packed = packed_next_token_loss(net, torch.cat([tokens, numbers]))
    alone = [next_token_loss(net, part) * (part.shape[1] - 1) for part in parts]
    torch.testing.assert_close(packed, sum(alone) / (6 + 11 + 3))
    unpacked = next_token_loss(net, tokens)
    assert abs(packed - unpacked) > 1e-4, "the documents see each other"


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("form", [pytest.param("data.buckets=[8,16,40]", marks=pytest.mark.slow), "data.packing=true"])
def test_losses_are_eagers_and_every_shape_has_its_graph(lines, tmp_path, scope, form):
    settings = [form, "train.grad_accumulation=2", "train.eval_every=8", "train.eval_batches=3", "train.steps=90"]
    plain = train(lines(*settings, "graph=none"), tmp_path / "none")
    graphed = train(lines(*settings, f"graph={scope}"), tmp_path / scope)
    assert graphed.losses == plain.losses and graphed.eval_losses == plain.eval_losses
    assert graphed.graph["failures"] == 0 and graphed.graph["state"] == "captured"
    if "buckets" in form:
        graphs = [graphed.lengths[length]["graphs"] for length in ("8", "16", "40")]
        assert all(count >= 1 for count in graphs), graphs
        assert "40: " in graphed.report() and "with only the longest bucket" in graphed.report()
        if scope == "full_iteration":
            assert graphs == [1, 1, 1]


def test_a_packed_run_learns_and_its_checkpoint_loads(lines, tmp_path):
    result = train(lines("data.packing=true", "optim.learning_rate=0.02"), tmp_path)
    first, last = (result.losses[index] for index in (0, -1))
    assert last < first
    AutoModelForCausalLM.from_pretrained(tmp_path / result.checkpoint)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.buckets=[16,8]"], "ascending"),
        (["data.buckets=[8]", "data.packing=true"], "use one of the two"),
        (["data.buckets=[8,4000]"], "the longest of data.buckets, 4000, is longer than model.max_positions"),
        (["data.buckets=[8,16]", "graph=auto"], "one shape"),
        (["data.buckets=[4,8,16]", "graph.max_graphs=2"], "graph.max_graphs=2"),
    ],
)
def test_settings_that_cannot_be_meant_together_are_clear_errors(tiny, overrides, said):
    with pytest.raises(ConfigError, match=said):
        tiny(*overrides)
