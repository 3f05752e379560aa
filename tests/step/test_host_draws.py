"""Random numbers drawn on the host that choose a branch: layer drop and its like are captured, one graph for each
branch, with eager's draws; whatever else such a number does keeps the call eager."""

import operator
import os
import random
import secrets
import time
import uuid

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from graphmod import CUDAGraphModule, graph_layers
from tests.support.harness import config

RANDOM, NUMPY, TORCH = random.Random(), np.random.default_rng(), torch.Generator()
BITS = np.random.PCG64()


def seed():
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    RANDOM.seed(8)
    NUMPY.bit_generator.state = np.random.default_rng(9).bit_generator.state
    TORCH.manual_seed(10)
    BITS.state = np.random.PCG64(11).state


def states():
    return (
        *(one.get_state().tolist() for one in (torch.default_generator, TORCH)),
        *(
            random.getstate(),
            RANDOM.getstate(),
            str(np.random.get_state()),
            str(NUMPY.bit_generator.state),
            str(BITS.state),
        ),
    )


def helper(p):
    return random.random() < p


BRANCHES = {
    "torch.rand([]) < p": lambda p: torch.rand([]) < p,
    "a tensor moved and cast": lambda p: (torch.rand(1) * 2 - 1).double()[0] < 2 * p - 1,
    "a tensor filled": lambda p: torch.empty(()).uniform_() < p,
    "bernoulli": lambda p: bool(torch.bernoulli(torch.tensor(p))),
    "a generator of its own": lambda p: torch.rand((), generator=TORCH) < p,
    "item": lambda p: torch.rand(1).item() < p,
    "float": lambda p: not (p <= float(torch.rand(()))),
    "int": lambda p: int(torch.randint(0, 2, ())) < p,
    "random.random": lambda p: random.random() < p,
    "random.uniform": lambda p: random.uniform(0, 1) < p,
    "random.randint": lambda p: random.randint(0, 1) < p,
    "random.choice": lambda p: random.choice([False, True]) and p > 0,
    "random.sample": lambda p: 0 in random.sample(range(2), 1) and p > 0,
    "a Random of its own": lambda p: RANDOM.random() < p,
    "numpy.random.uniform": lambda p: np.random.uniform(0, 1) < p,
    "numpy.random.rand": lambda p: np.random.rand() < p,
    "numpy.random.randint": lambda p: np.random.randint(0, 2) < p,
    "numpy's Generator": lambda p: NUMPY.random() < p,
    "a function that compares": helper,
    "two that are compared with each other": lambda p: random.random() < random.random() and p > 0,
    "a constant of the same value": lambda p: random.choice((0.25, 0.5)) == 0.25 and p > 0,
    "twice": lambda p: 0.05 < random.random() < p + 0.05,
}


class Net(nn.Module):
    def __init__(self, drop, p, dropout=0.0, layers=2):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head, self.dropout = nn.Linear(4, 4), nn.Dropout(dropout)
        self.drop, self.p = drop, p

    def forward(self, x):
        for layer in self.layers:
            if self.drop(self.p):
                continue
            x = x + torch.tanh(self.dropout(layer(x)))
        return self.head(x)


def stepping(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer


def train(make, graphed, calls=24, **settings):
    """Losses, weights, and where all generators are afterwards; and the wrapper."""
    net = make()
    step, optimizer = stepping(net)
    run = CUDAGraphModule(step, config(**settings)) if graphed else step
    seed()
    losses = []
    for i in range(calls):
        optimizer.zero_grad()
        losses.append(repr(run(torch.full((3, 4), float(i % 5)) + 0.1).item()))  # nan is no other than nan
    return (losses, repr([p.tolist() for p in net.parameters()]), states()), run


def compare(make, calls=24, **settings):
    (eager, _), (graphed, run) = train(make, False, calls), train(make, True, calls, **settings)
    assert graphed == eager
    return run.stats


@pytest.mark.parametrize("drop", BRANCHES.values(), ids=BRANCHES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_draws_that_choose_a_branch_are_captured(drop, dropout):
    """Bit for bit as eager, the generators included."""
    stats = compare(lambda: Net(drop, 0.4, dropout))
    assert stats.failures == 0
    assert stats.captures >= 1
    assert stats.replays > 4


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_branch_that_is_always_the_same_is_captured_once(p):
    stats = compare(lambda: Net(BRANCHES["torch.rand([]) < p"], p, layers=6))
    assert (stats.captures, stats.eager_calls) == (1, 2)


def test_many_branches_cost_few_recordings():
    """With twelve layers there are 4,096 branches: most calls are eager, and not recorded."""
    stats = compare(lambda: Net(BRANCHES["random.random"], 0.1, layers=12), calls=60)
    assert stats.state == "captured"
    assert 1 <= stats.captures <= 6


SAME_VALUE = {
    "as a constant": lambda x: x + 1 if torch.randint(1, 3, ()).div(4).item() == 0.25 else x,
    "as a constant, not more": lambda x: x + 1 if torch.randint(1, 3, ()).div(4).item() <= 0.25 else x,
    "as another": lambda x: (
        x + (1 if torch.randint(1, 3, ()).div(4).item() < 0.3 else 2) * (torch.randint(1, 3, ()).div(4).item() < 0.3)
    ),
    "as another that is compared with it": lambda x: (
        x + (torch.randint(1, 3, ()).div(4).item() < torch.randint(1, 3, ()).div(4).item())
    ),
}


@pytest.mark.parametrize("use", SAME_VALUE.values(), ids=SAME_VALUE)
def test_a_number_may_be_the_same_by_chance(use):
    """A float is known by its value alone, so that a constant or another number may look like it."""
    stats = compare(lambda: Using(lambda net, x: use(x)), calls=30)
    assert stats.replays > 4


def kept_in(net):
    net.seen = random.random()
    return net.seen < 0.4


ESCAPES = {
    "scales": lambda net, x: x * random.random(),
    "item that scales": lambda net, x: x * torch.rand(1).item(),
    "compared, and scales": lambda net, x: x * r if (r := torch.rand(1).item()) < 2 else x,
    "int of a tensor": lambda net, x: x * int(torch.rand(()) * 3),
    "truth of a tensor": lambda net, x: x if torch.rand(()) else x + 1,
    "argument of an operation": lambda net, x: torch.mul(x, random.random()),
    "dropout": lambda net, x: nn.functional.dropout(x, random.random() / 2),
    "made a tensor": lambda net, x: x + torch.tensor([random.random()]),
    "sort by chance": lambda net, x: x[sorted(range(3), key=lambda _: random.random())],
    "shuffle": lambda net, x: random.shuffle(net.order) or x * net.order[0],
    "through a list": lambda net, x: x * max([random.random(), 0.2]),
    "an array": lambda net, x: x * float(np.random.rand(3)[0]),
    "minimum": lambda net, x: x * min(0.5, random.random()),
    "kept in an attribute": lambda net, x: x if kept_in(net) else x + 1,
    "formatted": lambda net, x: x if float(f"{random.random()}") < 0.5 else x + 1,
    "truth": lambda net, x: x * bool(int(random.random() * 2)),
    "returned": lambda net, x: x * (lambda: random.random())(),
    "yielded": lambda net, x: x * next(random.random() for _ in "a"),
    "seeded": lambda net, x: random.seed(3) or (x if random.random() < 0.5 else x + 1),
    "a generator made inside": lambda net, x: x if random.Random(3).random() < 0.5 else x + 1,
    "compared as tensors": lambda net, x: x + torch.equal(torch.rand(1) < 0.5, torch.rand(1) < 0.5),
    "compared as tensors, nearly": lambda net, x: x + torch.allclose(torch.rand(1).round(), torch.rand(1).round()),
    "raw bits": lambda net, x: x + int(BITS.random_raw() % 2),
    "of the data": lambda net, x: x if torch.rand(()) < x.mean() else x + 1,
}


class Using(Net):
    def __init__(self, use):
        super().__init__(None, 0)
        self.use, self.order, self.seen = use, [1, 2, 3], 0.0

    def forward(self, x):
        return self.head(self.use(self, x))


@pytest.mark.parametrize("use", ESCAPES.values(), ids=ESCAPES)
def test_a_number_that_does_more_keeps_the_call_eager(use):
    stats = compare(lambda: Using(use), calls=12, eager_parts=False)
    assert stats.replays == 0
    assert stats.state == "disabled"
    compare(lambda: Using(use), calls=12)  # or what makes more of it is an eager part


def test_what_a_call_returns_of_a_number_is_seen():
    def call(x):
        drawn = random.random()
        return x + 1, drawn

    wrapper = CUDAGraphModule(call, config())
    random.seed(0)
    got = [wrapper(torch.ones(2))[1] for _ in range(8)]
    random.seed(0)
    assert got == [random.random() for _ in range(8)]


@pytest.mark.parametrize(
    "draw",
    [
        *(random.SystemRandom().random, lambda: random.SystemRandom().choice([0, 1]), lambda: secrets.randbelow(2)),
        *(lambda: len(secrets.token_hex(1)) / 2, lambda: os.urandom(1)[0] / 256, lambda: uuid.uuid4().int / 2**128),
        lambda: len(list(map(os.urandom, [1]))),
    ],
)
def test_numbers_of_the_system_keep_the_call_eager(draw):
    wrapper = CUDAGraphModule(lambda x: x + 1 if draw() < 2 else x, config())
    for _ in range(8):
        wrapper(torch.ones(2))
    assert wrapper.stats.replays == 0
    assert "draws random numbers on the host" in wrapper.last_failure


class WithoutState(random.Random):
    def getstate(self):
        raise NotImplementedError


class Legacy(np.random.RandomState):
    def get_state(self, legacy=True):
        raise NotImplementedError


@pytest.mark.parametrize("kind", [WithoutState, Legacy])
@pytest.mark.parametrize("used", [lambda one: one.uniform(0, 1), lambda one: sum(map(one.uniform, [0], [1]))])
def test_a_generator_that_does_not_tell_its_state_keeps_the_call_eager(used, kind):
    generator, twin = kind(0), kind(0)
    wrapper = CUDAGraphModule(lambda x: x * used(generator), config())
    for _ in range(8):
        assert torch.equal(wrapper(torch.ones(2)), torch.ones(2) * used(twin))
    assert "draws random numbers on the host" in wrapper.last_failure


class Counting(list):
    asked = 0

    def __getitem__(self, key):
        self.asked += 1
        return super().__getitem__(key)


def test_what_a_number_is_chosen_from_is_gone_through_once():
    """It may have code of its own, or be used up."""
    held = Counting([1, 2, 3])

    def call(x):
        return x * random.choice(held) * random.choices((1, 2), (one for one in (1, 3)))[0]

    def run(call):
        seed()
        held.asked = 0
        return [(call(torch.ones(2)).tolist(), held.asked, states()) for _ in range(8)]

    assert run(CUDAGraphModule(call, config())) == run(call)


class Limit(float):
    asked = 0

    def __gt__(self, other):
        Limit.asked += 1
        return float(self) > other


def test_what_a_number_is_compared_with_is_asked_once():
    limit = Limit(0.5)

    def call(x):
        return x + 1 if random.random() < limit else x

    def run(call):
        seed()
        Limit.asked = 0
        return [(call(torch.ones(2)).tolist(), Limit.asked) for _ in range(8)]

    assert run(CUDAGraphModule(call, config())) == run(call)


def test_of_two_equal_lists_the_one_that_was_chosen_counts():
    both = [[0.5], [0.5]]

    def call(x):
        return x + (random.choice(both) is both[0]) + 2 * (random.sample(both, 1)[0] is both[0])

    def run(call):
        seed()
        return [(call(torch.ones(2)).tolist(), states()) for _ in range(30)]

    wrapper = CUDAGraphModule(call, config())
    assert run(wrapper) == run(call)
    assert wrapper.stats.replays > 4


def test_large_data_that_was_there_is_not_searched_for_numbers():
    data = [0.5] * 1_000_000

    def call(x):
        skipped = random.random() < 0.5
        for i in range(100):
            x = x if skipped else x + data[i]
        return x

    wrapper = CUDAGraphModule(call, config())
    began = time.process_time()
    for _ in range(8):
        wrapper(torch.ones(2))
    assert wrapper.stats.captures
    assert time.process_time() - began < 10


def test_a_number_that_is_put_into_a_large_list_is_seen():
    def call(x, held=[0] * 100):
        held.append(random.random())
        return x * held.pop()

    def run(call):
        seed()
        return [call(torch.ones(2)).tolist() for _ in range(8)]

    assert run(CUDAGraphModule(call, config())) == run(call)


def test_a_zero_is_drawn_with_its_sign():
    def call(x):
        return x * torch.round(torch.randn(()) / 2).item()

    def run(call):
        seed()
        return [repr(call(torch.ones(2)).tolist()) for _ in range(40)]

    assert run(CUDAGraphModule(call, config())) == run(call)


def test_a_module_with_a_backward_outside():
    """Its forward is run again with the draws it had, where no graph of the backward fits."""

    def run(graphed):
        net = Net(BRANCHES["random.random"], 0.4, 0.2)
        call = CUDAGraphModule(net, config()) if graphed else net
        seed()
        found = []
        for i in range(20):
            x = torch.full((3, 4), float(i % 3), requires_grad=True)
            out = call(x)
            if i % 4 == 3:
                found.append(torch.autograd.grad(out.sum(), x)[0].tolist())
            else:
                out.sum().backward()
                found.append([p.grad.tolist() for p in net.head.parameters()])
            net.zero_grad()
        return found, states()

    assert run(True) == run(False)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.scale = random.random()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale


def hooked(x):
    scale = random.random()
    x.register_hook(lambda grad: grad * scale)
    return x


def hooked_by_default(x):
    scale = random.random()
    x.register_hook(lambda grad, scale=scale: grad * scale)
    return x


def hooked_by_class(x):
    class Kept:
        scale = random.random()

    x.register_hook(lambda grad: grad * Kept.scale)
    return x


@pytest.mark.parametrize("use", [Scaled.apply, hooked, hooked_by_default, hooked_by_class])
def test_a_number_that_is_kept_for_a_backward_outside(use):
    def run(graphed):
        net = Using(lambda net, x: use(net.layers[0](x)))
        call = CUDAGraphModule(net, config()) if graphed else net
        seed()
        found = []
        for i in range(10):
            call(torch.full((3, 4), float(i % 3))).sum().backward()
            found.append(net.layers[0].weight.grad.tolist())
            net.zero_grad()
        return found, states()

    assert run(True) == run(False)


def test_a_comprehension_may_compare_a_number_from_outside():
    def drop(p):
        drawn = random.random()
        return any(drawn < one for one in (0.1, p))

    assert compare(lambda: Net(drop, 0.4)).replays > 4


class Candidate:
    pass


def scored(step):
    candidate = Candidate()
    candidate.step, candidate.score = step, random.random()
    return candidate


def test_a_number_that_code_in_c_reads_of_an_object():
    def use(net, x):
        return x * max([scored(1), scored(2), scored(3)], key=operator.attrgetter("score")).step

    assert compare(lambda: Using(use), calls=12, eager_parts=False).replays == 0
    compare(lambda: Using(use), calls=12)


def test_replay_draws_nothing_and_so_serves_none():
    """`replay(times)` compares nothing, so that a call whose branch is drawn is none of its."""
    total = torch.zeros(())

    def call():
        total.add_(1 if random.random() < 0.5 else 2)

    wrapper = CUDAGraphModule(call, config())
    for _ in range(12):
        wrapper()
    assert wrapper.replay(3) == 0


def test_layers_in_graphs_are_dropped_as_in_eager():
    def run(graphed):
        net = Net(BRANCHES["torch.rand([]) < p"], 0.4, layers=4)
        step, optimizer = stepping(net)
        if graphed:
            graph_layers(net, layers="layers.*", config=config())
        seed()
        losses = []
        for i in range(16):
            optimizer.zero_grad()
            losses.append(step(torch.full((3, 4), float(i % 5))).item())
        return losses, states()

    assert run(True) == run(False)


@pytest.mark.parametrize(
    ("wrap", "advised", "not_advised"),
    [
        (CUDAGraphModule, "graph_layers(model) keeps the layers", "ungraph"),
        (graph_layers, "ungraph(model)", "graph_layers(model) keeps"),
    ],
)
def test_a_branch_of_a_layer_leads_to_its_parts_and_not_to_what_was_done(wrap, advised, not_advised, caplog):
    net = nn.Sequential(Net(BRANCHES["random.random"], 0.5), Net(BRANCHES["random.random"], 0.5))
    call = wrap(net, config()) if wrap is CUDAGraphModule else net
    if wrap is graph_layers:
        graph_layers(net, config())
    seed()
    for _ in range(16):
        call(torch.ones(3, 4, requires_grad=True)).sum().backward()
    said = next(one.getMessage() for one in caplog.records if "get a graph each" in one.getMessage())
    assert advised in said and not_advised not in said


steps = st.lists(
    st.sampled_from(["random", "torch", "item", "numpy", "int", "dropout", "own", "plain", "unread", "choice"]),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps, st.sampled_from([0.0, 0.2, 0.5]))
def test_draws_of_any_kinds_in_any_order(kinds, p):
    class Any(Net):
        def forward(self, x):
            for kind in kinds:
                if kind == "random" and random.random() < p:
                    x = x + 1
                elif kind == "torch" and torch.rand(()) < p:
                    x = torch.tanh(x)
                elif kind == "item" and torch.rand(2)[1].item() >= p:
                    x = self.layers[0](x)
                elif kind == "numpy" and np.random.random() < p:
                    x = x / 2
                elif kind == "int":
                    x = x / int(torch.randint(1, 3, ()))
                elif kind == "dropout":
                    x = nn.functional.dropout(x, 0.3)
                elif kind == "own" and torch.rand((), generator=TORCH) > p:
                    x = self.layers[1](x)
                elif kind == "unread":
                    torch.rand(3)
                elif kind == "choice":
                    x = random.choice(self.layers)(x)
            return self.head(x)

    compare(lambda: Any(None, 0), calls=14)


def families():
    transformers = pytest.importorskip("transformers")
    small = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    small |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64, "pad_token_id": 1}
    small |= {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    ids = torch.arange(16).view(2, 8) % 11 + 3

    def opt():
        made = transformers.OPTConfig(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=2,
            ffn_dim=32,
            num_attention_heads=2,
            word_embed_proj_dim=16,
        )
        return transformers.OPTForCausalLM(made), {"input_ids": ids, "labels": ids}

    def bart():
        made = transformers.BartConfig(**small)
        return transformers.BartForConditionalGeneration(made), {"input_ids": ids, "labels": ids}

    def whisper():
        made = transformers.WhisperConfig(**small, max_source_positions=32, max_target_positions=32, num_mel_bins=8)
        made = transformers.WhisperForConditionalGeneration(made)
        return made, {"input_features": torch.linspace(-1, 1, 1024).view(2, 8, 64), "labels": ids}

    return {"opt": opt, "bart": bart, "whisper": whisper}


@pytest.mark.parametrize("name", ["opt", "bart", "whisper"])
def test_families_with_layer_drop_are_captured_as_whole_steps(name):
    def run(graphed):
        torch.manual_seed(0)
        model, batch = families()[name]()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step(batch):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            return loss

        call = CUDAGraphModule(step, config()) if graphed else step
        seed()
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            losses.append(call(batch).item())
        return (losses, states()), call

    (eager, _), (graphed, wrapper) = run(False), run(True)
    assert graphed == eager
    assert (wrapper.stats.captures, wrapper.stats.replays) == (1, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("drop", BRANCHES.values(), ids=BRANCHES)
def test_draws_on_the_host_of_a_gpu(drop):
    """There the device draws from a generator of its own, and the host's is moved on by each replay."""

    def run(graphed):
        net = Net(drop, 0.4, 0.2).cuda()
        step, optimizer = stepping(net)
        call = CUDAGraphModule(step, config()) if graphed else step
        seed()
        losses = []
        for i in range(24):
            torch.rand(2)
            optimizer.zero_grad()
            losses.append(call(torch.full((3, 4), float(i % 5), device="cuda")).item())
        return (losses, states(), torch.cuda.get_rng_state().tolist()), call

    (eager, _), (graphed, wrapper) = run(False), run(True)
    assert graphed == eager
    assert wrapper.stats.replays > 4


def test_each_of_two_branches_keeps_its_graph(device):
    """The recording of one does not replace that of the other."""
    linear = nn.Linear(4, 4).to(device)
    wrapper = CUDAGraphModule(lambda x: (linear(x) if random.random() < 0.5 else x).detach(), config())
    x = torch.ones(2, 4, device=device)
    random.seed(1)
    for _ in range(40):
        wrapper(x)
    eager = wrapper.stats.eager_calls
    for _ in range(40):
        wrapper(x)
    assert wrapper.stats.eager_calls == eager
    assert wrapper.stats.captures == 2
