"""torch.compile inside graphs: fused kernels, captured by graphmod instead of by inductor.

On the CPU the compiled graphs are run operation by operation (`aot_eager`): same path, no generated code, no speed.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphmod.train.step.activations import Recomputed

log = logging.getLogger("graphmod")

# Each layer may be a variant of its own, in training and evaluation.
_RECOMPILES = 512


def options(how: str) -> dict[str, Any]:
    """Inductor's settings for `default` or `max`. It makes no graphs of its own: they would be copied in and out of."""
    from graphmod.torch_private import inductor_options

    tuning = inductor_options("max-autotune-no-cudagraphs") if how == "max" else {}
    return {**tuning, "triton.cudagraphs": False}


@functools.cache  # of layers that are compiled one by one, the first says it for all
def _say_not_fast() -> None:
    log.warning("graph.compile on the CPU runs the compiled graphs operation by operation: for tests, not for speed")


@functools.cache
def _say_switched_off() -> None:
    log.warning("graph.compile does nothing: torch.compile is switched off (TORCH_COMPILE_DISABLE)")


def switched_off() -> bool:
    """Whether torch.compile hands back what it is given."""
    from graphmod.torch_private import dynamo_config

    return dynamo_config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _how(how: str, device: torch.device) -> dict[str, Any]:
    """What torch.compile is told."""
    if device.type == "cuda":
        return {"options": options(how)}
    _say_not_fast()
    return {"backend": "aot_eager"}


def compiled(function: Callable, how: str, device: torch.device, in_pieces: bool = False) -> Callable:
    """`function` compiled for fixed shapes; its first call for each shape and mode compiles, which takes a while. Where
    torch.compile is switched off, `function` as it is.

    Args:
        function: a callable of tensors and modules.
        how: `default` or `max`.
        device: where it runs.
        in_pieces: inside of DistributedDataParallel, a piece for each bucket of gradients, so that these are summed
            while others are computed.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: (on calling) it was compiled again and again for ever new arguments.
    """
    if switched_off():
        _say_switched_off()
        return function
    from graphmod.torch_private import dynamo_config

    made = torch.compile(function, dynamic=False, **_how(how, device))

    def call(*args: Any, **kwargs: Any) -> Any:
        # Beyond the limit dynamo would go on in eager, and say so in a log line only.
        with dynamo_config.patch(recompile_limit=_RECOMPILES, fail_on_recompile_limit_hit=True, optimize_ddp=in_pieces):
            return made(*args, **kwargs)

    return call


def compile_layers(model: nn.Module, names: list[str], how: str, device: torch.device) -> Callable[[], None]:
    """Compiles the forward of each named layer where it stands; returns what undoes that. Of a layer that runs again in
    the backward the part that runs twice is compiled.
    """
    before = []
    for name in names:
        layer = model.get_submodule(name)
        # To compile the checkpoint itself would have inductor read the generator's state in a capture.
        again = layer.__dict__.get("forward")
        owner = again.__dict__ if isinstance(again, Recomputed) else layer.__dict__
        before.append((owner, owner.get("forward")))
        forward = again.forward if isinstance(again, Recomputed) else layer.forward
        owner["forward"] = compiled(forward, how, device)

    def undo() -> None:
        for owner, forward in before:
            owner.pop("forward", None)
            if forward is not None:
                owner["forward"] = forward

    return undo
