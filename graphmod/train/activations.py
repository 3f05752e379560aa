"""Activation checkpointing of a model's layers.

A layer's forward is wrapped before graphs are put around it, so that a graph holds both: the forward that keeps
little, and the backward that computes it again.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel

from graphmod.errors import ConfigError
from graphmod.torch_private import DispatchKey, Dropout, KeyExcluded, TorchDispatchMode, tree_map_only
from graphmod.trace.dispatch import is_recording, through_a_mode
from graphmod.trace.operations import draws, facts, tensors_in
from graphmod.train.settings import DRAWS_IN_COMPILED_CODE
from graphmod.wrap.layers import find_layers

# -- random draws that a second run of the same code repeats without drawing -------------------------------------------
# To run a layer again with the random numbers it had takes the generator's state, which a graph can neither read nor
# set. What the draws gave can be kept instead.


def _changed(op: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The arguments that an operation writes."""
    writes = facts(op).writes
    positional = [value for index, value in enumerate(args) if index in writes]
    return list(tensors_in([*positional, *(value for name, value in kwargs.items() if name in writes)]))


def _apart(tensor: Tensor) -> Tensor:
    """A tensor of the same memory and version counter without the autograd graph, which leads to whoever keeps this:
    together they would never be freed."""
    with KeyExcluded(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Kept:
    """What one random operation gave: its results, and the content of the arguments it changed."""

    def __init__(self, op: Any, args: tuple, kwargs: dict, result: Any) -> None:
        self._op = op
        self._written = [tensor.clone() for tensor in _changed(op, args, kwargs)]
        # What a factory makes gets another version counter on its way out, so that a change would go unnoticed.
        like = op._schema.name.endswith("_like")
        self._made = like or not any(True for _ in tensors_in((*args, *kwargs.values())))
        self._result = None
        returned = [value.alias_info for value in op._schema.returns]
        self._returns_written = bool(returned) and all(alias is not None and alias.is_write for alias in returned)
        if not self._returns_written:
            self._result = tree_map_only(Tensor, torch.clone if self._made else _apart, result)
        self._versions = [tensor._version for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return list(tensors_in((self._result,)))

    def again(self, op: Any, args: tuple, kwargs: dict) -> Any:
        if op is not self._op:
            raise RuntimeError(f"a layer that runs again calls {op} where it called {self._op}; it must do the same")
        if [tensor._version for tensor in self._tensors()] != self._versions:
            raise RuntimeError(f"the result of {op} was changed in place; a layer that runs again needs it as it was")
        targets = _changed(op, args, kwargs)
        for target, value in zip(targets, self._written, strict=True):
            target.copy_(value)
        if self._returns_written:
            return targets[0] if len(targets) == 1 else tuple(targets)
        return tree_map_only(Tensor, torch.clone, self._result) if self._made else self._result


class _Draws(TorchDispatchMode):
    """Keeps what random operations give, or gives it again. A recorder goes on to see the operations."""

    def __init__(self, kept: list[_Kept], again: bool) -> None:
        super().__init__()
        self._kept, self._again, self._next = kept, again, 0
        self._around = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._next = 0  # a second backward over the same forward runs it yet again
        self._around.enter_context(through_a_mode())
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._around.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not draws(facts(func), args, kwargs):
            return func(*args, **kwargs)
        if self._again:
            self._next += 1
            return self._kept[self._next - 1].again(func, args, kwargs)
        result = func(*args, **kwargs)
        self._kept.append(_Kept(func, args, kwargs, result))
        return result


def kept_draws() -> tuple[_Draws, _Draws]:
    """Contexts for a first run, which keeps what is drawn, and for later runs of the same code, which get it again.

    The later ones raise RuntimeError when the code calls other random operations, or when it changed the result of one
    in place.
    """
    kept: list[_Kept] = []
    return _Draws(kept, again=False), _Draws(kept, again=True)


# -- layers that run again in the backward -----------------------------------------------------------------------------


class Recomputed:
    """A layer's forward that keeps its arguments and runs again in the backward.

    Args:
        random: it draws random numbers. The second run must use those of the first. For that the generator's state is
            kept and set; in a call that is captured, which can do neither, what was drawn.

    Attributes:
        forward: what runs twice; it may be exchanged, by compiled code say.
    """

    def __init__(self, forward: Callable, random: bool) -> None:
        self.forward, self._random = forward, random

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keeps = self._random and is_recording()
        return checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=self._random and not keeps,
            context_fn=kept_draws if keeps else noop_context_fn,
            **kwargs,
        )


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether the model has dropout: in a module, or by its config, for what its code calls as a function."""
    modules = any(isinstance(m, Dropout) and m.p > 0 for m in model.modules())
    settings = vars(model.config) if isinstance(model, PreTrainedModel) else {}
    heads = ("summary", "classifier")  # of other models with the same config
    return modules or any(
        isinstance(value, float) and value > 0 and "drop" in name and not name.startswith(heads)
        for name, value in settings.items()
    )


def recompute_activations(model: nn.Module, compiled: bool = False) -> nn.Module:
    """Lets each decoder layer keep its arguments only and run its forward again in the backward; returns the model.

    In a graph, a layer with dropout keeps also what its random operations gave.

    Args:
        compiled: the layers will be compiled.

    Raises:
        ConfigError: layers that draw random numbers are to be compiled: generated code draws anew when it runs again.
    """
    if compiled and draws_random_numbers(model):
        raise ConfigError(DRAWS_IN_COMPILED_CODE)
    # Code of one's own may call dropout as a function, with a probability that nobody else knows.
    unknown = not isinstance(model, PreTrainedModel)
    if compiled and unknown:
        raise ConfigError(
            "train.activation_checkpointing=true runs layers twice, compiled code would draw other random numbers the "
            f"second time, and nobody knows whether {type(model).__name__} draws any; use graph.compile=none"
        )
    random = unknown or draws_random_numbers(model)
    for name in find_layers(model):
        layer = model.get_submodule(name)
        layer.__dict__["forward"] = Recomputed(layer.forward, random)
    return model


def recomputed_layers(model: nn.Module) -> list[str]:
    """The names of the layers that run again in the backward."""
    return [name for name, module in model.named_modules() if isinstance(module.__dict__.get("forward"), Recomputed)]
