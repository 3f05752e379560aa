"""The modes of PyTorch that change what the same code computes, as one key, and how to be in them again (rule R3).

Owns also the answer to whether somebody else looks on (a transform, a tracer, a mode of the user's), for whom a replay
would not exist. `mode_key` runs in every call, so it asks PyTorch's C functions one after the other and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphmod import torch_private as private
from graphmod.errors import BackwardUnavailable
from graphmod.torch_private import (
    EVAL_FRAME,
    SETTERS,
    SETTINGS_OF_ANY_DEVICE,
    SETTINGS_OF_CPU,
    SETTINGS_OF_CUDA,
    DeviceContext,
)

FOREIGN, GRAD, INFERENCE, AUTOCAST, DTYPE, DEVICE, SETTINGS = range(7)
"""Where each part of a `mode_key` stands."""

_NAMES = ("what looks on", "gradients enabled", "inference mode", "autocast", "default dtype", "default device")
_PRECISIONS = ("float32 matmul precision", "float32 convolution precision", "float32 RNN precision")
_OPERATIONS = ("matmul", "conv", "rnn")
_LAST = ("order of attention backends", "torch.compiler stance", "denormal numbers or current GPU")

_DENORMAL = 5e-324  # times one it is zero where denormal numbers are flushed, for which there is no getter


def _backend(device_type: str) -> str:
    """Whose float32 precision matters on a device."""
    return "cuda" if device_type == "cuda" else "mkldnn"


@functools.cache
def key_reader(device_type: str) -> Callable[[], tuple]:
    """What tells the modes that the present call runs in, for code that works on `cuda` or on `cpu`: a hashable key.
    Where its part `FOREIGN` is no None, the call must be eager: it says why.

    It is written out as one expression, because loops and calls of Python functions cost more than all the C functions
    together.
    """
    on_gpu = device_type == "cuda"
    read = [*SETTINGS_OF_ANY_DEVICE.values(), *(SETTINGS_OF_CUDA if on_gpu else SETTINGS_OF_CPU).values()]
    names: dict[str, Any] = {f"read{index}": function for index, function in enumerate(read)}
    backend = _backend(device_type)
    parts = [f"{name}()" for name in names]
    parts += [f"fp32_precision({backend!r}, {operation!r})" for operation in _OPERATIONS]
    parts += ["tuple(attention_order() or ())", f"dynamo_stance() if {EVAL_FRAME!r} in modules else 'default'"]
    several = on_gpu and torch.cuda.device_count() > 1
    parts.append("current_device()" if several else "None" if on_gpu else "denormal * 1.0 != 0.0")
    settings = f"({', '.join(parts)})"
    names |= {"modules": sys.modules, "denormal": _DENORMAL, "default_dtype": torch.get_default_dtype}
    names |= {"who_looks_on": _who_looks_on, "default_device": _default_device, "autocast": _autocast}
    seen = (
        "function_modes() or dispatch_modes() or functorch_interpreter() is not None or forward_ad._current_level >= 0 "
        "or jit_tracing() is not None or is_anomaly_enabled() or top_saved_tensors_hooks(True) is not None"
    )
    key = (
        f"(who_looks_on() if {seen} else None, is_grad_enabled(), is_inference_mode_enabled(), "
        f"autocast({device_type!r}) if any_autocast() else None, default_dtype(), "
        f"default_device() if function_modes() else None, {settings})"
    )
    return eval(f"lambda: {key}", vars(private) | names)


def mode_key(device_type: str) -> tuple:
    """The key of the present call, see `key_reader`."""
    return key_reader(device_type)()


def _who_looks_on() -> str | None:
    if private.functorch_interpreter() is not None:
        return "it runs inside a transform of torch.func"
    if private.forward_ad._current_level >= 0:
        return "it runs inside a level of forward-mode differentiation"
    if private.jit_tracing() is not None:
        return "it is being traced"
    active = private.dispatch_modes()
    if active:
        return f"it runs inside the mode {type(private.dispatch_mode_at(active - 1)).__name__}"
    for index in range(private.function_modes()):
        mode = private.function_mode_at(index)
        if type(mode) is not DeviceContext:
            return f"it runs inside the mode {type(mode).__name__}"
    if private.is_anomaly_enabled() and torch.is_grad_enabled():
        return "anomaly detection is on, which looks at every operation"
    hooks = private.top_saved_tensors_hooks(True)
    if hooks is not None and torch.is_grad_enabled() and not _keep_values(hooks[0]):
        return "hooks for saved tensors are active, which may change what its backward reads"
    return None


def _keep_values(pack: Callable) -> bool:
    """Whether a hook for saved tensors is one of PyTorch's own (checkpoints, save_on_cpu), which give back the same
    values, or one that gives back what it was given."""
    module = getattr(pack, "__module__", None) or ""
    return module.startswith(("torch.utils.checkpoint", "torch.autograd.graph", "graphmod"))


def _default_device() -> torch.device | None:
    for index in reversed(range(private.function_modes())):
        mode = private.function_mode_at(index)
        if type(mode) is DeviceContext:
            return mode.device
    return None


def _autocast(device_type: str) -> tuple | None:
    """dtype, or None, of autocast on the device and on the CPU, and whether it keeps its casts."""
    enabled = tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in (device_type, "cpu")
    )
    return None if enabled == (None, None) else (*enabled, torch.is_autocast_cache_enabled())


@contextlib.contextmanager
def entered_again(modes: tuple, device_type: str) -> Iterator[None]:
    """The modes of an earlier call, for code that runs in its place: autocast, defaults, and the settings that can be
    put back.

    Raises:
        BackwardUnavailable: another setting is not as it was.
    """
    names, now = _setting_names(device_type), mode_key(device_type)[SETTINGS]
    differing = [(name, old, new) for name, old, new in zip(names, modes[SETTINGS], now, strict=True) if old != new]
    for name, _, _ in differing:
        if name not in _PRECISIONS and SETTERS.get(name) is None:
            raise BackwardUnavailable(
                f"{name} is not as it was in the forward that has to run again for this backward; change it between "
                "steps"
            )
    on_device, on_cpu, cached = modes[AUTOCAST] or (None, None, None)
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as entered:
        for name, old, new in differing:
            _set(name, old, device_type)
            entered.callback(_set, name, new, device_type)
        if default is not modes[DTYPE]:
            torch.set_default_dtype(modes[DTYPE])
            entered.callback(torch.set_default_dtype, default)
        if modes[DEVICE] is not None:
            entered.enter_context(modes[DEVICE])
        for kind, dtype in {"cpu": on_cpu, device_type: on_device}.items():
            entered.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=cached))
        yield


def _set(name: str, value: Any, device_type: str) -> None:
    """Sets what a getter of this name reads."""
    if name in _PRECISIONS:
        backend, operation = _backend(device_type), _OPERATIONS[_PRECISIONS.index(name)]
        inherited = value == private.fp32_precision(backend, "all")
        private.set_fp32_precision(backend, operation, "none" if inherited else value)
        return
    SETTERS[name](list(value) if isinstance(value, tuple) else value)


def _setting_names(device_type: str) -> list[str]:
    of_device = SETTINGS_OF_CUDA if device_type == "cuda" else SETTINGS_OF_CPU
    return [*SETTINGS_OF_ANY_DEVICE, *of_device, *_PRECISIONS, *_LAST]


def difference(known: tuple, got: tuple) -> list[str]:
    """One line for each mode in which two keys differ: `name: was X, is Y`."""
    pairs = list(zip(_NAMES, known[:SETTINGS], got[:SETTINGS], strict=True))
    if len(known[SETTINGS]) == len(got[SETTINGS]):  # else of different kinds of device
        kind = "cuda" if len(known[SETTINGS]) == len(SETTINGS_OF_ANY_DEVICE) + len(SETTINGS_OF_CUDA) + 6 else "cpu"
        names = _setting_names(kind)
        pairs += list(zip(names, known[SETTINGS], got[SETTINGS], strict=True))
    return [f"{name}: was {old}, is {new}" for name, old, new in pairs if old != new]


def changed_mode(known: tuple, got: tuple) -> str | None:
    """Why no replay stands for a call that leaves other modes than it found; None where they are the same."""
    found = difference(known, got)
    return f"changes a mode of PyTorch ({found[0]}), which no replay does; do it around the call" if found else None
