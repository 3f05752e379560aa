"""Pieces of programs: what changes, where it lives, and how code gets to it. `staleness` puts programs together."""

from typing import NamedTuple


class Value(NamedTuple):
    """What changes.

    Attributes:
        first: makes what is there at first.
        change: makes what takes its place; or, where it is a statement, changes `v` itself.
        back: likewise, to what was there at first.
        use: makes a tensor of the tensor `h` and the value `v`.
    """

    first: str
    change: str
    back: str
    use: str

    @property
    def exchanged(self) -> bool:
        return not self.change.startswith("!")


class Home(NamedTuple):
    """Where a value lives.

    Attributes:
        read: gets at it, in a method of the module `self`.
        write: puts NEW there from outside, given the module `net`.
        init: lines of the module's `__init__`; FIRST stands for the value.
        before, after: lines of the program before and after the class.
        body: lines in the class.
        find: gets at it from outside; `read` with `net` for `self` where empty.
        given: what is passed to each call besides the tensor.
    """

    read: str
    write: str
    init: str = ""
    before: str = ""
    after: str = ""
    body: str = ""
    find: str = ""
    given: str = ""


def exchange(first: str, other: str, use: str) -> Value:
    return Value(first, other, first, use)


def mutate(first: str, change: str, back: str, use: str) -> Value:
    return Value(first, "!" + change, "!" + back, use)


PRELUDE = """
import array, asyncio, collections, contextlib, contextvars, dataclasses, datetime, decimal, enum, fractions, functools
import itertools, math, operator, os, sys, threading, types, weakref
import numpy as np
import torch
from collections import deque
from functools import partial
from pathlib import Path
from typing import NamedTuple
from torch import nn

class Color(enum.Enum):
    RED = 2.0
    BLUE = 3.0

class Point(NamedTuple):
    x: float
    y: float

@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    inner: object = None

@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0

class Holder:
    pass

class Slotted:
    __slots__ = ("value", "scale")
    def __init__(self, scale=None):
        self.scale = scale

class Lazy:
    def __init__(self, scale):
        self._scale = scale
    @property
    def scale(self):
        return self._scale

class Odd:
    def __init__(self, **values):
        self.__dict__["kept"] = values
    def __getattr__(self, name):
        try:
            return self.__dict__["kept"][name]
        except KeyError:
            raise AttributeError(name) from None

class Always:
    def __getattribute__(self, name):
        return object.__getattribute__(self, "_" + name)

class Kept:
    def __set_name__(self, owner, name):
        self.name = "_kept_" + name
    def __get__(self, owner, kind):
        return self if owner is None else owner.__dict__[self.name]

class Bag:
    def __init__(self, *items):
        self._items = list(items)
    def __getitem__(self, index):
        return self._items[index]
    def __len__(self):
        return len(self._items)
    def __iter__(self):
        return iter(self._items)
    def __contains__(self, item):
        return item in self._items

class Doubler:
    times = 2.0
    def __init__(self, factor=1.0):
        self.factor = factor
    def apply(self, h):
        return h * self.factor * self.times
    def __call__(self, h):
        return self.apply(h)

class Tripler(Doubler):
    times = 3.0

class Scale(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by
    def forward(self, h):
        return h * self.by

class Unscale(Scale):
    def forward(self, h):
        return h / self.by

def same(one):
    return one

def double(h):
    return h * 2

def triple(h):
    return h * 3

def scale(h, by=2.0):
    return h * by

def made(by):
    def scaled(h):
        return h * by
    return scaled

def set_cell(function, by):
    function.__closure__[0].cell_contents = by

def fresh():
    def scaled(h, by=2.0):
        return h * by * getattr(scaled, "tag", 1.0)
    return scaled

def linear(seed=0):
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    layer = nn.Linear(4, 4)
    torch.set_rng_state(state)
    return layer.to(DEVICE)

def full(value, *shape):
    return torch.full(shape or (4,), value, device=DEVICE)

def square():
    return torch.arange(16.0, device=DEVICE).view(4, 4) / 16

def rotate(tensor):
    tensor.data = tensor.data.t()

def twice(module, args, output):
    return output * 2

def through(parts, h):
    for part in parts:
        h = part(h)
    return h

def drive(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value

def decorated(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

@contextlib.contextmanager
def lent(value):
    yield value

def optimizer():
    return torch.optim.SGD([nn.Parameter(full(1.0))], lr=0.5, momentum=0.0)

def schedule():
    return torch.optim.lr_scheduler.LambdaLR(optimizer(), lambda epoch: 1.0 / (1 + epoch))

THINGS = [Settings(2.0), Settings(3.0)]
CONTEXT = contextvars.ContextVar("context", default=2.0)
"""

VALUES = {
    "int": exchange("2", "3", "h * v"),
    "float": exchange("0.5", "0.25", "h * v"),
    "minus zero": exchange("0.0", "-0.0", "h * math.copysign(1.0, v)"),
    "nan": exchange("math.nan", "1.0", "h if v != v else h * 2"),
    "bool": exchange("True", "False", "h * 2 if v else h"),
    "int of another type": exchange("1", "True", "h * (2 if type(v) is int else 3)"),
    "str": exchange("'relu'", "'tanh'", "getattr(torch, v)(h)"),
    "text of a number": exchange("'2.0'", "'3.0'", "h * float(f'{v}')"),
    "bytes": exchange("b'a'", "b'abc'", "h * len(v)"),
    "none": exchange("None", "2.0", "h if v is None else h * v"),
    "complex": exchange("1+2j", "1+3j", "h * v.imag"),
    "tuple": exchange("(1, 2.0)", "(1, 3.0)", "h * v[1]"),
    "tuple of lists": mutate("([1.0], [2.0])", "v[1].append(2.0)", "v[1].pop()", "h * sum(v[1])"),
    "list": exchange("[1.0, 2.0]", "[1.0, 3.0]", "h * v[1]"),
    "list append": mutate("[1.0]", "v.append(2.0)", "v.pop()", "h * sum(v)"),
    "list append, length": mutate("[1.0]", "v.append(2.0)", "v.pop()", "h * len(v)"),
    "list append, last": mutate("[1.0]", "v.append(2.0)", "v.pop()", "h * v[-1]"),
    "list append, truth": mutate("[]", "v.append(2.0)", "v.pop()", "h * 2 if v else h"),
    "list append, slice": mutate("[1.0, 2.0]", "v.append(2.0)", "v.pop()", "h * sum(v[1:])"),
    "list append, in": mutate("[1.0]", "v.append(2.0)", "v.pop()", "h * 2 if 2.0 in v else h"),
    "list append, star": mutate("[1.0]", "v.append(2.0)", "v.pop()", "h * max(0.5, *v)"),
    "list append, sorted": mutate("[1.0]", "v.append(2.0)", "v.pop()", "h * sorted(v)[-1]"),
    "list append, reversed": mutate("[1.0]", "v.append(2.0)", "v.pop()", "h * [*reversed(v)][0]"),
    "list append, index": mutate("[1.0]", "v.insert(0, 2.0)", "v.pop(0)", "h * (v.index(1.0) + 1)"),
    "list append, islice": mutate("[1.0]", "v.insert(0, 2.0)", "v.pop(0)", "h * next(itertools.islice(v, 1))"),
    "list append, unpacked": mutate("[1.0, 3.0]", "v[0] = 2.0", "v[0] = 1.0", "(lambda a, b: h * a)(*v)"),
    "list append, compared": mutate("[1.0]", "v.append(2.0)", "v.pop()", "h * 2 if v == [1.0] else h"),
    "list append, joined": mutate("['1']", "v.append('2')", "v.pop()", "h * float('.'.join(v))"),
    "list item": mutate("[1.0, 2.0]", "v[1] = 3.0", "v[1] = 2.0", "h * v[1]"),
    "nested list": mutate("[[1.0, 2.0]]", "v[0][1] = 3.0", "v[0][1] = 2.0", "h * sum(map(sum, v))"),
    "list of objects": mutate(
        "[Settings(1.0), Settings(2.0)]", "v[1].scale = 3.0", "v[1].scale = 2.0", "h * sum(s.scale for s in v)"
    ),
    "list of objects, map": mutate(
        "[Settings(1.0), Settings(2.0)]",
        "v[1].scale = 3.0",
        "v[1].scale = 2.0",
        "h * sum(map(operator.attrgetter('scale'), v))",
    ),
    "list of objects, max": mutate(
        "[Settings(1.0), Settings(2.0)]",
        "v[1].scale = 3.0",
        "v[1].scale = 2.0",
        "h * max(v, key=lambda s: s.scale).scale",
    ),
    "list of dicts": mutate("[{'a': 1.0}]", "v[0]['a'] = 2.0", "v[0]['a'] = 1.0", "h * sum(d['a'] for d in v)"),
    "list of objects, next": mutate(
        "[Settings(2.0)]", "v[0].scale = 3.0", "v[0].scale = 2.0", "h * next(iter(v)).scale"
    ),
    "dict of objects": mutate(
        "{'a': Settings(2.0)}", "v['a'].scale = 3.0", "v['a'].scale = 2.0", "h * sum(s.scale for s in v.values())"
    ),
    "list of functions": mutate("[double, triple]", "v.reverse()", "v.reverse()", "v[0](h)"),
    "dict item": mutate("{'a': 2.0}", "v['a'] = 3.0", "v['a'] = 2.0", "h * v['a']"),
    "dict values": mutate("{'a': 2.0}", "v['a'] = 3.0", "v['a'] = 2.0", "h * sum(v.values())"),
    "dict items": mutate("{'a': 2.0}", "v['a'] = 3.0", "v['a'] = 2.0", "h * sum(b for a, b in v.items())"),
    "dict keys": mutate("{2.0: 1}", "v[3.0] = 1", "del v[3.0]", "h * sum(v)"),
    "dict passed on": mutate("{'by': 2.0}", "v['by'] = 3.0", "v['by'] = 2.0", "scale(h, **v)"),
    "dict merged": mutate("{'by': 2.0}", "v['by'] = 3.0", "v['by'] = 2.0", "h * {**v, 'a': 1}['by']"),
    "dict or": mutate("{'by': 2.0}", "v['by'] = 3.0", "v['by'] = 2.0", "h * (v | {'a': 1})['by']"),
    "dict setdefault": mutate("{'a': 2.0}", "v['a'] = 3.0", "v['a'] = 2.0", "h * v.setdefault('a', 1.0)"),
    "dict new key": mutate("{'a': 2.0}", "v['b'] = 3.0", "del v['b']", "h * v.get('b', 1.0)"),
    "dict deleted key": mutate("{'a': 2.0}", "del v['a']", "v['a'] = 2.0", "h * 2 if 'a' in v else h"),
    "dict of many": mutate("{i: float(i) for i in range(100)}", "v[70] = 5.0", "v[70] = 70.0", "h * v[70]"),
    "dict of many, summed": mutate(
        "{i: float(i) for i in range(100)}", "v[70] = 5.0", "v[70] = 70.0", "h * sum(v.values())"
    ),
    "dict order": mutate(
        "{'a': 1.0, 'b': 2.0}", "v['a'] = v.pop('a')", "v['b'] = v.pop('b')", "h * next(iter(v.values()))"
    ),
    "dict match": mutate(
        "{'a': 2.0}", "v['a'] = 3.0", "v['a'] = 2.0", "(lambda a: h * a)(*[b for b in v.values() if b])"
    ),
    "defaultdict": mutate(
        "collections.defaultdict(float, a=2.0)", "v['a'] = 3.0", "v['a'] = 2.0", "h * v['a']"
    ),
    "ordered dict": mutate("collections.OrderedDict(a=2.0)", "v['a'] = 3.0", "v['a'] = 2.0", "h * v['a']"),
    "chain map": mutate("collections.ChainMap({}, {'a': 2.0})", "v['a'] = 3.0", "v['a'] = 2.0", "h * v['a']"),
    "user dict": mutate("collections.UserDict(a=2.0)", "v['a'] = 3.0", "v['a'] = 2.0", "h * v['a']"),
    "counter": mutate("collections.Counter('ab')", "v['a'] += 1", "v['a'] -= 1", "h * v['a']"),
    "counter, most common": mutate(
        "collections.Counter('ab')", "v['a'] += 1", "v['a'] -= 1", "h * v.most_common(1)[0][1]"
    ),
    "mapping proxy": exchange(
        "types.MappingProxyType({'a': 2.0})", "types.MappingProxyType({'a': 3.0})", "h * v['a']"
    ),
    "set": mutate("{1.0}", "v.add(2.0)", "v.discard(2.0)", "h * sum(sorted(v))"),
    "set, in": mutate("{1.0}", "v.add(2.0)", "v.discard(2.0)", "h * 2 if 2.0 in v else h"),
    "set of texts": mutate("{'a', 'b'}", "v.add('c')", "v.discard('c')", "h * len(v)"),
    "frozenset": exchange("frozenset({1})", "frozenset({1, 2})", "h * len(v)"),
    "deque": mutate("deque([1.0], maxlen=3)", "v.append(2.0)", "v.pop()", "h * v[-1]"),
    "array": mutate("array.array('d', [1.0])", "v[0] = 2.0", "v[0] = 1.0", "h * v[0]"),
    "bytearray": mutate("bytearray(b'ab')", "v[0] = 3", "v[0] = 97", "h * v[0]"),
    "numpy item": mutate("np.ones(3)", "v[1] = 3.0", "v[1] = 1.0", "h * float(v[1])"),
    "numpy sum": mutate("np.ones(3)", "v[1] = 3.0", "v[1] = 1.0", "h * float(v.sum())"),
    "numpy as tensor": mutate("np.ones(4, np.float32)", "v[1] = 3.0", "v[1] = 1.0", "h * float(np.dot(v, v))"),
    "numpy shape": exchange("np.ones(3)", "np.ones(4)", "h * v.shape[0]"),
    "numpy scalar": exchange("np.float64(2)", "np.float64(3)", "h * float(v)"),
    "numpy dtype": exchange("np.dtype('f4')", "np.dtype('f8')", "h * v.itemsize"),
    "enum": exchange("Color.RED", "Color.BLUE", "h * v.value"),
    "enum, is": exchange("Color.RED", "Color.BLUE", "h * 2 if v is Color.RED else h"),
    "function": exchange("double", "triple", "v(h)"),
    "bound method": exchange("Doubler(2.0).apply", "Doubler(3.0).apply", "v(h)"),
    "object of a bound method": mutate(
        "Doubler(2.0).apply", "v.__self__.factor = 3.0", "v.__self__.factor = 2.0", "v(h)"
    ),
    "lambda": exchange("lambda h: h * 2", "lambda h: h * 3", "v(h)"),
    "closure": exchange("made(2.0)", "made(3.0)", "v(h)"),
    "cell of a closure": mutate("made(2.0)", "set_cell(v, 3.0)", "set_cell(v, 2.0)", "v(h)"),
    "function's default": mutate("fresh()", "v.__defaults__ = (3.0,)", "v.__defaults__ = (2.0,)", "v(h)"),
    "function's code": mutate(
        "eval('lambda h: h * 2')",
        "v.__code__ = triple.__code__",
        "v.__code__ = double.__code__",
        "v(h)",
    ),
    "function's attribute": mutate("fresh()", "v.tag = 3.0", "del v.tag", "v(h)"),
    "partial": exchange("partial(scale, by=2.0)", "partial(scale, by=3.0)", "v(h)"),
    "partial's keyword": mutate("partial(scale, by=2.0)", "v.keywords['by'] = 3.0", "v.keywords['by'] = 2.0", "v(h)"),
    "partial of a method": mutate(
        "partial(Doubler(2.0).apply)", "v.func.__self__.factor = 3.0", "v.func.__self__.factor = 2.0", "v(h)"
    ),
    "class": exchange("Doubler", "Tripler", "v(2.0).apply(h)"),
    "class's attribute": mutate(
        "type('Own', (Doubler,), {'times': 2.0})", "v.times = 3.0", "v.times = 2.0", "v(2.0).apply(h)"
    ),
    "class's method": mutate(
        "type('Own', (Doubler,), {'apply': Doubler.apply})()",
        "type(v).apply = triple.__get__(0).__func__ and (lambda s, h: h * 5)",
        "type(v).apply = Doubler.apply",
        "v.apply(h)",
    ),
    "callable object": mutate("Doubler(2.0)", "v.factor = 3.0", "v.factor = 2.0", "v(h)"),
    "class assigned": mutate("Doubler(2.0)", "v.__class__ = Tripler", "v.__class__ = Doubler", "v.apply(h)"),
    "class asked": mutate(
        "Doubler(2.0)", "v.__class__ = Tripler", "v.__class__ = Doubler", "h * (2 if isinstance(v, Tripler) else 3)"
    ),
    "class of module assigned": mutate("Scale(2.0)", "v.__class__ = Unscale", "v.__class__ = Scale", "v(h)"),
    "module": exchange("linear(0)", "linear(1)", "v(h)"),
    "module's setting": mutate("Scale(2.0)", "v.by = 3.0", "v.by = 2.0", "v(h)"),
    "module appended": mutate("nn.ModuleList([linear(0)])", "v.append(Scale(2.0))", "del v[-1]", "through(v, h)"),
    "module appended to a list": mutate("[linear(0)]", "v.append(Scale(2.0))", "del v[-1]", "through(v, h)"),
    "module in a sequence": mutate(
        "nn.Sequential(linear(0), Scale(2.0))", "v[1] = Scale(3.0)", "v[1] = Scale(2.0)", "v(h)"
    ),
    "module's mode": mutate("nn.Dropout(0.5)", "v.eval()", "v.train()", "v(h)"),
    "module's probability": mutate("nn.Dropout(0.5)", "v.p = 0.25", "v.p = 0.5", "v(h)"),
    "module's forward": mutate("Scale(2.0)", "v.forward = triple", "del v.forward", "v(h)"),
    "module's weight": mutate(
        "linear(0)", "v.weight = nn.Parameter(v.weight.detach() * 2)", "v.weight = nn.Parameter(v.weight.detach() / 2)",
        "v(h)",
    ),
    "module's weight data": mutate(
        "linear(0)", "v.weight.data = v.weight.data * 2", "v.weight.data = v.weight.data / 2", "v(h)"
    ),
    "module's weight in place": mutate("linear(0)", "v.weight.data.mul_(2)", "v.weight.data.div_(2)", "v(h)"),
    "module's bias": mutate("linear(0)", "v.kept = v.bias; v.bias = None", "v.bias = v.kept", "v(h)"),
    "hook": mutate("linear(0)", "v.handle = v.register_forward_hook(twice)", "v.handle.remove()", "v(h)"),
    "frozen": mutate("linear(0)", "v.requires_grad_(False)", "v.requires_grad_(True)", "v(h)"),
    "parameter": exchange("nn.Parameter(full(2.0))", "nn.Parameter(full(3.0))", "h * v"),
    "tensor": exchange("full(2.0)", "full(3.0)", "h * v"),
    "tensor in place": mutate("full(2.0)", "v.mul_(2)", "v.div_(2)", "h * v"),
    "tensor transposed": mutate("square()", "v.t_()", "v.t_()", "h @ v"),
    "tensor's data transposed": mutate("square()", "rotate(v)", "rotate(v)", "h @ v"),
    "tensor resized": mutate(
        "full(1.0, 2, 4)", "v.resize_(1, 4).fill_(1.0)", "v.resize_(2, 4).fill_(1.0)", "h * v.sum()"
    ),
    "tensor's data": mutate("full(2.0)", "v.data = full(3.0)", "v.data = full(2.0)", "h * v"),
    "tensor's attribute": mutate("full(2.0)", "v.tag = 3.0", "del v.tag", "h * getattr(v, 'tag', 1.0)"),
    "list of tensors": mutate("[full(2.0)]", "v.append(full(3.0))", "v.pop()", "h * sum(v)"),
    "dict of tensors": mutate("{'a': full(2.0)}", "v['a'] = full(3.0)", "v['a'] = full(2.0)", "h * v['a']"),
    "list as an index": mutate("[0, 1]", "v[0] = 1", "v[0] = 0", "h * torch.tensor([2.0, 3.0])[v].sum().item()"),
    "numpy item, large": mutate("np.ones(200_000)", "v[1] = 3.0", "v[1] = 1.0", "h * float(v[1])"),
    "items of fresh lists": mutate(
        "[Settings(1.0), Settings(2.0)]",
        "v[1].scale = 3.0",
        "v[1].scale = 2.0",
        "h * (list(v)[1].scale + [*v][1].scale + sorted(v, key=lambda s: -s.scale)[0].scale + tuple(v)[::-1][0].scale)",
    ),
    "absent in a module": mutate(
        "Scale(2.0)", "v.more = Scale(3.0)", "del v.more", "v(h) if getattr(v, 'more', None) is None else v.more(h)"
    ),
    "absent parameter": mutate(
        "Scale(2.0)", "v.more = nn.Parameter(full(3.0))", "del v.more", "h * v.more if hasattr(v, 'more') else v(h)"
    ),
    "absent buffer": mutate(
        "Scale(2.0)", "v.register_buffer('more', full(3.0))", "del v.more", "h * sum(b.sum() for b in v.buffers())"
    ),
    "walked, without parameters": mutate(
        "Scale(2.0)", "v.more = nn.Parameter(full(3.0))", "del v.more", "h * sum(p.sum() for p in v.parameters())"
    ),
    "walked, without modules": mutate(
        "Scale(2.0)", "v.more = Scale(3.0)", "del v.more", "h * sum(m.by for m in v.modules())"
    ),
    "target of a weak dict": mutate(
        "weakref.WeakValueDictionary(a=THINGS[0])", "v['b'] = THINGS[1]", "del v['b']", "h * len(v)"
    ),
    "shape in a fresh list": mutate("[full(2.0)]", "v[0] = full(3.0)", "v[0] = full(2.0)", "h * list(v)[0].sum()"),
    "dtype": exchange("torch.float32", "torch.bfloat16", "h.to(v).float()"),
    "shape": exchange("torch.Size((1, 4))", "torch.Size((4,))", "h * len(v)"),
    "generator": exchange(
        "torch.Generator(DEVICE).manual_seed(1)",
        "torch.Generator(DEVICE).manual_seed(2)",
        "h + torch.rand(h.shape, generator=v, device=h.device)",
    ),
    "dataclass": mutate("Settings(2.0)", "v.scale = 3.0", "v.scale = 2.0", "h * v.scale"),
    "dataclass in a dataclass": mutate(
        "Settings(2.0, Settings(2.0))", "v.inner.scale = 3.0", "v.inner.scale = 2.0", "h * v.inner.scale"
    ),
    "equal dataclass": exchange("Settings(2.0)", "Settings(2.0)", "h * v.scale"),
    "other dataclass": exchange("Settings(2.0)", "Settings(3.0)", "h * v.scale"),
    "dataclasses compared": exchange("Settings(2.0)", "Settings(3.0)", "h * 2 if v == Settings(2.0) else h"),
    "dataclass compared": mutate(
        "Settings(2.0)", "v.scale = 3.0", "v.scale = 2.0", "h * 2 if v == THINGS[0] else h"
    ),
    "dataclass as dict": mutate(
        "Settings(2.0)", "v.scale = 3.0", "v.scale = 2.0", "h * dataclasses.asdict(v)['scale']"
    ),
    "dataclass as text": mutate("Settings(2.0)", "v.scale = 33.0", "v.scale = 2.0", "h * len(repr(v))"),
    "dataclass, vars": mutate("Settings(2.0)", "v.scale = 3.0", "v.scale = 2.0", "h * vars(v)['scale']"),
    "frozen dataclass": exchange("Frozen(2.0)", "Frozen(3.0)", "h * v.scale"),
    "named tuple": exchange("Point(1.0, 2.0)", "Point(1.0, 3.0)", "h * v.y"),
    "namespace": mutate("types.SimpleNamespace(scale=2.0)", "v.scale = 3.0", "v.scale = 2.0", "h * v.scale"),
    "slots": mutate("Slotted(2.0)", "v.scale = 3.0", "v.scale = 2.0", "h * v.scale"),
    "property": mutate("Lazy(2.0)", "v._scale = 3.0", "v._scale = 2.0", "h * v.scale"),
    "getattr": mutate("Odd(scale=2.0)", "v.kept['scale'] = 3.0", "v.kept['scale'] = 2.0", "h * v.scale"),
    "own container": mutate("Bag(2.0)", "v._items[0] = 3.0", "v._items[0] = 2.0", "h * v[0]"),
    "own container, length": mutate("Bag(2.0)", "v._items.append(3.0)", "v._items.pop()", "h * len(v)"),
    "own container, loop": mutate("Bag(2.0)", "v._items.append(3.0)", "v._items.pop()", "h * sum(v)"),
    "own container, in": mutate("Bag(2.0)", "v._items.append(3.0)", "v._items.pop()", "h * 2 if 3.0 in v else h"),
    "weak reference": exchange("weakref.ref(THINGS[0])", "weakref.ref(THINGS[1])", "h * v().scale"),
    "target of a weak reference": mutate(
        "weakref.ref(THINGS[0])", "v().scale = 3.0", "v().scale = 2.0", "h * v().scale"
    ),
    "weak proxy": mutate("weakref.proxy(THINGS[0])", "v.scale = 3.0", "v.scale = 2.0", "h * v.scale"),
    "context variable": mutate("CONTEXT", "v.set(3.0)", "v.set(2.0)", "h * v.get()"),
    "date": exchange("datetime.date(2000, 1, 2)", "datetime.date(2000, 1, 3)", "h * v.day"),
    "decimal": exchange("decimal.Decimal(2)", "decimal.Decimal(3)", "h * float(v)"),
    "fraction": exchange("fractions.Fraction(1, 2)", "fractions.Fraction(1, 3)", "h * float(v)"),
    "path": exchange("Path('a')", "Path('abc')", "h * len(v.name)"),
    "range": exchange("range(2)", "range(3)", "h * sum(v)"),
    "slice": exchange("slice(1)", "slice(2)", "h * [1, 2, 3][v][-1]"),
    "rate of an optimizer": mutate(
        "optimizer()", "v.param_groups[0]['lr'] = 0.25", "v.param_groups[0]['lr'] = 0.5",
        "h * v.param_groups[0]['lr']",
    ),
    "groups of an optimizer": mutate(
        "optimizer()", "v.param_groups[0]['lr'] = 0.25", "v.param_groups[0]['lr'] = 0.5",
        "h * sum(group['lr'] for group in v.param_groups)",
    ),
    "scheduler": mutate("schedule()", "v.last_epoch = 3", "v.last_epoch = 0", "h * v.get_lr()[0]"),
    "scaler": mutate(
        "torch.amp.GradScaler('cpu', enabled=True)", "v._enabled = False", "v._enabled = True",
        "h * 2 if v.is_enabled() else h",
    ),
}  # fmt: skip

PLAIN = ["float", "list append", "dataclass", "function", "dict item", "int", "bool"]
"""Values for the cells that are about something else."""

HOMES = {
    "attribute": Home("self.value", "net.value = NEW", "self.value = FIRST"),
    "helper": Home("self.helper.value", "net.helper.value = NEW", "self.helper = Holder(); self.helper.value = FIRST"),
    "chain": Home(
        "self.one.two.value",
        "net.one.two.value = NEW",
        "self.one = Holder(); self.one.two = Holder(); self.one.two.value = FIRST",
    ),
    "class": Home("self.value", "Net.value = NEW", body="value = FIRST", find="Net.value"),
    "type(self)": Home("type(self).value", "Net.value = NEW", body="value = FIRST", find="Net.value"),
    "base class": Home("self.value", "Base.value = NEW", after="Base.value = FIRST", find="Base.value"),
    "class of a helper": Home(
        "self.helper.value", "Holder.value = NEW", "self.helper = Holder(); Holder.value = FIRST"
    ),
    "class of settings": Home("Config.value", "Config.value = NEW", before="class Config:\n    value = FIRST"),
    "slots": Home("self.helper.value", "net.helper.value = NEW", "self.helper = Slotted(); self.helper.value = FIRST"),
    "property": Home(
        "self.value",
        "net.__dict__['_value'] = NEW",
        "self.__dict__['_value'] = FIRST",
        body="@property\n    def value(self):\n        return self.__dict__['_value']",
    ),
    "property of a helper": Home("self.helper.scale", "net.helper._scale = NEW", "self.helper = Lazy(FIRST)"),
    "cached property": Home(
        "self.helper.value",
        "net.helper.__dict__['value'] = NEW",
        "self.helper = Cached()",
        before="class Cached:\n    @functools.cached_property\n    def value(self):\n        return FIRST",
    ),
    "getattr": Home("self.odd.value", "net.odd.kept['value'] = NEW", "self.odd = Odd(value=FIRST)"),
    "getattribute": Home(
        "self.odd.value",
        "object.__setattr__(net.odd, '_value', NEW)",
        "self.odd = Always(); object.__setattr__(self.odd, '_value', FIRST)",
    ),
    "descriptor": Home(
        "self.helper.value",
        "net.helper.__dict__['_kept_value'] = NEW",
        "self.helper = Described(); self.helper.__dict__['_kept_value'] = FIRST",
        before="class Described:\n    value = Kept()",
    ),
    "global": Home("VALUE", "ns['VALUE'] = NEW", before="VALUE = FIRST", find="ns['VALUE']"),
    "global dict": Home("TABLE['value']", "TABLE['value'] = NEW", before="TABLE = {'value': FIRST}"),
    "global object": Home("OBJECT.value", "OBJECT.value = NEW", before="OBJECT = Holder(); OBJECT.value = FIRST"),
    "globals()": Home("globals()['VALUE']", "ns['VALUE'] = NEW", before="VALUE = FIRST", find="ns['VALUE']"),
    "imported module": Home(
        "settings.value",
        "settings.value = NEW",
        before="settings = types.ModuleType('settings'); settings.value = FIRST",
    ),
    "import inside": Home(
        "__import__('own_settings').value",
        "sys.modules['own_settings'].value = NEW",
        before="sys.modules['own_settings'] = types.ModuleType('own_settings')\n"
        "sys.modules['own_settings'].value = FIRST",
    ),
    "sys.modules": Home(
        "sys.modules['own_settings'].value",
        "sys.modules['own_settings'].value = NEW",
        before="sys.modules['own_settings'] = types.ModuleType('own_settings')\n"
        "sys.modules['own_settings'].value = FIRST",
    ),
    "closure": Home(
        "self.fetched()",
        "SETTER(NEW)",
        "self.fetched = GETTER",
        before="def shared():\n    value = FIRST\n    def fetch():\n        return value\n    def put(new):\n"
        "        nonlocal value\n        value = new\n    return fetch, put\nGETTER, SETTER = shared()",
        find="GETTER()",
    ),
    "default argument": Home(
        "by_default()",
        "by_default.__defaults__ = (NEW,)",
        before="def by_default(value=FIRST):\n    return value",
        find="by_default()",
    ),
    "default keyword": Home(
        "by_default()",
        "by_default.__kwdefaults__ = {'value': NEW}",
        before="def by_default(*, value=FIRST):\n    return value",
        find="by_default()",
    ),
    "default of a method": Home(
        "self.by_default()",
        "Net.by_default.__defaults__ = (NEW,)",
        body="def by_default(self, value=FIRST):\n        return value",
    ),
    "attribute of a function": Home("scale.value", "scale.value = NEW", before="scale.value = FIRST"),
    "attribute of a method": Home("self.forward.value", "Net.forward.value = NEW", after="Net.forward.value = FIRST"),
    "item of a list": Home("self.items[1]", "net.items[1] = NEW", "self.items = [0, FIRST]"),
    "last item of a list": Home("self.items[-1]", "net.items[-1] = NEW", "self.items = [0, FIRST]"),
    "item of a dict": Home("self.table['value']", "net.table['value'] = NEW", "self.table = {'value': FIRST}"),
    "item by a computed key": Home(
        "self.table['_'.join(['the', 'value'])]",
        "net.table['the_value'] = NEW",
        "self.table = {'the_value': FIRST, 'a': 0}",
    ),
    "item by get": Home("self.table.get('value')", "net.table['value'] = NEW", "self.table = {'value': FIRST}"),
    "item of an item": Home(
        "self.table['a'][0]['b']", "net.table['a'][0]['b'] = NEW", "self.table = {'a': [{'b': FIRST}]}"
    ),
    "item of a deque": Home("self.items[0]", "net.items[0] = NEW", "self.items = deque([FIRST])"),
    "item of an own container": Home("self.bag[0]", "net.bag._items[0] = NEW", "self.bag = Bag(FIRST)"),
    "item of a weak dict": Home(
        "self.weak[self]", "net.weak[net] = NEW", "self.weak = weakref.WeakKeyDictionary(); self.weak[self] = FIRST"
    ),
    "argument dict": Home("given['value']", "GIVEN['value'] = NEW", before="GIVEN = {'value': FIRST}", given="GIVEN"),
    "argument object": Home(
        "given.value", "GIVEN.value = NEW", before="GIVEN = Holder(); GIVEN.value = FIRST", given="GIVEN"
    ),
    "argument list": Home("given[0]", "GIVEN[0] = NEW", before="GIVEN = [FIRST]", given="GIVEN"),
    "context variable": Home(
        "VARIABLE.get()",
        "VARIABLE.set(NEW)",
        before="VARIABLE = contextvars.ContextVar('variable'); VARIABLE.set(FIRST)",
    ),
    "environment": Home(
        "os.environ['OWN_VALUE']", "os.environ['OWN_VALUE'] = NEW", before="os.environ['OWN_VALUE'] = FIRST"
    ),
    "getenv": Home("os.getenv('OWN_VALUE')", "os.environ['OWN_VALUE'] = NEW", before="os.environ['OWN_VALUE'] = FIRST"),
    "super attribute": Home("super(Net, self).kept", "Base.kept = NEW", after="Base.kept = FIRST", find="Base.kept"),
    "thread's": Home("LOCAL.value", "LOCAL.value = NEW", before="LOCAL = threading.local(); LOCAL.value = FIRST"),
    "partial's argument": Home(
        "self.bound()",
        "net.bound = partial(operator.pos.__class__ and give, NEW)",
        "self.bound = partial(give, FIRST)",
        before="def give(value):\n    return value",
    ),
    "vars(self)": Home(
        "vars(self.helper)['value']", "net.helper.value = NEW", "self.helper = Holder(); self.helper.value = FIRST"
    ),
    "__dict__": Home(
        "self.helper.__dict__['value']", "net.helper.value = NEW", "self.helper = Holder(); self.helper.value = FIRST"
    ),
    "submodule": Home(
        "self.part.fetch()",
        "net.part.value = NEW",
        "self.part = Part()",
        before="class Part(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.value = FIRST\n    def fetch(self):\n        return self.value",
    ),
    "container of modules": Home(
        "self.parts[1].value",
        "net.parts[1].value = NEW",
        "self.parts = nn.ModuleList([nn.Identity(), nn.Identity()]); self.parts[1].value = FIRST",
    ),
    "field of a dataclass": Home("self.settings.scale", "net.settings.scale = NEW", "self.settings = Settings(FIRST)"),
    "field of a named tuple": Home("self.point.y", "net.point = Point(0, NEW)", "self.point = Point(0, FIRST)"),
    "namespace": Home("self.space.value", "net.space.value = NEW", "self.space = types.SimpleNamespace(value=FIRST)"),
    "class's dict of instances": Home(
        "Registry.known['a'].value",
        "Registry.known['a'].value = NEW",
        before="class Registry:\n    known = {'a': Holder()}\nRegistry.known['a'].value = FIRST",
    ),
    "classmethod": Home(
        "self.of_class()",
        "Net.kept_value = NEW",
        body="kept_value = FIRST\n    @classmethod\n    def of_class(cls):\n        return cls.kept_value",
    ),
    "staticmethod": Home(
        "self.of_class()",
        "Net.kept_value = NEW",
        body="kept_value = FIRST\n    @staticmethod\n    def of_class():\n        return Net.kept_value",
    ),
    "metaclass": Home(
        "Chosen.value",
        "Meta.value = NEW",
        before="class Meta(type):\n    value = FIRST\nclass Chosen(metaclass=Meta):\n    pass",
    ),
    "group of an optimizer": Home(
        "self.optimizer.param_groups[0]['value']",
        "net.optimizer.param_groups[0]['value'] = NEW",
        "self.optimizer = optimizer(); self.optimizer.param_groups[0]['value'] = FIRST",
    ),
    "state of an optimizer": Home(
        "self.optimizer.state['value']",
        "net.optimizer.state['value'] = NEW",
        "self.optimizer = optimizer(); self.optimizer.state['value'] = FIRST",
    ),
}

FORMS = {
    "inline": "inline READ",
    "inline method": "inline self.fetch()",
    "inline property": "inline self.looked",
    "inline lambda": "inline (lambda: READ)()",
    "inline generator": "inline next(self.generate())",
    "inline or": "inline (x is None or READ)",
    "inline conditional": "inline (READ if x is not None else 0)",
    "inline list": "inline [READ][0]",
    "inline max": "inline max([READ], key=id)",
    "inline next": "inline next(iter([READ]))",
    "inline fresh list": "inline list((READ,))[0]",
    "inline starred list": "inline [*(READ,)][0]",
    "inline sorted": "inline sorted([READ], key=id)[0]",
    "inline reversed": "inline list(reversed((READ,)))[0]",
    "inline filter": "inline list(filter(lambda one: one is not self, [self, READ]))[0]",
    "inline values": "inline list({1: READ}.values())[0]",
    "inline merged": "inline {**{'a': READ}}['a']",
    "inline slice": "inline [self, READ][1:][0]",
    "inline links": "inline same(same(same(same(same(same(same(same(READ))))))))",
    "inline sum of lists": "inline ([self] + [READ])[-1]",
    "inline getattr": "inline getattr(BASE, NAME)",
    "inline item": "inline Caller(self)['a']",
    "conditional base": "v = getattr((BASE if x is not None else None), NAME)",
    "conditional base, inline": "v = (BASE if x is not None else None).__getattribute__(NAME)",
    "next base": "v = getattr(next(iter([BASE])), NAME)",
    "variable": "v = READ",
    "two names": "w = READ\nv = w",
    "unpacked": "v, _ = READ, 1",
    "unpacked late": "pair = (READ, 1)\nv, _ = pair",
    "starred": "v, *_ = [READ, 1]",
    "loop": "for v in [READ]:\n    pass",
    "enumerate": "for _, v in enumerate([READ]):\n    pass",
    "zip": "for v, _ in zip([READ], [1]):\n    pass",
    "map": "(v,) = map(lambda w: w, [READ])",
    "comprehension": "[v] = [w for w in (READ,)]",
    "read in a comprehension": "[v] = [READ for _ in range(1)]",
    "read in a dict comprehension": "v = {i: READ for i in range(1)}[0]",
    "read in a generator": "v = next(READ for _ in range(1))",
    "reduce": "v = functools.reduce(lambda a, b: b, [READ, READ])",
    "walrus": "if (v := READ) is not self:\n    pass",
    "walrus in a comprehension": "_ = [v := READ for _ in range(1)]",
    "match": "match READ:\n    case v:\n        pass",
    "method": "v = self.fetch()",
    "method of a method": "v = self.fetch_fetch()",
    "generator": "v = next(self.generate())",
    "delegated generator": "(v,) = self.delegate()",
    "coroutine": "v = drive(self.later())",
    "args": "v = self.second(*[1, READ])",
    "kwargs": "v = self.named(**{'value': READ})",
    "keyword": "v = self.named(value=READ)",
    "super": "v = self.inherited()",
    "nested function": "def inner():\n    return READ\nv = inner()",
    "nested twice": "def outer():\n    def inner():\n        return READ\n    return inner()\nv = outer()",
    "lambda": "v = (lambda: READ)()",
    "decorated": "v = self.wrapped()",
    "except": "try:\n    raise KeyError\nexcept KeyError:\n    v = READ",
    "finally": "try:\n    pass\nfinally:\n    v = READ",
    "with": "with contextlib.nullcontext():\n    v = READ",
    "context manager": "with lent(READ) as v:\n    pass",
    "conditional": "v = READ if x is not None else 0",
    "or": "v = x is None or READ",
    "and": "v = x is not None and READ",
    "dict display": "v = {'a': READ}['a']",
    "dict call": "v = dict(a=READ)['a']",
    "other name of self": "self = [self][0]\nv = READ",
    "eval": "v = eval(\"READ\")",
    "exec": "space = {**globals(), **locals()}\nexec(\"v = READ\", space)\nv = space['v']",
    "getattr": "v = getattr(BASE, 'val' + str('ue'))",
    "getattr with default": "v = getattr(BASE, NAME, None)",
    "hasattr": "v = getattr(BASE, NAME) if hasattr(BASE, NAME) else 0",
    "attrgetter": "v = operator.attrgetter(NAME)(BASE)",
    "base first": "base = BASE\nv = getattr(base, NAME)",
    "base in a loop": "for base in [BASE]:\n    v = getattr(base, NAME)",
    "base of a call": "v = getattr((lambda: BASE)(), NAME)",
    "map of getattr": "(v,) = map(getattr, [BASE], [NAME])",
    "object.__getattribute__": "v = object.__getattribute__(BASE, NAME)",
    "__getattribute__": "v = BASE.__getattribute__(NAME)",
    "vars": "v = vars(BASE)[NAME]",
    "vars().get": "v = vars(BASE).get(NAME)",
    "items of vars": "v = {a: b for a, b in vars(BASE).items()}[NAME]",
    "cached": "v = READ\nself.memory = None",
    "asyncio": "v = asyncio.new_event_loop().run_until_complete(self.later())",
    "callback": "v = (lambda f: f())(self.fetch)",
    "thread": "box = []\nt = threading.Thread(target=lambda: box.append(READ))\nt.start()\nt.join()\nv = box[0]",
    "partial": "v = partial(lambda a, b: a, READ)(1)",
    "partial of method": "v = partial(self.fetch)()",
    "methodcaller": "v = operator.methodcaller('fetch')(self)",
    "format": "v = READ\nf'{v!r}'",
    "delete": "w = READ\nv = w\ndel w",
    "assert": "assert READ is not self\nv = READ",
    "chained compare": "v = READ if 0 < 1 <= 2 else None",
    "while": "while True:\n    v = READ\n    break",
    "match class": "match BASE:\n    case object(value=v):\n        pass",
    "autograd function": "v = self.fetch()\nh = Same.apply(h)",
    "checkpoint": "h = torch.utils.checkpoint.checkpoint(lambda t: self.used(t), h, use_reentrant=False)\nv = READ",
    "no_grad method": "v = self.without()",
    "object call": "v = Caller(self)()",
    "object iter": "(v,) = Walker(self)",
    "object getitem": "v = Caller(self)['a']",
    "object enter": "with Caller(self) as v:\n    pass",
    "object compare": "v = (Caller(self) == 1)",
    "object contains": "v = READ if 1 in Caller(self) else None",
    "sort key": "v = sorted([0], key=lambda _: 0) and READ",
}  # fmt: skip

BODY = """
    def fetch(self):
        return READ
    @property
    def looked(self):
        return READ
    def fetch_fetch(self):
        return self.fetch()
    def generate(self):
        yield READ
    def delegate(self):
        yield from self.generate()
    async def later(self):
        return READ
    def second(self, *args):
        return args[1]
    def named(self, **kwargs):
        return kwargs['value']
    def inherited(self):
        return super().inherited()
    @decorated
    def wrapped(self):
        return READ
    @torch.no_grad()
    def without(self):
        return READ
    def used(self, h):
        v = READ
        return USE
"""

HELPERS = """
import torch.utils.checkpoint
class Base(nn.Module):
    def inherited(self):
        return READ
class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 1
    @staticmethod
    def backward(ctx, grad):
        return grad * 1
class Caller:
    def __init__(self, owner):
        self.owner = owner
    def __call__(self):
        self = self.owner
        return READ
    def __getitem__(self, _):
        self = self.owner
        return READ
    def __enter__(self):
        self = self.owner
        return READ
    def __exit__(self, *_):
        pass
    def __eq__(self, _):
        self = self.owner
        return READ
    __hash__ = None
    def __contains__(self, _):
        self = self.owner
        return READ is not self
class Walker(Caller):
    def __iter__(self):
        self = self.owner
        yield READ
"""
