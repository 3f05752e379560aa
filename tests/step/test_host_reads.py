"""What a call reads of its arguments on the host: such calls are captured, one graph for each value that comes often,
with eager's numbers; what depends on more keeps the call eager."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from graphmod import CUDAGraphModule, check, eager, graph_layers
from graphmod.trace.host_reads import HostReads
from tests.support.harness import config


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("flag", torch.tensor([True]))
        self.register_buffer("levels", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))


def build(device):
    torch.manual_seed(0)
    return Net().to(device)


def inputs(index, device):
    """A batch (4, 4) and its mask (4, 4) int64, of three kinds."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(index))
    mask = torch.ones(4, 4, dtype=torch.long)
    mask[:, 4 - index % 3 :] = 0
    return x.to(device), mask.to(device)


def raises(net, x, mask):
    if not torch.isfinite(x).all():
        raise ValueError("x is not finite")
    return net.linear(x)


def filled(net, x, mask):
    plain = torch.zeros(4, 4, device=x.device)
    plain[:, 2:] = mask[:, 2:].float()
    return net.linear(x) if plain.mul_(2).max() > 1 else net.linear(x) * 2


READS = {
    "all of a mask": lambda net, x, mask: net.linear(x) if mask.all() else net.linear(x) * mask,
    "the longest": lambda net, x, mask: net.linear(x)[:, : int(mask.sum(1).max())],
    "item": lambda net, x, mask: net.linear(x)[:, : mask.sum(1).amax().item()].sum(),
    "a flag": lambda net, x, mask: net.linear(x) if net.flag else net.linear(x) - 1,
    "a value of a buffer": lambda net, x, mask: net.linear(x) * net.levels[1].item(),
    "equal": lambda net, x, mask: net.linear(x) if torch.equal(mask, torch.ones_like(mask)) else net.linear(x) - 1,
    "allclose": lambda net, x, mask: net.linear(x) if torch.allclose(net.levels, net.levels + 0) else net.linear(x) - 1,
    "a mask as an index": lambda net, x, mask: net.linear(x)[mask.bool()],
    "a mask of a buffer": lambda net, x, mask: net.linear(x)[:, net.levels > 1.5],
    "a constant mask": lambda net, x, mask: net.linear(x)[~torch.eye(4, dtype=torch.bool, device=x.device)],
    "nonzero": lambda net, x, mask: net.linear(x)[mask[0].nonzero().squeeze(1)],
    "a list": lambda net, x, mask: sum(net.linear(x)[i] for i, n in enumerate(mask[0].tolist()) if n),
    "a list of lengths": lambda net, x, mask: torch.cat([net.linear(x)[:n] for n in mask.sum(1).tolist()]),
    "on the CPU": lambda net, x, mask: net.linear(x)[:, : int(mask[0].cpu().sum())],
    "a float that is compared": lambda net, x, mask: net.linear(x) if x.abs().max().item() < 50 else net.linear(x) - 1,
    "a check": raises,
    "of memory that is filled": filled,
    "two of them": lambda net, x, mask: net.linear(x) * (2 if mask[0].all() else 3) if net.flag else net.linear(x) - 1,
    "items by a list": lambda net, x, mask: net.linear(x) if 1 in mask[:, [-1, 0]] else net.linear(x) * 2,
    "a list of a buffer": lambda net, x, mask: net.linear(x) * sum(net.levels.tolist()),
    "a list of one": lambda net, x, mask: net.linear(x) * mask[:1, -1].tolist()[0],
    "nonzero of a buffer": lambda net, x, mask: net.linear(x)[:, (net.levels > 1.5).nonzero().squeeze(1)],
    "a mask of masks": lambda net, x, mask: net.linear(x) * mask.bool()[mask.bool()].sum() * net.flag[net.flag].sum(),
    "a view": lambda net, x, mask: net.linear(x) if mask.T[-1].view(2, 2).any() else net.linear(x) - 1,
}


def play(called, device, change, steps=24):
    """Steps of training with other inputs in each; every second of them has another loss."""
    net = build(device)
    step, wrapper = called(net)
    found = []
    for index in range(steps):
        change(net, index)
        net.zero_grad()
        x, mask = inputs(index, device)
        result = step(x, mask)
        if result.requires_grad:
            (result.sum() * (1 + index % 2)).backward()
        found += [result.detach().clone(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
    return found, wrapper


INDEXED = ("a mask as an index", "a mask of a buffer", "a constant mask")  # which a backward does once more


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def set_flag(net, index):
    if index == 17:
        net.flag.fill_(False)
    if index == 19:
        net.levels.mul_(2)


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("whole", [False, True], ids=["forward", "step"])
def test_a_read_is_compared_before_a_replay(device, name, whole):
    read = READS[name]

    def called(net, graph=True):
        def step(x, mask):
            result = read(net, x, mask)
            if whole:
                result.sum().backward()
                result = result.detach()
            return result

        wrapper = CUDAGraphModule(step, config()) if graph else step
        return wrapper, wrapper

    expected, _ = play(lambda net: called(net, graph=False), device, set_flag)
    found, wrapper = play(called, device, set_flag)
    assert same(found, expected)
    if name in INDEXED and not whole:
        assert not wrapper.stats.captures and "boolean mask" in wrapper.last_failure
    else:
        assert wrapper.stats.replays > 4, wrapper.last_failure
        assert not wrapper.stats.failures


def counted(net, x, mask):
    net.seen += 1
    return net.linear(x) if net.seen.item() % 2 else x


def counted_after(net, x, mask):
    result = net.linear(x) if net.seen.item() % 2 else x
    net.seen.add_(1)
    return result


@eager
def an_eager_part(net, result):
    net.levels.add_(1)
    return result * 2


def after_an_eager_part(net, x, mask):
    result = an_eager_part(net, net.linear(x).detach())
    return result if net.levels.sum() > 20 else result - 1


REFUSED = {
    "what an eager part may change": after_an_eager_part,
    "a parameter": lambda net, x, mask: net.linear(x) * net.linear.weight.sum().item(),
    "a result": lambda net, x, mask: net.linear(x) * net.linear(x).detach().sum().item(),
    "chance": lambda net, x, mask: net.linear(x) * (torch.rand_like(x) + x).sum().item(),
    "what it changes": counted,
    "what it goes on to change": counted_after,
}


@pytest.mark.parametrize("read", REFUSED.values(), ids=REFUSED)
def test_what_depends_on_more_stays_eager(device, read):
    def called(net, graph=True):
        def step(x, mask):
            return read(net, x, mask)

        wrapper = CUDAGraphModule(step, config(eager_parts=False)) if graph else step
        return wrapper, wrapper

    torch.manual_seed(1)
    expected, _ = play(lambda net: called(net, graph=False), device, set_flag)
    torch.manual_seed(1)
    found, wrapper = play(called, device, set_flag)
    assert same(found, expected)
    assert not wrapper.stats.replays
    assert "reads a value on the host" in wrapper.last_failure


def changed_after_a_read(net, x, mask):
    full = mask.all().long()
    result = net.linear(x) * (2 if full.item() else 1)
    full.fill_(1)
    return result + full.item()


def no_number(net, x, mask):
    return net.linear(x) * (2 if (x.sum().abs() * (0.5 - mask[0, -1])).sqrt().item() > 0 else 3)


def shared_with_numpy(net, x, mask):
    mask = mask.clone()
    mask.numpy()[0] = 7
    return net.linear(x) * mask


SHARED = torch.ones(8, 4, dtype=torch.long)


def of_another_name(net, x, mask):
    return net.linear(x) * (2 if SHARED[:4].all() else 3) + mask.sum()


def beside_an_argument(net, x, mask):
    return net.linear(x) * (2 if mask.as_strided((8, 4), (4, 1), 0).all() else 3)


AWKWARD = (changed_after_a_read, no_number, shared_with_numpy, of_another_name, beside_an_argument)


@pytest.mark.parametrize("read", AWKWARD)
def test_reads_of_what_may_be_another_value_before_a_replay(read):
    """Memory that changes or that is another's in the next call, and a value that is equal to none."""

    def run(graph):
        net, found = build("cpu"), []
        step = lambda x, mask: read(net, x, mask).detach()  # noqa: E731
        step = CUDAGraphModule(step, config()) if graph else step
        for index in range(24):
            x, mask = inputs(index, "cpu")
            SHARED.fill_(1)
            if index < (3 if read is beside_an_argument else 6):
                mask = SHARED[:4]
            elif read is of_another_name:
                SHARED[:4], mask = mask, torch.ones_like(mask)
            try:
                found.append(step(x, mask).clone())
            except RuntimeError:
                found.append(torch.zeros(()))
        return found

    assert same(run(True), run(False))


def test_values_that_never_come_again_are_told_of_and_given_up(device, caplog):
    wrapper = CUDAGraphModule(lambda x: x * x.mean().item(), config())
    for index in range(40):
        x, _ = inputs(index, device)
        assert torch.equal(wrapper(x), x * x.mean().item())
    assert not wrapper.stats.replays
    assert "reads on the host is another" in caplog.text
    assert "return the tensor and read it after the call" in caplog.text


@pytest.mark.parametrize("often", [0, 20], ids=["never", "seldom"])
def test_values_that_hardly_come_again_are_hardly_computed(device, monkeypatch, often):
    looks, find = [], HostReads.find
    monkeypatch.setattr(HostReads, "find", lambda reads, leaves: (looks.append(index), find(reads, leaves)))
    wrapper = CUDAGraphModule(lambda x: x * x.mean().item(), config())
    for index in range(600):
        x, _ = inputs(0 if index < 40 * bool(often) or (often and not index % often) else index, device)
        assert torch.equal(wrapper(x), x * x.mean().item())
    assert sum(index >= 400 for index in looks) < 200  # of which each call would make four
    assert bool(wrapper.stats.replays) is bool(often)


def test_layers_read_their_arguments(device):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, mask):
            return x + self.linear(x) * (1 if mask.all() else mask)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x, mask):
            for layer in self.layers:
                x = layer(x, mask)
            return x

    def run(graph):
        torch.manual_seed(0)
        model = Model().to(device)
        wrappers = list(graph_layers(model, config=config())) if graph else []
        found = []
        for index in range(20):
            model.zero_grad()
            result = model(*inputs(index, device))
            result.square().sum().backward()
            found += [result.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        return found, sum(wrapper.stats.replays for wrapper in wrappers)

    expected, _ = run(False)
    found, replays = run(True)
    assert same(found, expected)
    assert replays > 20


def test_an_error_in_what_follows_a_read_is_none_of_the_call(device, monkeypatch):
    monkeypatch.setattr(HostReads, "_view", lambda reads, tensor: 1 / 0)
    wrapper = CUDAGraphModule(lambda x, mask: x * mask[0].tolist()[0], config())
    for index in range(8):
        x, mask = inputs(index, device)
        assert torch.equal(wrapper(x, mask), x * mask[0].tolist()[0])
    assert not wrapper.stats.replays


def test_the_cost_is_in_the_stats(device):
    net = build(device)
    wrapper = CUDAGraphModule(lambda x, mask: READS["all of a mask"](net, x, mask).detach(), config())
    plain = CUDAGraphModule(lambda x: net.linear(x).detach(), config())
    for _ in range(8):
        wrapper(*inputs(0, device))
        plain(inputs(0, device)[0])
    assert wrapper.stats.host_read_seconds > 0
    assert plain.stats.host_read_seconds == 0


def test_a_check_reports_no_hazard(device):
    net = build(device)
    step = lambda x, mask: READS["the longest"](net, x, mask).detach()  # noqa: E731
    report = check(step, *inputs(0, device))
    assert not report.hazards, report


UNARY = {
    "bool": lambda a: (a != 0).float(),
    "sum": lambda a: a.sum(-1),
    "cumsum": lambda a: a.cumsum(0) if a.dim() else a,
    "first": lambda a: a[..., 0] if a.dim() else a,
    "double": lambda a: a.clone().mul_(2),
    "flip": lambda a: a.flip(0) if a.dim() else a,
    "transpose": lambda a: a.T if a.dim() == 2 else a,
    "sort": lambda a: a.sort(-1).values if a.dim() else a,
    "like": lambda a: torch.ones_like(a) + a,
    "int": lambda a: a.long(),
}
LEAVES = {
    "x": lambda net, x, mask: x.round(),
    "mask": lambda net, x, mask: mask,
    "levels": lambda net, x, mask: net.levels,
    "both": lambda net, x, mask: x.round() * mask,
    "arange": lambda net, x, mask: torch.arange(4, device=x.device) * mask,
    "written": lambda net, x, mask: torch.zeros_like(mask).masked_fill_(mask.bool(), 3),
    "weight": lambda net, x, mask: net.linear.weight.round(),
}
ENDS = {
    "if": lambda a, y: y if a.sum() > 1 else y * 2,
    "item": lambda a, y: y * (1 + int(a.float().sum().item() % 3)),
    "equal": lambda a, y: y if torch.equal(a, a.abs()) else y + 1,
    "any": lambda a, y: y.neg() if bool((a > 2).any()) else y,
    "list": lambda a, y: y[: 1 + int(sum(a.reshape(-1).tolist())) % 3],
    "index": lambda a, y: y * (1 + y.detach().reshape(-1)[: a.numel()][a.reshape(-1)[: y.numel()] > 0].sum()),
}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(LEAVES)),
            st.lists(st.sampled_from(list(UNARY)), max_size=4),
            st.sampled_from(list(ENDS)),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_random_reads(parts):
    def step(net, x, mask):
        result = net.linear(x)
        for leaf, path, end in parts:
            value = LEAVES[leaf](net, x, mask)
            for name in path:
                value = UNARY[name](value)
            result = ENDS[end](value, result)
        result.sum().backward()
        return result.detach()

    device = torch.device("cpu")

    def called(net, graph=True):
        wrapper = CUDAGraphModule(lambda x, mask: step(net, x, mask), config()) if graph else None
        return wrapper or (lambda x, mask: step(net, x, mask)), wrapper

    expected, _ = play(lambda net: called(net, graph=False), device, set_flag, steps=20)
    found, _ = play(called, device, set_flag, steps=20)
    assert same(found, expected)
