"""Random numbers that a call draws on the host, and what its code made of them.

Layer drop is the common case: `if torch.rand([]) < self.layerdrop: continue`. No graph holds such a draw. But where
the numbers do nothing but choose a branch, a graph of that branch stands for each call whose numbers choose it too. So
the draws of a recorded call are kept, with the operations between them and what Python reads. Before a replay they are
made again, from where the generators are now and in eager's order, and what came of them is compared.

Whether what was kept is all that was drawn is asked of the generators: from where they were before the recorded call,
the draws made again must lead to the same answers, and to where they are after it.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.trace.hazards import Hazard
from graphmod.trace.operations import Facts, address
from graphmod.trace.origins import DATA, Origins
from graphmod.trace.tensors import each_tensor, tensors_in
from graphmod.trace.undo import Undo, let_through, undoing

# How much these draw depends on shapes alone. (`poisson`, `binomial` and gamma draw until a value is accepted.)
_BY_SHAPE = {
    *("bernoulli", "bernoulli_", "native_dropout", "uniform_", "normal_", "normal", "rand", "rand_like", "randn"),
    *("randn_like", "randint", "randint_like", "randperm", "random_", "exponential_", "geometric_", "cauchy_"),
    *("log_normal_", "multinomial"),
}
# Methods of generators in Python that give something, and change nothing but the generator.
_DRAW = {
    *("random", "uniform", "randint", "randrange", "getrandbits", "choice", "choices", "sample", "triangular", "gauss"),
    *("normalvariate", "betavariate", "expovariate", "gammavariate", "lognormvariate", "paretovariate", "binomial"),
    *("rand", "randn", "random_sample", "integers", "normal", "standard_normal", "exponential", "beta", "poisson"),
}
_CHOOSE = {"choice", "choices", "sample"}  # of what they are given
_FEW = 16  # which are looked at sooner than their container's age
_PLAIN = (int, str, bytes, bool, type(None))
# What a method may be given: going through it twice runs no code of the user's, and uses nothing up.
_GIVEN = {*_PLAIN, float, range, list, tuple, torch.nn.ModuleList, torch.nn.Sequential}
_COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne
}  # fmt: skip


class _Part(NamedTuple):
    """A tensor: which of the memories, and how it looks at it. Where there is none, only the shape counts."""

    memory: int | None
    size: torch.Size
    stride: tuple
    offset: int
    dtype: torch.dtype

    def of(self, memories: list[Tensor | None]) -> Tensor:
        held = None if self.memory is None else memories[self.memory]
        if held is None:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu").fill_(1)
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(
            held.untyped_storage(), self.offset, self.size, self.stride
        )


class Drawn(NamedTuple):
    """One of the numbers that were drawn."""

    index: int


class HostDraws:
    """What one recorded call drew on the host.

    Args:
        on_gpu: whether the call works on a GPU. Else a replay draws from torch's generators itself.

    Attributes:
        floats: number that code has in its hands -> which it is.
        expected: the tensor that code is about to read as the number it is.
        drawn_at: where code first called a method of a generator in Python (by identity).
        at: address -> which of the memories lies there that its operations work on.
        followed: whether all that was drawn is known, once `finish` has looked.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.floats: dict[float, int] = {}
        self.expected: Tensor | None = None
        self._as_it_is = True  # whether the number to come is what code gets
        self.drawn_at: dict[int, tuple] = {}
        self.followed = False
        self.reads: set[int] = set()  # the indices of operations by which code read a number
        self._steps: list[Callable[[list, list], None]] = []
        self._memories: list[Tensor | None] = []  # what lies in them to begin with
        self.at: dict[int, int] = {}  # address -> which memory
        self._numbers: list[Any] = []
        self._compared: list[tuple[Callable, Any, Any, bool]] = []
        self._exact: list[int] = []
        self._places: list[str] = []  # where code draws or reads the numbers
        self._last = 0  # how many steps there are up to the last number
        self._before: list[tuple[Any, Any]] = []  # generators, and where they were
        self._after: list[Any] = []  # where a replay leaves them
        self._hazards: list[Hazard] = []
        self._known = True
        self._stand_ins: dict[int, Any] = {}  # by identity of the generator, which `_before` holds
        self._draws: list[Callable[[], Any]] = []  # those from generators in Python

    # -- the recorded call -------------------------------------------------------------------------------------------

    def begin(self, generator: Any) -> None:
        """Takes in a generator before the call draws from it."""
        if all(generator is not known for known, _ in self._before):
            self._before.append((generator, _state(generator)))

    def before(self, op: Any, about: Facts, args: tuple, kwargs: dict, random: bool, origins: Origins) -> Any:
        """Takes in an operation before it runs; returns what `done` is to be given: None for what is not to be kept."""
        given = list(tensors_in((*args, *kwargs.values())))
        if about.views or not (random or any(address(tensor) in self.at for tensor in given)):
            return None
        device = kwargs.get("device")
        if self._on_gpu and (any(t.is_cuda for t in given) or (device and torch.device(device).type != "cpu")):
            return None
        of = [origins.of(address(tensor), tensor) for tensor in given]
        if not random and max(of) == DATA:
            return None
        name = about.name.removeprefix("aten::")
        if not isinstance(op, torch._ops.OpOverload) or (DATA in of and name not in _BY_SHAPE):
            self._known = False
            return None
        if random:
            generator = kwargs.get("generator")
            self.begin(torch.default_generator if generator is None else _same_of(self._before, generator))
        keep = partial(each_tensor, change=partial(self._part, origins=origins))
        return op._op, tuple(map(keep, args)), {key: keep(value) for key, value in kwargs.items()}

    def done(self, kept: Any, result: Any, fresh: list[Tensor]) -> None:
        """Takes in what an operation made, of which `fresh` lies in memory that may have been another tensor's."""
        if self.at:
            for tensor in fresh:
                self.at.pop(address(tensor), None)
        if kept is None:
            return
        made = []
        given = {part.memory for part in _parts(kept)}
        for index, tensor in enumerate(tensors_in((result,))):
            where = address(tensor)
            if where and self.at.get(where, -1) not in given:
                self.at[where] = len(self._memories)
                self._memories.append(None)
                made.append((index, self.at[where]))
        self._steps.append(partial(_operate, *kept, made))

    def _part(self, tensor: Tensor, origins: Origins) -> _Part:
        where = address(tensor)
        if tensor.is_conj() or tensor.is_neg():
            self._known = False
        memory = self.at.get(where)
        if memory is None and where and origins.of(where, tensor) != DATA:
            memory = self.at[where] = len(self._memories)
            self._memories.append(
                torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).clone()
            )
        return _Part(memory, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def read(self, tensor: Tensor, index: int, hazard: Hazard) -> bool:
        """Takes in that code is about to read a number; whether that can be done again.

        Args:
            index: of the operation that reads.
            hazard: what it is where the number turns out to do more than choose a branch.
        """
        self._as_it_is, self.expected = self.expected is tensor, None
        if address(tensor) not in self.at or tensor.numel() != 1:
            return False
        part = _Part(self.at[address(tensor)], tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        self._steps.append(partial(_read, part))
        self._hazards.append(hazard)
        self._places.append(hazard.lines.place)
        self.reads.add(index)
        return True

    def draw(self, function: Callable, given: list, where: tuple) -> None:
        """Takes in that code at `where` is about to call a method of a generator, of which it was told."""
        generator = function.__self__
        self.drawn_at.setdefault(id(generator), where)
        if function.__name__ not in _DRAW or not all(type(one) in _GIVEN or _is_array(one) for one in given):
            self._known = False
            return
        given = [list(one) if type(one) is list else one for one in given]
        try:
            draw = partial(getattr(self._stand_in(generator), function.__name__), *given)
            _put_back(draw.func.__self__, _state(generator))
            value = _drawn(function, draw())
        except Exception as error:  # as the call's own will raise it
            let_through(error)
            self._known = False
            return
        self._steps.append(partial(_draw, draw))
        self._draws.append(partial(function, *given))
        self._as_it_is = True
        self._places.append(f"{where[0].co_filename}:{where[1]} in {where[0].co_name}")
        self.got(value, function.__name__ in _CHOOSE)

    def got(self, value: Any, chosen: bool = False) -> None:
        """Takes in the number that the last of what was taken in gives.

        Args:
            chosen: whether it is one of a few, so that it may as well be the same again.
        """
        self._last = len(self._steps)
        if isinstance(value, float) and not (chosen or value.is_integer()):
            self._known = self._known and self._as_it_is  # `int(tensor)` reads the same, and makes something else of it
            known = self.floats.setdefault(value, len(self._numbers))
            if known != len(self._numbers):  # nobody can tell which of the two code has in its hands
                self._exact += [known, len(self._numbers)]
        elif chosen or isinstance(value, float) or _is_exact(value):
            self._exact.append(len(self._numbers))
        else:
            self._known = False
        self._numbers.append(value)

    def is_drawn(self, value: Any, is_old: Callable[[Any], bool] | None = None) -> bool:
        """Whether a value is, or holds, one of the numbers.

        Args:
            is_old: tells a container that was there before. What puts a number there is an instruction that is seen.
        """
        if isinstance(value, float):
            return value in self.floats
        if not isinstance(value, (list, tuple, set, frozenset, dict)):
            return False
        if is_old is not None and len(value) > _FEW and is_old(value):
            return False
        return any(self.is_drawn(one, is_old) for one in (value.values() if isinstance(value, dict) else value))

    def compared(self, how: str, left: Any, right: Any) -> None:
        """Takes in that code compares two values, of which one was drawn. Where both look like it, each may be a
        constant that happens to be the same: `random.choice((0.25, 0.5)) == 0.5`."""
        if not (_is_number(left) and _is_number(right)):
            self.escaped()
            return
        compare = _COMPARE[how]
        for one, other in itertools.product(self._may_be(left), self._may_be(right)):
            if type(one) is Drawn or type(other) is Drawn:
                self._compared.append((compare, one, other, compare(left, right)))

    def _may_be(self, value: float) -> tuple:
        drawn = self.floats.get(value) if isinstance(value, float) else None
        return (value,) if drawn is None else (value, Drawn(drawn))

    def escaped(self) -> None:
        """Takes in that a number does something else than to be compared."""
        self._known = False

    def finish(self, result: Any) -> list[Hazard]:
        """Ends the recording. Returns what a graph cannot repeat: where the draws made again are not those of the call,
        what was read of them.

        Args:
            result: what the call returned.
        """
        self.at = {}
        if not self._steps or not (self._numbers or self._on_gpu):
            self._steps, self._memories, self._before = [], [], []
            return []
        if self.floats and self.is_drawn(result):
            self.escaped()
        after = self.states()
        try:
            numbers, ended = self._run(self._steps, self._before)
            holds = all(map(_same, self._numbers, numbers)) and self._differs(numbers) is None
            same = all(_equal(state, found) for (_, state), (_, found) in zip(after, ended, strict=True))
            self.followed = self._known and holds and same
        except Exception as error:
            let_through(error)
            self.followed = False
        if not self.followed:
            self._steps, self._draws, self._before, self.reads = [], [], [], set()
            return self._hazards
        if not self._on_gpu:
            self._steps = self._steps[: self._last]
        moved = zip(self._before, after, strict=True)
        self._before = [(generator, None) for (generator, was), (_, now) in moved if not _equal(was, now)]
        self._hazards = []
        return []

    # -- replays -----------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._steps)

    def states(self) -> list[tuple[Any, Any]]:
        """The generators that it draws from, and where they are; for `put_back`."""
        return [(generator, _state(generator)) for generator, _ in self._before]

    def choose_otherwise(self) -> str | None:
        """What the numbers that would be drawn now change, in words; None where they choose the recorded branches. It
        leaves the generators as they are; `advance` takes them on."""
        if not self._steps:
            return None
        try:
            numbers, self._after = self._run(self._steps, self.states())
            differs = self._differs(numbers)
        except Exception as error:  # of what code chose from, or compared with
            let_through(error)
            return f"what it draws on the host cannot be drawn again: {error}"
        return None if differs is None else f"{OTHERWISE} ({self._places[differs]})"

    def advance(self) -> None:
        """Draws what was compared last: a replay stands for it."""
        for generator, state in self._after:
            if self._on_gpu and isinstance(generator, torch.Generator):
                generator.set_state(state)
        for draw in self._draws:  # and no state is set: another thread may draw, too
            draw()

    def _run(self, steps: list[Callable], states: list[tuple[Any, Any]]) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """What the draws give from these states of the generators, and where they end; no generator is moved."""
        memories = [None if one is None else one.clone() for one in self._memories]
        numbers: list[Any] = []
        now = [(generator, generator.get_state()) for generator, _ in states if isinstance(generator, torch.Generator)]
        grad = torch.is_grad_enabled()

        def run(undo: Undo) -> list[tuple[Any, Any]]:
            undo.then(lambda _: put_back(now))
            undo.then(lambda _: torch._C._set_grad_enabled(grad))
            torch._C._set_grad_enabled(False)
            for generator, state in states:
                _put_back(self._stand_in(generator), state)
            with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowADInplaceOrView():
                for step in steps:
                    step(memories, numbers)
            return [(generator, _state(self._stand_in(generator))) for generator, _ in states]

        return numbers, undoing(run)

    def _stand_in(self, generator: Any) -> Any:
        """What draws in the place of a generator: of one in Python, from which other threads may draw, a copy."""
        if isinstance(generator, torch.Generator):
            return generator
        found = self._stand_ins.get(id(generator))
        if found is None:
            found = self._stand_ins[id(generator)] = _copy(generator)
        return found

    def _differs(self, numbers: list[Any]) -> int | None:
        """One of the numbers that are now others, as far as code would notice; None where there is none."""
        for index in self._exact:
            if not _same(self._numbers[index], numbers[index]):
                return index
        for compare, left, right, result in self._compared:
            one, other = (numbers[side.index] if type(side) is Drawn else side for side in (left, right))
            if compare(one, other) is not result:
                return (left if type(left) is Drawn else right).index
        return None


OTHERWISE = "a random number that it draws on the host chooses another branch than any that was recorded"


def put_back(states: list[tuple[Any, Any]]) -> None:
    """Puts generators to where `states` found them."""
    for generator, state in states:
        _put_back(generator, state)


def kinds_followed() -> tuple[type, ...]:
    """The classes of generators in Python whose state can be read and set."""
    numpy = sys.modules.get("numpy.random")
    return random.Random, *(getattr(numpy, name) for name in ("RandomState", "Generator") if hasattr(numpy, name))


def _same_of(known: list[tuple[Any, Any]], generator: torch.Generator) -> torch.Generator:
    """The object that is known of a generator: operations are given another than the user holds."""
    of_torch = (one for one, _ in known if isinstance(one, torch.Generator))
    return next((one for one in of_torch if one._cdata == generator._cdata), generator)


def _copy(generator: Any) -> Any:
    """Another generator of the same kind."""
    kind = type(generator)
    if kind is random.Random:
        return random.Random()
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return kind(type(bits)())


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    legacy = hasattr(generator, "get_state")
    return generator.get_state(legacy=False) if legacy else generator.bit_generator.state


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_equal(value, other[key]) for key, value in one.items())
    same = one == other
    return bool(same if isinstance(same, bool) else same.all())


def _is_exact(value: Any) -> bool:
    """Whether a value that is drawn again must be the same: a number of a few."""
    return isinstance(value, _PLAIN) or not (isinstance(value, (float, complex, dict, set)) or _is_array(value))


def _is_number(value: Any) -> bool:
    """Whether to compare a value runs no code of the user's."""
    return isinstance(value, (int, float)) and (type(value) in _GIVEN or _is_array(value))


def _is_array(value: Any) -> bool:
    return type(value).__module__.startswith("numpy")


def _same(one: Any, other: Any) -> bool:
    if type(one) is list and type(other) is list:  # what was chosen: these very objects, and not others like them
        return len(one) == len(other) and all(map(_is_same, one, other))
    return _is_same(one, other)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    same = isinstance(one, (*_PLAIN, float)) and type(one) is type(other) and one == other
    return same and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other))


def _parts(kept: tuple) -> list[_Part]:
    _, args, kwargs = kept
    found: list[_Part] = []
    for value in (*args, *kwargs.values()):
        for one in value if type(value) in (list, tuple) else (value,):
            if type(one) is _Part:
                found.append(one)
    return found


def _operate(op: Any, args: tuple, kwargs: dict, made: list, memories: list, numbers: list) -> None:
    def there(value: Any) -> Any:
        if type(value) is _Part:
            return value.of(memories)
        return [there(one) for one in value] if type(value) in (list, tuple) else value

    results = list(tensors_in((op(*map(there, args), **{key: there(one) for key, one in kwargs.items()}),)))
    for index, memory in made:
        memories[memory] = results[index]


def _read(part: _Part, memories: list, numbers: list) -> None:
    numbers.append(part.of(memories).item())


def _draw(draw: partial, memories: list, numbers: list) -> None:
    numbers.append(_drawn(draw.func, draw()))


def _drawn(function: Callable, value: Any) -> Any:
    return [value] if function.__name__ == "choice" else value
