"""Puts model, data and loss of a run together, and tries parts of one's own on each other before the first step."""

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from graphmod.config import CompileMode
from graphmod.errors import ConfigError
from graphmod.train.attention import NAME
from graphmod.train.batches import Batches, Data, Items, described, parts_of
from graphmod.train.loss import IGNORED, OfRows, count_targets_of, criterion_of, own_logits
from graphmod.train.model import autocast_dtype, build_model, set_special_tokens
from graphmod.train.ranks import ALONE, Ranks
from graphmod.train.settings import CUSTOM, FUSED, ModelPrecision, ParallelMode, RunConfig, Scope
from graphmod.train.step import microbatches, on_device
from graphmod.train.targets import in_words, located, made, named, passes_on
from graphmod.wrap.layers import find_layers

_LOOKS_AHEAD = 8  # times the precision of a number, relative to the greatest one
_MEAN = "a loss is the mean over the targets of a microbatch, a 0-d floating tensor that depends on the model's weights"


def fitted(
    config: RunConfig,
    corpus: Data,
    dims: PretrainedConfig | None,
    batches: Batches,
    device: torch.device,
    ranks: Ranks = ALONE,
    first: int = 0,
) -> tuple[nn.Module, Callable]:
    """The model of a run on its device, and the loss that goes with it and the data.

    Layers run again in the backward where that is asked for. Parts of one's own are called a few times, on a microbatch
    of step `first`; random state, buffers, attributes and modes of the model are as they were then. Raises ConfigError
    where they do not fit together; the message names the part that does not.
    """
    model = build_model(config.model, dims, config.train.precision, device, config.train.seed, corpus.vocab_size)
    _require_supported(config, model, corpus)
    if config.model.precision is not ModelPrecision.none:
        from graphmod.train.float8 import use_float8  # which no other run loads

        use_float8(model, config.model.precision, config.parallel.mode.shards)
    if config.train.activation_checkpointing:
        from graphmod.train.activations import recompute_activations  # which no other run loads

        recompute_activations(model, config.graph.compile is not CompileMode.none)
    if isinstance(model, PreTrainedModel):
        if corpus.tokenizer is not None:
            set_special_tokens(model, corpus.tokenizer)
        of_data = batches.loss_fn
    else:
        of_data = batches.loss_fn and functools.partial(batches.loss_fn, forward=own_logits)
    loss_fn, of_logits = _own_loss(config, of_data, device) if config.train.own_loss else (of_data, of_data)
    assert loss_fn is not None
    if config.train.loss == FUSED:
        from graphmod.train.fused_loss import fused_loss  # which no other run loads

        loss_fn = fused_loss(model, loss_fn)
    keeps_attention = isinstance(model, PreTrainedModel) and model.config._attn_implementation != NAME
    if own_parts(config) or keeps_attention:
        microbatch = microbatches(on_device(batches.sampler(first), device))[0]
        if of_logits is not None:
            _try_logits(model, config, microbatch, of_logits, corpus)
        criterion = criterion_of(loss_fn)
        before = _state(criterion)
        # Numbers that an object counts in should begin where they do without a trial.
        tried = loss_fn if isinstance(loss_fn, (types.FunctionType, functools.partial)) else copy.copy(loss_fn)
        averaged = ranks.count > 1 and config.parallel.mode is ParallelMode.ddp
        _try_loss(model, config, microbatch, tried, averaged)
        if batches.evaluation:  # what fails there alone
            what = "the loss in an evaluation, which has no gradients (train.eval_every=0 makes none),"
            with torch.no_grad():
                _called(model, config, what, lambda: tried(model, microbatch), training=False)
        if _state(criterion) != before:
            raise ConfigError(
                f"{named('train.loss', config.train.own_loss)} keeps something from step to step, which no "
                "checkpoint holds; keep it in a buffer of the model"
            )
    return model, loss_fn


def _state(criterion: Callable | None) -> list[Any]:
    """What a module of logits and targets may keep from one call to the next."""
    modules = list(criterion.modules()) if isinstance(criterion, nn.Module) else []
    simple = [(name, one) for part in modules for name, one in vars(part).items() if isinstance(one, (int, float, str))]
    return simple + [buffer.tolist() for part in modules for buffer in part._buffers.values() if buffer is not None]


def own_parts(config: RunConfig) -> str:
    """The parts of one's own, as settings name them; empty without any."""
    parts = {"model": config.model.target, "data": config.data.target, "train.loss": config.train.own_loss}
    return ", ".join(named(setting, target) for setting, target in parts.items() if target)


def has_layers(model: nn.Module) -> bool:
    """Whether the model has a list of like layers, which can be captured, sharded and run again one by one."""
    try:
        return bool(find_layers(model))
    except ConfigError:
        return False


def _require_supported(config: RunConfig, model: nn.Module, corpus: Data) -> None:
    """Raises ConfigError for settings that need what this model or data does not have."""
    name, of_transformers = type(model).__name__, isinstance(model, PreTrainedModel)
    told = isinstance(model, PreTrainedModel) and model.config._attn_implementation == NAME
    if config.data.packing and not told:
        raise ConfigError(
            "data.packing=true tells the attention of a model which tokens share a document, and that of "
            f"{name} cannot be told; pad documents instead (data.buckets), or leave it out"
        )
    if config.parallel.mode.splits_layers and not of_transformers:
        raise ConfigError(
            f"parallel={config.parallel.mode} splits models of transformers with layers like Llama's, and {name} "
            "is a model of your own; use parallel=ddp or parallel=fsdp"
        )
    if isinstance(corpus, Items) and "attention_mask" in corpus.names and of_transformers:
        raise ConfigError(
            f"{corpus.name} has an attention_mask, and {name} is trained without one; leave it out: with padding at "
            "the end of a row and labels of -100 there, the numbers are the same"
        )
    by_layer = {
        "graph=per_layer": config.graph.scope is Scope.per_layer and config.graph.layers is None,
        "train.activation_checkpointing=true": config.train.activation_checkpointing,
        f"parallel={config.parallel.mode}": config.parallel.mode.shards,
        f"model.precision={config.model.precision}": config.model.precision is not ModelPrecision.none,
    }
    wanted = [what for what, asked in by_layer.items() if asked]
    if wanted and not has_layers(model):
        way_out = "or leave that out"
        if wanted[0] == "graph=per_layer":
            modules = ",".join(child for child, _ in model.named_children())
            way_out = f"name modules (graph.layers=[{modules}]), or use graph=full_iteration"
        raise ConfigError(
            f"{wanted[0]} goes layer by layer, and {name} has no list of like layers; keep them in an nn.ModuleList or "
            f"nn.Sequential, {way_out}"
        )
    has_tokens = not isinstance(corpus, Items) or corpus.tokenizer is not None
    if config.train.sample_every and not (of_transformers and has_tokens):
        raise ConfigError(
            f"train.sample_every={config.train.sample_every} writes text, with a model of transformers and a tokenizer "
            f"of transformers, which data of your own has as its attribute `tokenizer`; got {name}. Leave it out"
        )


def _own_loss(config: RunConfig, otherwise: Callable | None, device: torch.device) -> tuple[Callable, Callable | None]:
    """The loss that `train.loss` names, and the same again if it is one of logits that the data's loss takes."""
    target = config.train.own_loss
    said = named("train.loss", target)
    bound_to = () if inspect.isclass(located("train.loss", target)) else ("model", "microbatch")
    found = made("train.loss", target, bound_to=bound_to)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise ConfigError(
                f"{said} made a {type(found).__name__}, which cannot be called; a loss is a function of model and "
                "microbatch, a class whose objects are called so, or an nn.Module of logits and targets"
            )
        if config.data.packing:
            raise ConfigError(
                f"data.packing=true needs a loss that keeps packed documents apart, and {said} is called with model "
                "and microbatch; give an nn.Module of logits and targets, or use data.buckets"
            )
        return found, None
    if otherwise is None:
        raise ConfigError(
            f"{said} is a module of logits and targets, and the items of {named('data', config.data.target)} do not "
            "say what these are; give a function loss(model, microbatch)"
        )
    if any(parameter.requires_grad for parameter in found.parameters()):
        raise ConfigError(f"{said} has parameters, which nothing would train; put them into the model")
    ignored, reduction = getattr(found, "ignore_index", IGNORED), getattr(found, "reduction", "mean")
    if ignored != IGNORED or reduction != "mean":
        raise ConfigError(
            f"{said} has ignore_index={ignored} and reduction={reduction}; {_MEAN}, and {IGNORED} marks what is no "
            f"target. Leave ignore_index at {IGNORED} and reduction at 'mean'"
        )
    loss_fn = functools.partial(otherwise, criterion=OfRows(found).to(device))
    return loss_fn, loss_fn


@contextlib.contextmanager
def _without_trace(model: nn.Module, device: torch.device, training: bool) -> Iterator[None]:
    """In training or evaluation mode; random state, buffers, attributes and modes are as before at the end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(patch.dict(vars(module)))
            stack.enter_context(patch.dict(module._buffers))
        model.train(training)
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)


def _shown(found: Any) -> str:
    return described(parts_of(found)) if isinstance(found, Tensor) else f"a {type(found).__name__}"


def _called(model: nn.Module, config: RunConfig, what: str, call: Callable[[], Any], training: bool = True) -> Any:
    """Calls model or loss once, to say in words what would fail in the first step."""
    dtype, device = autocast_dtype(config.train.precision), next(model.parameters()).device
    try:
        with _without_trace(model, device, training), torch.autocast(device.type, dtype, enabled=dtype is not None):
            return call()
    except Exception as error:
        if passes_on(error):
            raise
        raise ConfigError(f"{own_parts(config) or type(model).__name__}: {what} fails: {in_words(error)}") from error


def _try_logits(model: nn.Module, config: RunConfig, microbatch: Any, loss_fn: Callable, corpus: Data) -> None:
    """Whether the model has the logits of tokens that `loss_fn` needs, a built-in loss whose keyword `forward` is
    how it calls the model, and for as many tokens as the data has. The data gets the model's vocabulary where it has
    none."""
    custom = config.model.architecture == CUSTOM
    name = named("model", config.model.target) if custom else type(model).__name__
    forward = inspect.signature(loss_fn).parameters["forward"].default if not config.data.packing else None
    if forward is None:  # only models of transformers, whose attention is known, have packed batches
        return
    given = {key: value[:1] for key, value in parts_of(microbatch).items()}
    tokens = given[""][:, :-1] if "" in given else given["input_ids"]
    more = {key: value for key, value in given.items() if key not in ("", "input_ids", "labels")}
    zeros = torch.zeros_like(tokens)
    other = zeros.clone()
    other[:, -1] = 1

    def call(some: Tensor) -> Any:
        with torch.no_grad():
            return forward(model, some, **more)

    shape = tuple(tokens.shape)
    what = f"calling the model with tokens {shape} int64 for its logits (a tensor, or `.logits` of what it returns)"
    found = _called(model, config, what, functools.partial(call, zeros))
    fits = isinstance(found, Tensor) and found.is_floating_point() and found.dim() == 3
    if not fits or tuple(found.shape[:2]) != shape:
        raise ConfigError(
            f"{name} returned {_shown(found)} for tokens {shape}; expected logits ({shape[0]}, {shape[1]}, "
            "vocabulary), floating. For another task give a loss of your own (train.loss._target_)"
        )
    if found.shape[-1] < (corpus.vocab_size or 0):
        raise ConfigError(
            f"{name} returned {_shown(found)} for tokens {shape}: the data has a vocabulary of {corpus.vocab_size} and "
            f"the model {found.shape[-1]}; return a logit for each token of it (an argument vocab_size is told how "
            "many), or give a loss of your own (train.loss._target_)"
        )
    if corpus.vocab_size is None:
        corpus.vocab_size = found.shape[-1]
    # As it evaluates: dropout and the statistics of a batch would differ anyway.
    seen = [_called(model, config, what, functools.partial(call, some), training=False) for some in (zeros, other)]
    if not all(isinstance(one, Tensor) and one.shape == found.shape for one in seen):
        return  # it evaluates in another form
    before, after = (one[:, :-1].float() for one in seen)
    dtypes = {found.dtype, autocast_dtype(config.train.precision) or found.dtype}
    dtypes |= {one.dtype for one in model.parameters() if one.is_floating_point()}
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    if before.numel() and (before - after).abs().max() > _LOOKS_AHEAD * coarsest * before.abs().max():
        raise ConfigError(
            f"{name} looks ahead: what it predicts for a token changes with the tokens that come after it, so the "
            "loss of the next token would be of what it has seen. Make it causal (BERT's kind: "
            "model.options.is_decoder=true); for another task give a loss of your own (train.loss._target_)"
        )


def _try_loss(model: nn.Module, config: RunConfig, microbatch: Any, loss_fn: Callable, averaged: bool) -> None:
    """Whether the loss is one; where gradients are `averaged` over ranks, each parameter must have one."""
    parts = own_parts(config) or type(model).__name__  # which may be wrong
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]

    def call() -> tuple[Any, list[Any]]:
        found = loss_fn(model, microbatch)
        asked = averaged and isinstance(found, Tensor) and found.requires_grad and not found.dim()
        parameters = [one for _, one in trained]
        return found, list(torch.autograd.grad(found, parameters, allow_unused=True)) if asked else parameters

    found, gradients = _called(model, config, f"the loss of a microbatch ({described(parts_of(microbatch))})", call)
    if not isinstance(found, Tensor) or found.dim() or not found.is_floating_point() or not found.requires_grad:
        without = " without a gradient" if isinstance(found, Tensor) and not found.requires_grad else ""
        raise ConfigError(f"{parts}: the loss returned {_shown(found)}{without}; {_MEAN}")
    unused = [name for (name, _), gradient in zip(trained, gradients, strict=True) if gradient is None]
    if unused:
        raise ConfigError(
            f"{parts}: the loss does not depend on {', '.join(unused[:3])}, and parallel=ddp waits for a "
            "gradient of each parameter; drop them, set requires_grad to False, or use parallel=fsdp"
        )
    if (count := count_targets_of(loss_fn)) is not None:
        targets = _called(model, config, "count_targets of the loss", lambda: count(microbatch))
        if not isinstance(targets, Tensor) or targets.dim() or targets.device != found.device:
            raise ConfigError(
                f"{parts}: count_targets returned {_shown(targets)}; expected a 0-d tensor on "
                f'{found.device}, such as (batch["labels"] != -100).sum()'
            )
