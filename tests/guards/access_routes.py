"""How a program of `access_paths` gets at what holds its number, and code that they share."""

PRELUDE = """
import array, bisect, collections, contextlib, contextvars, copy, dataclasses, enum, functools, heapq, itertools, math
import operator, sys, threading, types, weakref
import numpy as np
import torch
from typing import NamedTuple
from torch import nn

ns = globals()

def linear():
    torch.manual_seed(7)
    return nn.Linear(3, 3)

def same(value): return value
def shown(value): return f"{value!r}"
def text(value): return f"{value}"
def formatted(value): return f"{value:x}"
def walk(values):
    for one in values:
        yield one
def delegate(values):
    yield from values
def first_of(*values): return values[0]
def named(a, **others): return a
def of_names(**names): return names["a"]
@functools.lru_cache
def cached(): return o
@contextlib.contextmanager
def lent(value):
    yield value
context, local = contextvars.ContextVar("own"), threading.local()

class Root:
    def reached(self): return self.o
class Holder(Root):
    def __init__(self, o): self.o = o
    def get(self): return self.o
    @property
    def looked(self): return self.o
    @classmethod
    def of_class(cls): return cls.shared
    def reached(self): return super().reached()
    def itself(self): return self
    def __getitem__(self, key): return self.o
    def __iter__(self): return iter([self.o])
    def __call__(self): return self.o
    def __enter__(self): return self.o
    def __exit__(self, *_): pass
class Slotted:
    __slots__ = ("o",)
    def __init__(self, o): self.o = o
@dataclasses.dataclass
class Record:
    o: object
class Pair(NamedTuple):
    one: object
    two: object
"""

EXPRESSIONS = """
o
holder.o
Holder.shared
holder.shared
slotted.o
record.o
space.o
context.get()
local.o
holder.get()
holder.looked
holder.of_class()
holder.reached()
holder.itself().itself().o
holder['k']
holder()
[*holder][0]
next(iter(holder))
holder.__dict__['o']
vars(holder)['o']
getattr(holder, 'o')
getattr(holder, 'o', None)
getattr(holder, 'absent', o)
globals()['o']
operator.attrgetter('o')(holder)
operator.methodcaller('get')(holder)
object.__getattribute__(holder, 'o')
functools.partial(Holder.get, holder)()
functools.partial(getattr, holder)('o')
Holder.get(holder)
type(holder).get(holder)
super(Holder, holder).reached()
with_default()
with_keyword()
closed()
kept_partial()
functools.partial(same, o)()
cached()
copy.copy(holder).o
copy.copy(record).o
dataclasses.replace(record).o
dataclasses.astuple(Record(1)) and o
sys.modules['own_program'].o
items[0]
items[-len(items)]
items[:1][0]
items[::-1][-1]
items[slice(1)][0]
nested[0][0]
list(items)[0]
[*items][0]
tuple(items)[0]
(*items,)[0]
(items + [])[0]
([] + items)[0]
(items * 1)[0]
items.copy()[0]
copy.copy(items)[0]
list(items).pop(0)
items.__getitem__(0)
next(iter(items))
iter(items).__next__()
items.__iter__().__next__()
list(reversed(items))[-1]
sorted(items, key=lambda q: 0)[0]
max(items, key=lambda q: 0)
min(items, key=lambda q: 0)
max((q for q in items), key=lambda q: 0)
list(map(same, items))[0]
[*map(same, items)][0]
next(map(same, items))
list(filter(None, items))[0]
next(filter(lambda q: True, items))
dict(enumerate(items))[0]
list(enumerate(items))[0][1]
next(enumerate(items))[1]
list(zip(items, range(9)))[0][0]
next(zip(items))[0]
dict(zip('ab', items))['a']
[q for q in items][0]
[q for q in items if q is not None][0]
{i: q for i, q in enumerate(items)}[0]
next(q for q in items)
list(q for q in items)[0]
[r for q in nested for r in q][0]
next(walk(items))
list(walk(items))[0]
[*delegate(items)][0]
next(walk(walk(items)))
first_of(*items)
(lambda *q: q)(*items)[0]
first_of(*[*items], *items)
first_of(*walk(items))
functools.reduce(lambda a, b: a, items)
operator.itemgetter(0)(items)
operator.getitem(items, 0)
next(itertools.chain(items))
[*itertools.chain(items, items)][0]
next(itertools.islice(items, 1))
next(itertools.chain.from_iterable(nested))
list(itertools.chain(*nested))[0]
next(itertools.product(items))[0]
next(itertools.cycle(items))
next(itertools.repeat(items[0]))
next(itertools.takewhile(lambda q: True, items))
next(itertools.dropwhile(lambda q: False, items))
next(itertools.groupby(items, lambda q: 0))[1].__next__()
next(itertools.accumulate(items, lambda a, b: a))
next(itertools.starmap(same, pairs[:0] or [(items[0],)]))
next(itertools.compress(items, [1, 1]))
next(itertools.tee(items)[0])
next(itertools.zip_longest(items, [1]))[0]
next(itertools.permutations(items))[0]
heapq.nsmallest(1, items, key=lambda q: 0)[0]
collections.deque(items)[0]
collections.deque(items).popleft()
queue[0]
list(queue)[0]
queue.copy()[0]
[items][0][0]
(items, 1)[0][0]
{'k': items}['k'][0]
[items, items][1][:1][0]
Pair(items[0], 1).one
Pair(*items[:2]).one
Pair._make(items[:2]).one
types.SimpleNamespace(k=items[0]).k
Record(items[0]).o
Holder(items[0]).get()
Slotted(items[0]).o
several[0]
several[:1][0]
list(several)[0]
[*several, 1][0]
next(iter(several))
(several + ())[0]
list(dict([(o, 1)]).keys())[0]
pairs[0][0]
list(zip(*pairs))[0][0]
[q for q, _ in pairs][0]
next(iter({o}))
[*{o}][0]
{o}.pop()
list(frozenset([o]))[0]
sorted({o, 1}, key=lambda q: q == 1)[0]
weakref.ref(o)()
weakref.WeakValueDictionary({'a': o})['a']
list(weakref.WeakSet([o]))[0]
table['a']
table.get('a')
table.setdefault('a', None)
table.__getitem__('a')
table.copy()['a']
dict(table)['a']
dict(table).pop('a')
{**table}['a']
{**table, 'c': 1}.get('a')
(table | {})['a']
({} | table)['a']
list(table.values())[0]
[*table.values()][0]
tuple(table.values())[0]
next(iter(table.values()))
list(table.items())[0][1]
next(iter(table.items()))[1]
table[next(iter(table))]
sorted(table.items(), key=lambda q: q[0])[0][1]
sorted(table.values(), key=lambda q: 0)[0]
max(table.values(), key=lambda q: 0)
list(reversed(table.values()))[-1]
[table[k] for k in sorted(table)][0]
{k: q for k, q in table.items()}['a']
dict(sorted(table.items(), key=lambda q: q[0]))['a']
dict(**table)['a']
list(dict(a=o).values())[0]
dict.fromkeys('a', o)['a']
of_names(**table)
(lambda **k: k)(**table)['a']
operator.itemgetter('a')(table)
operator.itemgetter('a', 'b')(table)[0]
ordered['a']
list(ordered.values())[0]
next(iter(ordered.values()))
next(reversed(ordered.values()))
ordered.copy()['a']
default['a']
default.get('a')
mapping['a']
dict(mapping)['a']
{**mapping}['a']
types.MappingProxyType(table)['a']
chained['a']
collections.ChainMap(table)['a']
dict(chained)['a']
collections.ChainMap({}, table).maps[1]['a']
own['a']
own.data['a']
dict(own)['a']
collections.UserDict(table)['a']
collections.OrderedDict(table)['a']
collections.OrderedDict(pairs and table).popitem(last=False)[1]
list(map(table.get, ['a']))[0]
[*map(table.__getitem__, 'a')][0]
list(map(operator.itemgetter(0), pairs))[0]
list(map(lambda k: table[k], 'a'))[0]
types.SimpleNamespace(**table).a
functools.reduce(operator.getitem, [0, 0], nested)
(o or p)
(o if items else p)
(None or items[0])
(items and items[0])
(w := o)
(w := items)[0]
same(same(same(o)))
same([same(o)])[0]
same(items)[0]
(lambda q: q)(items[0])
(lambda: items)()[0]
(lambda: (lambda: o)())()
[o][0]
[o, p][0]
(o, p)[0]
{'k': o}['k']
[[o]][0][0]
{'k': [o]}['k'][0]
[o][:1][0]
list([o])[0]
next(iter([o]))
[*[o]][0]
max([o], key=same and (lambda q: 0))
copy.copy([o])[0]
[o, p].__getitem__(0)
[o, p].pop(0)
copy.copy({'k': o})['k']
[p, o].pop()
eval('o')
eval('items')[0]
(lambda a, *b: a)(*items)
(lambda a, b=items: b)(1)[0]
(lambda *, k: k)(k=o)
"""

STATEMENTS = """
unpacking
    = q, *_ = items
    = q

unpacking of a dict's values
    = q, *_ = table.values()
    = q

unpacking in unpacking
    = (q, *_), *_ = nested
    = q

unpacking of pairs
    = (q, _), *_ = pairs
    = q

loop
    = for q in items: break
    = q

loop with enumerate
    = for _, q in enumerate(items): break
    = q

loop over a dict
    = for k, q in table.items(): break
    = q

loop over a copy
    = for q in list(items): break
    = q

loop over a generator
    = for q in walk(items): break
    = q

while
    = i = 0
    = while i < len(items) - 1: i += 1
    = items[i]

with
    = with lent(o) as q: pass
    = q

with an object
    = with holder as q: pass
    = q

match a sequence
    = match items:
    =     case [q, *_]: pass
    = q

match a mapping
    = match table:
    =     case {'a': q}: pass
    = q

match a class
    = match holder:
    =     case Holder(o=q): pass
    = q

try
    = try:
    =     q = absent
    = except NameError:
    =     q = o
    = q

try of a key
    = try:
    =     q = table['absent']
    = except KeyError:
    =     q = table['a']
    = q

finally
    = try:
    =     pass
    = finally:
    =     q = items[0]
    = q

list filled
    = q = []
    = q.append(o)
    = q[0]

list extended
    = q = []
    = q.extend(items)
    = q[0]

list added to
    = q = []
    = q += items
    = q[0]

dict updated
    = q = {}
    = q.update(table)
    = q['a']

dict filled
    = q = {}
    = for k in table: q[k] = table[k]
    = q['a']

function inside
    = def inner(): return o
    = inner()

function inside that closes over it
    = q = o
    = def inner(): return q
    = inner()

class inside
    = class Inner:
    =     k = o
    = Inner.k

import
    = import own_program
    = own_program.o

import from
    = from own_program import o as q
    = q

exec
    = space = {}
    = exec('q = items[0]', globals(), space)
    = space['q']

deleted
    = q = o
    = r = q
    = del q
    = r

key of a sort
    = q = sorted(range(2), key=lambda i: items is None)
    = items[q[0]]
"""
"""Blocks of a name and lines, the last of which is what holds the number."""

# What code in C gets from a function or generator of Python: SOURCE gives the list `l`, once.
HANDING = """
l = FIRST
class Holding:
    def __init__(self): self.l = l
    def get(self):
        r = self.l
        return r
    def generate(self): yield self.l
    def __iter__(self):
        r = self.l
        yield r
h, d = Holding(), {'l': l}
def generated(): yield h.l
def generated_variable():
    r = h.l
    yield r
def picked(q):
    r = q.l
    return r
"""
SOURCES = {
    "expression of attributes": "(q.l for q in [h])",
    "expression of items": "(q['l'] for q in [d])",
    "expression of variables": "(q for q in [l])",
    "expression of calls": "(h.get() for _ in range(1))",
    "expression of keys": "(d.get(k) for k in 'l')",
    "expression of names": "(getattr(h, k) for k in 'l')",
    "generator": "generated()",
    "generator of a variable": "generated_variable()",
    "generator of an object": "h.generate()",
    "object": "h",
    "map of a lambda": "map(lambda q: q.l, [h])",
    "map of a lambda with a variable": "map(picked, [h])",
    "map of a lambda with a key": "map(lambda k: d.get(k), 'l')",
    "map of a lambda with a name": "map(lambda k: getattr(h, k), 'l')",
    "map of a lambda with a choice": "map(lambda q: q.l if q else None, [h])",
    "map of get": "map(d.get, 'l')",
    "map of getattr": "map(getattr, [h], 'l')",
    "map of itemgetter": "map(operator.itemgetter('l'), [d])",
    "map of attrgetter": "map(operator.attrgetter('l'), [h])",
    "map of methodcaller": "map(operator.methodcaller('get'), [h])",
    "map of a method": "map(Holding.get, [h])",
    "map over an expression": "map(operator.attrgetter('l'), (q for q in [h]))",
    "map over a generator": "map(operator.attrgetter('l'), walk([h]))",
    "map over values": "map(operator.attrgetter('l'), {'a': h}.values())",
    "filter": "filter(lambda q: True, (q.l for q in [h]))",
    "reversed": "reversed([h.l])",
    "chain": "itertools.chain((q.l for q in [h]))",
    "islice": "itertools.islice((q.l for q in [h]), 1)",
    "list": "[q.l for q in [h]]",
    "values": "{'a': h.l}.values()",
}
SINKS = {
    "any": (
        "[]",
        "(7.0 if any(SOURCE) else 3.0)",
        "l.append(1.0)",
        "l.pop()",
    ),
    "all": (
        "[]",
        "(7.0 if all(SOURCE) else 3.0)",
        "l.append(1.0)",
        "l.pop()",
    ),
    "sum of lists": (
        "[2.0]",
        "sum(SOURCE, [])[0]",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "chain.from_iterable": (
        "[2.0]",
        "sum(itertools.chain.from_iterable(SOURCE))",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "map of len": (
        "[2.0]",
        "sum(map(len, SOURCE))",
        "l.append(1.0)",
        "l.pop()",
    ),
    "map of sum": (
        "[2.0]",
        "sum(map(sum, SOURCE))",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "filter": (
        "[]",
        "len(list(filter(None, SOURCE)))",
        "l.append(1.0)",
        "l.pop()",
    ),
    "key of a sort": (
        "[2.0]",
        "sorted([([3.0], 7.0), (next(iter(SOURCE)), 5.0)])[0][1]",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "max": (
        "[2.0]",
        "max(itertools.chain(SOURCE, [[3.0]]))[0]",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "dict of pairs": (
        "[1, 2.0]",
        "dict(SOURCE)[1]",
        "l[1] = 6.0",
        "l[1] = 2.0",
    ),
    "reduce": (
        "[2.0]",
        "functools.reduce(operator.add, SOURCE, [])[0]",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "list, then tensor": (
        "[2.0]",
        "torch.tensor(list(SOURCE))",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "unpacking in a call": (
        "[2.0]",
        "list(zip(*SOURCE))[0][0]",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "text": (
        "[2]",
        "float(str(list(SOURCE))[2:-2])",
        "l[0] = 6",
        "l[0] = 2",
    ),
    "comparison": (
        "[2.0]",
        "(7.0 if list(SOURCE) == [[2.0]] else 3.0)",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "in": (
        "[2.0]",
        "(7.0 if [2.0] in SOURCE else 3.0)",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "deque": (
        "[2.0]",
        "collections.deque(SOURCE)[0][0]",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "update": (
        "[1, 2.0]",
        "q = {}\nq.update(SOURCE)\nq[1]",
        "l[1] = 6.0",
        "l[1] = 2.0",
    ),
    "extend": (
        "[2.0]",
        "q = []\nfor r in SOURCE: q.extend(r)\nq[0]",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
    "extend with a chain": (
        "[2.0]",
        "q = []\nq.extend(itertools.chain.from_iterable(SOURCE))\nq[0]",
        "l[0] = 6.0",
        "l[0] = 2.0",
    ),
}
"""Name -> what `l` is at first, the number, the change and the change back."""
