"""What a graph cannot repeat: tells, before an operation runs, why.

That depends on where the values of tensors come from. A value made from constants alone inside a call is the same in
every such call. One that depends on an argument, on anything from outside or on chance is not.
"""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.torch_private import OpOverload, no_dispatch_of_its_own
from graphmod.trace.compiled import CompiledGraph
from graphmod.trace.lines import TORCH, Lines
from graphmod.trace.operations import Facts, address

_PACKAGES = str(Path(torch.__file__).parent.parent)
_HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::allclose", "aten::item"}
_LINALG_CHECK = "aten::_linalg_check_errors"
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_UNREPEATABLE = {
    # Keeps its workspace and weights in a packed form outside the recorded tensors.
    "aten::mkldnn_rnn_layer": "an LSTM or GRU on the CPU",
    "aten::_cudnn_rnn": "an LSTM or GRU of cuDNN",
    "aten::miopen_rnn": "an LSTM or GRU of MIOpen",
    # Kernels that wait for the GPU themselves.
    "aten::_linalg_eigh": "a decomposition that checks on the host whether it has converged",
    "aten::linalg_eig": "a decomposition that works on the host in part",
    "aten::_linalg_eigvals": "a decomposition that works on the host in part",
    "aten::_linalg_svd": "a decomposition that checks on the host whether it has converged",
    "aten::linalg_lstsq": "a solver that checks on the host whether it has converged",
}
_GROUPED = "aten::_grouped_mm"
_SPARSE_GRADIENT = {"aten::embedding": (4, "sparse"), "aten::_embedding_bag": (5, "sparse")}
PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""The classes of tensors that run no Python of their own."""
_TOLD_BY_NAME = {*_HOST_READS, _LINALG_CHECK, *_INDEXING, *_UNREPEATABLE, _GROUPED, *_SPARSE_GRADIENT}
OUTSIDE = "keep it outside the captured module"


class Reason(NamedTuple):
    """Why a graph cannot repeat an operation.

    Attributes:
        effect: what a graph would do with it.
        remedy: what to do about it.
        kept: for an operation on constants alone, what is kept from the recorded call to stand in for it in a capture:
            its `result`, the host tensors among its `arguments`, or the places where its `masks` are true; else empty.
    """

    effect: str
    remedy: str
    kept: str = ""


class Hazard(NamedTuple):
    """Something that a call did and that a graph cannot repeat.

    Attributes:
        operation: the name of the operation or function.
        lines: where.
        effect, remedy: see `Reason`.
    """

    operation: str
    lines: Lines
    effect: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.operation} at {self.lines.location}: {self.effect}; {self.remedy}"


def is_harmless(op: Any, about: Facts) -> bool:
    """Whether an operator is one that graphs can repeat on tensors with memory on their device, if it is given no other
    device: nothing that `Check` asks then, and nothing that the recorder takes special care with."""
    told = about.dynamic or about.unsafe or about.collective or about.name in _TOLD_BY_NAME
    special = about.random or about.lifts or about.statistics or about.profiler
    return isinstance(op, OpOverload) and not (told or special)


def hazard(operation: str, lines: Lines, reason: Reason, on_gpu: bool) -> Hazard:
    """A reason with its place; of an optimizer's step, with what helps for this optimizer."""
    if lines.optimizer is None:
        of_library = (lines.library or "").startswith
        known = (remedy for part, remedy in _REMEDIES_IN.items() if reason is _READ and of_library(part))
        of_autograd = lines.backward and lines.user is None and reason.kept == "result"
        remedy = _OF_AUTOGRAD if of_autograd else reason.remedy
        return Hazard(operation, lines, reason.effect, next(known, remedy))
    name = type(lines.optimizer).__name__
    effect = f"the step of {name} reads or changes values on the host, such as its step count or learning rate, which "
    return Hazard(operation, lines, effect + "no replay would do", _remedy_for(lines.optimizer, on_gpu))


def _remedy_for(optimizer: torch.optim.Optimizer, on_gpu: bool) -> str:
    """What its user can do about an optimizer whose step reads values on the host."""
    known = inspect.signature(type(optimizer).__init__).parameters
    wanted = ("fused", "capturable") if on_gpu else ("fused",)
    given = [name for name in wanted if name in known and not all(g.get(name) for g in optimizer.param_groups)]
    outside = "keep optimizer.step() outside the captured callable"
    if not given or ("fused" not in known and not on_gpu):
        return outside
    flags = ", ".join(f"{name}=True" for name in given)
    rate = "" if isinstance(optimizer.param_groups[0].get("lr"), torch.Tensor) else ", with a tensor as lr"
    return f"build {type(optimizer).__name__} with {flags}{rate}, or {outside}"


_OF_AUTOGRAD = "put others in place of the operation whose backward that is (prod and cumprod look for zeros in theirs)"
# What the user of a library can do about code of it that reads values on the host.
_REMEDIES_IN = {
    f"{_PACKAGES}/transformers/masking_utils.py": "pass no attention_mask where nothing is padded, or load the "
    "model with attn_implementation='eager'",
    f"{_PACKAGES}/transformers/modeling_utils.py": "pass attention_mask=torch.ones_like(input_ids) where nothing is "
    "padded, or set model.config.pad_token_id = None",
    f"{TORCH}amp/grad_scaler.py": "keep the GradScaler's step() and update() outside of the captured call",
    f"{TORCH}distributions/": "build the distribution with validate_args=False",
    f"{TORCH}nn/utils/clip_grad.py": "call it with error_if_nonfinite=False",
    f"{TORCH}optim/swa_utils.py": "keep update_parameters() outside of the captured call",
}


UNDER_A_MODE = Reason("computes under a dispatch mode, whose Python code a replay would not run", OUTSIDE)
_READ = Reason(
    "reads a value on the host (.item(), float(), bool(), if, max(a, b), a tensor as a slice bound), and a replay "
    "reads nothing",
    "use torch.where or clamp, or return the tensor and read it after the call",
    "result",
)
READ_CHANCE = Reason(
    "reads a value on the host that was drawn at random inside the call, and a replay would go on with that one",
    "draw it on the host and do no more with it than compare it (if torch.rand(()).item() < p), draw it outside and "
    "pass it as an argument, or use torch.where",
)
_TO_HOST = Reason("copies a GPU tensor to the host", "read it after the replay", "result")
_MASK = Reason("indexes with a boolean mask, whose result has no fixed size", "use torch.where or masked_fill", "masks")
_LINALG = Reason(
    "checks on the host whether it worked, and a replay checks nothing",
    "use the variant with _ex in its name (torch.linalg.inv_ex, cholesky_ex, solve_ex)",
    "result",
)
_FROM_LIST = Reason(
    "uses a tensor on the host, which a graph would copy from an address that changes",
    "create it once, outside, on the device",
    "arguments",
)
_ON_FUNCTIONS = Reason(
    "is an operator on functions (torch.cond, while_loop, scan, flex_attention), which runs code of its own choice",
    f"compile what calls it, use torch.where in place of torch.cond, or {OUTSIDE}",
)
_GROUPS = Reason(
    "reads on the host where each group of rows ends, which it does for all numbers but bfloat16",
    "use bfloat16; or, for the experts of a transformers model, model.set_experts_implementation('batched_mm')",
)
COMPILES = Reason("compiles with torch.compile, for which no capture can wait", "call it once before, on equal shapes")
_ON_HOST = Reason(
    "passes a tensor on the host to compiled code, which computes with it there or reads its value, and a replay does "
    "neither",
    "keep it on the GPU",
)
_HOST_COLLECTIVE = Reason(
    "communicates tensors that lie on the host, which a replay would not do", "keep them on the GPU, in a group of NCCL"
)
_OWN_GRAPHS = Reason(
    'runs code compiled with mode="reduce-overhead", which makes CUDA graphs of its own',
    'compile it with mode="default" or "max-autotune-no-cudagraphs": it becomes part of the graph made here',
)


# -- where values come from -------------------------------------------------------------------------------------------
# Their results have the shape of what they are given, and nothing of its values.
_ONLY_SHAPES = {
    *("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like"),
    *("randint_like", "_shape_as_tensor"),
}
NO_VALUES = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "empty_quantized",
}  # fmt: skip
UNWRITTEN, CONSTANTS, CHANCE, DATA, NOT_MADE = range(5)
"""What a value depends on at most; the greater one wins. NOT_MADE is memory that was there before the call."""


class Origins:
    """The origins of what one call makes, by the addresses of storages. What it did not make is data.

    Attributes:
        here: address -> origin, of memory on the device of the call, which operations need no care with.
        elsewhere: address -> origin, of memory that the call has made and that may lie elsewhere.
        earlier: the addresses of memory that the call made before code ran unseen, and has not used since.
        of_kernels: the addresses that `note_of_kernels` was told of.
    """

    def __init__(self) -> None:
        self.here: dict[int, int] = {}
        self.elsewhere: dict[int, int] = {}
        self.earlier: set[int] = set()
        self.of_kernels: set[int] = set()

    def __contains__(self, where: int) -> bool:
        """Whether the call made what lies at an address."""
        return self.here.get(where, NOT_MADE) != NOT_MADE or where in self.elsewhere or where in self.earlier

    def of(self, where: int, tensor: Tensor) -> int:
        if where not in self:  # what has no memory has no values that depend on anything
            nothing = not tensor.numel() or (not where and tensor._is_zerotensor())
            return CONSTANTS if nothing else DATA
        return self.here[where] if where in self.here else self.elsewhere.get(where, DATA)

    def result(self, about: Facts, given: list[Tensor], given_at: list[int]) -> int:
        """The origin of what an operation makes of these, chance apart."""
        fixed = fixed_origin(about)
        return max(CONSTANTS, self.greatest(given_at, given)) if fixed is None else fixed

    def greatest(self, places: Iterable[int], tensors: Iterable[Tensor]) -> int:
        """The origin of what any of these goes into."""
        return max(map(self.of, places, tensors), default=UNWRITTEN)

    def note_made(self, where: int, origin: int, ordinary: bool = False) -> None:
        """Takes in that what lies at an address is made, or known, from here on: new memory, a tensor made of values
        in Python, or one that is kept from an earlier call.

        Args:
            ordinary: whether it is known to lie on the device of the call.
        """
        if where:
            self.of_kernels.discard(where)
            self.here.pop(where, None)
            self.earlier.discard(where)
            (self.here if ordinary else self.elsewhere)[where] = origin

    def note_of_kernels(self, places: Iterable[int]) -> None:
        """Takes in host tensors that an operation on a GPU returned: attention does, for the seed and offset of its
        dropout. They hold nothing computed there, because to know that would have been to wait for it; and in a
        capture, where they count, they lie on the GPU."""
        self.of_kernels.update(places)

    def forget(self) -> None:
        """Takes in that code ran unseen: memory that was there before may be another's by now, and any values may be
        in what the call has made."""
        self.earlier |= {where for where, origin in self.here.items() if origin != NOT_MADE} | self.elsewhere.keys()
        self.here.clear()
        self.elsewhere.clear()

    def note_write(self, where: int, origin: int) -> None:
        """Takes in that an operation changed what lies at an address, with values of this origin."""
        if where in self:
            held = self.here if where in self.here else self.elsewhere
            held[where] = max(held.get(where, DATA), origin)


def fixed_origin(about: Facts) -> int | None:
    """The origin of an operation's results, whatever it is given; None where that matters."""
    if about.collective:
        return DATA
    name = about.short
    return UNWRITTEN if name in NO_VALUES else CONSTANTS if name in _ONLY_SHAPES else None


# -- operations --------------------------------------------------------------------------------------------------------
class Check:
    """The check of one call.

    Args:
        gpu: index of the GPU on which CUDA captures: then "device" tensors are those there. None under emulation: then
            they are all but those made inside from constants alone, which are host data.
        origins: where the values of tensors come from.
        in_backward: whether the call is one function that an eager backward calls. What its forward saved may lie on
            the host there and on the GPU in a capture, as attention's seed and offset; so that is left to the capture.
    """

    def __init__(self, gpu: int | None, origins: Origins, in_backward: bool = False) -> None:
        self.on_gpu = gpu is not None
        self._index = -1 if gpu is None else gpu  # as of `Tensor.get_device`
        self._origins, self._in_backward = origins, in_backward

    def read(self, tensors: list[Tensor]) -> Reason | None:
        """Why these may not be read on the host; None where nobody would notice."""
        found = max((self._origins.of(address(tensor), tensor) for tensor in tensors), default=CONSTANTS)
        if found == CHANCE:
            return READ_CHANCE
        return _READ if found != CONSTANTS or any(tensor.is_cuda for tensor in tensors) else None

    def reason(self, op: Any, about: Facts, args: tuple, kwargs: dict, given: list[Tensor]) -> Reason | None:
        """Why a graph cannot repeat an operation that is about to run."""
        if isinstance(op, CompiledGraph):
            return self._compiled(op, given)
        if not isinstance(op, OpOverload):
            return _ON_FUNCTIONS
        name = about.name
        if name in _HOST_READS:
            return self.read(given)
        if name == _LINALG_CHECK:
            return None if self.read(given) is None else _LINALG
        if name in _INDEXING:
            if any(map(is_mask, args[1])):
                return None if self._fills(*args) else _MASK
        elif about.dynamic and kwargs.get("output_size") is None and self._waits(given):
            return Reason(
                "has a result whose size depends on the data", "pad it, or use nonzero_static or output_size=", "result"
            )
        if name in _UNREPEATABLE:
            return Reason(f"cannot be repeated from a recording: {_UNREPEATABLE[name]}", OUTSIDE)
        if about.unsafe:
            return Reason("is marked by its author as unsafe in a CUDA graph (torch.Tag.cudagraph_unsafe)", OUTSIDE)
        if name == _GROUPED and self.on_gpu and given[0].dtype is not torch.bfloat16:
            return _GROUPS
        if name in _SPARSE_GRADIENT and torch.is_grad_enabled():
            position, keyword = _SPARSE_GRADIENT[name]
            if (args[position] if len(args) > position else kwargs.get(keyword, False)) and given[0].requires_grad:
                return Reason(
                    "has a sparse gradient, whose size depends on the data", f"use sparse=False, or {OUTSIDE}"
                )
        if kwargs and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device.type == "cuda" and device.index not in ((None, self._index) if self.on_gpu else ()):
                return self._elsewhere(device)
        if about.collective and self.on_gpu and any(tensor.get_device() < 0 for tensor in given):
            return _HOST_COLLECTIVE
        host = False
        for tensor in given:
            if tensor.layout is not torch.strided or tensor.is_nested:
                return Reason("works on a sparse or nested tensor, whose size depends on the data", OUTSIDE)
            if tensor.__class__ not in PLAIN and type(tensor).__torch_dispatch__ is not no_dispatch_of_its_own:
                return Reason(
                    f"works on a {type(tensor).__name__}, a kind of tensor with Python code of its own, which a replay "
                    "would not run",
                    OUTSIDE,
                )
            index = tensor.get_device()
            if index != self._index and index >= 0:
                return self._elsewhere(tensor.device)
            host = host or index < 0
        if self.on_gpu and (host or name == "aten::_to_copy"):
            return self._gpu_reason(about, args, kwargs, given)
        return None

    def _compiled(self, code: CompiledGraph, given: list[Tensor]) -> Reason | None:
        """Why a graph cannot repeat what inductor has compiled."""
        if not code.known:
            return Reason("runs compiled code that does not tell what it writes", OUTSIDE)
        if not self.on_gpu:
            return None
        if code.has_graphs:
            return _OWN_GRAPHS
        return None if self._in_backward or self._constant(self._on_host(given)) else _ON_HOST

    def result_reason(self, results: list[Tensor]) -> Reason | None:
        """Why a graph cannot hold these results of an operation."""
        if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in results):
            return Reason("makes a sparse or nested tensor, whose size depends on the data", OUTSIDE)
        return None

    def _fills(self, _: Tensor, indices: list[Any], value: Any = None, accumulate: bool = False, *__: Any) -> bool:
        """Whether to index is to put one number, known beforehand, where one mask says: PyTorch runs `masked_fill_`."""
        one = isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" and not accumulate
        masks = [index for index in indices if index is not None]
        return one and len(masks) == 1 and self._constant([value])

    def _waits(self, given: list[Tensor]) -> bool:
        """Whether to know the size of a result would be to wait for the GPU."""
        return any(tensor.is_cuda for tensor in given) if self.on_gpu else not self._constant(given)

    def _on_host(self, given: list[Tensor]) -> list[Tensor]:
        """Those of some tensors that lie on the host, also where a GPU captures."""
        return [t for t in given if not (t.is_cuda or t.is_meta or address(t) in self._origins.of_kernels)]

    def _constant(self, given: list[Tensor]) -> bool:
        """Whether nothing but constants went into any of these."""
        return all(self._origins.of(address(tensor), tensor) == CONSTANTS for tensor in given)

    def _elsewhere(self, device: torch.device) -> Reason:
        if self.on_gpu:
            return Reason(
                f"works on {device} in a graph of cuda:{self._index}, which would leave that out",
                "wrap the parts of the model on each GPU apart, as graph_layers(model) does",
            )
        return Reason(
            f"works on {device}, but the callable's arguments and attributes showed tensors of the CPU only",
            "pass it a tensor of the GPU, or keep one in an attribute",
        )

    def _gpu_reason(self, about: Facts, args: tuple, kwargs: dict, given: list[Tensor]) -> Reason | None:
        cuda = [tensor for tensor in given if tensor.is_cuda]
        host = self._on_host(given)
        if about.name == "aten::_to_copy":
            target = kwargs.get("device")
            kind = torch.device(target).type if target is not None else given[0].device.type
            if cuda and kind == "cpu":
                return _TO_HOST
            if host and kind == "cuda":
                return _FROM_LIST._replace(kept="result")
        if cuda and about.name == "aten::copy_":
            return (
                _FROM_LIST if args[0].is_cuda else Reason("copies a GPU tensor to the host", "read it after the replay")
            )
        if cuda and about.name in _INDEXING and args[0].is_cuda:
            return _FROM_LIST
        if host and not cuda and about.writes and any(address(tensor) not in self._origins for tensor in host):
            return Reason("changes a host tensor, which a replay would not", "keep it on the GPU")
        if host and not cuda and about.computes and self._origins.result(about, host, list(map(address, host))) == DATA:
            return Reason("computes on the host, which a replay would not", "keep it on the GPU")
        if cuda and any(tensor.dim() for tensor in host):
            return _FROM_LIST
        if cuda and not (self._in_backward or self._constant(host)):
            return Reason("uses the value of a host tensor, which a graph would freeze", "keep it on the GPU")
        return None

    def keeps(self, reason: Reason, needs: list[Tensor]) -> bool:
        """Whether something kept can stand in for an operation, since all that it `needed` is constant."""
        return bool(reason.kept) and self._constant(needs)


def needed(reason: Reason, args: tuple, given: list[Tensor], on_gpu: bool) -> list[Tensor]:
    """Those of an operation's tensors whose values it would read on the host."""
    if reason.kept == "masks":
        return [index for index in args[1] if is_mask(index)]
    return [tensor for tensor in given if not tensor.is_cuda] if on_gpu and reason.kept == "arguments" else given


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
