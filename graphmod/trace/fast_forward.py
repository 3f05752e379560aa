"""Goes through the Python of a call once more, up to an eager part that was made, and runs none of its operations: so
the rest of the call can run eagerly where its graph cannot go on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphmod.errors import CaptureRefused, Diverged
from graphmod.torch_private import storage_behind
from graphmod.trace.dispatch import hidden
from graphmod.trace.lines import lines
from graphmod.trace.operations import address, each_tensor, facts, tensors_in, written_tensors
from graphmod.trace.recorder import Follower, Operation, _do
from graphmod.trace.script import Script


class Gave:
    """A tensor that an operation of a capture gave.

    Attributes:
        place: which of the tensors it is that the operation was given; -1 of a new one.
        memory: over its memory, where that was still there at an eager part; else None.
    """

    __slots__ = ("_device", "_dtype", "_offset", "_size", "_storage", "_stride", "memory", "place")

    def __init__(self, tensor: Tensor, place: int) -> None:
        self.place = place
        self.memory: Tensor | None = None
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._offset, self._device = tensor.storage_offset(), tensor.device
        self._storage: StorageWeakRef | None = StorageWeakRef(tensor.untyped_storage()) if place < 0 else None

    def hold(self) -> None:
        """Holds the memory, if that is still there."""
        assert self._storage is not None, "it is new"
        storage = storage_behind(self._storage.cdata)
        if storage is not None:
            made = torch.empty(0, dtype=self._dtype, device=self._device)
            self.memory = made.set_(storage, self._offset, self._size, self._stride)
        self._storage = None

    def empty(self) -> Tensor:
        """The like of it, with whatever values."""
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._device)


class Trail:
    """What the operations of a capture gave. A tensor that is there at an eager part is held from then on."""

    def __init__(self) -> None:
        self.results: dict[int, Any] = {}  # by number of the operation, with a `Gave` in the place of each tensor
        self._loose: list[Gave] = []
        self.held: list[Tensor] = []  # over that

    def note(self, index: int, op: Any, args: tuple, kwargs: dict, result: Any, fresh: list[Tensor]) -> None:
        """Takes in an operation; see `Parts.after`."""
        if not (fresh or facts(op).writes) or any(tensor._is_zerotensor() for tensor in fresh):
            return
        if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in fresh):
            self.results[index] = None
            return
        places = {id(one): place for place, one in enumerate(tensors_in((*args, *kwargs.values())))}
        places |= dict.fromkeys(map(id, fresh), -1)

        def gave(tensor: Tensor) -> Gave | None:
            made = Gave(tensor, places[id(tensor)]) if id(tensor) in places else None
            if made is not None and made.place < 0:
                self._loose.append(made)
            return made

        self.results[index] = each_tensor(result, gave)

    def hold(self) -> None:
        """Holds what is there now."""
        with torch.inference_mode(False), torch.no_grad():
            for one in self._loose:
                one.hold()
        self.held += [one.memory for one in self._loose if one.memory is not None]
        self._loose = []


class FastForward(Follower):
    """Shows code what the operations of a captured call gave, until it arrives at an eager part.

    Args:
        inputs, gpu, script: see `Follower`.
        trail: of the capture.
        lend: gives a tensor with the values that one of the graph has.
        part: called in the place of each eager part, as `Parts.call`.

    Attributes:
        arrived: whether the rest of the call runs as if nobody looked on.
    """

    goes_through = True

    def __init__(
        self, inputs: list[Tensor], gpu: int | None, script: Script, trail: Trail, lend: Callable, part: Callable
    ) -> None:
        super().__init__(inputs, gpu=gpu, script=script)
        self._trail, self._lend, self._part = trail, lend, part
        self.arrived = False
        self._own: dict[int, StorageWeakRef] = {}  # what it has made itself, by address
        self._wrong: list[StorageWeakRef] = []  # of that, what has not the values that it has in an eager call

    def eager_part(self, function: Callable, args: tuple, kwargs: dict, frame: Any, name: str = "") -> Any:
        return self._part(function, args, kwargs)

    def arrive(self) -> None:
        """The rest of the call runs eagerly from here.

        Raises:
            CaptureRefused: it may use values that nobody has.
        """
        if self._refused is not None:
            raise CaptureRefused(self._refused)
        if not all(storage.expired() for storage in self._wrong):
            raise CaptureRefused("a value that the rest may use is gone")
        self.arrived = True
        self._undo.enter(hidden())

    def wrong(self, tensor: Tensor) -> Tensor:
        """Takes in a tensor whose values are not those of an eager call; returns it."""
        self._wrong.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def _note_read(self, tensor: Tensor, where: int) -> int | None:
        """What it reads is no matter, and not to be held."""

    def refuse(self, operation: str, reason: Any) -> None:
        """What a graph cannot repeat is no matter here."""

    def _note_own(self, tensor: Tensor) -> Tensor:
        self._own[address(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def _is_as_before(self, step: Any, about: Any) -> bool:
        return False

    def _run(self, one: Operation) -> Any:
        script, about = self.script, one.about
        assert script is not None, "it was given one"
        number, record = self.number_of(one.step.op), script.lifted if about.lifts else script.trace
        if one.index >= len(record) or record[one.index].op is not one.step.op:
            self.give_up(Diverged(f"{lines().location} does {about.short}, which the call before did not do there"))
        kept = script.kept.get(number)
        if kept is not None and kept.kind == "result":
            return each_tensor(kept.result(), self._note_own)
        if number not in self._trail.results:
            return _do(one.step.op, one.args, one.kwargs)  # a view, or a value on the host
        for tensor in written_tensors(about, one.args, one.kwargs):
            if address(tensor) in self._own:
                self._wrong.append(self._own[address(tensor)])
        return self._like(self._trail.results[number], one.given)

    def _like(self, result: Any, given: list[Tensor]) -> Any:
        if isinstance(result, (list, tuple)):
            return type(result)([self._like(one, given) for one in result])
        if not isinstance(result, Gave):
            return result
        if result.place >= 0:
            return given[result.place]
        return self.wrong(result.empty()) if result.memory is None else self._lend(result.memory)
