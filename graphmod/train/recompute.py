"""Activation checkpointing of a model's layers. May import the core's `layers`, and torch.

A layer's forward is wrapped before graphs are put around it, so that a graph holds both: the forward that keeps
nothing, and the backward that computes it again.
"""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from graphmod.errors import ConfigError
from graphmod.layers import find_layers


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether the model has dropout, in a module or in the attention kernel."""
    modules = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return modules or any(getattr(getattr(model, "config", None), name, 0) for name in names)


def recompute_activations(model: nn.Module, in_graphs: bool) -> nn.Module:
    """Lets each decoder layer keep its arguments only and run its forward again in the backward; returns the model.

    Raises:
        ConfigError: the layers draw random numbers and are to be captured: the second forward must draw the same
            numbers as the first, which takes reading the generator's state, and a graph cannot.
    """
    random = draws_random_numbers(model)
    if random and in_graphs:
        raise ConfigError(
            "train.activation_checkpointing=true computes dropout twice, and in a graph the second time would draw "
            "other numbers; set the model's dropout to 0, or use graph=none"
        )
    for name in find_layers(model):
        layer = model.get_submodule(name)
        layer.__dict__["forward"] = partial(_recomputed, layer.forward, random)
    return model


def _recomputed(forward: Callable, random: bool, *args: object, **kwargs: object) -> object:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=random, **kwargs)
