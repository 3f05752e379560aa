"""Truth values of what a call computes, read on the host before it has changed anything: a replay stops there and
looks, and a call that goes another way is eager, with eager's error and state."""

import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from tests.support.harness import config

pytestmark = pytest.mark.usefixtures("quiet")

CALLS = 14


def demand(condition, what):
    if not condition:
        raise ValueError(what)


def trained(step_of):
    def program(device):
        net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

        def update(loss):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step_of(net, update), lambda: list(net.parameters())

    return program


@trained
def raises(net, update):
    def step(x):
        loss = net(x).square().mean()
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        return update(loss)

    return step


@trained
def asserts_two_things(net, update):
    def step(x):
        y = net(x)
        demand(torch.isfinite(y).all(), "y")
        loss = y.square().mean()
        demand((loss < 1e9).item(), "loss")
        return update(loss)

    return step


@trained
def leaves_an_update_out(net, update):
    def step(x):
        loss = net(x).square().mean()
        return x.new_zeros(()) if torch.isnan(loss) else update(loss)

    return step


@trained
def validates(net, update):
    def step(x):
        normal = torch.distributions.Normal(net(x), nn.functional.softplus(net(x)) + 0.1, validate_args=True)
        return update(-normal.log_prob(torch.ones_like(x)).mean())

    return step


def only_computes(device):
    weight = nn.Parameter(torch.ones(3, device=device))

    def step(x):
        with torch.no_grad():
            y = x * weight
            demand(torch.isfinite(y).all(), "y")
            return y.sum(0)

    return step, lambda: [weight]


def changes_something_before(device):
    net = nn.Linear(3, 3).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        demand(torch.isfinite(net.weight).all(), "weight")
        return loss.detach()

    return step, lambda: list(net.parameters())


def leaves_gradients_behind(device):
    net = nn.Linear(3, 3).to(device)

    def step(x):
        net.zero_grad()
        loss = net(x).square().mean()
        demand(torch.isfinite(loss), "loss")
        loss.backward()
        return loss.detach()

    return step, lambda: [one for parameter in net.parameters() for one in (parameter, parameter.grad)]


def changes_what_was_read(device):
    weight = nn.Parameter(torch.ones(3, device=device))

    def step(x):
        with torch.no_grad():
            good = torch.isfinite((x * weight).sum())
            demand(good, "good")
            good.fill_(True)
            return (x * weight).sum() + good

    return step, lambda: [weight]


LOOKED_AT = [raises, asserts_two_things, leaves_an_update_out, validates, only_computes]
REFUSED = [changes_something_before, leaves_gradients_behind, changes_what_was_read]


def run(program, device, graphed, bad, **settings):
    """All that calls return, raise and leave, their random numbers too; and the wrapper."""
    torch.manual_seed(0)
    step, state = program(device)
    call = CUDAGraphModule(step, config(**settings)) if graphed else step
    seen = []
    for k in range(CALLS):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(k)).to(device)
        try:
            seen.append(call(x * float("nan") if k in bad else x).tolist())
        except ValueError as error:
            seen.append(repr(error))
        seen += [None if one is None else one.tolist() for one in state()]
        seen.append(torch.rand(2, device=device).tolist())
    return seen, call


@pytest.mark.parametrize("bad", [(), (8, 11), (2, 3), range(7, CALLS)], ids=["never", "now and then", "early", "late"])
@pytest.mark.parametrize("program", [*LOOKED_AT, *REFUSED], ids=lambda program: program.__name__)
def test_what_a_call_reads_of_what_it_computes_is_eagers(program, bad, device):
    (eager, _), (graphed, call) = (run(program, device, which, bad) for which in (False, True))
    assert repr(eager) == repr(graphed)  # NaN is itself here
    if program in REFUSED:  # unless a function that reads is an eager part
        graphed, call = run(program, device, True, bad, eager_parts=False)
        assert repr(eager) == repr(graphed)
        assert not call.stats.replays and "reads a value on the host" in call.last_failure
    else:
        assert call.stats.replays > 1, call.last_failure
        assert call.stats.host_read_seconds > 0


def test_the_message_says_what_was_otherwise(device):
    _, call = run(raises, device, True, (8,))
    assert not call.stats.failures and "a truth value that it reads on the host is another" in call.last_failure


def test_a_branch_that_keeps_changing_costs_few_captures(device):
    weight = nn.Parameter(torch.ones(3, device=device))

    @torch.no_grad()
    def step(x):
        y = x * weight
        return y + 1 if y.sum() > 0 else y - 1

    call = CUDAGraphModule(step, config())
    for k in range(400):
        x = torch.full((3,), 2.0 if k // 6 % 2 else -2.0, device=device)
        assert torch.equal(call(x), step(x))
    assert 0 < call.stats.captures <= 12, call.stats


def test_a_verified_call_that_goes_another_way_is_no_failure(device):
    """A replay would have looked."""

    def step(x):
        loss = x.square().sum()
        return loss if not torch.isfinite(loss) else loss + torch.ones_like(loss)

    call = CUDAGraphModule(step, config(verify="always"))
    for k in range(CALLS):
        x = torch.full((3,), float("nan") if k in (6, 9) else float(k), device=device)
        assert torch.equal(call(x).nan_to_num(), step(x).nan_to_num())
    assert call.stats.captures and not call.stats.failures
