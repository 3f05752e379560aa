"""What a graph cannot repeat is refused, naming the user's line, and the numbers stay eager's: never silently wrong."""

import contextlib
import io
import logging
import random

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from graphmod.trace.hazards import Check, Origins
from graphmod.trace.operations import facts
from tests.support.harness import loss_of, mlp, play


def takes_a_branch(self, x):
    return x * 2 if x.sum() > 0 else x * 3


def uses_a_maximum(self, x):
    return x * max(x[0, 0], x[0, 1])


def slices_by_a_tensor(self, x):
    return x[: (x[:, 0] > -9).sum()]


def one_hot_without_classes(self, x):
    return x.sum() + nn.functional.one_hot((x[0] > 0).long()).sum() * x


def picks_by_a_mask(self, x):
    return x * x[x > 0].mean().tanh()


def asks_for_nonzero(self, x):
    return x + torch.nonzero(x > 0).sum()


def asks_for_unique(self, x):
    return x + torch.unique((x > 0).long()).sum()


def selects_by_a_mask(self, x):
    return x + torch.masked_select(x, x > 0).sum()


def counts_bins(self, x):
    return x + torch.bincount((x[0] > 0).long()).sum()


def counts_beyond_its_bins(self, x):
    return x + torch.bincount((x[0] > 0).long() + 3, minlength=2).sum()


def repeats_by_a_tensor(self, x):
    return x + torch.repeat_interleave(x[0], (x[0] > 0).long()).sum()


def reads_a_list(self, x):
    return x * sum(x[0].tolist())


def reads_a_float(self, x):
    return x * float(x.abs().max())


def puts_a_result_where_a_mask_says(self, x):
    x = x.clone()
    x[x > 0] = self.average[0]
    return x


def checks_for_equality(self, x):
    return x * 2 if torch.equal(x, x.abs()) else x * 3


def makes_a_table_of_python_numbers(self, x):
    return x * torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], device=x.device)


def picks_by_a_list(self, x):
    return x[:, [7, 6, 5, 4, 3, 2, 1, 0]]


def keeps_the_refusal(self, x):
    try:
        scale = 2.0 if x.sum().item() > 0 else 1.0
    except Exception:
        scale = 3.0
    return x * scale


def keeps_it_by_its_kind(self, x):
    with contextlib.suppress(RuntimeError):
        return x * (2.0 if x.sum().item() > 0 else 1.0)
    return x


def logs_a_value(self, x):
    LOG.info("mean %.3f", x.detach().mean())
    return x * 2


LOG = logging.getLogger("graphmod_test.hazards")
LOG.setLevel(logging.INFO)
LOG.addHandler(logging.StreamHandler(io.StringIO()))
LOG.propagate = False


REFUSED = [
    keeps_the_refusal, keeps_it_by_its_kind, slices_by_a_tensor,
    one_hot_without_classes, picks_by_a_mask, asks_for_nonzero, asks_for_unique, selects_by_a_mask, counts_bins,
    counts_beyond_its_bins, repeats_by_a_tensor, reads_a_list, reads_a_float,
    puts_a_result_where_a_mask_says, checks_for_equality,
]  # fmt: skip


def draws_a_python_number(self, x):
    return x * random.random()


def counts_its_calls(self, x):
    self.calls += 1
    return x * self.calls


def branches_on_python_state(self, x):
    self.calls += 1
    return x * 2 if self.calls % 2 else x * 3


def switches_late(self, x):
    self.calls += 1
    return x * 2 if self.calls < 9 else x * 3


def counts_in_a_list(self, x):
    self.log.append(len(self.log))
    return x * 2 if len(self.log) < 9 else x * 3


def anneals(self, x):
    self.rate *= 0.9
    return x * self.rate


def keeps_what_it_saw(self, x):
    before, self.seen = self.seen, x.detach().clone()
    return x if before is None else x + before


def rebinds_its_buffer(self, x):
    self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
    return x - self.average


def fills_a_cache(self, x):
    key = tuple(x.shape)
    if key not in self.cache:
        self.cache[key] = torch.ones(x.shape, device=x.device) * (1 + len(self.cache))
    return x * self.cache[key]


def grows_a_history(self, x):
    self.history.append(x.detach().mean())
    return x + torch.stack(self.history[-3:]).mean()


PYTHON_STATE = [
    draws_a_python_number, counts_its_calls, branches_on_python_state, switches_late, counts_in_a_list, anneals,
    keeps_what_it_saw, rebinds_its_buffer, fills_a_cache, grows_a_history,
]  # fmt: skip


def uses_a_table_made_inside(self, x):
    return x * torch.arange(8, device=x.device)


def draws_with_its_generator(self, x):
    return x + torch.rand(x.shape, generator=self.generator, device=x.device)


def changes_a_buffer_in_place(self, x):
    self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - self.average


def sorts(self, x):
    values, order = x.sort(-1)
    return values * (order.float() + 1) + torch.topk(x, 2).values.sum()


def gathers(self, x):
    return x.gather(1, x.argsort(-1)) + torch.where(x > 0, x, x * 2).cumsum(-1)


def puts_a_number_where_a_mask_says(self, x):
    x = x.clone()
    x[x > 0] = 1.0
    return x


FINE = [
    puts_a_number_where_a_mask_says,
    uses_a_table_made_inside, draws_with_its_generator, changes_a_buffer_in_place, sorts, gathers,
    makes_a_table_of_python_numbers, picks_by_a_list,
]  # fmt: skip


class Hazard(nn.Module):
    def __init__(self, use, device):
        super().__init__()
        self.linear, self.use = nn.Linear(8, 8), use
        self.calls, self.rate, self.log, self.cache, self.history, self.seen = 0, 1.0, [], {}, [], None
        self.register_buffer("average", torch.zeros(8))
        self.generator = torch.Generator(device).manual_seed(3)

    def forward(self, x):
        return self.use(self, self.linear(x))


def step(side, i):
    random.seed(i)
    output = side.call(side.batch(i, 4, 8))
    loss = loss_of(output)
    loss.backward()
    side.note(output=output)
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad()


def play_hazard(use, device, **settings):
    return play(lambda d: Hazard(use, d).to(d), step, device, steps=18, **settings)


@pytest.mark.parametrize("use", REFUSED)
def test_a_hazard_is_refused_and_its_line_is_named(use, device):
    side, history = play_hazard(use, device)
    assert history[-1][0] == 0, "a graph ran"
    assert side.call.stats.state == "disabled" and side.call.stats.failures == 3
    line = use.__code__.co_firstlineno
    named = [f"{__file__}:{number} in {use.__name__}" for number in range(line, line + 4)]
    assert any(place in side.call.last_failure for place in named), side.call.last_failure


@pytest.mark.parametrize("use", [takes_a_branch, uses_a_maximum])
def test_a_branch_that_goes_by_what_is_computed_is_eagers(use, device):
    play_hazard(use, device)


def test_a_value_that_logging_reads_is_refused(device):
    side, history = play_hazard(logs_a_value, device)
    assert history[-1][0] == 0, "a graph ran"
    assert "reads a value on the host" in side.call.last_failure


@pytest.mark.parametrize("use", PYTHON_STATE)
def test_state_in_python_is_never_frozen_unnoticed(use, device):
    play_hazard(use, device)


@pytest.mark.parametrize("use", FINE)
def test_what_only_looks_dangerous_is_captured(use, device):
    _, history = play_hazard(use, device)
    assert history[-1][0] - history[-2][0] == 2


def test_a_module_that_leaves_a_loss_in_an_attribute(device):
    """As mixture-of-experts layers do; the attribute's gradient must flow, or the module stays out of the graph."""

    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp("cpu")

        def forward(self, x):
            x = self.body(x)
            self.extra_loss = x.pow(2).mean()
            return x

    def step(side, i):
        loss = loss_of(side.call(side.batch(i, 4, 8))) + side.model.extra_loss
        loss.backward()
        side.note(loss=loss)
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(lambda d: Leaves().to(d), step, device)


def test_a_recurrent_layer_is_right_however_it_runs(device):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x):
            return self.cell(x)[0]

    def step(side, i):
        loss_of(side.call(side.batch(i, 2, 3, 8))).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()

    play(lambda d: Recurrent().to(d), step, device)


def test_a_tensor_from_outside_with_a_history_of_its_own(device):
    """`weight` is computed with gradients outside; a graph cannot follow it there."""

    class Modulated(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.gate, self.make = mlp("cpu"), None, nn.Linear(8, 8)

        def forward(self, x):
            return self.body(x) * self.gate

    def step(side, i):
        side.model.gate = torch.sigmoid(side.model.make(side.batch(i, 8, key=3)))
        loss_of(side.call(side.batch(i, 4, 8))).backward()
        side.note_gradients()
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.model.gate = None

    play(lambda d: Modulated().to(d), step, device)


def test_a_tensor_from_outside_that_stays_and_has_a_history_of_its_own_is_refused(device):
    gate = torch.ones(8, device=device, requires_grad=True) * 2
    module, x = mlp(device), torch.ones(4, 8, device=device)
    wrapper = CUDAGraphModule(lambda x: module(x) * gate)
    for _ in range(6):
        loss_of(wrapper(x)).backward(retain_graph=True)
    assert "was itself computed with gradients" in wrapper.last_failure and not wrapper.stats.replays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_read_on_the_host_but_for_bfloat16(dtype, monkeypatch):
    op = torch.ops.aten._grouped_mm.default
    rows, weights, ends = torch.ones(4, 16, dtype=dtype), torch.ones(2, 16, 16, dtype=dtype), torch.tensor([1, 4])
    check = Check(0, Origins())
    monkeypatch.setattr(check, "_gpu_reason", lambda *_: None)
    found = check.reason(op, facts(op), (rows, weights, ends), {}, [rows, weights, ends])
    assert (found is None) == (dtype is torch.bfloat16)
    if found is not None:
        assert "set_experts_implementation('batched_mm')" in found.remedy


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_captured_in_bfloat16_and_told_else(dtype):
    weights = torch.randn(2, 64, 64, device="cuda", dtype=dtype)
    ends = torch.tensor([3, 16], device="cuda", dtype=torch.int32)
    wrapper = CUDAGraphModule(lambda x: torch.nn.functional.grouped_mm(x, weights, offs=ends), eager_parts=False)
    for step in range(6):
        torch.manual_seed(step)
        x = torch.randn(16, 64, device="cuda", dtype=dtype)
        assert torch.equal(wrapper(x), torch.nn.functional.grouped_mm(x, weights, offs=ends))
    assert (wrapper.stats.replays > 0) == (dtype is torch.bfloat16)
    assert dtype is torch.bfloat16 or "where each group of rows ends" in wrapper.last_failure


@torch.library.custom_op("graphmod_tests::for_no_graph", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def for_no_graph(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@pytest.mark.parametrize("eager_parts", [False, True])
def test_what_its_author_says_is_for_no_graph_is_refused_or_called_between_two(eager_parts, device):
    graphed = CUDAGraphModule(lambda x: for_no_graph(x) + 1, warmup_steps=1, eager_parts=eager_parts)
    for step in range(5):
        x = torch.full((3,), float(step), device=device)
        assert torch.equal(graphed(x), x * 3 + 1)
    if eager_parts:
        assert graphed.stats.replays == graphed.stats.eager_parts == 3
    else:
        assert graphed.stats.captures == 0 and "cudagraph_unsafe" in str(graphed.last_failure)
