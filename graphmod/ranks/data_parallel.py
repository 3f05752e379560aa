"""DistributedDataParallel that can be captured: `take_over` gives a wrapped model another reducer.

Its own hangs at the AccumulateGrad nodes of the parameters, which a capture makes anew, and runs kernels on a stream of
its own from the first step on. What it computes, and when, stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from graphmod.ranks.reducer import Reducer
from graphmod.torch_private import FIRST_BUCKET_BYTES, foreach_copy_, lacking, to_device
from graphmod.trace.dispatch import current, hidden
from graphmod.trace.undo import under_way


def refused(model: DistributedDataParallel) -> str | None:
    """Why a model cannot be taken over, so that it stays eager; None where it can."""
    why = lacking("DistributedDataParallel", model) or lacking("Reducer", model.reducer)
    if why is not None:
        return f"a way to work that is not known: {why}"
    has = {
        f"a class of its own ({type(model).__name__})": type(model) not in (DistributedDataParallel, _Found, _Waiting),
        "find_unused_parameters=True, which reads on the host what got no gradient": model.find_unused_parameters,
        "mixed_precision, which casts in hooks of its own; use torch.autocast": model.mixed_precision is not None,
        "a communication hook": bool(model._comm_hooks),
        "delay_all_reduce_named_params": bool(model._delay_all_reduce_params),
        "the Python reducer of torch.compile": model._use_python_reducer,
        "a buffer hook": hasattr(model, "buffer_hook"),
        "replicate; use DistributedDataParallel itself": isinstance(model.module, nn.ParameterList),
        "join(), for inputs of different length": joins(model),
        "sparse gradients of an embedding": any(
            getattr(one, "sparse", False) is True
            for one in model.module.modules()
            if isinstance(one, (nn.Embedding, nn.EmbeddingBag))
        ),
        "an optimizer that steps in the backward": any(
            hasattr(p, "_in_backward_optimizers") for p in model.module.parameters()
        ),
    }
    return next((why for why, is_so in has.items() if is_so), None)


def compiled_around(module: nn.Module) -> str | None:
    """Why a step with a module cannot be captured, whose averaging of gradients torch.compile compiles; or None."""
    inside = module._orig_mod if type(module).__name__ == "OptimizedModule" else module
    if not isinstance(inside, DistributedDataParallel) or (inside is module and module._compiled_call_impl is None):
        return None
    return "compiles DistributedDataParallel; compile what is inside: DistributedDataParallel(torch.compile(model))"


def is_taken_over(model: nn.Module) -> bool:
    """Whether `take_over` was called on it."""
    return isinstance(model, Averaging)


def joins(model: DistributedDataParallel) -> bool:
    """Whether ranks may call it a different number of times, in `join()`; it does not say when that is over."""
    return model._join_config.enable


def take_over(model: DistributedDataParallel) -> str | None:
    """Lets gradients be averaged by a `Reducer`, from the next forward on; returns why not, where that cannot be."""
    if isinstance(model, (Averaging, _Counting)):
        return model._why
    why = refused(model)
    if why is None and model.static_graph:
        model.__class__ = _Counting
        why = _Counting._why
    elif why is None:
        _replace_reducer(model, _trained(model))
    return why


def take_over_later(model: DistributedDataParallel, inside: bool = False) -> str | None:
    """Lets a model be taken over by its next forward, because one runs now; returns why not, where that cannot be.

    Args:
        inside: by the next forward that runs inside a call, since one rank alone may have a call that only uses the
            module in it. Until then it is not averaged otherwise, which is told.
    """
    if isinstance(model, (Averaging, _Counting, _Waiting)):
        return model._why
    why = refused(model)
    if why is None:
        model.__class__ = _Found if inside else _Waiting
    if why is None and inside:
        return (
            "its own reducer, because its forward runs outside of what is wrapped; wrap the whole step, or the layers: "
            "graph_layers(model)"
        )
    return why


def _replace_reducer(model: DistributedDataParallel, trained: dict[str, Tensor], times: Any = None) -> None:
    if model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True
    places = {id(parameter): index for index, parameter in enumerate(trained.values())}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    planned = [[places[id(one)] for one in bucket.parameters() if id(one) in places] for bucket in buckets]
    first = getattr(getattr(model, "_bucket_config", None), "first_bucket_bytes_cap", None)
    limits = [FIRST_BUCKET_BYTES if first is None else first, model.bucket_bytes_cap]
    model.__class__ = Averaging
    taken: Any = model  # which is of that class from here on, and lets go of what holds as much memory as the gradients
    taken._gradients = Reducer(trained, model.process_group, limits, times)
    if model._has_rebuilt_buckets:
        taken._gradients.keep(list(filter(None, planned)))
    taken.reducer = taken.logger = None


def _trained(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that it averages: those that required grad when it was made."""
    buckets = model.reducer._get_zeros_like_grad_buckets()
    averaged = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and id(parameter) in averaged
    }


class Borrowed:
    """Models that are taken over for a while, and given back as they were when it is left."""

    def __init__(self) -> None:
        self._noted: dict[DistributedDataParallel, tuple] = {}

    def note(self, models: Iterable[DistributedDataParallel]) -> None:
        """Takes in models before they are taken over; those that wrappers took over already stay so."""
        for one in models:
            if one not in self._noted and type(one) not in (Averaging, _Counting):
                self._noted[one] = (type(one), one.reducer, one.logger, one._has_rebuilt_buckets)

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(self, *_: Any) -> None:
        for model, (kind, reducer, logger, rebuilt) in self._noted.items():
            averaged = is_taken_over(model)
            if averaged:
                model.__dict__.pop("_gradients").remove()
            elif type(model) is _Counting:
                model._stop_counting()
            model.__class__ = kind
            if averaged and model.static_graph:  # its own reducer has counted on in what is its first iteration
                parameters, sparse = model._build_params_for_reducer()
                names = model._build_debug_param_to_name_mapping(parameters)
                model._ddp_init_helper(parameters, sparse, names, True)
                model.static_graph = False
                model._set_static_graph()
            elif averaged:
                model.reducer, model.logger, model._has_rebuilt_buckets = reducer, logger, rebuilt


class _Waiting(DistributedDataParallel):
    """One that is taken over by its next forward."""

    _why: str | None = None  # nothing is against it

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return _taken_over_now(self)(*inputs, **kwargs)


class _Found(DistributedDataParallel):
    """One that is taken over by its next forward inside a call."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inside = under_way.eager or current() is not None
        return (_taken_over_now(self) if inside else super().forward)(*inputs, **kwargs)


def _taken_over_now(model: DistributedDataParallel) -> Callable:
    """The forward of a model that was to be taken over."""
    model.__class__ = DistributedDataParallel
    take_over(model)
    return model.forward


class _Counting(DistributedDataParallel):
    """One with `static_graph=True`, until a backward has shown which parameters get a gradient, and how often. Its own
    reducer averages that."""

    _why = "static_graph=True, whose first step shows what gets gradients and is eager"
    _times: dict[str, int] | None = None
    _counts = False  # whether the backward of the last forward is to be averaged

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        for name in ("_why", "_times", "_hooks", "_counts"):
            state.pop(name, None)
        return state

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._counts = self.require_backward_grad_sync
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            if self._times is None:
                self._count()
            elif self._hooks and any(self._times.values()):
                with hidden():
                    self._decide()
        return (self if is_taken_over(self) else super()).forward(*inputs, **kwargs)

    def _count(self) -> None:
        def counted(name: str, _: Tensor) -> None:
            times[name] += self._counts

        trained = _trained(self)
        times = self._times = dict.fromkeys(trained, 0)
        self._hooks = [
            one.register_post_accumulate_grad_hook(functools.partial(counted, name)) for name, one in trained.items()
        ]

    def _stop_counting(self) -> None:
        for hook in self.__dict__.pop("_hooks", ()):
            hook.remove()
        self.__dict__.pop("_times", None)
        self.__dict__.pop("_counts", None)

    def _decide(self) -> None:
        """Lets a `Reducer` average what got gradients, which has to be the same on all ranks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        found: list[Any] = [None] * distributed.get_world_size(self.process_group)
        distributed.all_gather_object(found, self._times, group=self.process_group)
        if any(one != self._times for one in found):
            self._why = "static_graph=True and parameters that get gradients on some ranks only"
            return
        times = {name: count for name, count in (self._times or {}).items() if count}
        trained = _trained(self)
        del self._times, self._hooks, self._counts
        _replace_reducer(self, {name: trained[name] for name in times}, list(times.values()))


class Averaging(DistributedDataParallel):
    """A DistributedDataParallel whose gradients a `Reducer` averages. Its copies have not been taken over."""

    _why: str | None = None  # nothing is against it
    _gradients: Reducer

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        del state["_gradients"]
        return state

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        copied: DistributedDataParallel = self
        copied.__class__ = DistributedDataParallel

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        averages = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.will_sync_module_buffers():
            self._spread_buffers()
        if self.modules_buffers and self.require_forward_param_sync != averages:
            self.require_forward_param_sync = averages
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, named = to_device(inputs, kwargs, device, False)
            inputs, kwargs = moved[0], named[0]
        self._gradients.begin(averages)
        around = DistributedDataParallel._active_ddp_module
        try:
            with self._inside_ddp_forward():  # where torch.compile compiles a piece for each bucket, as without graphs
                return self.module(*inputs, **kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = around  # torch 2.11 forgets it

    @torch.no_grad()
    def _spread_buffers(self) -> None:
        """Gives all ranks the buffers of the first."""
        assert self.process_group is not None
        root = distributed.get_global_rank(self.process_group, 0)
        kinds: dict[tuple, list[Tensor]] = {}
        for name, buffer in self.module.named_buffers():
            if name not in self.parameters_to_ignore and buffer.numel():
                kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for buffers in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            distributed.broadcast(flat, root, group=self.process_group)
            parts = flat.split([buffer.numel() for buffer in buffers])
            values = [part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True)]
            # As DistributedDataParallel does it, unseen by the backward of an earlier forward.
            foreach_copy_([buffer.data for buffer in buffers], values)

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuses: ranks that ran out of inputs would have to follow the votes of the others.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "this model is captured by graphmod, whose ranks all make the same calls; enter join() before the first "
            "call of what graphmod wraps, and it runs eagerly"
        )

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refuses: the hook would be called by the reducer that was replaced.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "this model is captured by graphmod, which averages gradients itself; register communication hooks before "
            "the first call of what graphmod wraps, and it runs eagerly"
        )
