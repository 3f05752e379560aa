"""Every mode of PyTorch that changes what code computes is part of the signature, and what looks on is not kept from
the code."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from graphmod import BackwardUnavailable, CUDAGraphModule, torch_private
from graphmod.signature.modes import FOREIGN, difference, entered_again, mode_key
from tests.support.harness import config, mlp

CALLS = 5


@contextlib.contextmanager
def as_before(get, set_, value):
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


def setting(owner, name, value):
    return lambda: as_before(lambda: getattr(owner, name), lambda v: setattr(owner, name, v), value)


def deterministic(**how):
    def get():
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    return lambda: as_before(
        get, lambda v: torch.use_deterministic_algorithms(v[0], warn_only=v[1]), (True, *how.values())
    )


def attention(*args, **kwargs):
    return lambda: sdpa_kernel(*args, **kwargs)


CPU = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "default dtype": lambda: as_before(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "set_default_device": lambda: as_before(lambda: None, torch.set_default_device, "cpu"),
    "deterministic": deterministic(warn_only=False),
    "deterministic, warnings": deterministic(warn_only=True),
    "filled memory": setting(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "precision of everything": setting(torch.backends, "fp32_precision", "tf32"),
    "precision of mkldnn": setting(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "attention": attention(SDPBackend.MATH),
    "order of attention": attention(
        [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
        set_priority=True,
    ),
    "threads": lambda: as_before(torch.get_num_threads, torch.set_num_threads, 2),
    "denormal numbers": lambda: as_before(lambda: False, torch.set_flush_denormal, True),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
}
CUDA = {
    "precision of cuda": setting(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "precision of cudnn": setting(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "reduced sums": setting(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "float16 accumulation": setting(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False, fp32_precision=None),
    "cudnn.benchmark": setting(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": setting(torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic),
    "attention": attention(SDPBackend.CUDNN_ATTENTION),
}


@pytest.fixture
def modes_are_put_back():
    modes = [
        as_before(torch.is_grad_enabled, torch.set_grad_enabled, True),
        as_before(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        deterministic(warn_only=True)(),
        setting(torch.backends, "fp32_precision", "none")(),
        as_before(torch.get_num_threads, torch.set_num_threads, 1),
    ]
    with contextlib.ExitStack() as entered:
        for mode in modes:
            entered.enter_context(mode)
        torch.use_deterministic_algorithms(False)
        yield


@pytest.mark.parametrize(("kind", "mode"), [*(("cpu", m) for m in CPU), *(("cuda", m) for m in CUDA)])
def test_a_mode_is_part_of_the_signature_and_has_a_name(kind, mode, modes_are_put_back):
    before = mode_key(kind)
    with (CPU if kind == "cpu" else CUDA)[mode]():
        now = mode_key(kind)
        assert now != before and hash(now) is not None
        assert mode_key(kind) == now
        lines = difference(before, now)
    assert lines and all(": was " in line and ", is " in line for line in lines)
    assert mode_key(kind) == before


class Attends(nn.Module):
    def __init__(self, fills=False):
        super().__init__()
        self.layer, self.fills = nn.Linear(8, 8), fills

    def forward(self, x):
        y = self.layer(x)
        y = F.scaled_dot_product_attention(y, y, y).to(x.dtype)
        y = y + torch.tensor(0.1).to(y)
        return y + torch.empty(2, device=y.device).sum() * 0 if self.fills else y


@pytest.mark.parametrize("mode", ["no gradients", "autocast", "default dtype", "deterministic", "attention"])
def test_calls_in_turn_in_and_out_of_a_mode_are_those_of_eager(mode, device):
    torch.manual_seed(0)
    module = Attends(fills=mode == "deterministic").to(device)
    wrapper, x = (
        CUDAGraphModule(module, config()),
        torch.linspace(-1, 1, 2 * 2 * 33 * 8, device=device).view(2, 2, 33, 8),
    )
    enter = CPU[mode] if mode != "autocast" else lambda: torch.autocast(device.type, torch.bfloat16)
    for step in range(12):
        inside = step // 4 % 2
        with enter() if inside else contextlib.nullcontext():
            results = wrapper(x * step).detach(), module(x * step).detach()
        if inside or not module.fills:  # deterministic algorithms fill new memory with NaN; others leave what was there
            torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert wrapper.stats.replays


def test_precision_in_the_newer_settings_disturbs_no_call(device):
    module = nn.Linear(8, 8).to(device)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(4, 8, device=device)
    with torch.no_grad(), setting(torch.backends.cuda.matmul, "fp32_precision", "tf32")():
        for _ in range(CALLS):
            assert torch.equal(wrapper(x), module(x))
    assert wrapper.stats.captures == 1


class Negates(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return -result if function is F.linear else result


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        return result * 2 if op is torch.ops.aten.addmm.default else result


def halved():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t / 2, lambda t: t)


LOOK_ON = {
    "a function mode": Negates,
    "a dispatch mode": Doubles,
    "anomaly detection": torch.autograd.detect_anomaly,
    "hooks for saved tensors": halved,
    "a level of forward-mode differentiation": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("which", LOOK_ON)
@pytest.mark.filterwarnings("ignore:Anomaly")
def test_who_looks_on_sees_the_code(which, device, caplog):
    module = mlp(device)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(4, 8, device=device)

    def run(call):
        module.zero_grad()
        result = call(x)
        result.pow(2).sum().backward()
        return [result.detach().clone(), *(p.grad.clone() for p in module.parameters())]

    for _ in range(CALLS):
        run(wrapper)
    replays = wrapper.stats.replays
    with LOOK_ON[which]():
        assert mode_key("cpu")[FOREIGN]
        for eager, graphed in zip(run(module), run(wrapper), strict=True):
            assert torch.equal(eager, graphed)
    assert wrapper.stats.replays == replays
    assert caplog.text.count("runs eagerly, because") == 1
    run(wrapper)
    assert wrapper.stats.replays > replays


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_anomaly_detection_sees_nothing_of_a_call_without_gradients():
    """Compilers switch it on for the whole process while they trace, in whatever thread."""
    with torch.autograd.detect_anomaly():
        assert mode_key("cpu")[FOREIGN]
        with torch.no_grad():
            assert mode_key("cpu")[FOREIGN] is None


def test_operations_can_be_counted_around_a_wrapper(device):
    module = mlp(device)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(4, 8, device=device)
    with torch.no_grad():
        for _ in range(CALLS):
            wrapper(x)
        with FlopCounterMode(display=False) as eager:
            module(x)
        with FlopCounterMode(display=False) as graphed:
            wrapper(x)
    assert graphed.get_total_flops() == eager.get_total_flops() > 0


def test_dual_tensors_keep_their_tangents(device):
    module = mlp(device)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(4, 8, device=device)
    forward_ad = torch.autograd.forward_ad
    with torch.no_grad():
        for _ in range(CALLS):
            wrapper(x)
        with forward_ad.dual_level():
            tangents = [
                forward_ad.unpack_dual(call(forward_ad.make_dual(x, x * 2))).tangent for call in (module, wrapper)
            ]
    assert torch.equal(*tangents)


def test_a_second_backward_runs_under_the_autocast_of_its_forward(device):
    module, x = mlp(device), torch.ones(4, 8, device=device, requires_grad=True)
    wrapper = CUDAGraphModule(module, config())

    def gradients(call):
        with torch.autocast(device.type, torch.bfloat16):
            result = call(x).float().pow(2).sum()
        return torch.autograd.grad(result, x)[0]

    for _ in range(CALLS):
        assert torch.equal(gradients(wrapper), gradients(module))


def test_a_forward_that_runs_again_for_its_backward_takes_the_attention_that_it_took(device):
    """`torch.autograd.grad` for an argument runs the forward again, after the context has been left."""
    torch.manual_seed(0)
    module = Attends().to(device)
    wrapper = CUDAGraphModule(module, config())
    x = torch.linspace(-1, 1, 2 * 2 * 33 * 8, device=device).view(2, 2, 33, 8).requires_grad_()

    def gradients(call):
        with sdpa_kernel(SDPBackend.MATH):
            result = call(x).pow(2).sum()
        return torch.autograd.grad(result, x)[0]

    for _ in range(CALLS):
        assert torch.equal(gradients(wrapper), gradients(module))
    before = mode_key(device.type)
    with pytest.raises(BackwardUnavailable, match=r"number of threads is not as it was|of the GPU"):
        for _ in range(CALLS):
            threads = torch.get_num_threads()
            with as_before(torch.get_num_threads, torch.set_num_threads, threads + 1):
                result = wrapper(x).sum()
            torch.autograd.grad(result, x)
        assert device.type == "cuda", "no kernel of a GPU depends on it"
        raise BackwardUnavailable("of the GPU")
    assert mode_key(device.type) == before


def test_autocast_can_be_entered_again():
    plain = mode_key("cpu")
    with torch.autocast("cpu", torch.float16):
        modes = mode_key("cpu")
    with entered_again(modes, "cpu"):
        assert torch.get_autocast_dtype("cpu") is torch.float16 and torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16), entered_again(plain, "cpu"):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad], ids=["no gradients", "gradients"])
def test_an_autocast_that_serves_all_calls_may_be_entered_elsewhere_in_between(around, device):
    """As a decorator does, and Accelerate: what it found when it was entered is no state of the module."""
    module, x = mlp(device), torch.ones(4, 8, device=device)
    module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
    wrapper = CUDAGraphModule(module, config())
    for _ in range(2 * CALLS):
        with around():
            assert torch.equal(wrapper(x), module(x))
        with torch.autocast(device.type, torch.bfloat16):
            module(x)
    assert wrapper.stats.replays > CALLS and wrapper.stats.failures == 0


def test_private_names_that_are_gone_are_replaced_or_named(monkeypatch):
    assert torch_private.getter("_get_what_no_release_has")() is None
    monkeypatch.setattr(torch_private, "any_autocast", lambda: 3)
    with pytest.raises(ImportError, match="_is_any_autocast_enabled"):
        torch_private.self_test()


INSIDE = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "determinism": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "precision": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() % 2 + 1),
}


@pytest.mark.parametrize("which", INSIDE)
def test_a_mode_that_is_changed_inside_stays_changed(which, device, caplog, modes_are_put_back):
    if which == "threads" and device.type == "cuda":
        pytest.skip("no kernel of a GPU depends on it")
    module = mlp(device)
    before = mode_key(device.type)

    def call(x):
        result = module(x)
        INSIDE[which]()
        return result

    wrapper, x = CUDAGraphModule(call, config()), torch.ones(4, 8, device=device)
    call(x)
    changed = mode_key(device.type)
    assert changed != before
    undo = {"gradients": lambda: torch.set_grad_enabled(True), "threads": INSIDE["threads"]}
    undo["default dtype"] = lambda: torch.set_default_dtype(torch.float32)
    undo["determinism"] = lambda: torch.use_deterministic_algorithms(False)
    undo["precision"] = lambda: setattr(torch.backends, "fp32_precision", "none")
    for _ in range(2 * CALLS):
        undo[which]()
        assert torch.equal(wrapper(x), module(x))
        assert mode_key(device.type) == changed
    assert "changes a mode of PyTorch" in caplog.text


def test_a_backward_in_other_settings_than_the_captured_one_runs_eagerly(device):
    module = mlp(device)
    wrapper, x = CUDAGraphModule(module, config()), torch.ones(4, 8, device=device)

    def run(call, precision):
        module.zero_grad()
        result = call(x).pow(2).sum()
        with setting(torch.backends, "fp32_precision", precision)():
            result.backward()
        return [p.grad.clone() for p in module.parameters()]

    for step in range(3 * CALLS):
        precision = "tf32" if step // CALLS == 1 else "none"
        replays = wrapper.stats.replays
        for eager, graphed in zip(run(module, precision), run(wrapper, precision), strict=True):
            assert torch.equal(eager, graphed)
        if step == CALLS:
            assert wrapper.stats.replays - replays == 1, "the backward was replayed"
    assert wrapper.stats.replays - replays == 2
