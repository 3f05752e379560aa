"""torch.compile inside graphs: fused kernels, captured by graphmod instead of by inductor.

On the CPU the emulator repeats what the recorder saw. There the compiled graphs are run operation by operation
(`aot_eager`), in sight: same path, no generated code, no speed.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from graphmod.guards.watching import note_whole
from graphmod.trace.compiled import note_random, shown
from graphmod.trace.operations import draws, facts
from graphmod.trace.tracer import is_recording
from graphmod.train.recompute import Recomputed

log = logging.getLogger("graphmod")

CHOICES = ("none", "default", "max")
# Each layer may be a variant of its own, in training and evaluation.
_RECOMPILES = 512


def options(how: str) -> dict[str, Any]:
    """Inductor's settings for `default` or `max`. It makes no graphs of its own: they would be copied in and out of."""
    tuning = torch._inductor.list_mode_options("max-autotune-no-cudagraphs") if how == "max" else {}
    return {**tuning, "triton.cudagraphs": False}


def _hidden(compile_inner: Callable) -> Callable:
    """Inductor's inner compiler, with a result that runs out of the recorder's sight: autograd calls a backward where
    nothing of ours is around it. Whether it draws random numbers the recorder is told."""

    def inner(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        operations = [node for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        random = any(draws(facts(node.target), node.args, node.kwargs) for node in operations)
        code = compile_inner(graph, *args, **kwargs)
        run = code.current_callable

        def hidden(inputs: Any) -> Any:
            with shown(inputs, hide=True):
                if random:
                    note_random()
                return run(inputs)

        code.current_callable = hidden
        return code

    return inner


@functools.cache  # dynamo keeps what it compiled for each backend object
def inductor(how: str) -> Callable:
    """The backend for CUDA devices."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # From the cache of whole autograd graphs a result would come back without the wrapper.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=_hidden(compile_fx_inner), config_patches=options(how))

    return backend


@functools.cache  # of layers that are compiled one by one, the first says it for all
def _say_not_fast() -> None:
    log.warning("graph.compile on the CPU runs the compiled graphs operation by operation: it checks, and is not fast")


@functools.cache
def _say_switched_off() -> None:
    log.warning("graph.compile does nothing: torch.compile is switched off (TORCH_COMPILE_DISABLE)")


def switched_off() -> bool:
    """Whether torch.compile hands back what it is given."""
    return torch._dynamo.config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _backend(how: str, device: torch.device) -> Any:
    if device.type == "cuda":
        return inductor(how)
    _say_not_fast()
    return "aot_eager"


def compiled(function: Callable, how: str, modules: list[nn.Module], device: torch.device) -> Callable:
    """`function` compiled for fixed shapes; its first call for each shape and mode compiles, which takes a while. Where
    torch.compile is switched off, `function` as it is.

    Args:
        function: a callable of tensors and modules.
        how: `default` or `max`.
        modules: those whose parameters and buffers it reads.
        device: where it runs.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: (on calling) it was compiled again and again for ever new arguments.
    """
    if switched_off():
        _say_switched_off()
        return function
    made = torch.compile(function, dynamic=False, backend=_backend(how, device))
    hide = device.type == "cuda"

    def call(*args: Any, **kwargs: Any) -> Any:
        if not hide:
            # AOTAutograd detaches a view before it saves it, and arguments are views in a capture only: in sight of
            # the recorder that would be another program.
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), (args, kwargs))
        if not is_recording():
            # Beyond the limit dynamo would go on in eager, and say so in a log line only.
            with torch._dynamo.config.patch(recompile_limit=_RECOMPILES, fail_on_recompile_limit_hit=True):
                return made(*args, **kwargs)
        read = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        note_whole(modules)
        with shown([*read, *tree_leaves((args, kwargs))], hide), torch.compiler.set_stance("fail_on_recompile"):
            return made(*args, **kwargs)

    return call


def compile_layers(model: nn.Module, names: list[str], how: str, device: torch.device) -> Callable[[], None]:
    """Compiles the forward of each named layer where it stands; returns what undoes that. Of a layer that runs again in
    the backward the part that runs twice is compiled.

    Until it is undone, backwards that are compiled in this process do not reuse the memory of what their forward saved
    (`torch._functorch.config.donated_buffer`): a backward with a graph of its own is captured twice, on equal values.
    The setting is looked at when such a backward runs, on whatever thread, so that it cannot be narrower.
    """
    before = []
    donated = torch._functorch.config.donated_buffer
    torch._functorch.config.donated_buffer = False
    for name in names:
        layer = model.get_submodule(name)
        # To compile the checkpoint itself would have inductor read the generator's state in a capture.
        again = layer.__dict__.get("forward")
        owner = again.__dict__ if isinstance(again, Recomputed) else layer.__dict__
        before.append((owner, owner.get("forward")))
        forward = again.forward if isinstance(again, Recomputed) else layer.forward
        owner["forward"] = compiled(forward, how, [layer], device)

    def undo() -> None:
        torch._functorch.config.donated_buffer = donated
        for owner, forward in before:
            owner.pop("forward", None)
            if forward is not None:
                owner["forward"] = forward

    return undo
