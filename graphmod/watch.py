"""The address watch (rule R8): is everything a graph reads by address still where it was, and still the same?

Owns holding the tensors that a graph reads without being given them, and a check that costs about 0.1 us a tensor.
May import `trace`, `places` and `reach`.
"""

import operator
import types
from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor, nn

from graphmod.places import PLAIN, SIZED, dict_of, get
from graphmod.reach import Reach, plain_sequence
from graphmod.trace import address

_data_ptr = Tensor.data_ptr
_requires_grad = operator.attrgetter("requires_grad")
_grad = operator.attrgetter("grad")


class _Attributes(NamedTuple):
    """Which attributes an object had."""

    kind: str
    names: frozenset[str]

    def difference(self, now: Collection[str]) -> str:
        come, gone = set(now) - self.names, self.names - set(now)
        said = [
            f"{did} {', '.join(sorted(map(repr, which)))}" for did, which in (("got", come), ("lost", gone)) if which
        ]
        return f"a {self.kind} {' and '.join(said)} since it was captured"


class Watch:
    """Compares the present with the moment of a capture.

    Args:
        found: what the captured callable reaches: its tensors, the objects that lead to them, the numbers it names.
        outside: address -> tensor, what the capture read without being given it; held from now on.
        parameters: leaf tensors whose `.grad` the capture may have read or set.
        grads: their gradients before the capture.
        backward: whether a backward pass ran inside the capture.

    Attributes:
        unseen: the addresses of `outside` to which no place leads, so that what takes their place goes unnoticed.
    """

    def __init__(
        self,
        found: Reach,
        outside: dict[int, Tensor],
        parameters: list[Tensor],
        grads: list[Tensor | None],
        backward: bool,
    ) -> None:
        self.held = list(outside.values())
        found_at = {address(tensor) for _, _, tensor in found.slots}
        found_at.update(address(grad) for grad in grads if grad is not None)
        self.unseen = [where for where in outside if where not in found_at]
        slots = [slot for slot in found.slots if address(slot[2]) in outside]
        named = {id(tensor) for container, _, tensor in slots if not isinstance(container, list)}
        slots = [s for s in slots if not (isinstance(s[0], list) and id(s[2]) in named)]
        places = slots + found.links
        cells = [place[0] for place in places + found.numbers if isinstance(place[0], types.CellType)]
        self._cells = [(cell, None, get(cell, None)) for cell in cells]
        places = [place for place in places if not isinstance(place[0], types.CellType)]
        numbers = [place for place in found.numbers if not isinstance(place[0], types.CellType)]
        self._items = [item for _, _, item in places] + [get(container, key) for container, key, _ in numbers]
        self._containers = [container for container, _, _ in places + numbers]
        self._keys = [key for _, key, _ in places + numbers]
        self._parameters = [t for _, _, t in slots if isinstance(t, nn.Parameter) or t.requires_grad]
        self._flags = list(map(_requires_grad, self._parameters))
        # The state of an optimizer is many tensors, whose memory is held, and which nobody resizes.
        states = {id(state) for optimizer in found.optimizers for state in optimizer.state.values()}
        self._first = [tensor for container, _, tensor in slots if id(container) not in states]
        self._first_addresses = list(map(_data_ptr, self._first))
        self._state = [tensor for container, _, tensor in slots if id(container) in states]
        self._state_addresses = list(map(_data_ptr, self._state))
        counted = [(key, item) for _, key, item in found.links if isinstance(item, SIZED) and id(item) not in states]
        for module in found.modules:
            if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                counted.append((type(module).__name__, module._modules))
        for one in found.objects:
            held = dict_of(one)
            counted.append((_Attributes(type(one).__name__, frozenset(held)), held))
        self._sized_keys, self._sized = [key for key, _ in counted], [item for _, item in counted]
        self._lengths = list(map(len, self._sized))
        self._watch_grads(parameters, grads, outside, backward)

    def also(self, found: Reach, outside: dict[int, Tensor]) -> None:
        """Holds and watches more tensors, which the backward of what it watches reads."""
        self.held += outside.values()
        known = set(zip(map(id, self._containers), self._keys, strict=True))
        slots = [s for s in found.slots if address(s[2]) in outside and (id(s[0]), s[1]) not in known]
        self._cells += [slot for slot in slots if isinstance(slot[0], types.CellType)]
        self._first += [tensor for _, _, tensor in slots]
        self._first_addresses = list(map(_data_ptr, self._first))
        slots = [slot for slot in slots if not isinstance(slot[0], types.CellType)]
        self._containers += [container for container, _, _ in slots]
        self._keys += [key for _, key, _ in slots]
        self._items += [tensor for _, _, tensor in slots]

    def _watch_grads(
        self, parameters: list[Tensor], grads: list[Tensor | None], outside: dict[int, Tensor], backward: bool
    ) -> None:
        """A gradient that was read must be the same. One that was absent must be absent again if a backward ran, and
        one that was there but never read had been cleared inside, and may be anything."""
        watched = [
            (p, g) for p, g in zip(parameters, grads, strict=True) if (backward if g is None else address(g) in outside)
        ]
        self._with_grads = [p for p, _ in watched]
        self._grads = [g for _, g in watched]
        self._grad_addresses = [0 if g is None else g.data_ptr() for g in self._grads]

    def gone(self) -> str | None:
        """A tensor that has moved, in words: the part of `moved` that has to be known before a launch. What was read is
        held, but a storage can be emptied (`resize_(0)`) or moved, and its memory given back, all the same."""
        if list(map(_data_ptr, self._first)) != self._first_addresses:
            return "a tensor it reads has moved to another address"
        return None

    def moved(self) -> str | None:
        """What is no longer as it was, in words; None when nothing changed."""
        return self.gone() or self.changed()

    def changed(self) -> str | None:
        """What `gone` does not look at."""
        try:
            same = all(map(operator.is_, map(operator.getitem, self._containers, self._keys), self._items))
        except Exception:  # KeyError and IndexError, or whatever a container of the user's raises
            return "a tensor or setting it reads is no longer where it was"
        if not same:
            reason = self._exchanged()
            if reason is not None:
                return reason
        if list(map(len, self._sized)) != self._lengths:
            for key, item, length in zip(self._sized_keys, self._sized, self._lengths, strict=True):
                if len(item) != length and isinstance(key, _Attributes):
                    return key.difference(item)
                if len(item) != length:
                    return f"{'a variable' if key is None else repr(key)} had {length} items when it was captured"
        if self._state and list(map(_data_ptr, self._state)) != self._state_addresses:
            return "a tensor it reads has moved to another address"
        if list(map(_requires_grad, self._parameters)) != self._flags:
            return "requires_grad of a parameter changed"
        for cell, _, item in self._cells:
            now = get(cell, None)
            if now is not item and not (isinstance(item, PLAIN) and type(now) is type(item) and now == item):
                return "a variable it closes over is another than when it was captured"
        return self._moved_grads() if self._with_grads else None

    def _exchanged(self) -> str | None:
        """What is another object than at the capture, in words, unless all of that are plain values, and the same."""
        for index, (container, key, item) in enumerate(zip(self._containers, self._keys, self._items, strict=True)):
            now = get(container, key)
            if now is item:
                continue
            if not isinstance(item, PLAIN) and not plain_sequence(item):
                return f"{key!r} is another {type(item).__name__} than when it was captured"
            if type(now) is not type(item) or repr(now) != repr(item):  # 0.0 is not -0.0, and NaN is NaN
                return f"{key!r} was {item!r} when it was captured and is {now!r}"
            self._items[index] = now
        return None

    def _moved_grads(self) -> str | None:
        now = list(map(_grad, self._with_grads))
        if all(map(operator.is_, now, self._grads)):
            return None
        if [0 if g is None else g.data_ptr() for g in now] != self._grad_addresses:
            return "the gradients it accumulates into or reads are others than when it was captured"
        return None
