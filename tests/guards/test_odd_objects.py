"""Objects that make what they hold when first asked, or whose reading runs code or fails."""

import copy
import functools
import sys
import types
import weakref
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule, check
from graphmod.errors import BackwardUnavailable
from graphmod.guards import values
from graphmod.guards.notes import Note
from graphmod.guards.values import INERT, OBJECT, OTHER, Place, content, sort_of
from graphmod.reads.frames import noting
from graphmod.torch_private import weak_reference
from tests.guards.test_helper_objects import CHANGES, play
from tests.support.harness import config


class Lazy:
    """Makes its table when it is first asked."""

    def __init__(self):
        self.table, self.by_size, self.recent = None, {}, deque(maxlen=1)

    def attribute(self, x):
        if self.table is None:
            self.table = torch.arange(3.0, device=x.device)
        return self.table

    def dictionary(self, x):
        if 3 not in self.by_size:
            self.by_size[3] = torch.arange(3.0, device=x.device)
        return self.by_size[3]

    def queue(self, x):
        if not self.recent:
            self.recent.append(torch.arange(3.0, device=x.device))
        return self.recent[0]

    @functools.cached_property
    def cached(self):
        return torch.arange(3.0, device=self.device)


class LazySlot(Lazy):
    __slots__ = ("made",)

    def attribute(self, x):
        try:
            return self.made
        except AttributeError:
            self.made = torch.arange(3.0, device=x.device)
            return self.made


def exchange(lazy, what, value):
    if what == "attribute":
        setattr(lazy, "made" if isinstance(lazy, LazySlot) else "table", value)
    elif what == "dictionary":
        lazy.by_size[3] = value
    elif what == "queue":
        lazy.recent.append(value)
    else:
        lazy.cached = value


@pytest.mark.parametrize("what", ["attribute", "dictionary", "queue", "cached"])
@pytest.mark.parametrize("kind", [Lazy, LazySlot])
@pytest.mark.parametrize("in_module", [False, True])
def test_what_is_made_in_the_first_call_is_watched(what, kind, in_module, device, caplog):
    lazy = kind()
    lazy.device = device
    read = (lambda x: lazy.cached) if what == "cached" else getattr(lazy, what)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.lazy = lazy

        def forward(self, x):
            return x + (self.lazy.cached if what == "cached" else getattr(self.lazy, what)(x))

    call = Module() if in_module else lambda x: x + read(x)
    change = lambda n: exchange(lazy, what, torch.full((3,), float(n), device=device))  # noqa: E731
    play(CUDAGraphModule(call, config()), lambda x: x + read(x), change, device)
    assert "found neither" not in caplog.text


def test_a_number_that_became_a_tensor_is_compared_as_one(device):
    lazy = SimpleNamespace(scale=None)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.lazy = lazy

        def forward(self, x):
            if self.lazy.scale is None:
                self.lazy.scale = torch.tensor(2.0, device=x.device)
            return x * self.lazy.scale

    graphed = CUDAGraphModule(Module(), config())

    def change(n):
        if n == CHANGES[0]:
            lazy.scale = torch.tensor(2.0, device=device)  # equal, and another
        else:
            lazy.scale.fill_(5)

    play(graphed, lambda x: x * lazy.scale, change, device)


class Odd:
    """Slots whose reading runs code, or fails."""

    __slots__ = ("scale", "unset")

    def __init__(self, device):
        Odd.scale.__set__(self, torch.full((3,), 2.0, device=device))


class RaisingProperty(Odd):
    __slots__ = ()

    @property
    def unset(self):
        raise NotImplementedError("use scale")


class RaisingLookup(Odd):
    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError(f"not connected: {name}")


class OddEquality(type):
    def __eq__(cls, other):
        return NotImplemented


class Unhashable(Odd, metaclass=OddEquality):
    __slots__ = ()

    def __call__(self):
        return self.scale


@pytest.mark.parametrize("kind", [Odd, RaisingProperty, RaisingLookup, Unhashable])
def test_looking_for_tensors_runs_no_code_of_the_user(kind, device):
    held = kind(device)
    graphed = CUDAGraphModule(lambda x: x * held.scale, config())
    for _ in range(12):
        x = torch.randn(3, device=device)
        assert torch.equal(graphed(x), x * 2)
    assert graphed.stats.replays == 10 and graphed.stats.captures == 1


def test_a_container_that_raises_is_an_eager_call(device):
    class Strict(dict):
        def __missing__(self, key):
            raise AttributeError(key)

    held = Strict(a=2.0)
    graphed = CUDAGraphModule(lambda x: x * held["a"] if "a" in held else x * 5.0, config())
    for step in range(12):
        if step == 6:
            held.pop("a")
        found = graphed(torch.ones(3, device=device))
        assert torch.equal(found, torch.full((3,), 2.0 if step < 6 else 5.0, device=device)), step


class Late:
    """What its step reads may not be there yet."""

    factor = 2.0

    def by_default(self, x):
        return x * getattr(self, "k", 2.0)

    def by_asking(self, x):
        return x * self.table if hasattr(self, "table") else x

    def over_the_class(self, x):
        return x * self.factor


LATER = {
    "by_default": lambda late, n: setattr(late, "k", float(n)),
    "by_asking": lambda late, n: setattr(late, "table", torch.full((3,), float(n), device=late.device)),
    "over_the_class": lambda late, n: setattr(late, "factor", float(n)),
}


@pytest.mark.parametrize("way", LATER)
@pytest.mark.parametrize("root", ["method", "closure"])
def test_an_attribute_that_comes_later_is_noticed(way, root, device):
    late = Late()
    late.device = device
    step = getattr(late, way)
    graphed = CUDAGraphModule(step if root == "method" else lambda x: step(x), config())
    play(graphed, step, lambda n: LATER[way](late, n), device)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this PyTorch has no CUDA events")
def test_notes_on_what_pytorch_forgets_to_clear_keep_it_alive():
    event = torch.cuda.Event()
    with pytest.raises(TypeError):
        weak_reference(event)
    note = Note(event, Place({"event": event}, "event", event), ())
    del event
    gone = [bytes(size) for size in range(200)]  # takes the memory of what is freed
    assert isinstance(note.owner, torch.cuda.Event), len(gone)
    assert isinstance(note.before(), torch.cuda.Event)


class Gathered(NamedTuple):
    whole: torch.Tensor


class Pending(NamedTuple):
    result: Gathered


def test_what_a_named_tuple_held_is_freed_when_the_call_lets_go_of_it(device):
    alive = []

    def step(x):
        made = Pending(Gathered(x * 2))
        gone = weakref.ref(made[0][0])
        del made
        alive.append(gone() is not None)
        return x + 1

    with noting(step):
        step(torch.ones(3, device=device))
    assert alive == [False]


def test_looking_at_an_object_runs_no_code_of_its_class():
    asked = []

    class Settings:
        def __init__(self):
            self.factor = 2.0

        def __getattribute__(self, name):
            if name == "__class__":  # which the step never reads
                asked.append(sys._getframe(1).f_code)
            return object.__getattribute__(self, "factor" if name == "scale" else name)

    settings, held = Settings(), {}
    held["settings"] = settings

    def step():
        for one in held.values():
            vars(one)
        return settings.scale, hasattr(settings, "shape"), held.get("settings"), [settings], settings == held

    with noting(step) as notes:
        step()
    assert {"scale", "factor", "shape"} <= {note.key for note in notes.notes.values() if note.owner is settings}
    assert not asked


def test_what_stands_for_a_container_by_code_in_c_cannot_be_looked_into():
    class Stands:
        __slots__ = ("__class__",)

    one = Stands()
    assert content(one) is None
    one.__class__ = list
    with pytest.raises(ValueError, match="a Stands stands for"):
        content(one)


def test_what_stands_for_another_object_is_no_ordinary_one():
    class Stands:
        __class__ = property(lambda self: list)

    class Answers:
        def __getattribute__(self, name):
            return getattr([], name)

    assert {sort_of(kind) for kind in (weakref.ProxyType, Stands, Answers, list, map, functools.partial)} == {OTHER}
    assert {sort_of(kind) for kind in (Lazy, object)} == {OBJECT}
    assert {sort_of(kind) for kind in (nn.Linear, torch.Tensor, int, type, torch.dtype)} == {INERT}


def test_a_module_of_the_users_is_not_taken_for_a_librarys_of_a_like_name(device, monkeypatch):
    module = types.ModuleType("logging_utils")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec("class Config:\n    scale = None\n", module.__dict__)
    settings = module.Config()
    settings.scale = 2.0

    def step(x):
        return x * settings.scale

    play(CUDAGraphModule(step, config()), step, lambda n: setattr(settings, "scale", float(n)), device)


def test_the_order_of_an_ordered_dict_is_its_own(device):
    factors = OrderedDict(a=2.0, b=6.0, c=7.0)

    def step(x):
        return x * next(iter(factors.values()))

    play(CUDAGraphModule(step, config()), step, lambda n: factors.move_to_end(next(iter(factors))), device)


def test_modules_of_fx_are_a_programs_own(device):
    net = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    others = [nn.Sigmoid(), nn.ReLU(), nn.Tanh()]

    def exchange(n):
        setattr(net, "0", others[n % 3])

    play(CUDAGraphModule(net, config()), lambda x: net(x), exchange, device)


def refuses(*_):
    raise NotImplementedError


@pytest.mark.parametrize(
    "method", ["__len__", "__iter__", "__bool__", "__contains__", "__eq__", "__hash__", "__repr__"]
)
@pytest.mark.parametrize("base", [list, tuple, dict, set])
def test_a_container_that_is_merely_held_is_asked_nothing(base, method, device):
    kind = type("Odd", (base,), {method: refuses})
    held = kind({0: 1.5} if base is dict else [1.5])
    x = torch.ones(2, device=device)
    read = (lambda x: x * 2 if held is not None else x) if base is set else (lambda x: x * held[0])
    graphed = CUDAGraphModule(read, config())
    for index in range(8):
        assert torch.equal(graphed(x + index), read(x + index))
    assert graphed.stats.replays and not graphed.stats.failures
    given = CUDAGraphModule(lambda x, held: x * 2, config())
    for index in range(8):
        assert torch.equal(given(x + index, held), (x + index) * 2)
    assert check(read, x)


@pytest.mark.parametrize("place", ["in a dict", "in a list", "an attribute", "an argument"])
def test_a_view_whose_history_autograd_does_not_tell_is_merely_held(place, device):
    memory, weight = torch.zeros(4, 4, device=device), torch.ones(4, device=device, requires_grad=True)
    with torch.no_grad():
        view = memory.view(-1)
    memory.mul_(weight)
    held = {"in a dict": {0: view}, "in a list": [view], "an attribute": SimpleNamespace(view=view)}.get(place)

    def read(x, *given):
        there = given[0] if given else held.view if place == "an attribute" else held[0]
        return x * 2 if there is not None else x

    given = (view,) if place == "an argument" else ()
    graphed = CUDAGraphModule(read, config())
    for index in range(8):
        x = torch.full((2,), float(index), device=device)
        assert torch.equal(graphed(x, *given), read(x, *given))
    assert "no_grad" in graphed.last_failure if given else graphed.stats.replays
    check(read, x, *given)


def test_a_module_that_is_imported_inside_stays_imported(device, monkeypatch, tmp_path):
    (tmp_path / "own_late_module.py").write_text("scale = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_late_module", raising=False)

    def step(x):
        import own_late_module

        return x * own_late_module.scale

    wrapper = CUDAGraphModule(step, config(warmup_steps=1))
    for index in range(6):
        if index == 4:
            sys.modules["own_late_module"].scale = 3.0
        assert wrapper(torch.ones(2, device=device)).tolist() == [2.0 if index < 4 else 3.0] * 2
    monkeypatch.delitem(sys.modules, "own_late_module")
    assert wrapper.stats.captures and not wrapper.stats.failures


class Unset:
    """A slot in which nothing is yet."""

    __slots__ = ("scale",)

    def read(self):
        return getattr(self, "scale", 1.0)

    def change(self):
        self.scale = 5.0

    def back(self):
        del self.scale


class Default:
    """A function that gets another default."""

    def __init__(self):
        def read(scale=1.0):
            return scale

        self.read = read

    def change(self):
        self.read.__defaults__ = (5.0,)

    def back(self):
        self.read.__defaults__ = (1.0,)


class Unbound:
    """A variable of a closure that has no value yet."""

    def __init__(self):
        def read():
            try:
                return scale
            except NameError:
                return 1.0

        def change():
            nonlocal scale
            scale = 5.0

        def back():
            nonlocal scale
            del scale

        scale = 0.0
        back()
        self.read, self.change, self.back = read, change, back


class Shown:
    """Memory that numpy shows, which nobody puts back."""

    def __init__(self):
        self.values = numpy.ones(1)

    def read(self):
        return float(self.values[0])

    def change(self):
        self.values[0] = 5

    def back(self):
        self.values[0] = 1


@pytest.mark.parametrize("kind", [Unset, Default, Unbound, Shown])
@pytest.mark.parametrize("late", [3, 6])
def test_a_backward_that_runs_its_forward_again_finds_what_that_found(kind, late, device):
    held = kind()
    module = nn.Linear(4, 4, device=device)
    plain = copy.deepcopy(module)
    graphed = CUDAGraphModule(Scaled(module, held), config())
    for step in range(10):
        x = torch.randn(2, 4, device=device)
        found, expected = graphed(x), plain(x) * held.read()
        if step == late:
            held.change()
            torch.set_default_dtype(torch.float64)  # another mode, in which no graph of a backward runs
        try:
            if kind is Shown and step == late:
                with pytest.raises(BackwardUnavailable, match="has to run again, but the items of a ndarray"):
                    found.sum().backward()
                break
            found.sum().backward()
            expected.sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(module.weight.grad, plain.weight.grad), step
        if step == late:
            held.back()
    assert graphed.stats.replays


class Scaled(nn.Module):
    def __init__(self, inner, held):
        super().__init__()
        self.inner, self.held = inner, held

    def forward(self, x):
        return self.inner(x) * self.held.read()


class Rate(float):
    def __init__(self, value, unit=1.0):
        self.unit = unit

    def __new__(cls, value, unit=1.0):
        return super().__new__(cls, value)


class SlottedRate(Rate):
    __slots__ = ("unit",)


class Rough(Rate):
    def __eq__(self, other):
        return True

    __hash__ = float.__hash__


@pytest.mark.parametrize("kind", [Rate, SlottedRate, Rough])
@pytest.mark.parametrize("other", [(2.0, 3.0), (3.0, 1.0)])
def test_a_number_of_a_class_of_ones_own_is_the_same_with_the_same_attributes(kind, other, device):
    held = SimpleNamespace(rate=kind(2.0))
    call = CUDAGraphModule(lambda x: x * float(held.rate) * held.rate.unit, config())
    for step in range(10):
        held.rate = kind(2.0) if step < 5 else kind(*other)
        expected = torch.full((2,), held.rate.unit * float(held.rate), device=device)
        assert torch.equal(call(torch.ones(2, device=device)), expected)
    assert call.stats.replays >= 4


SAME = {
    "is": lambda x, refs: x is refs[0],
    "is one of a list": lambda x, refs: any(x is one for one in refs),
    "is in a set": lambda x, refs: x in SETS[id(refs)],
    "is a key of a dict": lambda x, refs: DICTS[id(refs)].get(x, 0) == 1,
    "is an item of a tuple": lambda x, refs: x is TUPLES[id(refs)][0],
    "is that key": lambda x, refs: DICTS[id(refs)].get(x, 2) > 1,
}
SETS, DICTS, TUPLES = {}, {}, {}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("way", SAME)
def test_an_argument_that_code_finds_elsewhere_too_is_told_from_others(way, first, device):
    refs = [torch.ones(2, device=device) for _ in range(2)]
    SETS[id(refs)], DICTS[id(refs)] = set(refs), {one: index + 1 for index, one in enumerate(refs)}
    TUPLES[id(refs)] = tuple(refs)

    def step(x):
        return x * (2 if SAME[way](x, refs) else 3)

    call = CUDAGraphModule(step, config())
    for index in range(14):
        x = refs[index % 2] if (index in (5, 6, 11, 12)) != first else torch.ones(2, device=device)
        assert torch.equal(call(x), step(x))
    assert call.stats.replays >= 4 or first


@pytest.mark.parametrize("make", [lambda: {"k": 1.0}, list], ids=["dict", "empty list"])
def test_equal_containers_are_not_taken_for_each_other_where_code_asks_which_they_are(make, device):
    held = types.SimpleNamespace(one=make())
    held.other = held.one

    def step(x):
        return x * 2 if held.one is held.other else x * 3

    module = CUDAGraphModule(step, config())
    for number in range(24):
        if number == 8:
            held.other = make()
        elif number == 16:
            held.one = held.other
        x = torch.randn(3, device=device)
        assert torch.equal(module(x), step(x)), number
    assert module.stats.replays > 14


@pytest.mark.parametrize("often", [3, 8])
def test_what_code_keeps_of_a_version_of_a_weight_is_made_anew_with_another(often, device):
    class Rounded(nn.Linear):
        made_of, rounded = -1, None

        def forward(self, x):
            if self.weight._version != self.made_of:
                self.rounded, self.made_of = self.weight.detach().round(decimals=1), self.weight._version
            return x @ self.rounded.T

    torch.manual_seed(0)
    model = Rounded(4, 4).to(device)
    module = CUDAGraphModule(model, config())
    for number in range(24):
        if number % often == 0:
            with torch.no_grad():
                model.weight.add_(0.5)
        x = torch.randn(3, 4, device=device)
        with torch.no_grad():
            assert torch.equal(module(x), x @ model.weight.round(decimals=1).T), number
    assert often == 3 or module.stats.replays > 8


def test_an_array_that_is_too_large_to_compare_keeps_a_call_eager(device, monkeypatch):
    monkeypatch.setattr(values, "_MOST_DIGESTED", 64)
    array, x = numpy.ones(9), torch.ones(3, device=device)
    wrapper = CUDAGraphModule(lambda x: x * float(array.sum()), config())
    for _ in range(6):
        assert wrapper(x).tolist() == [9.0] * 3
        array += 1
        assert wrapper(x).tolist() == [18.0] * 3
        array -= 1
    assert "is too large to compare at each call" in wrapper.last_failure and not wrapper.stats.replays
