"""A training step on two ranks: the numbers of one process that has the microbatches of both."""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from graphmod.errors import ConfigError
from graphmod.train.batches import PADDING, padded_next_token_loss
from graphmod.train.fused_loss import fused_loss
from graphmod.train.loss import targets_counted_by
from graphmod.train.parallel import shard, whole
from graphmod.train.settings import TrainGraphConfig
from graphmod.train.step import TrainStep
from tests.support.ranks import in_group, on_ranks
from tests.support.train_steps import language_model

SCOPES = ["per_layer", "full_iteration"]
WHOLE = ["none", "full_iteration"]
SHARDED = [f"sharded {scope}" for scope in WHOLE]
FUSED = [f"fused {scope}" for scope in ("none", *SCOPES, *SHARDED)]
RANKS, STEPS, PARTS = 2, 8, 2


def batch_of(step, rank):
    """(2, 2, 13): two microbatches with other numbers of targets in each row, and none at all in some."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 32, (PARTS, 2, 13), generator=generator)
    lengths = torch.randint(1, 13, (PARTS, 2), generator=generator)
    if rank and step == 2:
        lengths[:] = 0
    return tokens.masked_fill(torch.arange(13) > lengths[..., None], PADDING)


def made(scope, group=None, sharded=False, fused=False, **settings):
    torch.manual_seed(3 if group is None or sharded else 3 + distributed.get_rank())  # all have the model of the first
    model = language_model(torch.device("cpu"))
    loss_fn = settings.pop("loss_fn", padded_next_token_loss)
    if fused:
        loss_fn = fused_loss(model, loss_fn)
    if sharded:
        mesh = init_device_mesh("cpu", (RANKS,))
        shard(model, mesh, reshard_after_forward=True, dtype=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)
    settings = {"max_grad_norm": 0.5, "nonfinite": "skip", "ema_decay": 0.9, **settings}
    config = TrainGraphConfig(scope=scope)
    return TrainStep(model.eval(), optimizer, loss_fn=loss_fn, config=config, process_group=group, **settings)


def weights(step):
    return torch.cat([whole(p.detach()).flatten() for p in step.model.parameters()])


def trained(rank, scope, **settings):
    step = made(scope, distributed.group.WORLD, **settings)
    losses, norms = [], []
    for index in range(STEPS):
        losses.append(float(step(batch_of(index, rank))))
        norms.append(float(step.grad_norm))
    stats = step.stats
    found = losses, norms, weights(step).tolist(), stats.replays, stats.failures
    step.reset()
    return found


@targets_counted_by(lambda batch: (batch["tokens"] >= 0).sum())
def spoilt(model, batch):
    return padded_next_token_loss(model, batch["tokens"]) * batch["factor"].sum()


def trained_on_a_bad_batch(rank, scope, **settings):
    """Rank 1 has a loss that is infinite in one step."""
    step, losses = made(scope, distributed.group.WORLD, loss_fn=spoilt, **settings), []
    for index in range(STEPS):
        factor = torch.full((PARTS, 1), float("inf") if rank and index == 5 else 1.0)
        losses.append(float(step({"tokens": batch_of(0, rank), "factor": factor})))
    found = losses, int(step.skipped), int(step.first_nonfinite), weights(step).tolist()
    step.reset()
    return found


def says_about_another_model(rank):
    """Rank 1 has a wider layer."""
    model = torch.nn.Linear(4, 5 if rank else 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)
    try:
        TrainStep(model, optimizer, process_group=distributed.group.WORLD)
    except ConfigError as error:
        return str(error)


def test_several_processes_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="init_process_group"):
        TrainStep(model, torch.optim.SGD(model.parameters()), process_group=distributed.group.WORLD)


def says_without_its_group(rank):
    """A sharded model in a step that is told of no other rank."""
    try:
        made("none", sharded=True)
    except ConfigError as error:
        return str(error)


def program(rank):
    """All that the tests below look at; in one group, because processes take seconds to start."""
    scopes = ("none", *SCOPES)
    return {
        **{scope: trained(rank, scope) for scope in scopes},
        **{f"bad {scope}": trained_on_a_bad_batch(rank, scope) for scope in scopes},
        **{f"sharded {scope}": trained(rank, scope, sharded=True) for scope in WHOLE},
        **{f"bad sharded {scope}": trained_on_a_bad_batch(rank, scope, sharded=True) for scope in WHOLE},
        **{f"fused {scope}": trained(rank, scope, fused=True) for scope in scopes},
        **{f"fused sharded {scope}": trained(rank, scope, sharded=True, fused=True) for scope in WHOLE},
        "another model": says_about_another_model(rank),
        "no group": says_without_its_group(rank),
    }


@pytest.fixture(scope="module")
def found():
    return on_ranks(in_group(program), RANKS)


def test_ranks_with_different_models_are_told_where_they_differ(found):
    for rank, one in enumerate(found):
        assert "weight" in one["another model"] and f"on rank {1 - rank}" in one["another model"]


def test_a_sharded_model_needs_its_group(found):
    assert "process_group=mesh.get_group()" in found[0]["no group"]


@pytest.mark.parametrize("scope", ["none", *SCOPES, *SHARDED, *FUSED])
def test_ranks_stay_alike(found, scope):
    first, second = (one[scope] for one in found)
    assert first[:3] == second[:3]


EAGER = {**dict.fromkeys(SCOPES, "none"), SHARDED[1]: SHARDED[0]}


@pytest.mark.parametrize(
    ("scope", "eager"),
    [pair for kind in ("", "fused ") for pair in ((kind + scope, kind + eager) for scope, eager in EAGER.items())],
)
def test_graphs_have_the_numbers_of_eager_data_parallel_training(found, scope, eager):
    assert found[0][scope][:3] == found[0][eager][:3]
    assert found[0][scope][3] > 0 and found[0][scope][4] == 0


@pytest.mark.parametrize("kind", ["none", "sharded none", "fused none", "fused sharded none"])
def test_the_numbers_are_those_of_one_process_with_all_microbatches(found, kind):
    step, losses, norms = made("none"), [], []
    for index in range(STEPS):
        losses.append(float(step(torch.cat([batch_of(index, rank) for rank in range(RANKS)]))))
        norms.append(float(step.grad_norm))
    torch.testing.assert_close(torch.tensor(found[0][kind][0]), torch.tensor(losses))
    torch.testing.assert_close(torch.tensor(found[0][kind][1]), torch.tensor(norms))
    torch.testing.assert_close(torch.tensor(found[0][kind][2]), weights(step), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scope", ["none", *SCOPES, *SHARDED])
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(found, scope):
    (losses, skipped, first_bad, after), other = (one[f"bad {scope}"] for one in found)
    assert (losses, skipped, first_bad, after) == other
    assert skipped == 1 and first_bad == 5 and not torch.tensor(losses[5]).isfinite()
    assert torch.tensor(after).isfinite().all()
