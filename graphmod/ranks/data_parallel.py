"""DistributedDataParallel that can be captured: `take_over` gives a wrapped model another reducer.

Its own hangs at the AccumulateGrad nodes of the parameters, which a capture makes anew, and runs kernels on a stream of
its own from the first step on. What it computes, and when, stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel import DistributedDataParallel

from graphmod.ranks.reducer import Reducer


def refused(model: DistributedDataParallel) -> str | None:
    """Why a model cannot be taken over, so that it stays eager; None where it can."""
    has = {
        "find_unused_parameters=True, which reads on the host what got no gradient": model.find_unused_parameters,
        "mixed_precision, which casts in hooks of its own; use torch.autocast": model.mixed_precision is not None,
        "a communication hook": bool(model._comm_hooks),
        "delay_all_reduce_named_params": bool(model._delay_all_reduce_params),
        "the Python reducer of torch.compile": model._use_python_reducer,
        "a buffer hook": hasattr(model, "buffer_hook"),
        "join(), for inputs of different length": model._join_config.enable,
        "an optimizer that steps in the backward": any(
            hasattr(p, "_in_backward_optimizers") for p in _trained(model).values()
        ),
    }
    return next((why for why, is_so in has.items() if is_so), None)


def is_taken_over(model: nn.Module) -> bool:
    """Whether `take_over` was called on it."""
    return isinstance(model, Averaging)


def take_over(model: DistributedDataParallel) -> str | None:
    """Lets gradients be averaged by a `Reducer`, from the next forward on; returns why not, where that cannot be."""
    if is_taken_over(model):
        return None
    why = refused(model)
    if why is not None:
        return why
    first = getattr(getattr(model, "_bucket_config", None), "first_bucket_bytes_cap", None)
    limits = [distributed._DEFAULT_FIRST_BUCKET_BYTES if first is None else first, model.bucket_bytes_cap]
    model.__class__ = Averaging
    model._gradients = Reducer(_trained(model), model.process_group, limits)
    model.reducer = model.logger = None  # which hold as much memory as the gradients
    return None


def take_over_later(model: DistributedDataParallel) -> str | None:
    """Likewise, of a model whose forward runs now: from its next one on."""
    why = None if isinstance(model, (Averaging, _Waiting)) else refused(model)
    if why is None and not isinstance(model, (Averaging, _Waiting)):
        model.__class__ = _Waiting
    return why


def _trained(model: DistributedDataParallel) -> dict[str, Tensor]:
    ignored = model.parameters_to_ignore
    return {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


class _Waiting(DistributedDataParallel):
    """One that is taken over by its next forward."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.__class__ = DistributedDataParallel
        take_over(self)
        return self.forward(*inputs, **kwargs)


class Averaging(DistributedDataParallel):
    """A DistributedDataParallel whose gradients a `Reducer` averages. Its copies have not been taken over."""

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        del state["_gradients"]
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.__class__ = DistributedDataParallel

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.will_sync_module_buffers():
            self._spread_buffers()
        if self.modules_buffers and self.require_forward_param_sync != averages:
            self.require_forward_param_sync = averages
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, named = _to_kwargs(inputs, kwargs, device, False)
            inputs, kwargs = moved[0], named[0]
        self._gradients.begin(averages)
        return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def _spread_buffers(self) -> None:
        """Gives all ranks the buffers of the first."""
        root = distributed.get_global_rank(self.process_group, 0)
        kinds: dict[tuple, list[Tensor]] = {}
        for name, buffer in self.module.named_buffers():
            if name not in self.parameters_to_ignore and buffer.numel():
                kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for buffers in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            distributed.broadcast(flat, root, group=self.process_group)
            parts = flat.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [p.view(b.shape) for p, b in zip(parts, buffers, strict=True)])

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refuses: the hook would be called by the reducer that was replaced.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "this model is captured by graphmod, which averages gradients itself; register communication hooks before "
            "the first call of what graphmod wraps, and it runs eagerly"
        )
