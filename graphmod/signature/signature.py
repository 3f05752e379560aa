"""What identifies a call: the structure of its arguments, their tensors and the modes it runs in (rule R3).

Owns the key of one tensor, and telling two signatures apart in words.
"""

import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphmod.signature import modes as modes_of
from graphmod.signature.flattening import (
    PLAIN_KINDS,
    Constant,
    Keys,
    Leaf,
    Opaque,
    children,
    flatten,
    opaque_parts,
    unrepeatable,
)
from graphmod.torch_private import alike
from graphmod.trace.operations import is_leaf

PLAIN_TENSORS = (Tensor, nn.Parameter)
STATIC = "_graphmod_static"
"""The attribute of tensors that `mark_static` was told of."""
_HAS_NAMES = hasattr(Tensor, "has_names")  # later releases have no named dimensions any more
PLAIN_KEY = 6
"""How many parts the key of a tensor has about which nothing is unusual."""


# What dynamo notes on the tensors of a call, under one name or the other depending on the release, and the range of a
# `mark_dynamic`, which is no plain value and makes it compile anew at the most.
_NO_MATTER = (STATIC, "_dynamo_propagated_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_dynamic_range")


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that Python code has set on a tensor, torch.compile's notes to itself apart."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _NO_MATTER}


def _names_of(tensor: Any) -> tuple | None:
    """The names of a tensor's dimensions, which its stub has not; None where it has none."""
    return tensor.names if _HAS_NAMES and tensor.has_names() else None


def has_own_gradient(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf with a `.grad`, which code may read."""
    return tensor.requires_grad and is_leaf(tensor) and tensor.grad is not None


def unusual(tensor: Tensor) -> str | None:
    """Why no graph can be given a copy of this tensor in its place, in words to follow "is"; None if one can."""
    if type(tensor) not in PLAIN_TENSORS:
        return f"a {type(tensor).__name__}"
    for name, kind in (("is_nested", "nested"), ("is_quantized", "quantized"), ("is_meta", "without memory")):
        if getattr(tensor, name):
            return f"a {kind} tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor._is_zerotensor():
        return "a tensor without memory"
    if tensor.is_conj() or tensor.is_neg():
        return "a lazy conjugate or negation, which its copy would not be (.resolve_conj(), .resolve_neg())"
    if _names_of(tensor) is not None:
        return "a tensor with named dimensions"
    own = attributes_of(tensor)
    if own:
        leaves: list[Tensor] = []
        structure = flatten(own, leaves, {})
        if leaves or unrepeatable(structure) or any(True for _ in opaque_parts(structure)):
            return f"a tensor with the attribute {next(iter(own))!r}, which holds more than a plain value"
    return None


def tensor_key(tensor: Tensor) -> tuple:
    """Everything about a tensor argument that a capture freezes, its address and values apart."""
    kind = tensor.__class__
    if kind not in PLAIN_TENSORS or tensor.is_nested or tensor.layout is not torch.strided:
        shape = None if tensor.is_nested else tensor.shape
        return (shape, tensor.layout, tensor.dtype, tensor.device, tensor.requires_grad, kind, "no plain tensor")
    key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, kind)
    if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
        key += (("lazy", tensor.is_neg(), tensor.is_conj(), tensor._is_zerotensor()),)
    if (names := _names_of(tensor)) is not None:
        key += (names,)
    if tensor.__dict__ and (own := attributes_of(tensor)):
        # Those with tensors or objects in them count as themselves; such a tensor is never captured.
        own_leaves: list[Tensor] = []
        key += ((flatten(own, own_leaves, {}), tuple(map(id, own_leaves))),)
    if has_own_gradient(tensor):
        key += ("has a gradient",)
    return key


class Signature(NamedTuple):
    """The key of a call.

    Attributes:
        structure: that of `(args, kwargs)`.
        tensors: per tensor argument, `tensor_key`.
        modes: `modes.mode_key`.
        training: train/eval mode of a wrapped module as a whole; None for other callables.
        function: what is called, where that is not the wrapped callable alone; else None.
    """

    structure: Any
    tensors: tuple
    modes: tuple
    training: bool | None
    function: Any = None


_form = operator.attrgetter("__class__", "layout", "is_nested", "__dict__")


class Matcher:
    """Tells whether calls have the arguments of a signature, without building theirs.

    To take arguments apart costs more than all else about a replay of one layer, and most calls have the signature of
    the call before. So the places of a signature's structure are listed once, and the values there are compared.
    """

    def __init__(self, signature: Signature) -> None:
        self._known = signature.tensors
        self._with_grad = [index for index, key in enumerate(self._known) if key[4]]
        self._forms: list[tuple] = []  # of tensors that were found to be as in the signature
        self._alike: Callable[..., bool] | None = None
        self._containers: list[tuple] = []
        self._constants: list[tuple] = []
        self._objects: list[tuple] = []
        first: dict[int, int] = {}
        self._again: list[tuple] = []
        self._mutable: list[int] = []
        self._tells = all(len(key) == PLAIN_KEY for key in self._known)
        parts = list(signature.structure[1:])
        for place, part in enumerate(parts):
            kind = part.__class__
            if part is None:
                self._constants.append((place, None, None))
            elif kind is Leaf:
                if first.setdefault(part.index, place) != place:
                    self._again.append((place, part.index))
            elif kind is Opaque or kind is Constant:
                self._objects.append((place, part))
            elif kind is tuple and part[0] in PLAIN_KINDS:
                self._constants.append((place, part[1], part))
            elif kind is tuple and _is_walked(part):
                keys = part[1] if part[0] in (dict, OrderedDict) else None
                inside = part[1:] if keys is None else part[2:]
                self._containers.append((place, part[0], keys, len(inside)))
                self._mutable += [place] if part[0] is not tuple else []
                parts += inside
            else:
                self._tells = False
        self._leaves = [first[index] for index in sorted(first)]

    def match(self, args: tuple, kwargs: dict) -> list[Tensor] | None:
        """The tensors of a call, in the order of `flatten`, if its arguments have this signature's structure and
        tensors; None if they have not, or where only `flatten` can tell."""
        if not self._tells:
            return None
        values: list[Any] = [args, kwargs]
        for place, kind, keys, count in self._containers:
            value = values[place]
            if value.__class__ is not kind or len(value) != count:
                return None
            if keys is None:
                values += value
            elif tuple(value) == keys:
                values += value.values()
            else:
                return None
        for place, known, part in self._constants:
            if values[place] is not known and flatten(values[place], [], {}) != part:
                return None
        for place, part in self._objects:
            if values[place] is not part.value:
                return None
        tensors = [values[place] for place in self._leaves]
        for place, index in self._again:
            if values[place] is not tensors[index]:
                return None
        # Two leaves are never one tensor, nor are two containers one; the first is `kwargs`, a new one in each call.
        if len({*map(id, tensors)}) < len(tensors):
            return None
        if len(self._mutable) > 2 and len({id(values[place]) for place in self._mutable}) < len(self._mutable):
            return None
        return tensors if self._have_keys(tensors) else None

    def _have_keys(self, tensors: list[Any]) -> bool:
        """Whether values are tensors with the keys of the signature."""
        try:
            forms = list(map(_form, tensors))
        except AttributeError:
            return False  # one is no tensor
        # What has no strides ends the process in the guards of PyTorch: it has another form.
        if self._alike is None or forms != self._forms or not self._alike(*tensors):
            if tuple(map(tensor_key, tensors)) != self._known:
                return False
            self._forms = [(*form[:3], dict(form[3])) for form in forms]
            self._alike = alike(tensors)
        return not any(has_own_gradient(tensors[index]) for index in self._with_grad)


def _is_walked(structure: tuple) -> bool:
    """Whether a container is one whose parts are reached in its plain way."""
    kind = structure[0]
    if len(structure) > 1 and structure[1].__class__ is Keys:
        return False
    plain = issubclass(kind, tuple) and kind.__iter__ is tuple.__iter__ and not kind.__dictoffset__
    return plain or kind in (list, dict, OrderedDict)


def _paths(structure: Any, path: str) -> Iterator[tuple[str, Any]]:
    inside = children(structure)
    if inside is None:
        yield path.removeprefix("."), structure
    for step, item in inside or ():
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
        found.update(_paths(item, argument_names(args[1:], names)[index]))
    found.update(_paths(kwargs, ""))
    return found


def path_of(part: Any, structure: Any, names: list[str]) -> str:
    """The path of an argument part, which is that object in the structure of the arguments."""
    return next((path for path, one in argument_paths(structure, names).items() if one is part), "")


def argument_names(args: tuple, names: list[str]) -> list[str]:
    """How messages name positional arguments."""
    return [names[index] if index < len(names) else f"argument {index}" for index in range(len(args))]


def _text(part: Any, tensors: tuple) -> str:
    if part.__class__ is Leaf:
        shape, _, dtype, device, grad = tensors[part.index][:5]
        text = f"{tuple(shape or ())} {str(dtype).removeprefix('torch.')} on {device}"
        return text + (", requires grad" if grad else "")
    if isinstance(part, Opaque):
        return f"a {type(part.value).__name__} (by identity)"
    return repr(part[1]) if part.__class__ is tuple else repr(part)


def _more(key: tuple) -> str:
    return " ".join([f"a {key[PLAIN_KEY - 1].__name__}", *map(str, key[PLAIN_KEY:])])


def difference(known: Signature, got: Signature, names: list[str]) -> list[str]:
    """One line for each argument or mode in which two signatures differ: `path: was X, is Y`."""
    lines = []
    before, after = argument_paths(known.structure, names), argument_paths(got.structure, names)
    for path in before | after:
        old = _text(before[path], known.tensors) if path in before else "nothing"
        new = _text(after[path], got.tensors) if path in after else "nothing"
        if path in before and path in after:
            old_leaf, new_leaf = before[path], after[path]
            if old_leaf.__class__ is Leaf and new_leaf.__class__ is Leaf and old == new:
                old_key, new_key = known.tensors[old_leaf.index], got.tensors[new_leaf.index]
                if old_key[1] != new_key[1]:
                    old, new = f"strides {old_key[1]}", f"strides {new_key[1]}"
                elif old_key != new_key:
                    old, new = (_more(key) for key in (old_key, new_key))
            elif old_leaf != new_leaf and old == new:
                new = f"another {type(getattr(new_leaf, 'value', new_leaf)).__name__}"
        if old != new:
            lines.append(f"{path}: was {old}, is {new}")
    lines += modes_of.difference(known.modes, got.modes)
    if known.training != got.training:
        lines.append("train/eval mode of the module")
    return lines


def remedy(known: Signature, got: Signature) -> str:
    """What helps where calls take turns that differ like these two; "" where nothing is known."""
    before, after = argument_paths(known.structure, []), argument_paths(got.structure, [])
    pairs = [(before[path], after[path]) for path in before if path in after]
    leaves = [(one.index, other.index) for one, other in pairs if one.__class__ is other.__class__ is Leaf]
    found = []
    if any(known.tensors[one][0] != got.tensors[other][0] for one, other in leaves):
        found.append("pad to a few lengths")
    if any(one != other and _is_number(one) and _is_number(other) for one, other in pairs):
        found.append("pass a number that changes as a tensor")
    if any(one != other and one.__class__ is other.__class__ is Opaque for one, other in pairs):
        found.append("pass the same object, or tensors")
    return "; ".join(found)


def _is_number(part: Any) -> bool:
    return part.__class__ is tuple and part[0] in (int, float)
