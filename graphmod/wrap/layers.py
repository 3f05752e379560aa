"""`graph_layers`: graphs for the layers of an existing model, in place.

A wrapped layer stays the object it was: only its `forward` is redirected, so that `state_dict` keys, parameter names,
hooks on the layer, isinstance and attribute access do not change.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from graphmod.config import CUDAGraphConfig, settings
from graphmod.errors import ConfigError
from graphmod.layers.group import LayerGroup
from graphmod.ranks.data_parallel import take_over
from graphmod.torch_private import is_compiled
from graphmod.wrap.body import Body, body_of
from graphmod.wrap.module import CUDAGraphModule
from graphmod.wrap.target import MARK, Mark, Target, set_forward

_HOOKS = f"{MARK}_hooks"  # under which a model has those of `train_without_cache`
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # they only hold


def graph_layers(
    model: nn.Module,
    config: CUDAGraphConfig | None = None,
    *,
    layers: str | list[str] | None = None,
    **single: Any,
) -> list[CUDAGraphModule]:
    """Lets the layers of `model` run from CUDA graphs: all from one, or each from its own.

    Where one module inside `model` runs the layers (`model.model` in transformers), it is captured as a whole, which
    costs the host a fraction of what a graph for each layer does. Where it cannot be, or is in a new state, each layer
    runs from its own graphs; neighbours share buffers and one memory pool. That module is left alone with several
    ranks, where parameters have post-accumulate-grad hooks, with `body=False`, and where `layers` name what to wrap.

    Args:
        model: any module, such as a transformers causal LM.
        config: settings; None means the defaults.
        layers: name patterns (`layers.*.mlp`; matched against the end of a module's name, `*` within one part) of the
            modules to wrap. None takes `config.layers`, or finds the layers: the outermost `nn.ModuleList`s and
            `nn.Sequential`s whose items are of one class.
        single: single settings of `CUDAGraphConfig`, such as `max_graphs=4`, in the place of those of `config`.

    Returns:
        The wrappers, in the order of `model.named_modules()`, for their `stats` and `reset()`; the module that runs the
        layers, where it is wrapped, is the first.

    A transformers model in training, or with `labels`, is called with `use_cache=False` from now on, where nothing else
    is asked for, unless it is given `position_ids`, which it would then read in another way: a key-value cache that is
    made anew in each step can be in no graph.

    Raises:
        UnknownSetting: `single` has a name that is no setting.
        ConfigError: nothing matches, a match lies inside another, a layer has graphs already, or lies in a model that
            is compiled as a whole.
        TypeError: `model` is no module, or `config` no CUDAGraphConfig.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"graph_layers takes an nn.Module, got {type(model).__name__}; a callable: CUDAGraphModule(it)")
    config = settings(config, single)
    patterns = layers if layers is not None else config.layers
    names = find_layers(model) if patterns is None else match_layers(model, patterns)
    return wrap(model, config, names, body_of(model, names) if config.body and patterns is None else None)


def wrap(model: nn.Module, config: CUDAGraphConfig, names: list[str], body: str | None) -> list[CUDAGraphModule]:
    """Wraps the modules of these names, and the one around some of them, if there is to be such a `body`."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            take_over(module)  # where it cannot be, its layers say so when they would be captured
    groups: dict[torch.device, LayerGroup] = {}
    wrapped = []
    for name in names:
        if MARK in model.get_submodule(name).__dict__:
            raise ConfigError(f"{name!r} has graphs already; call ungraph(model) first")
        require_called(model, name)
    if not model.__dict__.get(_HOOKS):
        model.__dict__[_HOOKS] = train_without_cache(model)  # which looks at what forwards take
    for name in names:
        layer = model.get_submodule(name)
        tensors = itertools.chain(layer.parameters(), layer.buffers())
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        group = groups.setdefault(device, LayerGroup())
        wrapped.append(_in_place(layer, CUDAGraphModule(layer, config, name=name, group=group, call=Target(layer))))
    inside = [name for name in names if body is not None and name.startswith(f"{body}.")]
    beside = [name for name in names if name not in inside]
    for name, graphed in zip(names, wrapped, strict=True):
        # Modules beside the body do not know of what it uses, because it is not captured with them.
        tied = _tied_outside(model, inside if name in inside else beside, graphed._root)
        graphed._context.group.share(tied, lasting=True)
    if body is None or len(groups) > 1:
        return wrapped
    around = model.get_submodule(body)
    if MARK not in around.__dict__:
        graphed = _in_place(around, CUDAGraphModule(around, config, name=body, call=Body(around)))
        graphed._context.group.share(_tied_outside(model, [body], around), lasting=True)
        graphed._context.group.gradients = wrapped[0]._context.group.gradients  # the same addresses, whoever serves
        wrapped.insert(0, graphed)
    return wrapped


def _in_place(module: nn.Module, graphed: CUDAGraphModule) -> CUDAGraphModule:
    """Redirects the `forward` of a module to its wrapper, which it returns."""
    module.__dict__[MARK] = Mark(graphed, module.__dict__.get("forward"))
    module.__dict__["forward"] = graphed._run
    return graphed


def require_called(model: nn.Module, name: str) -> None:
    """Raises ConfigError for a module whose `forward` nobody calls: one that only holds others, or lies in compiled
    code, which passes over wrapped layers inside it, and a module compiled in place over its own `forward`."""
    layer = model.get_submodule(name)
    if isinstance(layer, _NEVER_CALLED):
        raise ConfigError(
            f"{name!r} is a {type(layer).__name__}, which nobody calls; name the modules in it: '{name}.*'"
        )
    parts = name.split(".")
    around = ["", *(".".join(parts[:count]) for count in range(1, len(parts)))]
    compiled = [outer for outer in around if is_compiled(model.get_submodule(outer))]
    if compiled or layer._compiled_call_impl is not None:
        outer = repr(compiled[0]) if compiled and compiled[0] else type(model).__name__
        what = f"{outer}, which holds {name!r}, is compiled" if compiled else f"{name!r} was compiled in place"
        raise ConfigError(
            f"{what}, and compiled code passes over the graphs of layers. Compile the layers themselves (layers[i] = "
            "torch.compile(layers[i])), or capture the whole step: CUDAGraphModule(step)"
        )


def _tied_outside(model: nn.Module, layers: list[str], layer: nn.Module) -> list[nn.Parameter]:
    """The parameters of a wrapped layer that modules outside every wrapped layer use too."""
    inside = {id(module) for name in layers for module in model.get_submodule(name).modules()}
    outside = {id(p) for m in model.modules() if id(m) not in inside for p in m._parameters.values() if p is not None}
    return [parameter for parameter in layer.parameters() if id(parameter) in outside]


def ungraph(model: nn.Module) -> nn.Module:
    """Undoes `graph_layers` on `model`, frees the graphs, and returns the model. Does nothing where there are none.

    Raises:
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ungraph takes the nn.Module that graph_layers was given, got {type(model).__name__}")
    for module in model.modules():
        mark = module.__dict__.get(MARK)
        if mark is None:
            continue
        mark.graphed.retire()
        if module.__dict__.get("forward") == mark.graphed._run:  # else somebody assigned another since
            set_forward(module, mark.forward)
        del module.__dict__[MARK]
    for hook in model.__dict__.pop(_HOOKS, ()):
        hook.remove()
    return model


@contextlib.contextmanager
def without_graphs(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Lets the wrapped layers among `modules` run as if they had never been wrapped, for as long as it is active."""
    wrapped = [(module, module.__dict__[MARK]) for module in modules if MARK in module.__dict__]
    wrapped = [(module, mark) for module, mark in wrapped if module.__dict__.get("forward") == mark.graphed._run]
    for module, mark in wrapped:
        set_forward(module, mark.forward)
    try:
        yield
    finally:
        for module, mark in wrapped:
            module.__dict__["forward"] = mark.graphed._run


def find_layers(model: nn.Module) -> list[str]:
    """The names of the items of the outermost module lists and sequences whose items are of one class and have
    parameters; a sequence of plain operations, such as two `nn.Linear`, is none.

    Raises:
        ConfigError: the model has no such list.
    """
    found: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(outer + ".") for outer in lists)
        inside = inside or isinstance(module, ParametrizationList)  # which computes a weight
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)) or not len(module):
            continue
        if isinstance(module, nn.Sequential) and not (len(module) > 1 and _is_block(module[0])):
            continue
        if len({type(item) for item in module}) == 1 and any(True for _ in module.parameters()):
            lists.append(name)
            # Distinct ones: one may stand there twice.
            found += [layer for index, item in module.named_children() for layer in _called(_path(name, index), item)]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no list of like layers (nn.ModuleList, nn.Sequential) to wrap; name the "
            'modules, for example graph_layers(model, layers="blocks.*"), or wrap one: CUDAGraphModule(module); with '
            'TrainStep, capture the whole step: TrainGraphConfig(scope="full_iteration")'
        )
    return found


def _path(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if outer else inner


def _called(name: str, item: nn.Module) -> Iterator[str]:
    """The name of an item, or, of a list or dict of modules, which nobody calls, those of the items in it."""
    if not isinstance(item, _NEVER_CALLED):
        yield name
        return
    for inner, module in item.named_children():
        if any(True for _ in module.parameters()):
            yield from _called(_path(name, inner), module)


def _is_block(module: nn.Module) -> bool:
    """Whether it is made of modules, and can be called."""
    return any(True for _ in module.children()) and not isinstance(module, _NEVER_CALLED)


def match_layers(model: nn.Module, patterns: str | list[str]) -> list[str]:
    """The names of the modules that match one of the patterns, in the order of `model.named_modules()`."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, (list, tuple)) or not patterns or not all(isinstance(name, str) for name in patterns):
        raise ConfigError(
            f"layers must be one or more name patterns, such as 'layers.*.mlp', got {patterns!r:.80}; modules one has "
            "in hand are wrapped one by one: CUDAGraphModule(module)"
        )
    weights = [name for name, module in model.named_modules() if isinstance(module, ParametrizationList)]
    names = [name for name, _ in model.named_modules() if name and not name.startswith(tuple(f"{w}." for w in weights))]
    found: list[str] = []
    for pattern in patterns:
        parts = pattern.split(".")
        hits = [name for name in names if _matches(name.split("."), parts)]
        if not hits:
            near = difflib.get_close_matches(pattern.replace("*", "0"), names, n=3, cutoff=0.6)
            near = near or [name for name in names if name.endswith(".0")][:3] or names[:3]
            raise ConfigError(f"layers={pattern!r} matches no module; names look like: {', '.join(near)}")
        found += hits
    ordered = [name for name in names if name in set(found)]
    for outer in ordered:
        inner = next((name for name in ordered if name.startswith(outer + ".")), None)
        if inner is not None:
            raise ConfigError(f"layers={patterns} matches {inner!r} inside {outer!r}; wrap the one or the other")
    return ordered


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) >= len(pattern) and all(
        fnmatchcase(part, wanted) for part, wanted in zip(name[-len(pattern) :], pattern, strict=True)
    )


def edge_modules(model: nn.Module, layers: list[str]) -> list[str]:
    """The names of the outermost modules with parameters or buffers that lie beside `layers`: embedding, rotary
    frequencies, final norm, head."""

    def holds_layer(name: str) -> bool:
        return any(layer == name or layer.startswith(name + ".") for layer in layers)

    found: list[str] = []
    for name, module in model.named_modules():
        covered = any(name == other or name.startswith(other + ".") for other in (*layers, *found))
        tensors = itertools.chain(module.parameters(), module.buffers())
        if name and not covered and not holds_layer(name) and any(True for _ in tensors):
            found.append(name)
    return found


def train_without_cache(model: nn.Module) -> list[RemovableHandle]:
    """Hooks by which models of transformers train without a key-value cache. Its parts have them, too, because a
    library may call past those of the model that it was given (PEFT)."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    hooks = []
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters) if isinstance(module, kind) else []
        if "use_cache" in names:
            hook = functools.partial(_without_cache, names.index("use_cache"))
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return hooks


def _without_cache(place: int, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    # With a cache transformers does not look for packed sequences in the positions that it is given.
    packed = kwargs.get("position_ids") is not None and kwargs.get("attention_mask") is None
    trains = (module.training and torch.is_grad_enabled()) or kwargs.get("labels") is not None
    if trains and not packed and kwargs.get("use_cache") is None and len(args) <= place:
        kwargs["use_cache"] = False
    return args, kwargs
