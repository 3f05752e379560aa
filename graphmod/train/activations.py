"""Activation checkpointing of a model's layers.

A layer's forward is wrapped before graphs are put around it, so that a graph holds both: the forward that keeps
little, and the backward that computes it again.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel

from graphmod.errors import ConfigError
from graphmod.torch_private import Dropout
from graphmod.trace.dispatch import is_recording
from graphmod.train.draws import kept_draws
from graphmod.train.settings import DRAWS_IN_COMPILED_CODE
from graphmod.wrap.layers import find_layers


class Recomputed:
    """A layer's forward that keeps its arguments and runs again in the backward. Where it draws random numbers, the
    second run must use those of the first. For that the generator's state is kept and set; in a call that is captured,
    which can do neither, what was drawn. `forward` may be exchanged, by compiled code say."""

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
    """Lets each decoder layer keep its arguments only and run its forward again in the backward; returns the model. In
    a graph, a layer with dropout keeps also what its random operations gave. Raises ConfigError where layers that draw
    random numbers will be `compiled`: generated code draws anew when it runs again."""
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
