"""Each token computed the same, bit for bit, whatever is computed beside it: in a decode step of any batch, in prefill,
and in a trainer's forward of whole sequences.

Kernels choose how to divide a sum by the shapes that they are given, and another division rounds otherwise. Here sums
are divided by the length of what is added up alone ("batch invariance": Horace He and Thinking Machines Lab, Defeating
Nondeterminism in LLM Inference, 2025). Products, means and log-sum-exps are exchanged below autograd, so that the
backward is PyTorch's own; attention is exchanged with transformers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.attention import attention
from graphmod.decode.attention import Implementation, misfit
from graphmod.decode.cache import Attends, CacheView, PagedCache
from graphmod.errors import ConfigError
from graphmod.torch_private import TorchDispatchMode, has_kernel_for

_NAME, _WITH_MASKS = "graphmod_invariant", "graphmod_invariant_sequences"
"""Under which transformers finds the attention: in decode steps, for which it makes no mask, and elsewhere."""
TILE = 16
"""Tokens that attention adds up at a time, counted from the beginning of the sequence."""
aten = torch.ops.aten


class batch_invariant:
    """For `with batch_invariant(model):`. While it is entered, what this thread computes of a token of `model` depends
    on that token and those before it alone, and not on the batch, its padding, or how many tokens are computed at once.
    So the log-probabilities of a forward over whole sequences are those that a `DecodeEngine` with
    `batch_invariant=True` told when it sampled them, bit for bit.

    Rows may be padded on either side, with an `attention_mask` (and, on the left, `position_ids` that begin with the
    first token); each holds one sequence. It takes longer than PyTorch's own kernels: on a CPU, rows are computed one
    by one.

    Args:
        model: a transformers causal LM that attends through transformers' attention interface. It is as it was
            afterwards. Let one thread leave before another enters: PyTorch keeps in the process whether there is such a
            mode.

    Raises:
        ConfigError: at an operation whose sums depend on the batch, such as those of grouped experts; the message names
            it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not hasattr(getattr(model, "config", None), "_attn_implementation"):
            raise ConfigError(
                f"batch_invariant needs a transformers model, and got {type(model).__name__}; of one that is wrapped, "
                "as by DistributedDataParallel, give the model within (model.module)"
            )
        self._model = model
        self._within: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_numbers(self._model))
            if not torch.is_inference_mode_enabled():
                stack.callback(_put_back, _exchange_checkpoints(self._model))
            self._within.append(stack.pop_all())

    def __exit__(self, *given: Any) -> None:
        self._within.pop().__exit__(*given)


def _numbers(model: PreTrainedModel) -> ExitStack:
    """The attention and the mode, entered."""
    with ExitStack() as stack:
        # Attention over whole sequences computes in the dtype of the engine's cache, also under autocast.
        name = f"{_WITH_MASKS}_{str(model.dtype).removeprefix('torch.')}"
        ALL_ATTENTION_FUNCTIONS.register(name, _attends(model.dtype))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask)
        stack.enter_context(attention(model, name))
        stack.enter_context(Invariant())
        return stack.pop_all()


class _Recomputed:
    """In the place of the checkpointing function of a model's layers: what is computed again in a backward, which may
    come when `batch_invariant` is left, is computed as it was."""

    def __init__(self, model: PreTrainedModel, function: Callable) -> None:
        self.model, self.function = model, function

    def __call__(self, part: Callable, *args: Any, **given: Any) -> Any:
        return self.function(functools.partial(self._again, part), *args, **given)

    def _again(self, part: Callable, *args: Any, **given: Any) -> Any:
        with _numbers(self.model):
            return part(*args, **given)


_CHECKPOINTS = "_gradient_checkpointing_func"


def _exchange_checkpoints(model: PreTrainedModel) -> list[tuple[Any, _Recomputed]]:
    found = [(module, vars(module).get(_CHECKPOINTS)) for module in model.modules()]
    exchanged = [
        (module, _Recomputed(model, function))
        for module, function in found
        if function is not None and not isinstance(function, _Recomputed)
    ]
    for module, own in exchanged:
        setattr(module, _CHECKPOINTS, own)
    return exchanged


def _put_back(exchanged: list[tuple[Any, _Recomputed]]) -> None:
    for module, own in exchanged:
        if vars(module).get(_CHECKPOINTS) is own:
            setattr(module, _CHECKPOINTS, own.function)


class Invariant(TorchDispatchMode):
    """Exchanges the operations whose sums depend on the batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(_plain, "entered", False):
            return func(*args, **kwargs)
        name = func.name()
        own = _OPERATIONS.get(name)
        if own is not None:
            return own(*args, **kwargs)
        operation = name.partition(".")[0].removesuffix("_")
        if operation in _REFUSED or operation.startswith("aten::_scaled_dot_product"):
            raise _refusal(name)
        if name in _CURVES and not args[0].is_cuda and args[0].is_floating_point():
            return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        if has_kernel_for(name, "CompositeImplicitAutograd"):  # in inference mode they come here whole
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _refusal(name: str) -> ConfigError:
    return ConfigError(
        f"with batch_invariant, {name} cannot be computed: how it adds up depends on the batch. Use a dense model that "
        "attends through transformers' attention interface, or leave batch_invariant out"
    )


_plain = threading.local()  # `entered` while a backward computes by PyTorch's own kernels
_REFUSED = {
    *("aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv", "aten::dot", "aten::convolution"),
    *("aten::_convolution", "aten::_grouped_mm", "aten::_scaled_mm", "graphmod::scaled_linear"),
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::vdot", "aten::_int_mm"),  # what is not exchanged of them
    *("aten::_addmm_activation", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"),
    *("aten::_weight_int4pack_mm", "aten::_weight_int8pack_mm", "aten::convolution_overrideable"),
    *("aten::_flash_attention_forward", "aten::_efficient_attention_forward"),
}
_CURVES = {
    f"aten::{name}" for name in ("gelu", "silu", "tanh", "sigmoid", "exp", "log", "cos", "sin", "erf", "softplus")
}
"""Operations whose last bit depends, on a CPU, on where in memory a number stands."""


# -- products, means and log-sum-exps ----------------------------------------------------------------------------------


def _kernels(tensor: Tensor) -> Any:
    """The module of kernels where there is one for such a tensor, else None."""
    half_or_float = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return _triton() if tensor.is_cuda and half_or_float else None


@functools.cache
def _triton() -> Any:
    try:
        from graphmod.decode import kernels
    except ImportError:
        return None
    return kernels


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """(M, N) of (M, K) and (K, N), with a bias (N,) added before it is rounded."""
    if _kernels(left) is not None:
        return torch.ops.graphmod.invariant_product(left, right, bias)
    # A row in memory of its own: libraries look at addresses too.
    rows = (row.clone().unsqueeze(0) for row in left)
    made = [row @ right if bias is None else torch.addmm(bias, row, right) for row in rows]
    return torch.cat(made) if made else left.new_empty((0, right.shape[1]))


def _added(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.dim() == 1 and len(bias) == right.shape[1] and beta == alpha == 1:
        return _product(left, right, bias)
    return bias * beta + _product(left, right) * alpha


def _batched(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[2] != 1:
        raise _refusal("aten::bmm")
    return left * right  # as of frequencies and positions: nothing is added up


def _halved(tensor: Tensor) -> Tensor:
    """The sum over the last dimension, by adding halves to each other."""
    length = tensor.shape[-1]
    tensor = pad(tensor, (0, (1 << max(0, length - 1).bit_length()) - length))
    while tensor.shape[-1] > 1:
        first, second = tensor.chunk(2, dim=-1)
        tensor = first + second
    return tensor.squeeze(-1)


def _is_last(tensor: Tensor, dim: list[int] | None) -> bool:
    """Whether it is the last dimension alone that is reduced, and there is something in it."""
    return bool(dim) and tensor.numel() > 0 < tensor.dim() and [one % tensor.dim() for one in dim] == [tensor.dim() - 1]


def _wide(tensor: Tensor) -> Tensor:
    """In fp32, or fp64 where it is that: what sums are made in."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _mean(tensor: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    tensor = tensor if dtype is None else tensor.to(dtype)
    if not _is_last(tensor, dim):
        return aten.mean.dim(tensor, dim, keepdim)
    if _kernels(tensor) is not None:
        found = torch.ops.graphmod.invariant_mean(tensor)
    else:
        found = (_halved(_wide(tensor)) / tensor.shape[-1]).to(tensor.dtype)
    return found.unsqueeze(-1) if keepdim else found


def _logsumexp(tensor: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    if not _is_last(tensor, dim) or not tensor.is_floating_point():
        return aten.logsumexp.default(tensor, dim, keepdim)
    if _kernels(tensor) is not None:
        found = torch.ops.graphmod.invariant_logsumexp(tensor)
    else:
        exact = tensor.double().contiguous()  # the last bit of exp and log depends on where in memory a number stands
        most = exact.amax(-1, keepdim=True)
        shift = torch.where(torch.isfinite(most), most, 0.0)
        found = (shift.squeeze(-1) + _halved((exact - shift).exp()).log()).to(tensor.dtype)
    return found.unsqueeze(-1) if keepdim else found


def _log_softmax(tensor: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if not _is_last(tensor, [dim]):
        return torch.log_softmax(tensor.float() if half_to_float else tensor, dim)
    wide = _wide(tensor)
    # As who takes the log-sum-exp from one logit alone computes it.
    found = wide - _logsumexp(wide, [dim], True)
    return found if half_to_float else found.to(tensor.dtype)


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "aten::mm": _product,
    "aten::addmm": _added,
    "aten::bmm": _batched,
    "aten::mean.dim": _mean,
    "aten::logsumexp": _logsumexp,
    "aten::_log_softmax": _log_softmax,
}


# -- attention ---------------------------------------------------------------------------------------------------------


def _mask(*args: Any, **given: Any) -> Tensor | None:
    """As transformers calls it: also where all that comes before is seen, and other attentions need no mask."""
    return sdpa_mask(*args, **{**given, "allow_is_causal_skip": False})


def attend(
    module: Attends,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache_view: CacheView | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: in a decode step over the cache, else over the keys that it is given.

    Args:
        query: (B, heads, S, head_dim).
        key, value: (B, kv_heads, C, head_dim or value_dim).
        attention_mask: (B, 1, S, C) bool, or a float that is added to scores, zero where they are seen; what a token
            sees must lie together. Where C is more than S, rows have no padding before them.
        dtype: it computes in where there is no cache, whose dtype it has; None is that of the query.

    Returns:
        (B, S, heads, value_dim).
    """
    if dropout:
        raise ConfigError(f"with batch_invariant, attention drops nothing, and dropout={dropout} was asked for; use 0")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cache_view is None:
        chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
        whole = chunk is None and kwargs.get("sliding_window") is None
        seen = _checked(attention_mask, len(query), query.shape[2], key.shape[2], chunk, whole)
        asked, key, value = (one.to(dtype or query.dtype) for one in (query, key, value))
        out = _Attention.apply(asked, key, value, seen, s_aux, scale, softcap)
        return out.transpose(1, 2).to(query.dtype), None
    view, memory = cache_view, cache_view.memory
    rule = memory.layers[module.layer_idx].rule
    if rule not in view.shared:
        view.shared[rule] = rule.first_seen(view.context)
    keys, values = memory.near(module.layer_idx)
    asked, first = query.to(memory.dtype), view.shared[rule]
    out = _tiles(asked, keys, values, view.block_table, view.context, first, s_aux, scale, softcap)
    return out.to(query.dtype), None


@functools.cache
def _attends(dtype: torch.dtype) -> Callable[..., tuple[Tensor, None]]:
    return functools.partial(attend, dtype=dtype)


_UNSEEN = -1e4
"""What is added to a score that gets no weight, or less."""


def _checked(mask: Tensor | None, rows: int, tokens: int, columns: int, chunk: int | None, whole: bool) -> Tensor:
    """(rows, 1, tokens, columns) bool: what each token sees, of a mask as transformers or a caller gives it.

    Args:
        chunk: tokens of a chunk, where the model has layers that see no more.
        whole: whether tokens see all that comes before them.

    Raises:
        ConfigError: sums over what it lets tokens see would depend on more than a sequence.
    """
    if mask is None:
        raise ConfigError("with batch_invariant, attention needs the causal mask that transformers makes, and got none")
    known = mask.dtype == torch.bool or mask.is_floating_point()
    if not known or mask.dim() != 4 or mask.shape[1] != 1:
        raise ConfigError(
            "with batch_invariant, attention takes masks of shape (B, 1, S, C), of bool or float, and got "
            f"{tuple(mask.shape)} of {mask.dtype}"
        )
    seen = (mask if mask.dtype == torch.bool else mask == 0).expand(rows, 1, tokens, columns)
    graded = ~(seen | (mask <= _UNSEEN)).all() if mask.is_floating_point() else seen.new_zeros(())
    near = seen[:, 0].to(torch.int8)
    count, first, last = near.sum(2), near.argmax(2), columns - 1 - near.flip(2).argmax(2)
    apart = (count > 0) & (last - first + 1 != count)
    start = near.amax(1).argmax(1, keepdim=True)
    within = first - start
    # A token that sees itself alone begins a sequence. Where that is no tile's beginning, tiles would lie otherwise.
    alone = (count == 1) & (first == torch.arange(tokens, device=mask.device)) & (within % TILE != 0)
    if chunk is not None:
        alone &= within % chunk != 0
    late = start % TILE != 0
    if columns == tokens or not whole:
        late = late[:0]
    if columns != tokens:
        alone = alone[:0]
    graded, several, apart, late = torch.stack((graded, alone.any(), apart.any(), late.any())).tolist()
    if late:
        raise ConfigError(
            "with batch_invariant, rows that go on from a cache have no padding before them; pad them on the right, or "
            "compute whole sequences with use_cache=False"
        )
    if graded:
        raise ConfigError("with batch_invariant, attention takes no biases: a mask holds other than zeros and -inf")
    if several:
        raise ConfigError(
            "with batch_invariant, each row holds one sequence, and several are packed into one, or padding sees "
            "itself; give each sequence a row of its own, padded with an attention_mask"
        )
    if apart:
        raise ConfigError(
            "with batch_invariant, what a token sees must lie together, and a mask hides tokens between others; pad "
            "rows at their ends, and leave out what is not to be seen"
        )
    return seen


class _Attention(torch.autograd.Function):
    """Forward in tiles; backward that of SDPA, or of its formula."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, key, value, mask, sinks, scale, cap = given
        ctx.save_for_backward(query, key, value, mask, sinks)
        ctx.numbers = scale, cap
        return _over_sequences(query, key, value, mask, sinks, scale, cap)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        *tensors, mask, sinks = ctx.saved_tensors
        blind = ~mask.any(-1, keepdim=True)  # padding, for which the formula has no numbers
        query, key, value = leaves = [one.detach().requires_grad_() for one in tensors]
        if sinks is not None:
            leaves.append(sinks := sinks.detach().requires_grad_())
        before, _plain.entered = getattr(_plain, "entered", False), True
        try:
            with torch.enable_grad():
                out = _formula(query, key, value, mask | blind, sinks, *ctx.numbers)
                found = torch.autograd.grad(out, leaves, grads[0].masked_fill(blind, 0))
        finally:
            _plain.entered = before
        return *found[:3], None, found[3] if sinks is not None else None, None, None


def _over_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    scale: float,
    cap: float | None,
) -> Tensor:
    """(B, heads, S, value_dim): each token over the tiles of its row, from the row's first token on."""
    rows, heads, tokens, width = query.shape
    columns = key.shape[2]
    seen = mask[:, 0]
    # With more keys than queries, in pieces of prompts, windows may hide the first token, which is that of the row.
    start = seen.any(1).to(torch.int8).argmax(1) * (columns == tokens)
    count = seen.sum(2)
    first = seen.to(torch.int8).argmax(2) - start.unsqueeze(1)
    blocks = -(-columns // TILE)
    place = (start.unsqueeze(1) + torch.arange(blocks * TILE, device=query.device)).clamp(max=columns - 1)

    def laid(one: Tensor) -> Tensor:
        index = place[:, None, :, None].expand(rows, one.shape[1], -1, one.shape[3])
        taken = one.gather(2, index).transpose(1, 2).contiguous()
        return taken.view(rows * blocks, TILE, one.shape[1], one.shape[3])

    table = torch.arange(rows * blocks, device=query.device).view(rows, 1, blocks)
    table = table.expand(rows, tokens, blocks).reshape(rows * tokens, blocks)
    context = torch.where(count > 0, first + count, 0).reshape(-1)
    asked = query.transpose(1, 2).reshape(rows * tokens, heads, 1, width)
    out = _tiles(asked, laid(key), laid(value), table, context, first.reshape(-1).clamp(min=0), sinks, scale, cap)
    return out.view(rows, tokens, heads, -1).transpose(1, 2)


def _formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None, scale: float, cap: float | None
) -> Tensor:
    """(B, heads, S, value_dim), as PyTorch computes it."""
    grouped = query.shape[1] // key.shape[1]
    if sinks is None and cap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped > 1)
    key, value = (one.repeat_interleave(grouped, 1) for one in (key, value))
    scores = _wide(query) @ _wide(key).transpose(2, 3) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        more = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, more), -1)
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


def _tiles(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    context: Tensor,
    first: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    cap: float | None,
) -> Tensor:
    """`kernels.attend` in one part, or by operations of PyTorch that compute each row alone; its arguments."""
    if _kernels(query) is not None and misfit(query.device, keys.shape[1], (keys.shape[3], values.shape[3])) is None:
        counters = context  # of parts, of which there are none
        return torch.ops.graphmod.triton_decode(
            query, keys, values, table, context, first, sinks, counters, scale, cap, TILE
        )
    rows, heads, _, width = query.shape
    block, kv_heads = keys.shape[1:3]
    asked = _wide(query.view(rows, kv_heads, -1, 1, width))
    shape = asked.shape[:3]
    most = asked.new_full(shape, float("-inf"))
    total, result = torch.zeros_like(most), asked.new_zeros((*shape, values.shape[3]))
    if sinks is not None:
        most = sinks.to(asked.dtype).view(1, kv_heads, -1).expand(shape).contiguous()
        total = torch.ones_like(most)
    token = torch.arange(TILE, device=query.device)
    for begin in range(0, table.shape[1] * block, TILE):
        place = begin + token
        seen = place < context.unsqueeze(1)
        if first is not None:
            seen = seen & (place >= first.unsqueeze(1))
        held = table[:, begin // block].unsqueeze(1), (place % block).unsqueeze(0)
        key, value = (
            _wide(one[held].transpose(1, 2).unsqueeze(2)) for one in (keys, values)
        )  # (B, kv, 1, TILE, width)
        score = _halved(asked * key) * scale
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        seen = seen[:, None, None, :]
        score = score.masked_fill(~seen, float("-inf"))
        now = torch.maximum(most, score.amax(-1))
        shift = torch.where(torch.isfinite(now), now, 0.0)
        before, weight = (one.double().exp().to(asked.dtype) for one in (most - shift, score - shift.unsqueeze(-1)))
        value = value.masked_fill(~seen.unsqueeze(-1), 0)
        part = _halved((_wide(weight.to(values.dtype)).unsqueeze(-1) * value).transpose(-1, -2))
        result = result * before.unsqueeze(-1) + part
        total = total * before + _halved(weight)
        most = now
    out = result / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out.to(query.dtype).view(rows, 1, heads, -1)


IMPLEMENTATION = Implementation(_NAME, attend, True, lambda _: None)


def usable(memory: PagedCache, own_reason: str) -> Implementation:
    """This attention, registered.

    Args:
        own_reason: why the model can only use its own attention; "" if it need not.

    Raises:
        ConfigError: it cannot be used with this model or cache.
    """
    if own_reason:
        raise ConfigError(f"batch_invariant=True cannot be used with this model: {own_reason}")
    if memory.block_size % TILE:
        raise ConfigError(f"batch_invariant=True needs a block_size that {TILE} divides, got {memory.block_size}")
    IMPLEMENTATION.register()
    return IMPLEMENTATION
