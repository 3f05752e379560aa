"""torch.compile inside graphs: fused kernels, captured by graphmod instead of by inductor.

On the CPU the compiled graphs are run operation by operation (`aot_eager`): same path, no generated code, no speed.
"""

import itertools
import os
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as base_optimizer
from torch.optim.adam import adam

from graphmod.errors import ConfigError
from graphmod.torch_private import dynamo_config, foreach_mul, inductor_options
from graphmod.train.activations import Recomputed
from graphmod.train.parallel import clip, local, total_norm
from graphmod.words import warn_once
from graphmod.wrap.target import set_forward

# Each layer may be a variant of its own, in training and evaluation.
_RECOMPILES = 512


def options(how: str) -> dict[str, Any]:
    """Inductor's settings for `default` or `max`. It makes no graphs of its own: they would be copied in and out of."""
    tuning = inductor_options("max-autotune-no-cudagraphs") if how == "max" else {}
    return {**tuning, "triton.cudagraphs": False}


def switched_off() -> bool:
    """Whether torch.compile hands back what it is given."""
    return dynamo_config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _how(how: str, device: torch.device) -> dict[str, Any]:
    """What torch.compile is told."""
    if device.type == "cuda":
        return {"options": options(how)}
    warn_once("graph.compile on the CPU runs the compiled graphs operation by operation: for tests, not for speed")
    return {"backend": "aot_eager"}


def compiled(function: Callable, how: str, device: torch.device, in_pieces: bool = False) -> Callable:
    """`function` of tensors and modules compiled for fixed shapes; its first call for each shape and mode compiles,
    which takes a while. Where torch.compile is switched off, `function` as it is.

    Args:
        how: `default` or `max`.
        in_pieces: inside of DistributedDataParallel, a piece for each bucket of gradients, so that these are summed
            while others are computed.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: (on calling) it was compiled again and again for ever new arguments.
    """
    if switched_off():
        warn_once("graph.compile does nothing: torch.compile is switched off (TORCH_COMPILE_DISABLE)")
        return function
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
    undo = ExitStack()
    for name in names:
        layer = model.get_submodule(name)
        again = layer.__dict__.get("forward")
        if isinstance(again, Recomputed):  # to compile the checkpoint would have inductor read a generator's state
            undo.callback(setattr, again, "forward", again.forward)
            again.forward = compiled(again.forward, how, device)
        else:
            undo.callback(set_forward, layer, again)
            set_forward(layer, compiled(layer.forward, how, device))
    return undo.close


# -- clipping and Adam's update compiled into one pass over memory -----------------------------------------------------
# The arithmetic is torch's own (`torch.optim.adam.adam`), in float32 where the tensors are narrower. Tensors of one
# shape are updated some at a time, so that what has to be compiled depends on the kinds of tensors and not on their
# number.

_MOST_TOGETHER = 8
# Each kind takes a second or two to compile.
_MOST_KINDS = 32
# Beside betas, compiled in as they are.
_SETTINGS = ("eps", "weight_decay", "maximize", "decoupled_weight_decay")


class CompiledUpdate:
    """The step of a `torch.optim.Adam` or `AdamW`, with the gradients' scaling. The optimizer keeps the state, which a
    step changes in place as the optimizer's own step does."""

    def __init__(self, optimizer: torch.optim.Optimizer, how: str) -> None:
        self._optimizer = optimizer
        self._device = next(p for group in optimizer.param_groups for p in group["params"]).device
        self._settings: dict[int, tuple] = {}
        self._run = _compiled_for(optimizer, how, self._device)

    def ready(self) -> bool:
        """Whether the optimizer's next step can be made here.

        It can if torch.compile is not switched off, the optimizer is of one of the two classes, nothing was hung into
        its step, its state is there (its own first step makes it), the rate is a tensor, the other settings are those
        of the first time, and all is on one device.
        """
        optimizer = self._optimizer
        return (
            not switched_off()
            and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            and _steps_by_itself(optimizer)
            and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
            and not (base_optimizer._global_optimizer_pre_hooks or base_optimizer._global_optimizer_post_hooks)
            and all(itertools.starmap(self._plain, enumerate(optimizer.param_groups)))
            and len({(self._settings[index], *kind) for (index, *kind), _ in self._kinds()}) <= _MOST_KINDS
        )

    def _plain(self, index: int, group: dict[str, Any]) -> bool:
        if not self._here(group["lr"]) or group["amsgrad"] or group["differentiable"]:
            return False
        if any(isinstance(beta, Tensor) for beta in group["betas"]):
            return False
        settings = (*group["betas"], *(group[name] for name in _SETTINGS))
        if self._settings.setdefault(index, settings) != settings:
            return False  # one that changes all the time would be compiled all the time
        state = self._optimizer.state
        return all(
            p.device == self._device
            and p.is_floating_point()
            and p.grad.layout is torch.strided
            and self._here(state.get(p, {}).get("step"))
            for p in group["params"]
            if p.grad is not None
        )

    def _here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device == self._device

    def _kinds(self) -> Iterator[tuple[Any, Tensor]]:
        for index, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                if p.grad is not None:
                    mine, grad = local(p), local(p.grad)
                    yield (index, mine.shape, mine.stride(), mine.dtype, grad.stride(), grad.dtype), p

    @torch.no_grad()
    def __call__(self, norm: Tensor | None, max_norm: float | None) -> None:
        """Updates the parameters that have gradients. These are taken as scaled to `max_norm` where their total 2-norm,
        0-d, is larger, but stay as they are; None does not scale."""
        scale = None if max_norm is None or norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        blocked = getattr(self._optimizer, "found_inf", None)
        kinds: dict[Any, list[Tensor]] = {}
        for key, parameter in self._kinds():
            kinds.setdefault(key, []).append(parameter)
        for (index, *_), parameters in kinds.items():
            group = self._optimizer.param_groups[index]
            for some in _divided(parameters):
                states = [self._optimizer.state[p] for p in some]
                self._run(
                    [local(p.detach()) for p in some],
                    [local(p.grad) for p in some if p.grad is not None],
                    *([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq", "step")),
                    scale,
                    blocked,
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    **{name: group[name] for name in _SETTINGS},
                )


def _steps_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nobody has replaced an optimizer's step, but for a scheduler, which counts the calls of it."""
    step = optimizer.__dict__.get("step")
    return step is None or getattr(step, "__wrapped__", None) is type(optimizer).step


def compiled_update(
    optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None, compile: str = "default"
) -> Callable[[], Tensor | None]:
    """Clipping and the step of an Adam or AdamW as one compiled pass over memory, inside or outside of a captured step,
    also of DistributedDataParallel and fully_shard. It stands for `clip_grad_norm_` and `optimizer.step()`:

        update = graphmod.compiled_update(optimizer, max_grad_norm=1.0)
        loss.backward()
        norm = update()

    The optimizer keeps the state. Its first step is its own, which makes that; so is each step while step hooks are on
    it, or settings other than the rate are not those of the first time.

    Args:
        optimizer: exactly a `torch.optim.Adam` or `AdamW`, with a tensor on the parameters' device as `lr` (a scheduler
            may fill it), and `capturable=True` or `fused=True`.
        max_grad_norm: the gradients are taken as scaled to this total 2-norm where theirs is larger, but stay as they
            are; None does not clip.
        compile: `default` or `max`, of inductor's tuning.

    Returns:
        A function without arguments. It returns the gradients' total 2-norm before clipping, 0-d; None without
        `max_grad_norm`.

    Raises:
        ConfigError: the optimizer is another, or is not built so.
    """
    kind = type(optimizer)
    if compile not in ("default", "max"):
        raise ConfigError(f"compile={compile!r} is not known; choose one of: default, max")
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigError(f"optimizer must be a torch.optim.Adam or AdamW, got {kind.__module__}.{kind.__qualname__}")
    for group in optimizer.param_groups:
        rate, device = group["lr"], group["params"][0].device
        if not isinstance(rate, Tensor) or rate.device != device:
            got = f"a tensor on {rate.device}" if isinstance(rate, Tensor) else f"{rate!r}"
            raise ConfigError(f"optimizer must have a tensor on {device} as its lr, got {got}: lr=torch.tensor(1e-3)")
        for name in ("amsgrad", "differentiable"):
            if group[name]:
                raise ConfigError(f"optimizer must be built with {name}=False, got {name}=True")
        if not (group["fused"] or group["capturable"]):
            raise ConfigError("optimizer must be built with capturable=True or fused=True, got neither")
    run = CompiledUpdate(optimizer, compile)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]

    def update() -> Tensor | None:
        if run.ready():
            norm = None if max_grad_norm is None else total_norm(parameters)
            run(norm, max_grad_norm)
            if "step" in vars(optimizer):  # of a scheduler, which asks whether a step came before its own
                vars(optimizer)["_opt_called"] = True
            return norm
        norm = None if max_grad_norm is None else clip(parameters, max_grad_norm)
        optimizer.step()
        return norm

    return update


# The steps that are built around one optimizer (`graph=auto`) compile once.
_of_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[Any, Callable]] = weakref.WeakKeyDictionary()


def _compiled_for(optimizer: torch.optim.Optimizer, how: str, device: torch.device) -> Callable:
    """`_adam` compiled for one optimizer: what dynamo compiled of one code object counts towards its limit as long as
    the process lives, so each optimizer gets a copy."""
    known, key = _of_optimizers.setdefault(optimizer, {}), (how, device)
    if key not in known:
        known[key] = compiled(types.FunctionType(_adam.__code__.replace(), globals()), how, device)
    return known[key]


def _divided(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Parts of at most `_MOST_TOGETHER`, all of one size if there is such a division: each size is compiled anew."""
    count = len(parameters)
    least = -(-count // _MOST_TOGETHER)
    parts = next((n for n in range(least, 2 * least + 1) if count % n == 0), least)
    bounds = [index * count // parts for index in range(parts + 1)]
    return [parameters[start:end] for start, end in itertools.pairwise(bounds)]


def _adam(
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    scale: Tensor | None,
    blocked: Tensor | None,
    **settings: Any,
) -> None:
    """Adam on copies, which cost nothing once compiled; what is kept of them is decided at the end."""
    targets = [*parameters, *averages, *squares, *steps]
    wide = [_wide(tensor) for tensor in targets]
    count = len(parameters)
    scaled = [_wide(gradient) for gradient in gradients]
    # Where a dispatch mode of the user's keeps this from being compiled, torch refuses these two on the CPU.
    on_device = torch.compiler.is_compiling() or parameters[0].is_cuda
    if scale is not None:
        scaled = list(foreach_mul(scaled, scale))
    adam(
        wide[:count],
        scaled,
        wide[count : 2 * count],
        wide[2 * count : 3 * count],
        [],
        wide[3 * count :],
        foreach=on_device,
        capturable=on_device,
        amsgrad=False,
        **settings,
    )
    if blocked is not None:
        wide = [torch.where(blocked > 0, target, value) for target, value in zip(targets, wide, strict=True)]
    for target, value in zip(targets, wide, strict=True):
        target.copy_(value)


def _wide(tensor: Tensor) -> Tensor:
    """A copy in float32, or in float64 if it is that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
