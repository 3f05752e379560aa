"""Layers inside a checkpoint (`torch.utils.checkpoint`), which keeps nothing of them and runs them again.

A graph has memory of its own, of which that checkpoint knows nothing. So a capture does what the checkpoint does: the
graph of the forward keeps its arguments, and that of the backward computes the rest again.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as checkpoints

from graphmod.errors import CaptureRefused
from graphmod.signature.call import Call
from graphmod.signature.modes import entered_again
from graphmod.step.buffers import without_history
from graphmod.torch_private import current_backward, top_saved_tensors_hooks, tree_map_only

_CODE = inspect.unwrap(checkpoints.checkpoint).__code__
DRAWS = (
    "draws random numbers inside a checkpoint that draws others when it runs again (preserve_rng_state=False), which "
    "no replay would do; leave preserve_rng_state as it is, set dropout to 0, or do without the checkpoint"
)
KEPT = (
    "keeps in its graph what the checkpoint around it would not: it draws random numbers, which a graph cannot draw "
    "twice. Set dropout to 0, or do without the checkpoint (gradient_checkpointing=False)"
)


def in_checkpoint() -> bool:
    """Whether a checkpoint runs this call, to run it again in the backward."""
    hooks = top_saved_tensors_hooks(True)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return name.startswith("_checkpoint_hook.") and torch.is_grad_enabled()


def draws_anew() -> bool:
    """Whether a checkpoint runs this call that does not put back the random state when it runs it again."""
    frame = sys._getframe(1) if in_checkpoint() else None
    while frame is not None:
        if frame.f_code is _CODE:
            return not frame.f_locals.get("preserve", True)
        frame = frame.f_back
    return False


class _Enough(BaseException):
    """All that the backward needs has been computed again."""


class RunAgain(torch.autograd.graph.saved_tensors_hooks):
    """Within it autograd saves nothing: what a backward asks for is computed again, once for each backward.

    Args:
        call: what is computed within.
        modes: PyTorch's, as they are now; see `signature`.
        device_type: `cpu` or `cuda`.
    """

    def __init__(self, call: Call, modes: tuple, device_type: str) -> None:
        self._call = call
        self._modes, self._device_type = modes, device_type
        self._count = 0
        self._computed: list[Any] = []
        self._computed_in = -1
        super().__init__(self._leave_out, self._compute)

    def _leave_out(self, tensor: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def _compute(self, index: int) -> Tensor:
        if self._computed_in != current_backward():
            self._computed, self._computed_in = [], current_backward()
            args, kwargs = tree_map_only(Tensor, without_history, (self._call.args, self._call.kwargs))
            hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, _never)
            modes = entered_again(self._modes, self._device_type)
            with torch.enable_grad(), modes, hooks, contextlib.suppress(_Enough):
                self._call.function(*args, **kwargs)
            if len(self._computed) != self._count:
                raise CaptureRefused("saves other tensors for its backward when it runs again inside a checkpoint")
        found = self._computed[index]
        self._computed[index] = None  # its memory is for others, once autograd is done with it
        return found

    def _keep(self, tensor: Tensor) -> None:
        self._computed.append(tensor.detach())
        if len(self._computed) == self._count:
            raise _Enough


def _never(_: Any) -> Tensor:
    raise RuntimeError("nothing of a forward that runs again has a backward")
