"""The loss of a language model from its hidden states: logits of some tokens at a time, which become their gradient at
once, so that each matmul is done once and the logits of all tokens are never held.

What libraries have of it does not fit: `torch.nn.functional.linear_cross_entropy` adds losses of bfloat16 up in that,
and Liger's asks the host about targets and gradients in each step, which no graph can hold.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax
from transformers import PreTrainedModel

from graphmod.attention import decoding
from graphmod.errors import ConfigError
from graphmod.train.loss import IGNORED, count_targets_of, next_token_loss
from graphmod.train.parallel import is_split

_AT_ONCE = 1 << 27  # logits: 0.5 GiB in float32
_TOKENS = 4


class _LinearCrossEntropy(torch.autograd.Function):
    """`mean_cross_entropy(linear(hidden, weight, bias), targets)`, 0-d float32, of hidden (N, H) and targets (N,); with
    `slopes` it can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, slopes: bool) -> Tensor:
        real = targets != IGNORED
        safe = torch.where(real, targets, 0)
        total, kept = torch.zeros((), device=hidden.device), hidden * real.unsqueeze(1)
        of_hidden, of_weight, of_bias = made = [
            torch.zeros_like(one) if slopes and needed and one is not None else None
            for one, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        rows = max(1, _AT_ONCE // len(weight))
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            at = safe[part].unsqueeze(1)
            shares = log_softmax(linear(hidden[part], weight, bias), -1, dtype=torch.float32)
            total -= torch.where(real[part], shares.gather(1, at).squeeze(1), 0).sum()
            if not slopes:
                continue
            slope = shares.exp_().scatter_add_(1, at, shares.new_full(at.shape, -1)).to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[part] = slope @ weight * real[part].unsqueeze(1)
            if of_weight is not None:
                of_weight.addmm_(slope.t(), kept[part])
            if of_bias is not None:
                of_bias.addmv_(slope.t(), real[part].to(slope.dtype))
            del shares, slope  # else they live on beside those of the next part
        count = real.sum()
        ctx.save_for_backward(count, *made)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("the fused loss can be differentiated once only; leave out create_graph=True")
        count, *made = ctx.saved_tensors
        # Of one dimension, because a factor without any would be rounded to the dtype of the others first.
        scale = (grads[0] / count.clamp(min=1)).view(1)
        return *(None if one is None else torch.mul(one, scale, out=torch.empty_like(one)) for one in made), None, None


class LossHead(nn.Linear):
    """An output layer that, given targets, returns the mean cross entropy of its logits in their place."""

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, S, V) of hidden states (B, S, H); with targets (B, S) int64 their loss, 0-d float32."""
        if targets is None:
            return super().forward(input)
        given: list[Any] = [input.flatten(0, 1), self.weight, self.bias]
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            given = [None if one is None else one.to(dtype) for one in given]
        return _LinearCrossEntropy.apply(*given, targets.flatten(), torch.is_grad_enabled())


def fused_loss(
    model: nn.Module, loss_fn: Callable[..., Tensor] = next_token_loss
) -> Callable[[nn.Module, Any], Tensor]:
    """A `loss_fn` for `TrainStep` that never holds the logits of all tokens:

        step = TrainStep(model, optimizer, loss_fn=fused_loss(model))

    The output layer of `model` becomes a `LossHead`, in place. The model is called on four tokens, to see that what
    this layer returns are the logits. Of a gradient in 16 bits, parts are added up in that.

    Args:
        model: a causal LM of transformers, not yet divided over ranks.
        loss_fn: `next_token_loss`, `causal_lm_loss`, or another one whose argument `criterion` takes the model's
            logits and targets (B, S); its cross entropy is replaced.

    Raises:
        ConfigError: it is no such model, or its logits are not those of its output layer, such as scaled ones.
        ValueError: (on calling) the model that is trained has another output layer.
    """
    head: Any = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    why = None
    if not isinstance(model, PreTrainedModel) or type(head) not in (nn.Linear, LossHead):
        why = "it has none" if head is None else f"that is a {type(head).__name__} and no nn.Linear"
    elif is_split(model):
        why = "it is divided over ranks already; call fused_loss(model) before that"
    elif not _gives_logits(model, head):
        why = "its logits are scaled or capped after that"
    if why is not None:
        raise ConfigError(
            "train.loss=fused needs a causal LM of transformers whose output layer returns the logits, got "
            f"{type(model).__name__}: {why}; leave it out"
        )
    head.__class__ = LossHead
    body = _without(model, next(name for name, module in model.named_modules() if module is head))

    def loss(model: nn.Module, microbatch: Any) -> Tensor:
        if getattr(model, "get_output_embeddings", lambda: None)() is not head:
            raise ValueError(f"the fused loss was made for another {type(model).__name__}; call fused_loss(model) anew")
        return loss_fn(body, microbatch, criterion=head)

    vars(loss)["count_targets"] = count_targets_of(loss_fn)
    return loss


def _gives_logits(model: PreTrainedModel, head: nn.Module) -> bool:
    """Whether what the model returns is what `head` does."""
    found: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, given, logits: found.append(logits))
    try:
        tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device=model.device)
        logits = decoding(list(model.modules()), lambda: model(input_ids=tokens).logits)
    finally:
        handle.remove()
    return len(found) == 1 and torch.equal(found[0].float(), logits.float())


def _without(model: nn.Module, name: str) -> nn.Module:
    """A copy of the model that shares all with it, but for the module of that name, which lets pass what it gets."""
    bare, (first, _, rest) = copy.copy(model), name.partition(".")
    inside = _without(model.get_submodule(first), rest) if rest else nn.Identity()
    bare.__dict__["_modules"] = {**model._modules, first: inside}
    return bare
