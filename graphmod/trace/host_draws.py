"""Random numbers that a call draws on the host, and what its code made of them.

Layer drop is the common case: `if torch.rand([]) < self.layerdrop: continue`. No graph holds such a draw. But where
the numbers do nothing but choose a branch, a graph of that branch stands for each call whose numbers choose it too. So
the draws of a recorded call are kept, with the operations between them and what Python reads. Before a replay they are
made again, from where the generators are now and in eager's order, and what came of them is compared.

Whether what was kept is all that was drawn is asked of the generators: from where they were before the recorded call,
the draws made again must lead to the same answers, and to where they are after it.

A whole number must be the same again, and a float may only be compared, each time with the same outcome. Where code
does anything else with a float, the call is refused; a number that is kept (in an attribute, or for a function made
inside) may do more where nobody looks, as in a backward outside. A branch without a recording is recorded at its first,
second, fourth, eighth ... call, since of twelve layers there are 4,096 branches (`Entry`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphmod.torch_private import BelowAutograd, NoAutocast, OpOverload, set_grad_enabled
from graphmod.trace.generators import comparable, copy_of, put_back, same_generator, state_of
from graphmod.trace.hazards import DATA, Hazard, Origins
from graphmod.trace.host_reads import HostReads
from graphmod.trace.lines import location
from graphmod.trace.operations import Facts, address, each_tensor, tensors_in
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
_MANY = (complex, dict, set)  # which are hardly ever the same again
# What a method may be given: going through it twice runs no code of the user's, and uses nothing up.
_GIVEN = {*_PLAIN, float, range, list, tuple, torch.nn.ModuleList, torch.nn.Sequential}
_HOLDS = (list, tuple, set, frozenset, dict)
_COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne
}  # fmt: skip


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
        at: address -> the memory that stands for what lies there, for operations that are done again.
        followed: whether all that was drawn is known, once `finish` has looked.
        given: what the call reads that can be computed before it; None where nobody follows that.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.floats: dict[float, int] = {}
        self.expected: Tensor | None = None
        self._as_it_is = True  # whether the number to come is what code gets
        self.drawn_at: dict[int, tuple] = {}
        self.followed = False
        self.given: HostReads | None = None
        self.reads: set[int] = set()  # the indices of operations by which code read a number
        self._steps: list[tuple[bool, Callable[[], Any]]] = []  # whether it gives a number, and what does it
        self.at: dict[int, Tensor] = {}
        self._contents: list[tuple[Tensor, Tensor]] = []  # memory, and what lies in it to begin with
        self._origins = Origins()
        self._numbers: list[Any] = []
        self._read: set[int] = set()  # those that are not drawn
        self._compared: list[tuple[Callable, Any, Any, bool]] = []
        self._differences: list[str] = []  # what it means that one of the numbers is another
        self._last = 0  # how many steps there are up to the last number
        self._before: list[tuple[Any, Any]] = []  # generators, and where they were
        self._after: list[Any] = []  # where a replay leaves them
        self._hazards: list[Hazard] = []
        self._known = True
        self._stand_ins: dict[int, Any] = {}  # by identity of the generator, which `_before` holds
        self._draws: list[Callable[[], Any]] = []  # those from generators in Python

    # -- the recorded call -------------------------------------------------------------------------------------------

    def follow(self, origins: Origins) -> None:
        """Takes in where the values of the call's tensors come from, before it begins."""
        self._origins = origins
        self.begin(torch.default_generator)

    def begin(self, generator: Any) -> None:
        """Takes in a generator before the call draws from it."""
        if not any(same_generator(generator, known) for known, _ in self._before):
            self._before.append((generator, state_of(generator)))

    def before(self, op: Any, about: Facts, args: tuple, kwargs: dict, random: bool) -> tuple | None:
        """Takes in an operation before it runs; returns what `done` is to be given: None for what is not to be kept."""
        given = list(tensors_in((*args, *kwargs.values())))
        if about.views or not (random or any(address(tensor) in self.at for tensor in given)):
            return None
        device = kwargs.get("device")
        if self._on_gpu and (any(t.is_cuda for t in given) or (device and torch.device(device).type != "cpu")):
            return None
        of = [self._origins.of(address(tensor), tensor) for tensor in given]
        if not random and max(of) == DATA:
            return None
        name = about.short
        if not isinstance(op, OpOverload) or (DATA in of and name not in _BY_SHAPE):
            self._known = False
            return None
        if random:
            self.begin(kwargs.get("generator") or torch.default_generator)
        return op._op, each_tensor(args, self._view), {key: each_tensor(one, self._view) for key, one in kwargs.items()}

    def done(self, kept: tuple | None, result: Any, fresh: list[Tensor]) -> None:
        """Takes in what an operation made, of which `fresh` lies in memory that may have been another tensor's."""
        for tensor in fresh if self.at else ():
            self.at.pop(address(tensor), None)
        if kept is None:
            return
        made = []
        for index, tensor in enumerate(tensors_in((result,))):
            where = address(tensor)
            if where and where not in self.at and self._origins.of(where, tensor) != DATA:
                self.at[where] = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu")
                made.append((index, self._view(tensor)))
        op, args, kwargs = kept
        self._steps.append((False, partial(_operate, op, args, kwargs, made)))

    def _view(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor where its operation is done again. Of data only the shape counts: no values are
        kept of it."""
        where = address(tensor)
        if tensor.is_conj() or tensor.is_neg():
            self._known = False
        with torch.inference_mode(False), torch.no_grad():
            if where not in self.at and where and self._origins.of(where, tensor) != DATA:
                content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).clone()
                self.at[where] = content.clone()
                self._contents.append((self.at[where], content))
            if where not in self.at:
                return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            memory = self.at[where].untyped_storage()
            empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
            return empty.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())

    def read(self, tensor: Tensor, index: int, hazard: Hazard) -> bool:
        """Takes in that code is about to read a number; whether that can be done again.

        Args:
            index: of the operation that reads.
            hazard: what it is where the number turns out to do more than choose a branch.
        """
        self._as_it_is, self.expected = self.expected is tensor, None
        if address(tensor) not in self.at or tensor.numel() != 1:
            return False
        self._steps.append((True, self._view(tensor).item))
        self._hazards.append(hazard)
        self._differences.append(f"{OTHERWISE} ({hazard.lines.location})")
        self.reads.add(index)
        return True

    def read_given(self, value: Callable[[], Any], tensor: Tensor, hazard: Hazard) -> None:
        """Takes in that code is about to read what `value()` gives: a number, in a tensor, or bytes that must be the
        same again. See `read`."""
        self._as_it_is, self.expected = self.expected is tensor, None
        self._steps.append((True, value))
        self._read.add(len(self._numbers))
        self._hazards.append(hazard)
        self._differences.append(f"{_READS_OTHERWISE} ({hazard.lines.location}); {hazard.remedy}")
        self.got(value())

    def draw(self, function: Any, given: list, where: tuple) -> None:
        """Takes in that code at `where` is about to call a method of a generator, of which it was told."""
        generator = function.__self__
        self.drawn_at.setdefault(id(generator), where)
        if function.__name__ not in _DRAW or not all(type(one) in _GIVEN or _is_array(one) for one in given):
            self._known = False
            return
        given = [list(one) if type(one) is list else one for one in given]
        try:
            stand_in = self._stand_in(generator)
            draw = partial(getattr(stand_in, function.__name__), *given)
            put_back([(stand_in, state_of(generator))])
            value = _drawn(draw)
        except Exception as error:  # as the call's own will raise it
            let_through(error)
            self._known = False
            return
        self._steps.append((True, partial(_drawn, draw)))
        self._draws.append(partial(function, *given))
        self._as_it_is = True
        self._differences.append(f"{OTHERWISE} ({location(*where)})")
        self.got(value, function.__name__ in _CHOOSE)

    def got(self, value: Any, chosen: bool = False) -> None:
        """Takes in the number that the last of what was taken in gives.

        Args:
            chosen: whether it is one of a few, so that it may as well be the same again.
        """
        index, self._last = len(self._numbers), len(self._steps)
        self._numbers.append(value)
        if isinstance(value, float) and not (chosen or value.is_integer() or math.isnan(value)):
            known = self.floats.setdefault(value, index)
            if not self._as_it_is:  # `int(tensor)` reads the same, and makes something else of it
                self._escaped([index])
            if known != index:  # nobody can tell which of the two code has in its hands
                self._must_be_again(known)
                self._must_be_again(index)
        elif chosen or isinstance(value, (*_PLAIN, float)) or not (isinstance(value, _MANY) or _is_array(value)):
            self._must_be_again(index)
        else:
            self._known = False

    def _must_be_again(self, index: int) -> None:
        self._compared.append((_same, Drawn(index), self._numbers[index], True))

    def _drawn_in(self, value: Any, is_old: Callable[[Any], bool] | None = None) -> Iterator[int]:
        """Which of the numbers a value is, or holds.

        Args:
            is_old: tells a container that was there before. What puts a number there is an instruction that is seen.
        """
        if isinstance(value, float):
            if value in self.floats:
                yield self.floats[value]
        elif isinstance(value, _HOLDS) and (is_old is None or len(value) <= _FEW or not is_old(value)):
            for one in value.values() if isinstance(value, dict) else value:
                yield from self._drawn_in(one, is_old)

    def used(self, values: list, comparison: str | None, is_old: Callable[[Any], bool]) -> None:
        """Takes in that an instruction is about to use values, which may be, or hold, some of the numbers.

        Args:
            comparison: how it compares two values; None where it does something else.
            is_old: see `_drawn_in`.
        """
        drawn = list(self._drawn_in(values, is_old))
        if drawn and comparison is not None and all(map(_is_number, values)):
            self._compare(comparison, *values)
        else:
            self._escaped(drawn)

    def _compare(self, how: str, left: Any, right: Any) -> None:
        """Keeps a comparison of two values, of which one was drawn. Where both look like it, each may be a constant
        that happens to be the same: `random.choice((0.25, 0.5)) == 0.5`."""
        compare = _COMPARE[how]
        for one, other in itertools.product(self._may_be(left), self._may_be(right)):
            if type(one) is Drawn or type(other) is Drawn:
                self._compared.append((compare, one, other, compare(left, right)))

    def _may_be(self, value: float) -> tuple:
        drawn = self.floats.get(value) if isinstance(value, float) else None
        return (value,) if drawn is None else (value, Drawn(drawn))

    def escaped(self) -> None:
        """Takes in that a number which is drawn does something else than to be compared."""
        self._known = False

    def _escaped(self, drawn: Iterable[int]) -> None:
        """Takes in that these numbers do something else than to be compared. One that is read can be the same again."""
        for index in drawn:
            if index in self._read:
                self._must_be_again(index)
            else:
                self.escaped()

    def finish(self, result: Any) -> list[Hazard]:
        """Ends the recording. Returns what a graph cannot repeat: where the draws made again are not those of the call,
        what was read of them.

        Args:
            result: what the call returned.
        """
        self.at = {}
        if not self._steps or not (self._numbers or self._on_gpu):
            self._steps, self._contents, self._before = [], [], []
            return []
        self._escaped(self._drawn_in(result))
        if self.given is not None:
            self.given.finish()
        after = self.states()
        try:
            numbers, ended = self._run(self._before)
            same = all(comparable(one) == comparable(other) for (_, one), (_, other) in zip(after, ended, strict=True))
            self.followed = self._known and same and all(map(_same, self._numbers, numbers))
        except Exception as error:
            let_through(error)
            self.followed = False
        if not self.followed:
            self._steps, self._contents, self._draws, self._before, self.reads = [], [], [], [], set()
            return self._hazards
        if not self._on_gpu:
            self._steps = self._steps[: self._last]
        moved = zip(self._before, after, strict=True)
        self._before = [(one, None) for (one, was), (_, now) in moved if comparable(was) != comparable(now)]
        self._hazards = []
        return []

    # -- replays -----------------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __len__(self) -> int:
        """How many steps are made again."""
        return len(self._steps)

    def states(self) -> list[tuple[Any, Any]]:
        """The generators that it draws from, and where they are; for `put_back`."""
        return [(generator, state_of(generator)) for generator, _ in self._before]

    def choose_otherwise(self, leaves: list[Tensor]) -> str | None:
        """What the numbers that would be drawn or read now change, in words; None where they choose the recorded
        branches. It leaves the generators as they are; `advance` takes them on.

        Args:
            leaves: the tensor arguments of the call.
        """
        if not self._steps:
            return None
        try:
            if self.given:
                self.given.find(leaves)
            numbers, self._after = self._run(self.states())
            return self._differs(numbers)
        except Exception as error:  # of what code chose from, or compared with
            let_through(error)
            return f"what it draws or reads on the host cannot be had before the call: {error}"

    def advance(self) -> None:
        """Draws what was compared last: a replay stands for it."""
        for generator, state in self._after:
            if self._on_gpu and isinstance(generator, torch.Generator):
                generator.set_state(state)
        for draw in self._draws:  # and no state is set: another thread may draw, too
            draw()

    def _run(self, states: list[tuple[Any, Any]]) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """What the draws give from these states of the generators, and where they end; no generator is moved."""
        now = [(generator, generator.get_state()) for generator, _ in states if isinstance(generator, torch.Generator)]
        grad = torch.is_grad_enabled()

        def run(undo: Undo) -> tuple[list[Any], list[tuple[Any, Any]]]:
            undo.then(lambda _: put_back(now))
            undo.then(lambda _: set_grad_enabled(grad))
            set_grad_enabled(False)
            put_back([(self._stand_in(generator), state) for generator, state in states])
            with NoAutocast(), BelowAutograd():
                for memory, content in self._contents:
                    memory.copy_(content)
                found = [(gives, do()) for gives, do in self._steps]
            ended = [(generator, state_of(self._stand_in(generator))) for generator, _ in states]
            return [number for gives, number in found if gives], ended

        return undoing(run)

    def _stand_in(self, generator: Any) -> Any:
        """What draws in the place of a generator: of one in Python, from which other threads may draw, a copy."""
        if isinstance(generator, torch.Generator):
            return generator
        found = self._stand_ins.get(id(generator))
        if found is None:
            found = self._stand_ins[id(generator)] = copy_of(generator)
        return found

    def _differs(self, numbers: list[Any]) -> str | None:
        """What it means that one of the numbers is now another, as far as code would notice; None where none is."""
        for compare, left, right, result in self._compared:
            one, other = (numbers[side.index] if type(side) is Drawn else side for side in (left, right))
            if compare(one, other) is not result:
                return self._differences[(left if type(left) is Drawn else right).index]
        return None


_READS_OTHERWISE = "a value that it reads on the host is another than any that was recorded"
OTHERWISE = "a random number that it draws on the host chooses another branch than any that was recorded"


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
    if isinstance(one, float) and type(one) is type(other):
        return repr(one) == repr(other)  # NaN is NaN, and 0.0 is not -0.0
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def _operate(op: Any, args: tuple, kwargs: dict, made: list) -> None:
    results = list(
        tensors_in((op(*each_tensor(args, _there), **{k: each_tensor(v, _there) for k, v in kwargs.items()}),))
    )
    for index, memory in made:
        memory.copy_(results[index])


def _there(tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu").fill_(1)


def _drawn(draw: partial) -> Any:
    value = draw()
    return [value] if draw.func.__name__ == "choice" else value
