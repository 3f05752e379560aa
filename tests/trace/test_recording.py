"""What a recorded call is: an eager call with eager's numbers, of which everything is known afterwards."""

import functools
import operator
import queue
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from graphmod import CUDAGraphModule
from graphmod.trace import dispatch, patches
from graphmod.trace.dispatch import is_recording
from graphmod.trace.hazards import Hazard
from graphmod.trace.patches import Patch
from graphmod.trace.recorder import Follower, Recorder
from tests.support.harness import assert_same, config, loss_of, play


def on(device):
    return device.index or 0 if device.type == "cuda" else None


def watched(run, *inputs, gpu=None, **settings):
    with Recorder(inputs, gpu=gpu, **settings) as recorder:
        result = run(*inputs)
    return recorder, result


# -- numbers -----------------------------------------------------------------------------------------------------------

ASKS_FOR_A_MODE = {
    "masked_fill": lambda x, p: x.masked_fill(x > 0, p),
    "prod": lambda x, p: (x * p).prod(0),
    "prod of zeros": lambda x, p: (x * p).relu().prod(),
    "cumprod": lambda x, p: (x * p).cumprod(0),
    "masked_scatter": lambda x, p: x.masked_scatter(x > 0, p.expand_as(x).contiguous()),
    "index_put": lambda x, p: x.index_put((torch.arange(3, device=x.device),), p),
    "where": lambda x, p: torch.where(x > 0, x, p).logcumsumexp(0),
    "std": lambda x, p: (x * p).std(0) + (x * p).norm(dim=0),
    "linalg": lambda x, p: torch.linalg.det((x * p)[:, :8].t() @ x),
    "repeat": lambda x, p: (x * p).repeat(2, 3).flip(0).roll(1),
    # The backward of "reflect" has no deterministic kernel for a GPU.
    "pad": lambda x, p: F.pad(x[None] * p, (1, 2), mode="circular" if x.is_cuda else "reflect"),
}


@pytest.mark.parametrize("name", ASKS_FOR_A_MODE)
def test_a_watched_call_has_eagers_bits_forward_and_backward(name, device):
    x = torch.randn(40, 8, device=device)
    p = torch.tensor(0.37, device=device, requires_grad=True)

    def run(x):
        leaf = x.clone().requires_grad_()
        out = ASKS_FOR_A_MODE[name](leaf, p)
        grads = torch.autograd.grad(out, [leaf, p], torch.ones_like(out) / 3, allow_unused=True)
        return [out.detach(), *grads]

    expected = run(x)
    _, result = watched(run, x, gpu=on(device))
    assert_same(expected, result, name)


def test_no_tensor_looks_like_a_subclass_because_a_recorder_watches():
    x = torch.ones(2)
    with Recorder():
        assert is_recording() and not torch._C._dispatch_isTensorSubclassLike(x)
    assert dispatch.has_key()


@pytest.mark.parametrize("make", [lambda x: nn.Parameter(x), lambda x: x.as_subclass(nn.Buffer), nn.Linear(3, 2).to])
def test_objects_of_tensor_classes_are_made_as_without_a_recorder(make):
    x = torch.ones(3, 3)
    expected = make(x) if not isinstance(make, type(nn.Linear(1, 1).to)) else nn.Linear(3, 2)
    _, made = watched(lambda x: nn.Linear(3, 2) if isinstance(expected, nn.Linear) else make(x), x)
    assert type(made) is type(expected)


def test_code_under_a_mode_of_the_users_is_seen():
    with Recorder() as recorder, FlopCounterMode(display=False) as flops:
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert flops.get_total_flops() == 54
    assert [step.op.overloadpacket.__name__ for step in recorder.trace].count("mm") == 1


def test_what_a_record_holds_of_a_call(device):
    layer = nn.Linear(4, 4).to(device)
    statistic, x = torch.zeros(4, device=device), torch.randn(2, 4, device=device)
    generator = torch.Generator(device)
    torch.rand(1, device=device, generator=generator)

    def run(x):
        statistic.add_(1)
        x.mul_(2)
        (layer(x) + torch.rand(4, device=device, generator=generator)).sum().backward()

    recorder, _ = watched(run, x, gpu=on(device), generators=[generator])
    assert set(recorder.written) == {statistic.data_ptr()} and recorder.inputs_written == {x.data_ptr()}
    assert [one._cdata for one in recorder.generators] == [generator._cdata] and recorder.backward and recorder.random
    assert not recorder.hazards


@pytest.mark.gpu
def test_chance_on_the_host_is_noticed():
    x = torch.ones(2, device="cuda")
    recorder, _ = watched(lambda x: x * 2 if torch.rand([]) > 2 else x, x, gpu=0)
    drawn = next(hazard for hazard in recorder.hazards if "drawn at random" in hazard.effect)
    assert "test_recording.py" in drawn.lines.location


# -- hazards -----------------------------------------------------------------------------------------------------------


def test_a_watched_call_runs_on_and_each_hazard_is_told_with_its_line(device):
    x = torch.randn(4, 4, device=device)

    def run(x):
        for _ in range(3):
            scale = 2.0 if x.sum() > 0 else 3.0
        return x[x > 0] * scale

    recorder, result = watched(run, x, gpu=on(device))
    assert torch.equal(result, run(x))
    read, *again, mask = recorder.hazards
    assert again == [read, read]
    line = run.__code__.co_firstlineno
    assert isinstance(read, Hazard) and read.lines.user == f"{__file__}:{line + 2} in run" and not read.lines.backward
    assert mask.lines.user == f"{__file__}:{line + 3} in run" and mask.lines.library is None
    assert "reads a value on the host" in read.effect and "torch.where" in mask.remedy


def test_a_hazard_in_a_library_names_its_line_beside_the_users():
    x = torch.rand(3)
    run = lambda x: torch.distributions.Normal(x, x + 1, validate_args=True).log_prob(x)  # noqa: E731
    found = watched(run, x)[0].hazards[0]
    assert found.lines.user.startswith(f"{__file__}:{run.__code__.co_firstlineno}")
    assert "torch/distributions/distribution.py" in found.lines.library
    assert found.lines.user in str(found) and found.lines.library in str(found)


def test_a_hazard_in_a_backward_says_so():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0].sum().item()

    def run(x):
        Reads.apply(x).sum().backward()
        (x * torch.tensor(1.5, requires_grad=True)).masked_fill(x > 0, 0.0).prod().backward()

    recorder, _ = watched(run, torch.rand(3, requires_grad=True))
    own, torchs = recorder.hazards[0], recorder.hazards[-1]
    assert own.lines.backward and "in backward" in own.lines.user
    assert torchs.lines.backward and torchs.lines.user is None
    assert "the backward pass, by way of ProdBackward0" in str(torchs) and "whose backward that is" in str(torchs)


def test_what_the_recorder_itself_cannot_follow_refuses_and_breaks_nothing(monkeypatch):
    def fails(*_):
        raise LookupError("no such thing")

    monkeypatch.setattr(Recorder, "_note_read", fails)
    x = torch.ones(2)
    recorder, result = watched(lambda x: x * 2, x)
    assert torch.equal(result, x * 2) and "LookupError" in recorder.hazards[0].effect


OPTIMIZERS = [
    (torch.optim.NAdam, {}, "keep optimizer.step() outside", ["fused", "capturable"]),
    (torch.optim.RAdam, {}, "keep optimizer.step() outside", ["fused", "capturable"]),
    (torch.optim.Adamax, {}, "keep optimizer.step() outside", ["fused", "capturable"]),
    (torch.optim.ASGD, {}, "keep optimizer.step() outside", ["fused", "capturable"]),
    (torch.optim.Adafactor, {}, "keep optimizer.step() outside", ["fused", "capturable"]),
    (torch.optim.AdamW, {}, "build AdamW with fused=True", ["capturable"]),
    (torch.optim.Adagrad, {}, "build Adagrad with fused=True", ["capturable"]),
]


@pytest.mark.parametrize(("kind", "settings", "remedy", "without"), OPTIMIZERS)
def test_a_remedy_exists_for_this_optimizer(kind, settings, remedy, without):
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), **settings)

    def run(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run(torch.rand(2, 4))
    found = watched(run, torch.rand(2, 4))[0].hazards[0]
    assert found.effect.startswith(f"the step of {kind.__name__}") and remedy in found.remedy, found
    assert not any(word in found.remedy for word in without), found


# -- programs ----------------------------------------------------------------------------------------------------------


class Program(nn.Module):
    def __init__(self, use, device):
        super().__init__()
        self.use, self.linear = use, nn.Linear(8, 8)
        self.generator = torch.Generator(device).manual_seed(11)
        torch.rand(1, device=device, generator=self.generator)
        self.state = self.generator.get_state()

    def forward(self, x):
        return self.use(self, self.linear(x))


def step(side, i):
    output = side.call(side.batch(i, 4, 8))
    loss_of(output).backward()
    side.note(output=output)
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad()


def seeds_the_default_generator(self, x):
    torch.manual_seed(7)
    return x + torch.randn_like(x)


def seeds_its_generator(self, x):
    self.generator.manual_seed(7)
    return x + torch.rand(x.shape, device=x.device, generator=self.generator)


def puts_a_state_back(self, x):
    self.generator.set_state(self.state)
    return x + torch.rand(x.shape, device=x.device, generator=self.generator)


def puts_the_state_back_afterwards(self, x):
    state = self.generator.get_state()
    result = x + torch.rand(x.shape, device=x.device, generator=self.generator)
    self.generator.set_state(state)
    return result


def puts_the_state_back_out_of_sight(self, x):
    back = functools.partial(self.generator.set_state, self.generator.get_state())
    result = x + torch.rand(x.shape, device=x.device, generator=self.generator)
    back()
    return result


def seeds_by_way_of_c(self, x):
    operator.methodcaller("manual_seed", 7)(self.generator)
    return x + torch.rand(x.shape, device=x.device, generator=self.generator)


def seeds_by_way_of_c_afterwards(self, x):
    result = x + torch.rand(x.shape, device=x.device, generator=self.generator)
    operator.methodcaller("manual_seed", 7)(self.generator)
    return result


def moves_a_generator(self, x):
    self.generator.set_state(self.state)
    return x * 2


def forks_the_state(self, x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x + torch.rand_like(x)


def reads_chance(self, x):
    return x * torch.rand([], device=x.device).item()


def reads_with_numpy(self, x):
    return x * float(x.detach().cpu().numpy().sum())


def copies_to_the_host(self, x):
    return x + x.detach().cpu().mean().to(x.device)


def conditional(self, x):
    return torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v * 3, (x.detach(),)) + x


def computes_under_fake_tensors(self, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain = x.detach()
    with FakeTensorMode() as mode:
        wide = mode.from_tensor(plain)
        rows = (wide @ wide.t()).shape[0]
    return x * rows


def makes_a_sparse_tensor(self, x):
    return x + x.detach().to_sparse().to_dense()


def inverts(self, x):
    return x @ torch.linalg.inv(torch.eye(8, device=x.device) * 2 + x.detach().t() @ x.detach())


REFUSED = [
    seeds_the_default_generator, seeds_its_generator, puts_a_state_back, puts_the_state_back_afterwards,
    puts_the_state_back_out_of_sight, seeds_by_way_of_c, seeds_by_way_of_c_afterwards,
    moves_a_generator, forks_the_state, reads_chance, reads_with_numpy, copies_to_the_host, conditional,
    computes_under_fake_tensors, makes_a_sparse_tensor, inverts,
]  # fmt: skip


@pytest.mark.parametrize("use", REFUSED)
def test_what_no_replay_could_do_is_refused_with_its_line(use, device, fresh_dynamo):
    side, history = play(lambda d: Program(use, d).to(d), step, device)
    assert history[-1][0] == 0 and side.call.stats.state == "disabled"
    assert f"in {use.__name__}" in side.call.last_failure, side.call.last_failure


def reads_what_is_made_of_constants(self, x):
    widest = torch.arange(5, device=x.device).max().item()
    steps = torch.ones_like(x, dtype=torch.int64).cumsum(-1)
    return x * widest * (2 if bool((steps[0].diff() == 1).all()) else 3)


def copies_lists(self, x):
    table = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], device=x.device)
    return x[:, [7, 6, 5, 4, 3, 2, 1, 0]] * table + torch.arange(8).to(x.device)


def copies_a_list_and_changes_it(self, x):
    table = torch.tensor([0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], device=x.device)
    table += x.detach()[0]
    return x * table


def returns_a_list(self, x):
    return x, torch.tensor([1.0, 2.0], device=x.device)


def takes_apart_constants(self, x):
    return x + torch.ones(3, 3, device=x.device).nonzero().sum() + torch.arange(4, device=x.device).tolist()[2]


def encodes_classes(self, x):
    return x + F.one_hot((x.detach()[:, 0] > 0).long(), num_classes=8)


def counts_in_known_bins(self, x):
    return x + torch.bincount((x.detach()[:, 0] > 0).long(), minlength=8)


def makes_arrays_by_name(self, x):
    return x * torch.asarray(obj=[0.5] * 8, device=x.device) + x.new_tensor([1.0] * 8)


def makes_a_parameter(self, x):
    return x * nn.Parameter(torch.ones(8, device=x.device)).detach()


def maps(self, x):
    return torch.vmap(lambda row: row.sin() * 2)(x) + torch.func.grad(lambda v: (v**3).sum())(x.detach())


def writes_single_elements(self, x):
    x = x.clone()
    x[0] = 5.0
    x[:, [1, 2]] = 0.0
    return x


FINE = [
    reads_what_is_made_of_constants, copies_lists, copies_a_list_and_changes_it, returns_a_list, takes_apart_constants,
    encodes_classes, counts_in_known_bins, makes_arrays_by_name, makes_a_parameter, maps, writes_single_elements,
]  # fmt: skip


def kept_eager_by_a_number(device, history, side):
    """On a GPU the backward of a number that is put to the places of a list has a tensor on the host."""
    if device.type != "cuda":
        return False
    return history[-1][0] == history[-2][0] and "uses a tensor on the host" in side.call.last_failure


@pytest.mark.parametrize("use", FINE)
def test_what_is_the_same_in_each_call_is_captured(use, device):
    side, history = play(lambda d: Program(use, d).to(d), step, device)
    if use is writes_single_elements and kept_eager_by_a_number(device, history, side):
        return
    assert history[-1][0] - history[-2][0] == 2 and history[-1][3] == 0, side.call.last_failure


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("fuses", [False, True])
def test_code_of_torch_jit_is_captured_where_each_operation_is_seen(fuses, device, monkeypatch):
    """Kernels that it fuses run past the dispatcher, and may draw numbers there."""
    scripted = torch.jit.trace(lambda v: v * 2 + 1, torch.ones(4, 8, device=device), check_trace=False)
    before = torch._C._jit_texpr_fuser_enabled()
    torch._C._jit_set_texpr_fuser_enabled(False)
    monkeypatch.setattr(patches, "_fuses", lambda on_gpu: fuses)
    try:
        side, history = play(lambda d: Program(lambda _, x: scripted(x), d).to(d), step, device)
    finally:
        torch._C._jit_set_texpr_fuser_enabled(before)
    assert (history[-1][0] - history[-2][0] == 2) is not fuses
    assert "torch.jit" in side.call.last_failure if fuses else not side.call.last_failure


def test_methods_of_classes_in_cpp_are_no_scripts(device, monkeypatch):
    """Such as that of an opaque `ReduceOp` that tells which reduction a collective does."""
    monkeypatch.setattr(patches, "_fuses", lambda on_gpu: True)
    weight = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    side, history = play(lambda d: Program(lambda _, x: x + (packed.bias() is None), d).to(d), step, device)
    assert history[-1][0] - history[-2][0] == 2 and not side.call.last_failure


@pytest.mark.parametrize("use", [copies_lists, reads_what_is_made_of_constants, maps, reads_chance, reads_with_numpy])
def test_where_the_key_is_not_to_be_had_a_mode_serves(use, device, monkeypatch):
    monkeypatch.setattr(dispatch, "has_key", lambda: False)
    _, history = play(lambda d: Program(use, d).to(d), step, device)
    assert history[-1][0] - history[-2][0] == (2 if use in FINE else 0)


def put(key, value):
    def run(x):
        x = x.clone()
        x[key] = value
        return x

    return run


COLUMNS = [2, 0]
INDEXED_BY_LISTS = {
    "a list": lambda x: x[[2, -1]],
    "columns": lambda x: x[:, COLUMNS] * x[..., (1, 2)],
    "a place": lambda x: x[1, [0, 2]] + x[[0, 1], 2],
    "two lists": lambda x: x[[0, 1], [2, 0]],
    "a list of lists": lambda x: x[[[0, 1], [1, 0]],],
    "truth values": lambda x: x.detach()[:, [True, False] * 4] + x[:, :4],
    "a range": lambda x: x[range(1, 3)][:, range(2)],
    "none": lambda x: x[[]].sum() + x.sum(),
    "mapped": lambda x: torch.vmap(lambda row: row[[0, 2]] * 2)(x),
    "a number": put([0, 1], 3.0),
    "a number beside a place": put((1, [0, 2]), 1),
    "a truth value": put((slice(None), [1]), True),
    "a row": lambda x: put([2, 1], x[[0]])(x),
}


PUT_NUMBERS = ("a number", "a number beside a place", "a truth value")


@pytest.mark.parametrize("name", INDEXED_BY_LISTS)
def test_lists_index_in_a_capture_as_in_eager(name, device):
    use = INDEXED_BY_LISTS[name]
    side, history = play(lambda d: Program(lambda _, x: use(x) * 2, d).to(d), step, device)
    if name in PUT_NUMBERS and kept_eager_by_a_number(device, history, side):
        return
    assert history[-1][0] - history[-2][0] == 2 and history[-1][3] == 0, side.call.last_failure


def test_an_array_of_numpy_indexes_as_in_eager(device):
    columns = numpy.array([2, 0])
    side, history = play(lambda d: Program(lambda _, x: x[:, columns] * 2, d).to(d), step, device)
    on_gpu = device.type == "cuda"
    assert history[-1][0] - history[-2][0] == (0 if on_gpu else 2)
    assert "create it once, outside, on the device" in side.call.last_failure if on_gpu else not side.call.last_failure


def test_a_list_that_indexes_and_changes_is_noticed(device):
    columns = [2, 0]
    call = CUDAGraphModule(lambda x: x[:, columns], config())
    for k in range(12):
        columns[0] = 2 if k < 6 else 1
        x = torch.randn(4, 8, device=device)
        assert torch.equal(call(x), x[:, columns])
    assert call.stats.captures == 2 and not call.stats.failures


def test_an_emulated_capture_copies_no_list_unseen_either(monkeypatch):
    monkeypatch.setattr(patches, "_is_list", lambda index: False)
    call = CUDAGraphModule(lambda x: x[[0, 1]], config())
    for _ in range(5):
        call(torch.randn(4, 8))
    assert "GPU tensor of Python values" in call.last_failure


def test_the_trace_of_a_refused_capture_is_never_the_reference(device):
    """Code that does something else in a capture is refused each time, and not taken for what it is from then on."""

    def knows(self, x):
        recorder = dispatch.current()
        return x * 3 if recorder is not None and not recorder.watching else x * 2

    side, history = play(lambda d: Program(knows, d).to(d), step, device, steps=16)
    assert history[-1][0] == 0 and side.call.stats.state == "disabled"
    assert "where the call before passed 2" in side.call.last_failure


TOLD = queue.SimpleQueue()


def test_code_that_asks_whether_a_stream_captures_takes_eagers_way(device, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", torch._C._cuda_isCurrentStreamCapturing)
    if device.type == "cpu":  # a build without CUDA does not answer
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
        monkeypatch.setattr(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    internal = {"torch": torch, "__name__": "torch.distributed.somewhere"}
    exec("def asks(): return torch.cuda.is_current_stream_capturing()", internal)

    def asks(self, x):
        recorder = dispatch.current()
        if recorder is not None and not recorder.watching:
            TOLD.put(internal["asks"]())
        from_torch, from_c = torch.cuda.is_current_stream_capturing(), torch._C._cuda_isCurrentStreamCapturing()
        return x * (3 if from_torch or from_c else 2)

    _, history = play(lambda d: Program(asks, d).to(d), step, device)
    assert history[-1][0] - history[-2][0] == 2 and history[-1][3] == 0
    assert TOLD.get(timeout=1) is True and TOLD.empty()


# -- patches -----------------------------------------------------------------------------------------------------------

PATCHED = [
    (torch, "get_rng_state"), (torch, "set_rng_state"), (torch, "manual_seed"), (torch.cuda, "manual_seed_all"),
    (torch.Tensor, "numpy"), (torch.Tensor, "_make_subclass"), (torch._C._nn, "one_hot"), (F, "one_hot"),
    (torch, "bincount"),
    (torch.cuda.graphs, "_cuda_isCurrentStreamCapturing"), (torch._C.ScriptFunction, "__call__"),
]  # fmt: skip


def patched():
    return [vars(owner).get(name) for owner, name in PATCHED]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_patches_are_undone_however_a_call_ends(error):
    before = patched()

    def fails(x):
        raise error

    graph = CUDAGraphModule(fails)
    for _ in range(5):
        with pytest.raises(error):
            graph(torch.ones(2))
    with pytest.raises(error), Follower():
        raise error
    assert patched() == before and dispatch.current() is None


def test_two_threads_that_record_at_once_leave_nothing_behind():
    """The first to come is the first to leave."""
    before, inside = patched(), [threading.Event() for _ in range(3)]

    def first():
        with Recorder():
            inside[0].set()
            inside[1].wait(20)
        inside[2].set()

    def second():
        inside[0].wait(20)
        with Recorder() as recorder:
            inside[1].set()
            inside[2].wait(20)
            seen["second"] = patched() != before and dispatch.current() is recorder

    seen: dict[str, object] = {}
    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    inside[0].wait(20)
    seen["main"] = dispatch.current()
    for thread in threads:
        thread.join()
    assert seen == {"second": True, "main": None} and patched() == before


def test_other_threads_are_not_concerned():
    state = []
    with Follower():  # refuses to seed
        thread = threading.Thread(target=lambda: state.append((torch.get_rng_state().numel(), torch.ones(2).numpy())))
        thread.start()
        thread.join()
    assert state[0][0] > 0


def test_a_replacement_that_others_put_theirs_over_stays_theirs():
    class Owner:
        value = 1

    patch = Patch(lambda: [(Owner, "value", 2), (Owner, "other", 3)])
    for user in (1, 2):
        patch.take(user)
    patch.leave(1)
    assert (Owner.value, Owner.other) == (2, 3)
    Owner.value = 4
    patch.leave(2)
    assert Owner.value == 4 and not hasattr(Owner, "other")


HANDLED = {torch.Tensor.__getitem__: lambda self, index: self.as_subclass(torch.Tensor) * 10}


class Tabled(torch.Tensor):
    """Looks functions up, as PyTorch's documentation shows it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = HANDLED.get(function)
        if found is not None:
            return found(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_class_that_asks_for_a_function_is_asked_for_that_of_torch(device):
    table = torch.arange(4.0, device=device).as_subclass(Tabled)
    _, result = watched(lambda x: x + table[0], torch.ones(4, device=device), gpu=on(device))
    assert torch.equal(result, torch.arange(4.0, device=device) * 10 + 1)


def test_a_recording_leaves_the_default_device_to_itself():
    def run(x):
        with torch.device("cpu"):
            return x + torch.ones(2)

    torch.utils._device._device_constructors.cache_clear()
    watched(run, torch.ones(2))
    with torch.device("meta"):
        made = torch.tensor([1.0]), torch.as_tensor([1.0]), torch.asarray([1.0]), torch.zeros(1)
    assert {one.device.type for one in made} == {"meta"}


def kept_list(ctx, gradient):
    [weight] = ctx.kept
    return None, weight * gradient


def list_let_go(ctx, _):
    [weight], ctx.kept = ctx.kept, None
    return None, weight


def list_indexed(ctx, _):
    weight, ctx.kept = ctx.kept[0], None
    return None, weight


def parts_of_one(ctx, _):
    [weight] = ctx.kept
    flat = torch.cat([weight.reshape(-1), weight.reshape(-1) * 2])
    return None, flat[: weight.numel()].view_as(weight)


def test_a_function_of_autograd_may_be_made_in_the_call(device):
    def step(x):
        class Rounds(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.round()

            @staticmethod
            def backward(ctx, grad):
                return grad * 3

        return Rounds.apply(x) * 2

    graphed = CUDAGraphModule(step, config())
    for index in range(8):
        x = torch.full((3,), index + 0.4, device=device, requires_grad=True)
        graphed(x).sum().backward()
        assert x.grad.tolist() == [6.0] * 3
    assert graphed.stats.replays > 4 and not graphed.stats.failures


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("backward", [kept_list, list_let_go, list_indexed, parts_of_one])
def test_how_autograd_takes_over_a_gradient_is_no_part_of_a_record(backward, kind, device):
    """It copies one that somebody else holds, which a recorder may do, or the code."""

    class Makes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            y = x @ weight.t()
            ctx.kept = kind([2 * y.t() @ x])
            return y.pow(2).sum()

    Makes.backward = staticmethod(backward)

    def train(called):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(8, 4, device=device))
        found = []

        def step(x):
            loss = Makes.apply(x, weight)
            loss.backward()
            gradient = weight.grad.clone()
            with torch.no_grad():
                weight.add_(gradient, alpha=-0.01)
            weight.grad = None
            return gradient

        step = CUDAGraphModule(step, config()) if called else step
        for index in range(8):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index)).to(device)
            found.append(step(x).clone())
        return found, step

    (expected, _), (found, step) = train(False), train(True)
    assert all(map(torch.equal, expected, found))
    assert step.stats.replays > 4 and not step.stats.failures


READS_IN_INFERENCE = {
    "truth": lambda x: x + 1 if x.sum() > 30 else x,
    "one_hot": lambda x: F.one_hot(x.long()).sum(),
    "where": lambda x: x[torch.where(x > 3)],
}


@pytest.mark.parametrize("use", READS_IN_INFERENCE.values(), ids=READS_IN_INFERENCE)
@pytest.mark.parametrize("outside", [False, True])
def test_what_is_read_in_inference_mode_is_seen(use, outside):
    """There is no autograd that would take formulas apart, such as that of `bool(tensor)`."""

    def call(x):
        with torch.inference_mode():
            return use(x)

    def run(call):
        with torch.inference_mode(outside):
            return [call(torch.arange(4.0) + 2 * (i // 3)).tolist() for i in range(12)]

    wrapper = CUDAGraphModule(call, config())
    assert run(wrapper) == run(call)
    assert wrapper.stats.replays and not wrapper.stats.failures


def test_allclose_reads():
    def call(x):
        return x + 1 if torch.allclose(x, torch.zeros_like(x)) else x

    wrapper = CUDAGraphModule(call, config())
    for i in (1, 1, 1, 1, 1, 1, 0, 1, 0):
        x = torch.full((3,), float(i))
        assert wrapper(x).tolist() == call(x).tolist()
    assert wrapper.stats.replays and not wrapper.stats.failures


class Halves(torch.Tensor):
    """A tensor that stands for two, whose class runs each operation on both."""

    @staticmethod
    def __new__(cls, one, other):
        return torch.Tensor._make_wrapper_subclass(cls, one.size(), dtype=one.dtype, device=one.device)

    def __init__(self, one, other):
        self.halves = one, other

    def __tensor_flatten__(self):
        return ["one", "other"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Halves(parts["one"], parts["other"])

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        parts = [[arg.halves[i] if isinstance(arg, cls) else arg for arg in args] for i in range(2)]
        return cls(*(op(*part, **(kwargs or {})) for part in parts))


def test_tensors_that_stand_for_others_are_made_and_used_in_a_call(device):
    def step(x):
        return sum(part.sum() for part in (Halves(x + 1, x * 2) * 3).view(-1).halves)

    captured = CUDAGraphModule(step, config())
    for i in range(6):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(i)).to(device)
        assert torch.equal(captured(x), step(x))
    assert captured.stats.replays > 1, captured.last_failure


def test_a_line_of_code_in_a_folder_called_torch_is_told(device):
    code = compile("def use(x):\n    return x * 2\n", "/home/me/torch/mine.py", "exec")
    found = {}
    exec(code, found)
    recorder, _ = watched(found["use"], torch.ones(2, device=device), gpu=on(device))
    assert recorder.trace[0].location == "/home/me/torch/mine.py:2 in use"
