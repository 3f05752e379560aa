"""Containers among the arguments: their kind and everything in them is the code's to see, and what the code does to
them is done by eager calls."""

import collections
import copy
import dataclasses
import enum
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_outputs import BaseModelOutput

from graphmod import CUDAGraphModule
from graphmod.signature.flattening import Opaque, flatten, opaque_parts, rebuild, unrepeatable
from tests.support.harness import assert_same, config, mlp

CALLS = 10


@dataclasses.dataclass
class Plain:
    x: Tensor
    scale: float = 1.0
    note = "of the class"


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    x: Tensor
    scale: float = 1.0


@dataclasses.dataclass(kw_only=True)
class Derived(Plain):
    more: list = dataclasses.field(default_factory=list)
    factor: dataclasses.InitVar[float] = 2.0
    never: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self, factor):
        self.doubled = self.x * factor


class Point(NamedTuple):
    x: Tensor
    scale: float

    @property
    def scaled(self):
        return self.x * self.scale


class Attributes(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Named(list):
    name = "of the class"


class Named2(tuple):
    """A tuple with attributes."""


class Color(enum.Enum):
    red = 1


class Size:
    """A context that calls sizes equal which code can tell apart, as that of TensorDict does."""

    __slots__ = ("size",)

    def __init__(self, size):
        self.size = size

    def __eq__(self, other):
        return isinstance(other, Size)

    __hash__ = None


class Batch:
    """A container in C's eyes: its class has told PyTorch alone what is in it."""

    __slots__ = ("_tensors", "size")

    def __init__(self, tensors, size):
        self._tensors, self.size = tensors, size

    def __getitem__(self, name):
        return self._tensors[name]

    def __repr__(self):
        return f"Batch({self._tensors}, {self.size})"


class Sealed(Batch):
    """One that has more about it than can be compared."""


def _of_batch(values, context):
    return context["kind"](dict(zip(context["names"], values, strict=True)), context["size"].size)


class Loose(Batch):
    """One to which anybody may add an attribute."""


for _kind, _more in ((Batch, ()), (Sealed, object()), (Loose, ())):
    register_pytree_node(
        _kind,
        lambda batch, kind=_kind, more=_more: (
            list(batch._tensors.values()),
            {"names": list(batch._tensors), "size": Size(batch.size), "kind": kind, "make": _of_batch, "more": more},
        ),
        _of_batch,
    )


def with_attribute(value, **attributes):
    for name, item in attributes.items():
        object.__setattr__(value, name, item)
    return value


def each_kind(x: Tensor) -> dict[str, Any]:
    shared = [x]
    cyclic: list = [x]
    cyclic.append(cyclic)
    return {
        "dataclass": Plain(x),
        "dataclass with more": with_attribute(Plain(x), size=4, other=x * 2),
        "slots": Slots(x, 0.5),
        "derived dataclass": Derived(x=x, more=[x + 1], scale=3.0),
        "named tuple": Point(x, 2.0),
        "tuple with attributes": with_attribute(Named2([x, 1]), size=3),
        "list with attributes": with_attribute(Named([x]), name="own"),
        "dict with attribute access": Attributes(x=x, scale=2.0),
        "default dict": collections.defaultdict(list, x=[x]),
        "counter": collections.Counter(a=3),
        "ordered dict": collections.OrderedDict(b=x, a=1),
        "queue": collections.deque([x, 2], maxlen=3),
        "model output": BaseModelOutput(last_hidden_state=x),
        "namespace": types.SimpleNamespace(x=x, scale=2),
        "result of torch": torch.return_types.max((x, x + 1)),
        "keys that are no strings": {1: x, (2, 3): x + 1, 1.5: 2},
        "set": {3, 1, 2},
        "registered pytree": Batch({"a": x, "b": [x + 1, 2]}, 3),
        "range": range(0, 5, 2),
        "slice": slice(None, 3, 2),
        "enumeration": Color.red,
        "numpy array": np.arange(3.0),
        "numpy number": np.float32(0.1),
        "numbers": [0.0, -0.0, float("nan"), complex(0.0, -0.0), True, 1],
        "one list twice": [shared, shared],
        "a list that holds itself": cyclic,
    }


KINDS = list(each_kind(torch.zeros(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_taken_apart_and_put_together_a_value_is_as_before(kind):
    value = each_kind(torch.arange(6.0))[kind]
    leaves = []
    structure = flatten(value, leaves, {})
    again = []
    assert flatten(each_kind(torch.arange(6.0))[kind], again, {}) == structure and hash(structure) is not None
    made = rebuild(structure, leaves)
    assert type(made) is type(value)
    second: list = []
    assert flatten(made, second, {}) == structure
    assert all(a is b for a, b in zip(leaves, second, strict=True))
    if kind != "a list that holds itself":
        assert repr(made) == repr(value)
    assert getattr(made, "__dict__", None) == getattr(value, "__dict__", None) or kind == "namespace"


def test_put_together_containers_are_one_where_they_were():
    x = torch.ones(2)
    kinds = each_kind(x)
    for kind in ("one list twice", "a list that holds itself"):
        structure = flatten(kinds[kind], [], {})
        made = rebuild(structure, [x])
        assert made[0] is made[1] if kind == "one list twice" else made[1] is made
    assert flatten([[x], [x]], [], {}) != flatten(kinds["one list twice"], [], {})


def test_values_that_compare_equal_but_are_not_alike_differ():
    for one, other in (
        (0.0, -0.0),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (range(0, 3, 2), range(0, 4, 2)),
        ({1: 0}, {True: 0}),
        (slice(1), slice(True)),
        (1, True),
        (np.float32(1), np.float64(1)),
        (np.arange(3), np.arange(3.0)),
        ([1], Named([1])),
    ):
        assert flatten(one, [], {}) != flatten(other, [], {})
    assert flatten(float("nan"), [], {}) == flatten(float("nan"), [], {})


def test_objects_that_may_change_are_told():
    class Thing:
        pass

    thing = Thing()
    structure = flatten({"a": [thing, Color.red, 1], "b": thing.__class__}, [], {})
    assert [part.value for part in opaque_parts(structure)] == [thing, Thing]
    assert Opaque(thing) == Opaque(thing) != Opaque(Thing())


@pytest.mark.parametrize(
    "make",
    [
        lambda: (i for i in range(3)),
        lambda: iter([1]),
        lambda: np.zeros(100_000),
        lambda: np.array([object()]),
        lambda: {torch.ones(1)},
        lambda: zip([1], [2], strict=True),
    ],
)
def test_what_no_second_call_can_have_runs_eagerly(make, device, caplog):
    module = mlp(device)
    wrapper, x = CUDAGraphModule(lambda batch: module(batch["x"]), config()), torch.ones(4, 8, device=device)
    with torch.no_grad():
        for _ in range(CALLS):
            value = make()
            assert unrepeatable(flatten(value, [], {}))
            assert torch.equal(wrapper({"x": x, "other": [value]}), module(x))
    assert wrapper.stats.captures == wrapper.stats.failures == 0
    assert caplog.text.count("runs eagerly, because its argument 'batch.other[0]' is") == 1


def appends(batch, module):
    batch["list"].append(module(batch["x"]))
    return batch["x"].sum()


def fills(batch, module):
    batch["new"] = module(batch["x"])
    return batch["new"].sum()


def pops(batch, module):
    return module(batch.pop("x")).sum()


def renames(batch, module):
    batch["x"] = batch.pop("x")
    return module(batch["x"]).sum()


def exchanges(batch, module):
    batch["x"] = batch["x"] * 2
    return module(batch["x"]).sum()


def exchanges_a_list(batch, module):
    batch["list"] = list(batch["list"])
    return module(batch["x"]).sum()


def assigns_a_field(batch, module):
    batch["data"].scale = batch["data"].scale + 1
    return module(batch["data"].x).sum()


def assigns_an_attribute(batch, module):
    batch["data"].result = module(batch["data"].x)
    return batch["data"].result.sum()


def sorts(batch, module):
    batch["numbers"].sort()
    return module(batch["x"]).sum()


def rotates(batch, module):
    batch["queue"].rotate(1)
    return module(batch["x"]).sum()


def counts(batch, module):
    batch["counter"]["calls"] += 1
    return module(batch["x"]).sum()


def touches_a_default(batch, module):
    batch["default"]["missing"]
    return module(batch["x"]).sum()


def adds_to_a_set(batch, module):
    batch["set"].add(17)
    return module(batch["x"]).sum()


def writes_into_an_array(batch, module):
    batch["array"] += 1
    return module(batch["x"]).sum()


def returns_its_batch(batch, module):
    module(batch["x"])
    return batch


CHANGES = [
    *(appends, fills, pops, renames, exchanges, exchanges_a_list, assigns_a_field, assigns_an_attribute, sorts),
    *(rotates, counts, touches_a_default, adds_to_a_set, writes_into_an_array, returns_its_batch),
]


def batch_for(x):
    return {
        "x": x,
        "list": [x + 1],
        "data": Plain(x),
        "numbers": [3, 1, 2],
        "queue": collections.deque([1, 2, 3]),
        "counter": collections.Counter(),
        "default": collections.defaultdict(list),
        "set": {1, 2},
        "array": np.zeros(3),
    }


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("warmup", [1, 2])
def test_what_a_call_does_to_its_containers_is_done(change, warmup, device, caplog):
    module = mlp(device)
    wrapper = CUDAGraphModule(lambda batch: change(batch, module), config(warmup_steps=warmup))
    calls = 0
    with torch.no_grad():
        for step in range(CALLS):
            x = torch.full((4, 8), float(step), device=device)
            eager, graphed = batch_for(x), batch_for(x.clone())
            expected, got = change(eager, module), wrapper(graphed)
            assert list(eager) == list(graphed)
            for key in eager:
                values = [side[key].tolist() if key == "array" else side[key] for side in (eager, graphed)]
                assert_same(*values, key)
            assert eager["data"].__dict__.keys() == graphed["data"].__dict__.keys()
            assert (got is graphed) == (expected is eager)
            if expected is not eager:
                assert torch.equal(expected, got)
            calls += 1
    assert wrapper.stats.captures == 0
    assert "argument 'batch'" in caplog.text


FILLED_AGAIN = {
    "dict": (dict, lambda held, x: held.update(x=x), lambda held: held["x"]),
    "dict gone through": (dict, lambda held, x: held.update(x=x), lambda held: sum(held.values()) * len(held)),
    "list": (lambda: [None], lambda held, x: held.__setitem__(0, x), lambda held: held[0]),
    "dataclass": (lambda: Plain(None), lambda held, x: setattr(held, "x", x), lambda held: held.x * held.scale),
    "dict in a tuple": (lambda: ({},), lambda held, x: held[0].update(x=x), lambda held: held[0]["x"]),
    "list in a dict": (
        lambda: {"in": [None]},
        lambda held, x: held["in"].__setitem__(0, x),
        lambda held: held["in"][0],
    ),
}


@pytest.mark.parametrize("way", FILLED_AGAIN)
def test_a_container_may_be_passed_again_with_other_tensors(way, device):
    make, fill, read = FILLED_AGAIN[way]
    held, module = make(), CUDAGraphModule(lambda held: read(held) * 2, config())
    for step in range(CALLS):
        fill(held, torch.full((3,), float(step), device=device))
        assert torch.equal(module(held), read(held) * 2)
    assert (module.stats.captures, module.stats.replays) == (1, CALLS - 2), module.last_failure


def test_tensors_of_a_recorded_call_are_not_kept_alive(device):
    module, seen = CUDAGraphModule(lambda held, pair: held["x"] * pair[0], config()), []
    for step in range(CALLS):
        held = {"x": torch.full((3,), float(step), device=device)}
        seen.append(weakref.ref(held["x"]))
        module(held, (held["x"],))
        del held
    assert module.stats.captures == 1
    assert not [one for one in seen if one() is not None]


@pytest.mark.parametrize("inside", [False, True])
def test_a_container_that_code_finds_elsewhere_too_is_watched_there(inside, device):
    holder = types.SimpleNamespace(settings={"scale": 1.0})

    def step(x, given):
        given = given["in"][0] if inside else given
        return x * given["scale"] * holder.settings["scale"]

    def passed(settings):
        return {"in": (settings,)} if inside else settings

    module = CUDAGraphModule(step, config())
    for number in range(40):
        if number in (7, 25):
            holder.settings["scale"] += 1
        elif number == 16:
            holder.settings = {"scale": 5.0}
        given = passed(holder.settings if number % 10 < 5 else {"scale": 2.0})
        x = torch.randn(3, device=device)
        assert torch.equal(module(x, given), step(x, given)), number
    assert module.stats.replays > 15


ASKS = {
    "a dict is one that was there": (dict, lambda given, known: given is known[0]),
    "identity of a dict": (dict, lambda given, known: id(given) == id(known[0])),
    "identity of a tensor": (lambda x: x, lambda given, known: id(given) == id(known[0])),
    "a weak dict by tensors": (lambda x: x, lambda given, known: given in known[1]),
    "version": (lambda x: x, lambda given, known: given._version > 1),
}


@pytest.mark.parametrize("way", ASKS)
def test_code_that_asks_which_object_an_argument_is_runs_eagerly(way, device):
    make, asks = ASKS[way]
    tensors = [torch.full((3,), float(i), device=device) for i in range(3)]
    tensors[1].add_(1).add_(1)
    given = [make({"x": one}) if make is dict else one for one in tensors]
    known = given[1], None if make is dict else WeakTensorKeyDictionary({given[1]: 1})

    def step(one):
        return (one["x"] if make is dict else one) * (2 if asks(one, known) else 3)

    module = CUDAGraphModule(step, config())
    for number in range(CALLS):
        one = given[0 if number < 5 else number % 3]
        assert torch.equal(module(one), step(one)), number
    said = "version of a tensor" if way == "version" else "object"
    assert f"asks which {said} its argument 'one' is" in module.last_failure


def test_a_copy_of_an_argument_asks_nothing(device):
    module = CUDAGraphModule(lambda x, given: x * copy.deepcopy(given)["in"][0], config())
    for _ in range(CALLS):
        x = torch.randn(3, device=device)
        assert torch.equal(module(x, {"in": [2.0]}), x * 2)
    assert module.stats.replays > 4, module.last_failure


def test_a_list_that_grows_outside_is_another_signature(device):
    module = mlp(device)
    wrapper, xs = CUDAGraphModule(lambda xs: sum(module(x) for x in xs), config()), []
    with torch.no_grad():
        for step in range(CALLS):
            if step % 5 == 0:
                xs.append(torch.ones(4, 8, device=device))
            assert torch.equal(wrapper(xs), sum(module(x) for x in xs))
    assert wrapper.stats.captures == 2


SEEN = {
    "attributes beside the fields": (lambda x: Plain(x), lambda b, step: setattr(b, "scale", 1.0 if step < 6 else 0.5)),
    "an attribute that was the class's": (lambda x: Plain(x), lambda b, step: step >= 6 and setattr(b, "note", "own")),
    "an attribute of a list": (lambda x: Named([x]), lambda b, step: step >= 6 and setattr(b, "name", "own")),
    "the order of a dict": (
        lambda x: {"a": x, "b": 1},
        lambda b, step: step >= 6 and b.update(a=b.pop("a")),
    ),
}


def look(batch, module):
    """Reads what may differ in its argument."""
    x = batch.x if hasattr(batch, "x") else batch[0] if isinstance(batch, list) else batch["a"]
    words = (getattr(batch, "note", ""), getattr(batch, "name", ""), *(batch if isinstance(batch, dict) else ()))
    return module(x) * getattr(batch, "scale", 1.0) + sum(map(ord, "".join(words)))


@pytest.mark.parametrize("what", SEEN)
def test_everything_in_an_argument_counts(what, device):
    module = mlp(device)
    make, change = SEEN[what]
    wrapper = CUDAGraphModule(lambda batch: look(batch, module), config())
    with torch.no_grad():
        for step in range(14):
            batch = make(torch.full((4, 8), float(step), device=device))
            change(batch, step)
            assert torch.equal(wrapper(batch), look(copy.copy(batch), module))
    assert wrapper.stats.captures == 2


def test_the_same_list_twice_is_another_call_than_two_equal_lists(device):
    module, x = mlp(device), torch.ones(4, 8, device=device)
    call = lambda a, b: module(a[0]) * (2 if a is b else 1)  # noqa: E731
    wrapper, one = CUDAGraphModule(call, config()), [x]
    with torch.no_grad():
        for step in range(12):
            other = one if step % 6 >= 3 else [x]
            assert torch.equal(wrapper(one, other), call(one, other))


def test_a_method_counts_by_its_function_and_object(device):
    class Scale:
        def __init__(self, by):
            self.by = by

        def scaled(self, x):
            return x * self.by

    one, x = Scale(2.0), torch.ones(4, device=device)
    wrapper = CUDAGraphModule(lambda x, scaled: scaled(x), config())
    for _ in range(8):
        assert wrapper(x, one.scaled).tolist() == [2.0] * 4
    assert wrapper.stats.captures == 1 and wrapper.stats.replays > 4
    assert wrapper(x, Scale(3.0).scaled).tolist() == [3.0] * 4


def test_numpy_values_count_by_their_content(device):
    module, x = mlp(device), torch.ones(4, 8, device=device)
    weights = np.ones(2)
    call = lambda x, w, s: module(x) * float(w[1]) * float(s)  # noqa: E731
    wrapper = CUDAGraphModule(call, config())
    with torch.no_grad():
        for step in range(CALLS):
            weights[1] = step // 5
            assert torch.equal(wrapper(x, weights, np.float32(2)), call(x, weights, np.float32(2)))
    assert wrapper.stats.captures == 2


def test_an_object_that_is_another_in_each_call_is_told_of(device, caplog):
    class Batch:
        def __init__(self, x):
            self.x = x

    graphed = CUDAGraphModule(lambda batch, scale: batch.x * scale, config())
    for index in range(40):
        batch = Batch(torch.full((2, 2), float(index), device=device))
        assert torch.equal(graphed(batch, 2.0), batch.x * 2.0)
    assert not graphed.stats.captures and "'batch' is another Batch in each call" in graphed.last_failure
    assert caplog.text.count("another Batch in each call") == 1
    for _ in range(8):  # one that stays is captured all the same
        batch.x = batch.x + 1
        assert torch.equal(graphed(batch, 2.0), batch.x * 2.0)
    for _ in range(8):
        batch.x.add_(1)
        assert torch.equal(graphed(batch, 2.0), batch.x * 2.0)
    assert graphed.stats.replays


def test_an_object_that_stays_is_no_stranger_in_many_shapes(device):
    graphed = CUDAGraphModule(lambda x, kept: x * 2 if kept is not None else x, config())
    kept = object()
    for size in range(1, 24):
        graphed(torch.ones(size, device=device), kept)
    assert not graphed.last_failure
    for _ in range(4):
        graphed(torch.ones(30, device=device), kept)
    assert graphed.stats.replays


@pytest.mark.parametrize("kind", [Batch, Loose, Sealed])
def test_a_registered_pytree_is_an_argument_and_a_result_unless_more_than_its_parts_counts(kind, device):
    def run(batch):
        return kind({"sum": batch["a"] + batch["b"] * batch.size}, batch.size + 1)

    graphed = CUDAGraphModule(run, config())
    for call in range(CALLS):
        a, b = (torch.randn(3, generator=torch.Generator().manual_seed(2 * call + k)).to(device) for k in range(2))
        batch = kind({"a": a, "b": b}, 2 + call // 5)
        expected, result = run(batch), graphed(batch)
        assert type(result) is kind and result.size == expected.size
        assert torch.equal(result["sum"], expected["sum"])
    assert graphed.stats.captures == (0 if kind is Sealed else 2), graphed.last_failure


def test_a_registered_pytree_with_something_beside_its_parts_counts_as_it_is(device):
    graphed = CUDAGraphModule(lambda batch: batch["a"] * batch.scale, config())
    for call in range(CALLS):
        batch = Loose({"a": torch.full((3,), float(call), device=device)}, 2)
        batch.scale = 1.0 if call < CALLS - 3 else 2.0
        assert torch.equal(graphed(batch), batch["a"] * batch.scale)
    assert not graphed.stats.replays
