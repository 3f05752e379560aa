"""What identifies a call: the structure of its arguments, their tensors and the modes it runs in (rule R3).

Owns taking values apart into tensors and a hashable structure, putting them together again, and telling two
signatures apart in words. Imports only `errors`.
"""

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

PLAIN_KINDS = frozenset(
    {
        int,
        float,
        bool,
        str,
        bytes,
        complex,
        torch.dtype,
        torch.device,
        torch.Size,
        torch.layout,
        torch.memory_format,
        type(...),
    }
)


class Leaf:
    """Stands for the i-th tensor in a structure. One object per index, so that comparing is an identity test."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"tensor {self.index}"


_LEAVES = [Leaf(index) for index in range(64)]


def _leaf(index: int) -> Leaf:
    while len(_LEAVES) <= index:
        _LEAVES.append(Leaf(len(_LEAVES)))
    return _LEAVES[index]


class Opaque:
    """An object graphmod cannot look into: equal to itself only, and kept alive so that its identity stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def flatten(value: Any, leaves: list[Tensor], seen: dict[int, Leaf]) -> Any:
    """Appends the tensors inside `value` to `leaves` and returns its structure, hashable and comparable.

    A tensor that occurs twice is one leaf, because code may ask whether two arguments are the same object.
    Containers: tuple, named tuple, list, dict, OrderedDict, dataclass. Other values count by type and value where they
    are numbers, strings and the like, else by identity.
    """
    kind = value.__class__
    if value is None:
        return None
    if kind is Tensor or isinstance(value, Tensor):
        leaf = seen.get(id(value))
        if leaf is None:
            index = len(leaves)
            leaf = seen[id(value)] = _LEAVES[index] if index < 64 else _leaf(index)
            leaves.append(value)
        return leaf
    if kind in PLAIN_KINDS:
        return (kind, value) if value or kind is not float else (kind, value, repr(value))  # 0.0 is not -0.0
    if kind is slice:
        return (kind, (value.start, value.stop, value.step))
    if kind is tuple or kind is list or isinstance(value, (tuple, list)):
        return (kind, *[flatten(item, leaves, seen) for item in value])
    if kind is dict or kind is OrderedDict or (isinstance(value, dict) and dataclasses.is_dataclass(value)):
        return (kind, tuple(value), *[flatten(item, leaves, seen) for item in value.values()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        return (kind, names, *[flatten(getattr(value, name), leaves, seen) for name in names])
    return Opaque(value)


def rebuild(structure: Any, leaves: list) -> Any:
    """The inverse of `flatten`: a new value of this structure around `leaves`."""
    if structure is None:
        return None
    if structure.__class__ is Leaf:
        return leaves[structure.index]
    if structure.__class__ is Opaque:
        return structure.value
    kind = structure[0]
    if kind in PLAIN_KINDS:
        return structure[1]
    if kind is slice:
        return slice(*structure[1])
    if kind is tuple or kind is list:
        return kind([rebuild(item, leaves) for item in structure[1:]])
    if issubclass(kind, tuple):
        return kind(*[rebuild(item, leaves) for item in structure[1:]])
    if issubclass(kind, list):
        return kind([rebuild(item, leaves) for item in structure[1:]])
    items = {name: rebuild(item, leaves) for name, item in zip(structure[1], structure[2:], strict=True)}
    if kind is dict:
        return items
    if issubclass(kind, dict):
        return kind(**items) if dataclasses.is_dataclass(kind) else kind(items)
    made = object.__new__(kind)
    for name, item in items.items():
        object.__setattr__(made, name, item)
    return made


def _children(structure: Any) -> list[tuple[str, Any]] | None:
    """The `(how to get there, structure)` of the parts of a container, None for anything else."""
    if structure.__class__ is not tuple or structure[0] in PLAIN_KINDS or structure[0] is slice:
        return None
    if issubclass(structure[0], (tuple, list)):
        return [(f"[{index}]", item) for index, item in enumerate(structure[1:])]
    return [(f".{name}", item) for name, item in zip(structure[1], structure[2:], strict=True)]


def opaque_parts(structure: Any) -> Iterator[Any]:
    """The objects inside a structure that `flatten` could not look into."""
    if structure.__class__ is Opaque:
        yield structure.value
    for _, item in _children(structure) or ():
        yield from opaque_parts(item)


def tensor_key(tensor: Tensor) -> tuple:
    """Everything about a tensor argument that a capture freezes, its address and values apart."""
    if tensor.layout is not torch.strided:
        return (tensor.shape, tensor.layout, tensor.dtype, tensor.device, tensor.requires_grad)
    if tensor.is_neg() or tensor.is_conj():
        lazy = (tensor.is_neg(), tensor.is_conj())
        return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, lazy)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def mode_key(device_type: str) -> tuple:
    """The modes of PyTorch that change what the same code does: gradients, inference, autocast, determinism, TF32."""
    return (
        _is_grad_enabled(),
        _is_inference_mode_enabled(),
        torch.get_autocast_dtype(device_type) if _any_autocast() and torch.is_autocast_enabled(device_type) else None,
        _deterministic(),
        _matmul_precision(),
        _default_dtype(),
    )


_is_grad_enabled, _is_inference_mode_enabled = torch.is_grad_enabled, torch.is_inference_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms
_matmul_precision = torch._C._get_float32_matmul_precision
_default_dtype = torch.get_default_dtype
AUTOCAST = 2  # its index in `mode_key`
_MODE_NAMES = (
    "gradients enabled",
    "inference mode",
    "autocast",
    "deterministic algorithms",
    "float32 matmul precision",
    "default dtype",
)


class Signature(NamedTuple):
    """The key of a call.

    Attributes:
        structure: that of `(args, kwargs)`.
        tensors: per tensor argument, `tensor_key`.
        modes: `mode_key`.
        training: train/eval mode of a wrapped module as a whole; None for other callables.
    """

    structure: Any
    tensors: tuple
    modes: tuple
    training: bool | None


def _paths(structure: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = _children(structure)
    if children is None:
        yield path.removeprefix("."), structure
    for step, item in children or ():
        yield from _paths(item, path + step)


def parameter_names(function: Callable) -> list[str]:
    """The names of a callable's positional parameters, [] where it does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def argument_paths(structure: Any, names: list[str]) -> dict[str, Any]:
    """Maps the path of each argument part (`hidden_states`, `position_embeddings[0]`) to its structure."""
    args, kwargs = structure[1], structure[2]
    found = {}
    for index, item in enumerate(args[1:]):
        name = names[index] if index < len(names) else f"argument {index}"
        found.update(_paths(item, name))
    found.update(_paths(kwargs, ""))
    return found


def _text(part: Any, tensors: tuple) -> str:
    if part.__class__ is Leaf:
        shape, _, dtype, device, grad = tensors[part.index][:5]
        return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}" + (", requires grad" if grad else "")
    if part.__class__ is Opaque:
        return f"a {type(part.value).__name__} (by identity)"
    return repr(part[1]) if part.__class__ is tuple else repr(part)


def difference(known: Signature, got: Signature, names: list[str]) -> list[str]:
    """One line for each argument or mode in which two signatures differ: `path: captured X, got Y`."""
    lines = []
    before, after = argument_paths(known.structure, names), argument_paths(got.structure, names)
    for path in before | after:
        old = _text(before[path], known.tensors) if path in before else "nothing"
        new = _text(after[path], got.tensors) if path in after else "nothing"
        if path in before and path in after:
            old_leaf, new_leaf = before[path], after[path]
            if old_leaf.__class__ is Leaf and new_leaf.__class__ is Leaf and old == new:
                old_key, new_key = known.tensors[old_leaf.index], got.tensors[new_leaf.index]
                if old_key != new_key:
                    old, new = f"strides {old_key[1]}", f"strides {new_key[1]}"
            elif old_leaf != new_leaf and old == new:
                new = f"another {type(getattr(new_leaf, 'value', new_leaf)).__name__}"
        if old != new:
            lines.append(f"{path}: captured {old}, got {new}")
    for name, old, new in zip(_MODE_NAMES, known.modes, got.modes, strict=True):
        if old != new:
            lines.append(f"{name}: captured {old}, got {new}")
    if known.training != got.training:
        lines.append("train/eval mode of the module")
    return lines
