"""Programs whose parts do not vary with each other, for `access_paths`; `access_modules` says how they are written."""

ATTRIBUTES = """
sum(map(operator.attrgetter('v'), l))
sum(map(operator.attrgetter('v'), iter(l)))
sum(map(operator.attrgetter('v'), reversed(l)))
sum(map(operator.attrgetter('v'), walk(l)))
sum(map(operator.attrgetter('v'), (q for q in l)))
sum(map(operator.attrgetter('v'), [[*l]][0]))
sum(map(operator.attrgetter('v'), filter(None, l)))
sum(map(operator.attrgetter('v'), {1: t}.values()))
sum(map(operator.attrgetter('v'), itertools.chain(l)))
sum(map(operator.attrgetter('v'), set(l)))
sum(map(getattr, l, 'v'))
sum(map(getattr, walk(l), 'v'))
next(map(vars, l))['v']
sum(map(lambda q: q.v, l))
sum(map(T.m, l))
sum(map(operator.methodcaller('m'), l))
max(l, key=operator.attrgetter('v')).v
sum(itertools.starmap(getattr, [(t, 'v')]))
functools.partial(getattr, t, 'v')()
functools.partial(operator.attrgetter('v'), t)()
list(itertools.groupby(l, operator.attrgetter('v')))[0][0]
(7.0 if next(filter(operator.attrgetter('v'), l)).v > 3 else 3.0)
(lambda f: f(t))(operator.attrgetter('v'))
(lambda f: sum(map(f, l)))(operator.attrgetter('v'))
t.__getattribute__('v')
object.__getattribute__(t, 'v')
getattr(*[t, 'v'])
getattr(*(t, 'v', 1.0))
operator.attrgetter('v', 'v')(t)[1]
t.__dict__.get('v')
t.__dict__.__getitem__('v')
dict(vars(t))['v']
{**vars(t)}['v']
sum(vars(t).values())
copy.copy(t).v
copy.deepcopy(t).v
copy.deepcopy(l)[0].v
copy.deepcopy({'a': [t]})['a'][0].v
__import__('pickle').loads(__import__('pickle').dumps([2.0]))[0] * t.v
t.__reduce_ex__(2)[2]['v']
t.__getstate__()['v']
(lambda *, v: v)(**vars(t))
'%(v)s' % vars(t) and t.v
float('%(v)s' % vars(t))
float('{v}'.format(**vars(t)))
types.SimpleNamespace(**vars(t)).v
"""
"""Ways to get at the attribute `v` of `t`, which is in the list `l`, by code in C."""

IN_C = """
attribute of modules
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = 2.0
    m = nn.Sequential(M(), M())
    = sum(map(operator.attrgetter('k'), m))
    > m[0].k = 6.0
    < m[0].k = 2.0

attribute of all modules
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = 2.0
    m = nn.Sequential(M(), M())
    = sum(map(operator.attrgetter('training'), m.modules()))
    > m[0].eval()
    < m[0].train()

attribute of modules in a list
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = 2.0
    m = nn.Sequential(M(), M())
    = sum(map(operator.attrgetter('k'), list(m)))
    > m[0].k = 6.0
    < m[0].k = 2.0

getattr of modules
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = 2.0
    m = nn.Sequential(M(), M())
    = sum(map(getattr, m, ['k', 'k']))
    > m[0].k = 6.0
    < m[0].k = 2.0

requires_grad of parameters
    m = nn.Linear(1, 1)
    = sum(map(operator.attrgetter('requires_grad'), m.parameters()))
    > m.weight.requires_grad_(False)
    < m.weight.requires_grad_(True)

arrays in a list
    a = [np.array([2.0])]
    = float(np.stack(a)[0][0])
    > a[0][0] = 6.0
    < a[0][0] = 2.0

arrays in a list, sum
    a = [array.array('d', [2.0])]
    = sum(map(sum, a))
    > a[0][0] = 6.0
    < a[0][0] = 2.0

arrays in a dict
    a = {'a': np.array([2.0])}
    = float(sum(map(np.sum, a.values())))
    > a['a'][0] = 6.0
    < a['a'][0] = 2.0

array in a tuple
    a = (np.array([2.0]), 1)
    = float(np.add(*a)[0])
    > a[0][0] = 6.0
    < a[0][0] = 2.0

arrays as a tensor
    a = [np.array([2.0])]
    = torch.tensor(np.array(a))[0].float()
    > a[0][0] = 6.0
    < a[0][0] = 2.0

bytes in a list
    a = [bytearray(b'ab')]
    = len(b''.join(a))
    > a[0].append(3)
    < a[0].pop()

views in a list
    d = {1: 2.0}
    a = [d.values()]
    = sum(map(sum, a))
    > d[1] = 6.0
    < d[1] = 2.0

context variables in a list
    v = contextvars.ContextVar('v')
    v.set(2.0)
    a = [v]
    = sum(map(contextvars.ContextVar.get, a))
    > v.set(6.0)
    < v.set(2.0)

weak references in a list
    class T: v = 2.0
    t = T()
    a = [weakref.ref(t)]
    = [r() for r in a][0].v
    > t.v = 6.0
    < t.v = 2.0

json
    import json
    d = {'a': [{'b': 2.0}]}
    = len(json.dumps(d))
    > d['a'].append(1)
    < d['a'].pop()

struct
    import struct
    a = bytearray(8)
    = struct.unpack_from('q', a)[0] + 1
    > a[0] = 5
    < a[0] = 0

int of bytes
    a = bytearray(8)
    = int.from_bytes(a, 'little') + 1
    > a[0] = 5
    < a[0] = 0

hash of a tuple
    class T:
        v = 2
        def __hash__(self): return self.v
    t = (T(), 1)
    = hash(t) % 7 + 1
    > t[0].v = 6
    < t[0].v = 2

tuples compared
    class T:
        v = 2
        def __eq__(self, o): return self.v == o
    t = (T(), 1)
    = (7.0 if t == (2, 1) else 3.0)
    > t[0].v = 6
    < t[0].v = 2

zip of lists
    a, b = [2.0], [3.0]
    = sum(map(operator.mul, a, b))
    > a[0] = 6.0
    < a[0] = 2.0

sort key with a list
    class T:
        def __init__(self, *l): self.l = list(l)
    a = [T(2.0), T(3.0)]
    = sorted(a, key=lambda q: (1, q.l))[0].l[0]
    > a[0].l[0] = 6.0
    < a[0].l[0] = 2.0

sort key with a fresh list
    class T:
        def __init__(self, *l): self.l = list(l)
    a = [T(2.0), T(3.0)]
    = (7.0 if sorted(a, key=lambda q: [q.l])[0] is a[0] else 3.0)
    > a[0].l[0] = 6.0
    < a[0].l[0] = 2.0

key of max with a tuple
    class T:
        def __init__(self, *l): self.l = list(l)
    a = [T(2.0), T(3.0)]
    = (7.0 if max(a, key=lambda q: (q.l, 1)) is a[0] else 3.0)
    > a[0].l[0] = 6.0
    < a[0].l[0] = 2.0

__lt__ of a list
    class T:
        def __init__(self, *l): self.l = list(l)
        def __lt__(self, o): return self.l < o.l
    a = [T(2.0), T(3.0)]
    = (7.0 if min(a) is a[0] else 3.0)
    > a[0].l[0] = 6.0
    < a[0].l[0] = 2.0
"""

SINGLE = """
equal list that the call has put there
    h = types.SimpleNamespace(l=[2.0])
    = q = h.l[0]
    = h.l = [2.0]
    = q
    > h.l[0] = 6.0
    < h.l[0] = 2.0

equal list in a list
    l = [[2.0]]
    = sum(q[0] for q in l)
    > l[0] = [2.0]
    < l[0][0] = 6.0

equal list in a tuple
    h = types.SimpleNamespace(t=([2.0],))
    = h.t[0][0]
    > h.t = ([2.0],)
    < h.t[0][0] = 6.0

equal list of a context variable
    v = contextvars.ContextVar('v', default=[2.0])
    = v.get()[0]
    > v.set([2.0])
    < v.get()[0] = 6.0

equal list of a partial
    p = functools.partial(named, a=[2.0])
    = p()[0]
    > p.keywords['a'] = [2.0]
    < p.keywords['a'][0] = 6.0

equal partial
    h = types.SimpleNamespace(p=functools.partial(named, a=2.0))
    = h.p()
    > h.p = functools.partial(named, a=2.0)
    < h.p.keywords['a'] = 6.0

equal dict of dicts
    h = types.SimpleNamespace(d={'a': {'b': 2.0}})
    = sum(q['b'] for q in h.d.values())
    > h.d = {'a': {'b': 2.0}}
    < h.d['a']['b'] = 6.0

equal defaults
    def f(a=[2.0]): return a[0]
    = f()
    > f.__defaults__ = ([2.0],)
    < f.__defaults__[0][0] = 6.0

equal list in one of two places
    h = types.SimpleNamespace()
    h.a = h.b = [2.0]
    = h.a[0] + 10 * h.b[0]
    > h.a = [2.0]
    < h.b[0] = 6.0

equal list with another attribute
    class L(list): pass
    def made(k):
        l = L([1.0])
        l.k = k
        return l
    h = types.SimpleNamespace(l=made(2.0))
    = h.l.k * h.l[0]
    > h.l = made(6.0)
    < h.l = made(2.0)

indices of a part of a data set
    from torch.utils.data import Subset
    d = Subset([2.0, 6.0], [0])
    = d[0]
    > d.indices = [1]
    < d.indices = [0]

range of a quantization
    from torch.ao.quantization import FakeQuantize
    f = FakeQuantize.with_args(quant_min=0, quant_max=127)().eval()
    f.disable_observer()
    = f(x.detach() * 100).sum()
    > f.quant_max = 63
    < f.quant_max = 127
    @ function, layer

context that gives something
    c = contextlib.nullcontext(2.0)
    = with c as q: pass
    = q
    > c.enter_result = 6.0
    < c.enter_result = 2.0

errors that a context ends
    c = contextlib.suppress(KeyError)
    = q = 7.0
    = try:
    =     with c: raise ValueError
    = except ValueError: q = 3.0
    = q
    > c._exceptions = (ValueError,)
    < c._exceptions = (KeyError,)

value of a member
    class Kinds(enum.Enum): a = 2.0
    = Kinds.a.value
    > Kinds.a._value_ = 6.0
    < Kinds.a._value_ = 2.0

attribute by inspect
    import inspect
    class T:
        def __init__(self): self.v = 2.0
    t = T()
    = inspect.getattr_static(t, 'v')
    > t.v = 6.0
    < t.v = 2.0

protocol asked
    from typing import Protocol, runtime_checkable
    @runtime_checkable
    class P(Protocol):
        def m(self): ...
    t = types.SimpleNamespace()
    = (7.0 if isinstance(t, P) else 3.0)
    > t.m = len
    < del t.m

text of a template
    import string
    t = string.Template('2')
    = float(t.substitute())
    > t.template = '6'
    < t.template = '2'

attributes that objects share
    class T:
        shared = {'v': 2.0}
        def __init__(self): self.__dict__ = self.shared
    = T().v + getattr(T(), 'w', 1.0)
    > T.shared['w'] = 6.0
    < del T.shared['w']

global
    V = 2.0
    = V
    > ns['V'] = 6.0
    < ns['V'] = 2.0

global deleted
    V = 2.0
    def tried():
        try: return V
        except NameError: return 3.0
    = tried()
    > del ns['V']
    < ns['V'] = 2.0

global that was absent
    def tried():
        try: return LATER
        except NameError: return 3.0
    = tried()
    > ns['LATER'] = 6.0
    < del ns['LATER']

name in globals()
    = (7.0 if 'LATER' in globals() else 3.0)
    > ns['LATER'] = 6.0
    < del ns['LATER']

get of globals()
    = globals().get('LATER', 3.0)
    > ns['LATER'] = 6.0
    < del ns['LATER']

built-in hidden
    = len('ab')
    > ns['len'] = lambda v: 6.0
    < del ns['len']

function replaced
    def f(): return 2.0
    old = f
    = f()
    > ns['f'] = lambda: 6.0
    < ns['f'] = old

code replaced
    def f(): return 2.0
    old, new = f.__code__, (lambda: 6.0).__code__
    = f()
    > f.__code__ = new
    < f.__code__ = old

defaults replaced
    def f(k=2.0): return k
    = f()
    > f.__defaults__ = (6.0,)
    < f.__defaults__ = (2.0,)

keyword defaults replaced
    def f(*, k=2.0): return k
    = f()
    > f.__kwdefaults__['k'] = 6.0
    < f.__kwdefaults__['k'] = 2.0

keyword defaults added
    def f(**k): return k.get('a', 3.0)
    kw = {}
    = f(**kw)
    > kw['a'] = 6.0
    < kw.clear()

star-args appended
    args = [2.0]
    def f(*a): return sum(a)
    = f(*args)
    > args.append(6.0)
    < args.pop()

list of numbers, sum
    l = [2.0, 3.0]
    = sum(l)
    > l[0] = 6.0
    < l[0] = 2.0

list of numbers, max
    l = [2.0, 3.0]
    = max(l)
    > l[0] = 6.0
    < l[0] = 2.0

list of numbers, sorted
    l = [2.0, 3.0]
    = sorted(l)[0]
    > l[0] = 6.0
    < l[0] = 2.0

list of numbers, any
    l = [0, 0]
    = (7.0 if any(l) else 3.0)
    > l[0] = 1
    < l[0] = 0

list of numbers, all
    l = [1, 1]
    = (7.0 if all(l) else 3.0)
    > l[0] = 0
    < l[0] = 1

list of numbers, reversed
    l = [2.0, 3.0]
    = next(reversed(l))
    > l.append(6.0)
    < l.pop()

list of numbers, comprehension
    l = [2.0, 3.0]
    = [q + 1 for q in l][0]
    > l[0] = 6.0
    < l[0] = 2.0

list, multiplied
    l = [2.0]
    = sum(l * 2)
    > l[0] = 6.0
    < l[0] = 2.0

list, compared
    l = [2.0]
    = (7.0 if l == [2.0] else 3.0)
    > l[0] = 6.0
    < l[0] = 2.0

list, smaller than
    l = [2.0]
    = (7.0 if l < [3.0] else 3.0)
    > l[0] = 6.0
    < l[0] = 2.0

list, truth
    l = []
    = (7.0 if l else 3.0)
    > l.append(0)
    < l.pop()

list, not
    l = []
    = (7.0 if not l else 3.0)
    > l.append(0)
    < l.pop()

list, bool
    l = []
    = (7.0 if bool(l) else 3.0)
    > l.append(0)
    < l.pop()

list, len
    l = []
    = len(l)
    > l.append(0)
    < l.pop()

list, count
    l = [1]
    = l.count(1)
    > l.append(1)
    < l.pop()

list, index
    l = [1, 2]
    = l.index(2)
    > l.insert(0, 2)
    < l.pop(0)

list, while
    l = [1, 2]
    = n = 0
    = while n < len(l): n += 1
    = n
    > l.append(3)
    < l.pop()

list, join
    l = ['2']
    = float('.'.join(l))
    > l.append('5')
    < l.pop()

list, str
    l = [2]
    = float(str(l)[1:-1])
    > l[0] = 6
    < l[0] = 2

list, f-string
    l = [2]
    = float(f'{l}'[1:-1])
    > l[0] = 6
    < l[0] = 2

list, percent
    l = [2]
    = float('%s' % l[0])
    > l[0] = 6
    < l[0] = 2

list, format
    l = [2]
    = float('{}'.format(l[0]))
    > l[0] = 6
    < l[0] = 2

list of a format
    l = [2]
    = float('{0[0]}'.format(l))
    > l[0] = 6
    < l[0] = 2

list, tensor
    l = [2.0]
    = torch.tensor(l)
    > l[0] = 6.0
    < l[0] = 2.0

list, math.prod
    l = [2.0]
    = math.prod(l)
    > l[0] = 6.0
    < l[0] = 2.0

list, fsum
    l = [2.0]
    = math.fsum(l)
    > l[0] = 6.0
    < l[0] = 2.0

list, bisect
    l = [2.0]
    = bisect.bisect(l, 3.0)
    > l[0] = 6.0
    < l[0] = 2.0

list, heap
    l = [2.0]
    = heapq.nlargest(1, l)[0]
    > l[0] = 6.0
    < l[0] = 2.0

list, Counter
    l = [1]
    = collections.Counter(l)[1]
    > l.append(1)
    < l.pop()

list as an index
    l = [0]
    = torch.tensor([2.0, 6.0])[l]
    > l[0] = 1
    < l[0] = 0
    @ function, layer, step

list as a shape
    l = [1]
    = torch.ones(l) * len(torch.zeros(l))
    > l[0] = 3
    < l[0] = 1

list in a tuple
    t = ([2.0], 1)
    = t[0][0]
    > t[0][0] = 6.0
    < t[0][0] = 2.0

list in a tuple, sum
    t = ([2.0], [1.0])
    = sum(map(sum, t))
    > t[0][0] = 6.0
    < t[0][0] = 2.0

list deep inside
    t = {'a': [({'b': [2.0]},)]}
    = t['a'][0][0]['b'][0]
    > t['a'][0][0]['b'][0] = 6.0
    < t['a'][0][0]['b'][0] = 2.0

dict, order
    d = {'a': 2.0, 'b': 6.0}
    = next(iter(d.values()))
    > d['a'] = d.pop('a')
    < d['b'] = d.pop('b')

dict, last
    d = {'a': 2.0}
    = next(reversed(d.values()))
    > d['b'] = 6.0
    < del d['b']

dict, popitem of a copy
    d = {'a': 2.0}
    = dict(d).popitem()[1]
    > d['b'] = 6.0
    < del d['b']

dict, len
    d = {}
    = len(d)
    > d['b'] = 6.0
    < del d['b']

dict, truth
    d = {}
    = (7.0 if d else 3.0)
    > d['b'] = 6.0
    < del d['b']

dict, not in
    d = {}
    = (7.0 if 'b' not in d else 3.0)
    > d['b'] = 6.0
    < del d['b']

dict, keys
    d = {}
    = (7.0 if 'b' in d.keys() else 3.0)
    > d['b'] = 6.0
    < del d['b']

dict, values
    d = {'b': 2.0}
    = (7.0 if 6.0 in d.values() else 3.0)
    > d['b'] = 6.0
    < d['b'] = 2.0

dict, keys and
    d = {}
    = len(d.keys() & {'b'})
    > d['b'] = 6.0
    < del d['b']

dict, KeyError
    d = {}
    def tried():
        try: return d['b']
        except KeyError: return 3.0
    = tried()
    > d['b'] = 6.0
    < del d['b']

dict, __missing__
    class Own(dict):
        def __missing__(self, key): return 3.0
    d = Own()
    = d['b']
    > d['b'] = 6.0
    < del d['b']

dict, compared
    d = {}
    = (7.0 if d == {} else 3.0)
    > d['b'] = 6.0
    < del d['b']

dict, iter
    d = {2.0: 1}
    = sum(k for k in d)
    > d[6.0] = 1
    < del d[6.0]

dict, list
    d = {2.0: 1}
    = list(d)[-1]
    > d[6.0] = 1
    < del d[6.0]

dict, sum
    d = {2.0: 1}
    = sum(d)
    > d[6.0] = 1
    < del d[6.0]

dict, format
    d = {'k': 2}
    = float('{k}'.format(**d))
    > d['k'] = 6
    < d['k'] = 2

dict, format_map
    d = {'k': 2}
    = float('{k}'.format_map(d))
    > d['k'] = 6
    < d['k'] = 2

dict, percent
    d = {'k': 2}
    = float('%(k)s' % d)
    > d['k'] = 6
    < d['k'] = 2

default dict that was empty
    d = collections.defaultdict(lambda: 3.0)
    = dict.get(d, 'b', 3.0)
    > d['b'] = 6.0
    < del d['b']

factory of a default dict
    d = collections.defaultdict(lambda: 3.0)
    = q = copy.copy(d)
    = q['b']
    > d.default_factory = lambda: 6.0
    < d.default_factory = lambda: 3.0

set, in
    s = set()
    = (7.0 if 1 in s else 3.0)
    > s.add(1)
    < s.clear()

set, len
    s = set()
    = len(s)
    > s.add(1)
    < s.clear()

set, union
    s = set()
    = len(s | {2})
    > s.add(1)
    < s.clear()

set, subset
    s = set()
    = (7.0 if s <= {2} else 3.0)
    > s.add(1)
    < s.clear()

set, issubset
    s = set()
    = (7.0 if s.issubset({2}) else 3.0)
    > s.add(1)
    < s.clear()

set of objects
    class T: v = 2.0
    t = T()
    s = {t}
    = sum(q.v for q in s)
    > t.v = 6.0
    < del t.v

set of objects, list
    class T: v = 2.0
    t = T()
    s = {t}
    = list(s)[0].v
    > t.v = 6.0
    < del t.v

frozenset of objects
    class T: v = 2.0
    t = T()
    s = frozenset([t])
    = [*s][0].v
    > t.v = 6.0
    < del t.v

keys that are objects
    class T: v = 2.0
    t = T()
    d = {t: 1}
    = list(d)[0].v
    > t.v = 6.0
    < del t.v

keys that are objects, items
    class T: v = 2.0
    t = T()
    d = {t: 1}
    = [*d.items()][0][0].v
    > t.v = 6.0
    < del t.v

key by an object
    class T: k = 'a'
    t = T()
    d = {'a': 2.0, 'b': 6.0}
    = d[t.k]
    > t.k = 'b'
    < t.k = 'a'

key of a hash of its own
    class T:
        v = 1
        def __hash__(self): return self.v
        def __eq__(self, o): return o == self.v
    t, d = T(), {1: 2.0, 2: 6.0}
    = d[t]
    > t.v = 2
    < t.v = 1

item of a list by an object
    class T:
        v = 0
        def __index__(self): return self.v
    t, l = T(), [2.0, 6.0]
    = l[t]
    > t.v = 1
    < t.v = 0

slice by an object
    class T:
        v = 1
        def __index__(self): return self.v
    t, l = T(), [2.0, 6.0]
    = sum(l[:t])
    > t.v = 2
    < t.v = 1

range by an object
    class T:
        v = 1
        def __index__(self): return self.v
    t = T()
    = len(range(t))
    > t.v = 2
    < t.v = 1

list in a set operation
    l = [1]
    = len({1, 2}.difference(l))
    > l.append(2)
    < l.pop()

sorted by attributes
    class T:
        def __init__(self, v): self.v = v
    l = [T(2.0), T(3.0)]
    = sorted(l, key=operator.attrgetter('v'))[0].v
    > l[0].v = 6.0
    < l[0].v = 2.0

sorted by __lt__
    class T:
        def __init__(self, v): self.v = v
        def __lt__(self, o): return self.v < o.v
    l = [T(2.0), T(3.0)]
    = sorted(l)[0].v
    > l[0].v = 6.0
    < l[0].v = 2.0

max by __gt__
    class T:
        def __init__(self, v): self.v = v
        def __gt__(self, o): return self.v > o.v
    l = [T(2.0), T(3.0)]
    = max(l).v
    > l[0].v = 6.0
    < l[0].v = 2.0

in by __eq__
    class T:
        v = 1
        def __eq__(self, o): return o == self.v
    l = [T()]
    = (7.0 if 2 in l else 3.0)
    > l[0].v = 2
    < l[0].v = 1

sum by __radd__
    class T:
        v = 2.0
        def __radd__(self, o): return o + self.v
    l = [T()]
    = sum(l)
    > l[0].v = 6.0
    < l[0].v = 2.0

any by __bool__
    class T:
        v = False
        def __bool__(self): return self.v
    l = [T()]
    = (7.0 if any(l) else 3.0)
    > l[0].v = True
    < l[0].v = False

max of attributes
    class T:
        def __init__(self, v): self.v = v
    l = [T(2.0), T(3.0)]
    = max(q.v for q in l)
    > l[0].v = 6.0
    < l[0].v = 2.0

reduce of attributes
    class T:
        def __init__(self, v): self.v = v
    l = [T(2.0), T(3.0)]
    = functools.reduce(lambda a, q: a + q.v, l, 0.0)
    > l[0].v = 6.0
    < l[0].v = 2.0

subclass asked
    class A: pass
    class B: pass
    class C(A): pass
    = (7.0 if issubclass(C, B) else 3.0)
    > C.__bases__ = (A, B)
    < C.__bases__ = (A,)

instance asked, bases
    class A: pass
    class B: pass
    class C(A): pass
    c = C()
    = (7.0 if isinstance(c, B) else 3.0)
    > C.__bases__ = (A, B)
    < C.__bases__ = (A,)

attribute by bases
    class A: v = 2.0
    class B: v = 6.0
    class C(A): pass
    c = C()
    = c.v
    > C.__bases__ = (B,)
    < C.__bases__ = (A,)

tuple of classes
    kinds = [int]
    = (7.0 if isinstance('', tuple(kinds)) else 3.0)
    > kinds.append(str)
    < kinds.pop()

dir
    class T: pass
    t = T()
    = (7.0 if 'v' in dir(t) else 3.0)
    > t.v = 1
    < del t.v

annotations
    class T:
        v: int
    = len(T.__annotations__)
    > T.__annotations__['w'] = int
    < del T.__annotations__['w']

name of a function
    def f(): pass
    = len(f.__name__)
    > f.__name__ = 'four'
    < f.__name__ = 'f'

doc
    def f(): pass
    = (7.0 if f.__doc__ else 3.0)
    > f.__doc__ = 'a'
    < f.__doc__ = None

fields of a dataclass
    @dataclasses.dataclass
    class D:
        v: float = 2.0
    d = D()
    = sum(getattr(d, f.name) for f in dataclasses.fields(d))
    > d.v = 6.0
    < d.v = 2.0

asdict
    @dataclasses.dataclass
    class D:
        v: float = 2.0
    d = D()
    = dataclasses.asdict(d)['v']
    > d.v = 6.0
    < d.v = 2.0

astuple
    @dataclasses.dataclass
    class D:
        v: float = 2.0
    d = D()
    = dataclasses.astuple(d)[0]
    > d.v = 6.0
    < d.v = 2.0

dataclasses compared
    @dataclasses.dataclass
    class D:
        v: float = 2.0
    d, e = D(), D()
    = (7.0 if d == e else 3.0)
    > d.v = 6.0
    < d.v = 2.0

dataclass as text
    @dataclasses.dataclass
    class D:
        v: int = 2
    d = D()
    = len(repr(d))
    > d.v = 666
    < d.v = 2

namespaces compared
    s = types.SimpleNamespace(v=2)
    t = types.SimpleNamespace(v=2)
    = (7.0 if s == t else 3.0)
    > s.v = 6
    < s.v = 2

namespace as text
    s = types.SimpleNamespace(v=2)
    = len(str(s))
    > s.v = 666
    < s.v = 2

enumeration, values
    class E(enum.Enum):
        a = 1
    E.a.weight = 2.0
    = sum(e.weight for e in E)
    > E.a.weight = 6.0
    < E.a.weight = 2.0

enumeration, list
    class E(enum.Enum):
        a = 1
    E.a.weight = 2.0
    = list(E)[0].weight
    > E.a.weight = 6.0
    < E.a.weight = 2.0

enumeration, by name
    class E(enum.Enum):
        a = 1
    E.a.weight = 2.0
    = E['a'].weight
    > E.a.weight = 6.0
    < E.a.weight = 2.0

enumeration, by value
    class E(enum.Enum):
        a = 1
    E.a.weight = 2.0
    = E(1).weight
    > E.a.weight = 6.0
    < E.a.weight = 2.0

weak dict, in
    class T: pass
    box = [T()]
    d = weakref.WeakValueDictionary(a=box[0])
    = (2.0 if 'a' in d else 6.0)
    > box.clear()
    < box.append(T())
    < d['a'] = box[0]

weak reference that dies
    class T: pass
    box = [T()]
    r = weakref.ref(box[0])
    = (2.0 if r() is not None else 6.0)
    > box.clear()
    < pass

weak set, len
    class T: pass
    box = [T()]
    s = weakref.WeakSet(box)
    = len(s)
    > box.clear()
    < box.append(T())
    < s.add(box[0])

weak keys
    class T: pass
    box = [T()]
    d = weakref.WeakKeyDictionary({box[0]: 2.0})
    = sum(d.values(), 1.0)
    > d[box[0]] = 6.0
    < d[box[0]] = 2.0

cache that was cleared
    under = [2.0]
    @functools.lru_cache
    def f(): return under[0]
    = f()
    > under[0] = 6.0
    > f.cache_clear()
    < under[0] = 2.0
    < f.cache_clear()

cached property deleted
    class T:
        k = 2.0
        @functools.cached_property
        def v(self): return self.k
    t = T()
    t.v
    = t.v
    > t.k = 6.0
    > del t.v
    < t.k = 2.0
    < del t.v

single dispatch
    @functools.singledispatch
    def f(v): return 2.0
    = f(1)
    > f.register(int, lambda v: 6.0)
    < f.register(int, lambda v: 2.0)

total ordering
    @functools.total_ordering
    class T:
        v = 2.0
        def __lt__(self, o): return self.v < o
        def __eq__(self, o): return self.v == o
    t = T()
    = (7.0 if t >= 3.0 else 3.0)
    > t.v = 6.0
    < t.v = 2.0

partial method
    class T:
        v = 2.0
        def m(self, k): return self.v * k
        p = functools.partialmethod(m, 2.0)
    t = T()
    = t.p()
    > t.v = 6.0
    < t.v = 2.0

metaclass
    class M(type):
        @property
        def v(cls): return cls._v
    class T(metaclass=M): _v = 2.0
    = T.v
    > T._v = 6.0
    < T._v = 2.0

metaclass, getattr
    class M(type):
        def __getattr__(cls, name): return cls.kept[name]
    class T(metaclass=M): kept = {'v': 2.0}
    = T.v
    > T.kept['v'] = 6.0
    < T.kept['v'] = 2.0

metaclass, item
    class M(type):
        def __getitem__(cls, key): return cls.kept[key]
    class T(metaclass=M): kept = {'v': 2.0}
    = T['v']
    > T.kept['v'] = 6.0
    < T.kept['v'] = 2.0

__class_getitem__
    class T:
        kept = {'v': 2.0}
        def __class_getitem__(cls, key): return cls.kept[key]
    = T['v']
    > T.kept['v'] = 6.0
    < T.kept['v'] = 2.0

getattr of a module
    m = types.ModuleType('m')
    m.kept = {'v': 2.0}
    m.__getattr__ = lambda name: m.kept[name]
    = m.v
    > m.kept['v'] = 6.0
    < m.kept['v'] = 2.0

attribute of a module
    m = types.ModuleType('m')
    m.v = 2.0
    = m.v
    > m.v = 6.0
    < m.v = 2.0

absent in a module of Python
    m = types.ModuleType('m')
    = getattr(m, 'v', 3.0)
    > m.v = 6.0
    < del m.v

vars of a module
    m = types.ModuleType('m')
    = vars(m).get('v', 3.0)
    > m.v = 6.0
    < del m.v

new with a class
    class T:
        def __new__(cls): return cls.made
    T.made = types.SimpleNamespace(v=2.0)
    = T().v
    > T.made.v = 6.0
    < T.made.v = 2.0

init with a class
    class T:
        k = 2.0
        def __init__(self): self.v = self.k
    = T().v
    > T.k = 6.0
    < T.k = 2.0

default factory of a field
    kept = [2.0]
    @dataclasses.dataclass
    class D:
        v: list = dataclasses.field(default_factory=lambda: list(kept))
    = D().v[0]
    > kept[0] = 6.0
    < kept[0] = 2.0

default of a field
    @dataclasses.dataclass
    class D:
        v: float = 2.0
    = D().v
    > D.__init__.__defaults__ = (6.0,)
    < D.__init__.__defaults__ = (2.0,)

numpy, view
    a = np.array([2.0, 3.0])
    b = a[:1]
    = float(b.sum())
    > a[0] = 6.0
    < a[0] = 2.0

numpy, list
    a = np.array([2.0, 3.0])
    = a.tolist()[0]
    > a[0] = 6.0
    < a[0] = 2.0

numpy, array of arrays
    a = [np.array([2.0])]
    = float(np.concatenate(a)[0])
    > a[0][0] = 6.0
    < a[0][0] = 2.0

numpy, max
    a = np.array([2.0])
    = float(np.max(a))
    > a[0] = 6.0
    < a[0] = 2.0

numpy, tensor
    a = np.array([2.0], np.float32)
    = torch.as_tensor(a)
    > a[0] = 6.0
    < a[0] = 2.0

numpy, dtype
    a = np.array([2])
    = a.dtype.itemsize
    > ns['a'] = a.astype('i4')
    < ns['a'] = a.astype('i8')

numpy, flags
    a = np.array([2])
    = (7.0 if a.flags.writeable else 3.0)
    > a.flags.writeable = False
    < a.flags.writeable = True

memory of bytes
    b = bytearray(b'ab')
    = b[0]
    > b[0] = 3
    < b[0] = 97

memory of bytes, sum
    b = bytearray(b'ab')
    = sum(b)
    > b[0] = 3
    < b[0] = 97

optimizer, rate
    w = nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([w], lr=2.0)
    = opt.param_groups[0]['lr']
    > opt.param_groups[0]['lr'] = 6.0
    < opt.param_groups[0]['lr'] = 2.0

optimizer, rates
    w = nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([w], lr=2.0)
    = [g['lr'] for g in opt.param_groups][0]
    > opt.param_groups[0]['lr'] = 6.0
    < opt.param_groups[0]['lr'] = 2.0

optimizer, groups
    w = nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([w], lr=2.0)
    = sum(g['lr'] for g in opt.param_groups)
    > opt.add_param_group({'params': [nn.Parameter(torch.ones(1))], 'lr': 4.0})
    < opt.param_groups.pop()

optimizer, state
    w = nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([w], lr=2.0)
    = len(opt.state)
    > opt.state[w] = {}
    < opt.state.clear()

gradient
    w = torch.ones(1, requires_grad=True)
    = (7.0 if w.grad is None else 3.0)
    > w.grad = torch.ones(1)
    < w.grad = None

gradient in a list
    l = [torch.ones(1, requires_grad=True)]
    = sum(1.0 for q in l if q.grad is None)
    > l[0].grad = torch.ones(1)
    < l[0].grad = None

tensors in a list, order
    l = [torch.tensor([2.0]), torch.tensor([6.0])]
    = l[0]
    > l.reverse()
    < l.reverse()

tensors in a list, sum
    l = [torch.tensor([2.0])]
    = sum(l)
    > l.append(torch.tensor([6.0]))
    < l.pop()

tensors in a list, stack
    l = [torch.tensor([2.0])]
    = torch.stack(l).sum()
    > l.append(torch.tensor([6.0]))
    < l.pop()

tensors in a list, exchanged
    l = [torch.tensor([2.0])]
    = list(l)[0]
    > old = l[0]
    > l[0] = torch.tensor([6.0])
    < l[0] = old

tensors in a dict, exchanged
    d = {'a': torch.tensor([2.0])}
    = [*d.values()][0]
    > old = d['a']
    > d['a'] = torch.tensor([6.0])
    < d['a'] = old

tensors in a set
    t = torch.tensor([2.0])
    s = {t}
    = list(s)[0]
    > t.data = torch.tensor([6.0])
    < t.data = torch.tensor([2.0])

tensors in a named tuple
    t = Pair(torch.tensor([2.0]), 1)
    = t.one
    > t.one.data = torch.tensor([6.0])
    < t.one.data = torch.tensor([2.0])

tensors swapped
    t = torch.tensor([2.0])
    l = [t]
    = l[0] * 1
    > u = torch.tensor([6.0])
    > torch.utils.swap_tensors(t, u)
    < torch.utils.swap_tensors(t, u)

dtype of a tensor
    t = torch.tensor([2.0])
    = (7.0 if t.dtype is torch.float64 else 3.0)
    > t.data = t.data.double()
    < t.data = t.data.float()

strides of a tensor
    t = torch.ones(2, 3)
    = t.stride(0)
    > t.t_()
    < t.t_()

size of a tensor in a list
    l = [torch.ones(2)]
    = sum(q.numel() for q in l)
    > l[0].resize_(4)
    < l[0].resize_(2)

storage of a tensor
    t = torch.tensor([2.0])
    = t * 1
    > u = torch.tensor([6.0])
    > t.set_(u)
    < t.set_(torch.tensor([2.0]))

grad mode
    = (7.0 if torch.is_grad_enabled() else 3.0)
    > torch.set_grad_enabled(False)
    < torch.set_grad_enabled(True)
    @ function

default dtype
    = torch.zeros(1) + torch.get_default_dtype().itemsize
    > torch.set_default_dtype(torch.float64)
    < torch.set_default_dtype(torch.float32)
    @ function

view of an empty dict
    d = {}
    v = types.MappingProxyType(d)
    = v.get('k', 3.0)
    > d['k'] = 6.0
    < del d['k']

view of an empty dict, in
    d = {}
    v = types.MappingProxyType(d)
    = (7.0 if 'k' in v else 3.0)
    > d['k'] = 6.0
    < del d['k']

empty dict in a tuple
    t = ({}, 1)
    = t[0].get('k', 3.0)
    > t[0]['k'] = 6.0
    < del t[0]['k']

empty dict in a tuple, len
    t = ({}, 1)
    = len(t[0])
    > t[0]['k'] = 6.0
    < del t[0]['k']

empty dict in slots
    s = Slotted({})
    = len(s.o)
    > s.o['k'] = 6.0
    < del s.o['k']

empty dict that a method gives
    s = Holder({})
    = len(s.get())
    > s.o['k'] = 6.0
    < del s.o['k']

empty dict in a partial
    f = functools.partial(len, {})
    = f()
    > f.args[0]['k'] = 6.0
    < f.args[0].clear()

empty dict as a default
    def f(k={}): return len(k)
    = f()
    > f.__defaults__[0]['k'] = 1
    < f.__defaults__[0].clear()

empty dict in a closure
    def made(k): return lambda: len(k)
    d = {}
    f = made(d)
    = f()
    > d['k'] = 1
    < d.clear()

empty dict in a user's dict
    u = collections.UserDict()
    = len(u)
    > u['k'] = 1
    < del u['k']

empty dict in a chain
    u = collections.ChainMap()
    = u.get('k', 3.0)
    > u['k'] = 1
    < del u['k']

empty dict of a cache
    d = {}
    @functools.lru_cache
    def f(): return d
    f()
    = len(f())
    > d['k'] = 1
    < d.clear()

empty dict of a context variable
    d = {}
    v = contextvars.ContextVar('v')
    v.set(d)
    = len(v.get())
    > d['k'] = 1
    < d.clear()

empty dict of an iterator
    d = {}
    = len(next(iter([d])))
    > d['k'] = 1
    < d.clear()

empty dict in a property
    class T:
        d = {}
        @property
        def v(self): return self.d
    t = T()
    = len(t.v)
    > T.d['k'] = 1
    < T.d.clear()

empty dict in a list in C
    l = [{}]
    = sum(map(len, l))
    > l[0]['k'] = 1
    < l[0].clear()

empty vars
    class T: pass
    t = T()
    = len(vars(t))
    > t.v = 1
    < del t.v

empty vars, sum
    class T: pass
    t = T()
    = sum(vars(t).values(), 3.0)
    > t.v = 1
    < del t.v

empty vars, in
    class T: pass
    t = T()
    = (7.0 if 'v' in vars(t) else 3.0)
    > t.v = 1
    < del t.v

empty vars, in __dict__
    class T: pass
    t = T()
    = (7.0 if 'v' in t.__dict__ else 3.0)
    > t.v = 1
    < del t.v

empty vars, unpacked
    class T: pass
    t = T()
    = len({**vars(t)})
    > t.v = 1
    < del t.v

empty namespace
    t = types.SimpleNamespace()
    = len(vars(t))
    > t.v = 1
    < del t.v

attributes of a class
    class T: pass
    = (7.0 if 'v' in vars(T) else 3.0)
    > T.v = 1
    < del T.v

attributes of a class, keys
    class T: pass
    = len([k for k in vars(T) if k == 'v'])
    > T.v = 1
    < del T.v

attributes of a module of Python
    m = types.ModuleType('m')
    = (7.0 if 'v' in vars(m) else 3.0)
    > m.v = 1
    < del m.v

hasattr of a module of Python
    m = types.ModuleType('m')
    = (7.0 if hasattr(m, 'v') else 3.0)
    > m.v = 1
    < del m.v

subclasses
    class T: pass
    kept = []
    = len(T.__subclasses__())
    > kept.append(type('U', (T,), {}))
    < pass

parameter that was None
    m = nn.Module()
    m.register_parameter('v', None)
    = (3.0 if m.v is None else m.v.detach())
    > m.v = nn.Parameter(torch.tensor([6.0]))
    < m.v = None

buffer that was None
    m = nn.Module()
    m.register_buffer('v', None)
    = (3.0 if m.v is None else m.v)
    > m.v = torch.tensor([6.0])
    < m.v = None

module that was None
    m = nn.Module()
    m.register_module('v', None)
    = (3.0 if m.v is None else m.v(torch.tensor([6.0])))
    > m.v = nn.ReLU()
    < m.v = None

attribute of a wrapped module
    class W(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ReLU()
            self.inner.v = 2.0
        def __getattr__(self, name):
            try: return super().__getattr__(name)
            except AttributeError: return getattr(self.inner, name)
    w = W()
    = w.v
    > w.inner.v = 6.0
    < w.inner.v = 2.0

attribute over that of a wrapped module
    class W(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ReLU()
            self.inner.v = 2.0
        def __getattr__(self, name):
            try: return super().__getattr__(name)
            except AttributeError: return getattr(self.inner, name)
    w = W()
    = w.v
    > w._buffers['v'] = torch.tensor([6.0])
    < del w.v

absent in a part of a module
    m = nn.Sequential(nn.ReLU())
    = (7.0 if getattr(m[0], 'adapter', None) is not None else 3.0)
    > m[0].adapter = nn.ReLU()
    < del m[0].adapter

absent in a module with others
    m = nn.Linear(1, 1)
    = (7.0 if getattr(m, 'adapter', None) is not None else 3.0)
    > m.adapter = nn.Parameter(torch.ones(1))
    < del m.adapter

absent in a module, buffers there
    m = nn.BatchNorm1d(1)
    = (7.0 if hasattr(m, 'extra') else 3.0)
    > m.register_buffer('extra', torch.ones(1))
    < del m.extra

absent in a module, try
    m = nn.Linear(1, 1)
    def tried():
        try: return m.extra
        except AttributeError: return 3.0
    = tried()
    > m.register_buffer('extra', torch.tensor([6.0]))
    < del m.extra

absent in a module, item of ModuleDict
    m = nn.ModuleDict()
    def tried():
        try: return m['v'](torch.tensor([6.0]))
        except KeyError: return 3.0
    = tried()
    > m['v'] = nn.ReLU()
    < del m['v']

ModuleList that was empty
    m = nn.ModuleList()
    = len(m)
    > m.append(nn.ReLU())
    < del m[-1]

ModuleList that was empty, loop
    m = nn.ModuleList()
    = sum([1.0 for _ in m], 1.0)
    > m.append(nn.ReLU())
    < del m[-1]

Sequential that was empty
    m = nn.Sequential()
    = m(torch.tensor([-2.0]))
    > m.append(nn.ReLU())
    < del m[-1]

ParameterList that was empty
    m = nn.ParameterList()
    = len(m)
    > m.append(torch.ones(1))
    < ns['m'] = nn.ParameterList()

hooks of a module
    m = nn.ReLU()
    = len(m._forward_hooks)
    > k = m.register_forward_hook(lambda *_: None)
    < k.remove()

version of a tensor
    t = torch.ones(1)
    = (7.0 if t._version % 2 else 3.0)
    > t.fill_(1.0)
    < t.fill_(1.0)

offset of a tensor
    u = torch.ones(4)
    t = u[:1]
    = t.storage_offset()
    > t.set_(u[1:2])
    < t.set_(u[:1])

contiguity of a tensor
    t = torch.ones(2, 3)
    = (7.0 if t.is_contiguous() else 3.0)
    > t.t_()
    < t.t_()

leaf or not
    t = torch.ones(1)
    = (7.0 if t.is_leaf else 3.0)
    > ns['t'] = torch.ones(1, requires_grad=True) * 1
    < ns['t'] = torch.ones(1)

gradient exchanged
    w = torch.ones(1, requires_grad=True)
    w.grad = torch.tensor([2.0])
    = w.grad * 1
    > w.grad = torch.tensor([6.0])
    < w.grad = torch.tensor([2.0])

gradient exchanged, in a list
    l = [torch.ones(1, requires_grad=True)]
    l[0].grad = torch.tensor([2.0])
    = sum(q.grad for q in l)
    > l[0].grad = torch.tensor([6.0])
    < l[0].grad = torch.tensor([2.0])

gradient dropped
    w = torch.ones(1, requires_grad=True)
    w.grad = torch.tensor([2.0])
    = (3.0 if w.grad is None else w.grad)
    > w.grad = None
    < w.grad = torch.tensor([2.0])

tensor in a set exchanged
    t, u = torch.tensor([2.0]), torch.tensor([6.0])
    s = {t}
    = sum(s)
    > s.clear()
    > s.add(u)
    < s.clear()
    < s.add(t)

tensor in a deque
    q = collections.deque([torch.tensor([2.0])])
    = q[0]
    > q[0] = torch.tensor([6.0])
    < q[0] = torch.tensor([2.0])

tensor in an array of objects
    a = [torch.tensor([2.0]), 1]
    = [q for q in a if isinstance(q, torch.Tensor)][0]
    > a[0] = torch.tensor([6.0])
    < a[0] = torch.tensor([2.0])

tensor by attrgetter
    s = types.SimpleNamespace(t=torch.tensor([2.0]))
    = operator.attrgetter('t')(s)
    > s.t = torch.tensor([6.0])
    < s.t = torch.tensor([2.0])

tensor by attrgetter in C
    s = [types.SimpleNamespace(t=torch.tensor([2.0]))]
    = sum(map(operator.attrgetter('t'), s))
    > s[0].t = torch.tensor([6.0])
    < s[0].t = torch.tensor([2.0])

tensor by a cached function
    t = torch.tensor([2.0])
    @functools.lru_cache
    def f(): return t
    = f()
    > t.data = torch.tensor([6.0])
    < t.data = torch.tensor([2.0])

tensor by a cached method
    class T:
        t = torch.tensor([2.0])
        @functools.cached_property
        def v(self): return self.t * 2
    t = T()
    t.v
    = t.v
    > t.__dict__['v'] = torch.tensor([6.0])
    < t.__dict__['v'] = torch.tensor([2.0])

tensor by a generator
    l = [torch.tensor([2.0])]
    = next(walk(l))
    > l[0] = torch.tensor([6.0])
    < l[0] = torch.tensor([2.0])

tensor by sum of an expression
    s = [types.SimpleNamespace(t=torch.tensor([2.0]))]
    = sum(q.t for q in s)
    > s[0].t = torch.tensor([6.0])
    < s[0].t = torch.tensor([2.0])

tensor by stack of an expression
    s = [types.SimpleNamespace(t=torch.tensor([2.0]))]
    = torch.stack(tuple(q.t for q in s))[0]
    > s[0].t = torch.tensor([6.0])
    < s[0].t = torch.tensor([2.0])

tensor in a dataclass
    r = Record(torch.tensor([2.0]))
    = copy.copy(r).o
    > r.o = torch.tensor([6.0])
    < r.o = torch.tensor([2.0])

tensor in a named tuple, unpacked
    p = Pair(torch.tensor([2.0]), 1)
    = q, _ = p
    = q
    > ns['p'] = Pair(torch.tensor([6.0]), 1)
    < ns['p'] = Pair(torch.tensor([2.0]), 1)

tensor in a named tuple in a list
    p = [Pair(torch.tensor([2.0]), 1)]
    = p[0].one
    > p[0] = Pair(torch.tensor([6.0]), 1)
    < p[0] = Pair(torch.tensor([2.0]), 1)

tensor in a named tuple of an object
    h = Holder(Pair(torch.tensor([2.0]), 1))
    = h.o.one
    > h.o = Pair(torch.tensor([6.0]), 1)
    < h.o = Pair(torch.tensor([2.0]), 1)

tensor in a tuple
    p = (torch.tensor([2.0]), 1)
    = p[0]
    > p[0].data = torch.tensor([6.0])
    < p[0].data = torch.tensor([2.0])

tensor in a tuple in a tuple
    p = ((torch.tensor([2.0]), 1), 1)
    = p[0][0]
    > p[0][0].data = torch.tensor([6.0])
    < p[0][0].data = torch.tensor([2.0])

variable of a closure
    def made():
        v = 2.0
        def f(): return v
        return f
    f = made()
    = f.__closure__[0].cell_contents
    > f.__closure__[0].cell_contents = 6.0
    < f.__closure__[0].cell_contents = 2.0

globals of a function
    V = 2.0
    def f(): pass
    = f.__globals__['V']
    > ns['V'] = 6.0
    < ns['V'] = 2.0

default of a function, read
    def f(k=2.0): pass
    = f.__defaults__[0]
    > f.__defaults__ = (6.0,)
    < f.__defaults__ = (2.0,)

signature
    import inspect
    def f(k=2.0): pass
    = inspect.signature(f).parameters['k'].default
    > f.__defaults__ = (6.0,)
    < f.__defaults__ = (2.0,)

wrapped function
    def g(): return 2.0
    @functools.wraps(g)
    def f(): return g()
    = f.__wrapped__()
    > f.__wrapped__ = lambda: 6.0
    < f.__wrapped__ = g

object of a bound method
    class T:
        v = 2.0
        def m(self): pass
    t = T()
    f = t.m
    = f.__self__.v
    > t.v = 6.0
    < t.v = 2.0

method exchanged, methodcaller
    class T:
        def m(self): return 2.0
    t, old = T(), T.m
    = operator.methodcaller('m')(t)
    > T.m = lambda self: 6.0
    < T.m = old

method exchanged, map of methodcaller
    class T:
        def m(self): return 2.0
    t, old = T(), T.m
    = sum(map(operator.methodcaller('m'), [t]))
    > T.m = lambda self: 6.0
    < T.m = old

method exchanged, getattr
    class T:
        def m(self): return 2.0
    t, old = T(), T.m
    = getattr(t, 'm')()
    > T.m = lambda self: 6.0
    < T.m = old

method exchanged, super
    class B:
        def m(self): return 2.0
    class T(B):
        def m(self): return super().m()
    t, old = T(), B.m
    = t.m()
    > B.m = lambda self: 6.0
    < B.m = old

method between, super
    class B:
        def m(self): return 2.0
    class C(B): pass
    class T(C):
        def m(self): return super().m()
    t = T()
    = t.m()
    > C.m = lambda self: 6.0
    < del C.m

attribute of super
    class B: v = 2.0
    class T(B):
        v = 3.0
        def m(self): return super().v
    t = T()
    = t.m()
    > B.v = 6.0
    < B.v = 2.0

static method exchanged
    class T:
        @staticmethod
        def m(): return 2.0
    old = T.__dict__['m']
    = T.m()
    > T.m = staticmethod(lambda: 6.0)
    < T.m = old

class method exchanged
    class T:
        @classmethod
        def m(cls): return 2.0
    old = T.__dict__['m']
    = T.m()
    > T.m = classmethod(lambda cls: 6.0)
    < T.m = old

property exchanged for a number
    class T:
        v = property(lambda self: 2.0)
    t, old = T(), T.v
    = t.v
    > T.v = 6.0
    < T.v = old

property that comes
    class T: v = 2.0
    t = T()
    = t.v
    > T.v = property(lambda self: 6.0)
    < T.v = 2.0

property of a module exchanged
    class T(nn.Module):
        v = property(lambda self: 2.0)
    t, old = T(), T.v
    = t.v
    > T.v = property(lambda self: 6.0)
    < T.v = old

cached property exchanged
    class T:
        v = functools.cached_property(lambda self: 2.0)
    T.v.__set_name__(T, 'v')
    class U:
        v = functools.cached_property(lambda self: 6.0)
    U.v.__set_name__(U, 'v')
    old, new = vars(T)['v'], vars(U)['v']
    = T().v
    > T.v = new
    < T.v = old

descriptor exchanged
    class D:
        def __init__(self, v): self.v = v
        def __get__(self, o, k): return self.v
    class T: v = D(2.0)
    t = T()
    = t.v
    > T.v = D(6.0)
    < T.v = D(2.0)

descriptor that sets, exchanged
    class D:
        def __init__(self, v): self.v = v
        def __get__(self, o, k): return self.v
        def __set__(self, o, v): pass
    class T: v = D(2.0)
    t = T()
    = t.v
    > T.v = D(6.0)
    < T.v = D(2.0)

__init__ exchanged
    class T:
        def __init__(self): self.v = 2.0
    old = T.__init__
    def new(self): self.v = 6.0
    = T().v
    > T.__init__ = new
    < T.__init__ = old

__getattr__ exchanged
    class T:
        def __getattr__(self, name): return 2.0
    t, old = T(), T.__getattr__
    = t.v
    > T.__getattr__ = lambda self, name: 6.0
    < T.__getattr__ = old

__call__ exchanged
    class T:
        def __call__(self): return 2.0
    t, old = T(), T.__call__
    = t()
    > T.__call__ = lambda self: 6.0
    < T.__call__ = old

__len__ exchanged
    class T:
        def __len__(self): return 2
    t, old = T(), T.__len__
    = len(t)
    > T.__len__ = lambda self: 6
    < T.__len__ = old

__enter__ exchanged
    class T:
        def __enter__(self): return 2.0
        def __exit__(self, *_): pass
    t, old = T(), T.__enter__
    = with t as q: pass
    = q
    > T.__enter__ = lambda self: 6.0
    < T.__enter__ = old

forward of a library's module
    m, old = nn.ReLU(), nn.ReLU.forward
    = m(torch.tensor([-2.0])) + 1
    > nn.ReLU.forward = lambda self, x: x * 3
    < nn.ReLU.forward = old

function of functional
    import torch.nn.functional as F
    old = F.relu
    = F.relu(torch.tensor([-2.0])) + 1
    > F.relu = lambda x: x * 3
    < F.relu = old

function of torch
    old = torch.relu
    = torch.relu(torch.tensor([-2.0])) + 1
    > torch.relu = lambda x: x * 3
    < torch.relu = old

function of math
    old = math.sqrt
    = math.sqrt(4.0)
    > math.sqrt = lambda x: x * 3
    < math.sqrt = old

built-in exchanged
    import builtins
    old = round
    = round(2.4)
    > builtins.round = lambda v: 6.0
    < builtins.round = old

class exchanged in its module
    class T: v = 2.0
    class U: v = 6.0
    old = T
    = T().v
    > ns['T'] = U
    < ns['T'] = old

registry by class
    class T: pass
    t, d = T(), {T: 2.0}
    = d[type(t)]
    > d[T] = 6.0
    < d[T] = 2.0

registry by name
    d = {'relu': torch.relu}
    name = ['relu']
    = d[name[0]](torch.tensor([-2.0])) + 1
    > d['relu'] = torch.tanh
    < d['relu'] = torch.relu

registry of functions, loop
    l = [torch.relu]
    = q = torch.tensor([-2.0])
    = for f in l: q = f(q)
    = q + 1
    > l[0] = torch.tanh
    < l[0] = torch.relu

registry of functions, reduce
    l = [torch.relu]
    = functools.reduce(lambda h, f: f(h), l, torch.tensor([-2.0])) + 1
    > l[0] = torch.tanh
    < l[0] = torch.relu

context
    v = contextvars.ContextVar('v')
    c = contextvars.copy_context()
    c.run(v.set, 2.0)
    = c[v]
    > c.run(v.set, 6.0)
    < c.run(v.set, 2.0)

code that runs in a context
    v = contextvars.ContextVar('v')
    v.set(2.0)
    c = contextvars.copy_context()
    = c.run(v.get)
    > c.run(v.set, 6.0)
    < c.run(v.set, 2.0)

template
    import string
    d = {'k': 2}
    = float(string.Template('$k').substitute(d))
    > d['k'] = 6
    < d['k'] = 2

formatter
    import string
    s = types.SimpleNamespace(k=2)
    = float(string.Formatter().format('{0.k}', s))
    > s.k = 6
    < s.k = 2

format of an attribute
    s = types.SimpleNamespace(k=2)
    = float('{0.k}'.format(s))
    > s.k = 6
    < s.k = 2

arguments of an error
    e = ValueError([2.0])
    = e.args[0][0]
    > e.args[0][0] = 6.0
    < e.args[0][0] = 2.0

arguments of an error exchanged
    e = ValueError(2.0)
    = e.args[0]
    > e.args = (6.0,)
    < e.args = (2.0,)

arguments of an error raised
    class E(Exception): pass
    l = [2.0]
    def tried():
        try: raise E(l)
        except E as e: return e.args[0][0]
    = tried()
    > l[0] = 6.0
    < l[0] = 2.0

cell
    c = types.CellType(2.0)
    = c.cell_contents
    > c.cell_contents = 6.0
    < c.cell_contents = 2.0

shape of numpy
    a = np.ones((2, 3))
    = a.shape[0]
    > a.shape = (3, 2)
    < a.shape = (2, 3)

number of numpy
    a = np.array(2.0)
    = a.item()
    > a[()] = 6.0
    < a[()] = 2.0

number of numpy, float
    a = np.array(2.0)
    = float(a)
    > a[()] = 6.0
    < a[()] = 2.0

structure of numpy
    a = np.zeros(1, [('k', float)])
    a['k'] = 2.0
    = float(a['k'][0])
    > a['k'] = 6.0
    < a['k'] = 2.0

view of numpy in a list
    a = np.array([[2.0]])
    l = list(a)
    = float(l[0][0])
    > a[0, 0] = 6.0
    < a[0, 0] = 2.0

array in a dataclass
    r = Record(np.array([2.0]))
    = float(r.o.sum())
    > r.o[0] = 6.0
    < r.o[0] = 2.0

array in a dataclass, copied
    r = Record(np.array([2.0]))
    = float(copy.copy(r).o.sum())
    > r.o[0] = 6.0
    < r.o[0] = 2.0

array that a method gives
    h = Holder(np.array([2.0]))
    = float(h.get().sum())
    > h.o[0] = 6.0
    < h.o[0] = 2.0

array of a fresh list
    a = np.array([2.0])
    = float(np.concatenate([a])[0])
    > a[0] = 6.0
    < a[0] = 2.0

array of a fresh dict
    a = np.array([2.0])
    = float({'a': a}['a'].max())
    > a[0] = 6.0
    < a[0] = 2.0

array by an operator
    a = np.array([2.0])
    = float((a * 2)[0])
    > a[0] = 6.0
    < a[0] = 2.0

array in an expression
    l = [np.array([2.0])]
    = float(sum(q.sum() for q in l))
    > l[0][0] = 6.0
    < l[0][0] = 2.0

array in an expression in C
    h = Holder(np.array([2.0]))
    = float(sum(q.o for q in [h])[0])
    > h.o[0] = 6.0
    < h.o[0] = 2.0

queue
    import queue
    q = queue.Queue()
    = q.qsize()
    > q.put(1)
    < q.get()

simple queue
    import queue
    q = queue.SimpleQueue()
    = q.qsize()
    > q.put(1)
    < q.get()

counter
    import collections
    c = collections.Counter('ab')
    = c.most_common(1)[0][1]
    > c.update('a')
    < c.subtract('a')

counter, total
    c = collections.Counter('ab')
    = c.total()
    > c.update('a')
    < c.subtract('a')

deque, length
    q = collections.deque([1])
    = len(q)
    > q.append(2)
    < q.pop()

deque, sum
    q = collections.deque([1])
    = sum(q)
    > q.append(2)
    < q.pop()

fraction
    import fractions
    l = [fractions.Fraction(1, 2)]
    = float(l[0])
    > l[0] = fractions.Fraction(5, 2)
    < l[0] = fractions.Fraction(1, 2)

flags
    class P(enum.Flag):
        A = 1
        B = 2
    l = [P.A]
    = (7.0 if P.B in l[0] else 3.0)
    > l[0] = P.A | P.B
    < l[0] = P.A

list of the user's
    class L(list):
        def __getitem__(self, i): return super().__getitem__(i)
    l = L([2.0])
    = l[0]
    > l[0] = 6.0
    < l[0] = 2.0

dict of the user's
    class D(dict):
        def __getattr__(self, name): return self[name]
    d = D(k=2.0)
    = d.k
    > d['k'] = 6.0
    < d['k'] = 2.0

dict of the user's with attributes
    class D(dict):
        def __init__(self, **k):
            super().__init__(**k)
            self.__dict__ = self
    d = D(k=2.0)
    = d.k
    > d.k = 6.0
    < d.k = 2.0

dict of the user's with attributes, absent
    class D(dict):
        def __init__(self, **k):
            super().__init__(**k)
            self.__dict__ = self
    d = D(k=2.0)
    = getattr(d, 'l', 3.0)
    > d.l = 6.0
    < del d.l

dict of the user's with get
    class D(dict): __getattr__ = dict.get
    d = D(k=2.0)
    = d.k
    > d['k'] = 6.0
    < d['k'] = 2.0

dict of the user's with __getitem__
    class D(dict): __getattr__ = dict.__getitem__
    d = D(k=2.0)
    = d.k
    > d['k'] = 6.0
    < d['k'] = 2.0

dict of the user's with get, absent
    class D(dict): __getattr__ = dict.get
    d = D(k=2.0)
    = (3.0 if d.l is None else d.l)
    > d['l'] = 6.0
    < del d['l']

dict of the user's, an attribute and a key
    class D(dict): pass
    d = D(k=2.0)
    d.k = 1.0
    = d.k * d['k']
    > d['k'] = 6.0
    < d['k'] = 2.0

dict of the user's, a key and an attribute
    class D(dict): pass
    d = D(k=1.0)
    d.k = 2.0
    = d['k'] * d.k
    > d.k = 6.0
    < d.k = 2.0

ordered dict with attributes
    class D(collections.OrderedDict):
        def __getattr__(self, name):
            try: return self[name]
            except KeyError: raise AttributeError(name)
    d = D(k=2.0)
    = getattr(d, 'l', d.k)
    > d['l'] = 6.0
    < del d['l']

user's dict with attributes
    class D(collections.UserDict):
        def __getattr__(self, name):
            if name == 'data': raise AttributeError(name)
            return self[name]
    d = D(k=2.0)
    = d.k
    > d['k'] = 6.0
    < d['k'] = 2.0

dicts in dicts with attributes
    class D(dict):
        def __getattr__(self, name): return self[name]
    d = D(a=D(k=2.0))
    = d.a.k
    > d['a']['k'] = 6.0
    < d['a']['k'] = 2.0

module with items
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = {'k': 2.0}
        def __getattr__(self, name):
            kept = self.__dict__.get('kept', {})
            return kept[name] if name in kept else super().__getattr__(name)
    m = M()
    = m.k
    > m.kept['k'] = 6.0
    < m.kept['k'] = 2.0

tuple of the user's
    class T(tuple): pass
    t = T([1])
    t.v = 2.0
    = t.v
    > t.v = 6.0
    < t.v = 2.0

number of the user's
    class N(float): pass
    n = N(2.0)
    n.v = 2.0
    = n.v
    > n.v = 6.0
    < n.v = 2.0

text of the user's
    class S(str): pass
    n = S('a')
    n.v = 2.0
    = n.v
    > n.v = 6.0
    < n.v = 2.0

mapping of the user's
    class D(collections.abc.Mapping):
        def __init__(self): self.k = {'a': 2.0}
        def __getitem__(self, k): return self.k[k]
        def __iter__(self): return iter(self.k)
        def __len__(self): return len(self.k)
    d = D()
    = {**d}['a'] + len(d)
    > d.k['a'] = 6.0
    < d.k['a'] = 2.0

mapping of the user's, get
    class D(collections.abc.Mapping):
        def __init__(self): self.k = {}
        def __getitem__(self, k): return self.k[k]
        def __iter__(self): return iter(self.k)
        def __len__(self): return len(self.k)
    d = D()
    = d.get('a', 3.0)
    > d.k['a'] = 6.0
    < del d.k['a']

sequence of the user's
    class S(collections.abc.Sequence):
        def __init__(self): self.k = [2.0]
        def __getitem__(self, i): return self.k[i]
        def __len__(self): return len(self.k)
    s = S()
    = sum(s)
    > s.k.append(6.0)
    < s.k.pop()

iteration by __getitem__
    class S:
        def __init__(self): self.k = [2.0]
        def __getitem__(self, i): return self.k[i]
    s = S()
    = sum(q for q in s)
    > s.k[0] = 6.0
    < s.k[0] = 2.0

reversed by __reversed__
    class S:
        def __init__(self): self.k = [2.0]
        def __reversed__(self): return reversed(self.k)
    s = S()
    = next(reversed(s))
    > s.k[0] = 6.0
    < s.k[0] = 2.0

global of another module
    m = types.ModuleType('own_other')
    sys.modules['own_other'] = m
    exec('V = 2.0\\ndef f(): return V', m.__dict__)
    = m.f()
    > m.V = 6.0
    < m.V = 2.0

import inside
    m = types.ModuleType('own_other')
    sys.modules['own_other'] = m
    m.V = 2.0
    = from own_other import V as q
    = q
    > m.V = 6.0
    < m.V = 2.0

import that failed
    sys.modules.pop('own_absent', None)
    def tried():
        try: import own_absent
        except ImportError: return 3.0
        return 6.0
    = tried()
    > sys.modules['own_absent'] = types.ModuleType('own_absent')
    < del sys.modules['own_absent']

in sys.modules
    sys.modules.pop('own_absent', None)
    = (7.0 if 'own_absent' in sys.modules else 3.0)
    > sys.modules['own_absent'] = types.ModuleType('own_absent')
    < del sys.modules['own_absent']

import of an absent name
    m = types.ModuleType('own_other')
    sys.modules['own_other'] = m
    def tried():
        try: from own_other import V
        except ImportError: return 3.0
        return V
    = tried()
    > m.V = 6.0
    < del m.V

name of a code
    def f(): return 2.0
    old, new = f.__code__, (lambda: 6.0).__code__
    = len(f.__code__.co_name)
    > f.__code__ = new
    < f.__code__ = old

import inside, module exchanged
    for name, v in (("own_other", 2.0), ("other", 6.0)):
        m = types.ModuleType(name)
        m.V = v
        ns[name] = m
    sys.modules['own_other'] = own_other
    = import own_other as q
    = q.V
    > sys.modules['own_other'] = other
    < sys.modules['own_other'] = own_other

hook of an optimizer
    def tripled(optimizer, args, kwargs):
        for one in optimizer.param_groups[0]['params']: one.grad.mul_(3.0)
    = 1.0
    > handle = optimizer.register_step_pre_hook(tripled)
    < handle.remove()
    @ step

hook of all optimizers
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    def tripled(optimizer, args, kwargs):
        for one in optimizer.param_groups[0]['params']: one.grad.mul_(3.0)
    = 1.0
    > handle = register_optimizer_step_pre_hook(tripled)
    < handle.remove()
    @ step

rate of the step's optimizer
    = 1.0
    > optimizer.param_groups[0]['lr'] = 0.5
    < optimizer.param_groups[0]['lr'] = 0.125
    @ step

momentum of the step's optimizer
    = 1.0
    > optimizer.param_groups[0]['momentum'] = 0.5
    < optimizer.param_groups[0]['momentum'] = 0
    @ step

direction of the step's optimizer
    = 1.0
    > optimizer.param_groups[0]['maximize'] = True
    < optimizer.param_groups[0]['maximize'] = False
    @ step

parameters of the step's optimizer
    = 1.0
    > taken = optimizer.param_groups[0]['params'].pop()
    < optimizer.param_groups[0]['params'].append(taken)
    @ step

step of the step's optimizer
    = 1.0
    > optimizer.step = lambda: None
    < del optimizer.step
    @ step

step of the optimizer's class
    = 1.0
    > old, torch.optim.SGD.step = torch.optim.SGD.step, lambda self: None
    < torch.optim.SGD.step = old
    @ step

gradient that is there before
    = 1.0
    > getattr(net, 'linear', net).weight.grad = torch.ones(3, 3)
    < pass
    @ step, layer, backward, hook, checkpoint, backward inside

parameter frozen
    = 1.0
    > getattr(net, 'linear', net).bias.requires_grad_(False)
    < getattr(net, 'linear', net).bias.requires_grad_(True)
    @ step, layer, backward, hook, checkpoint, backward inside

bias gone
    = 1.0
    > kept = getattr(net, 'linear', net).bias
    > getattr(net, 'linear', net).bias = None
    < getattr(net, 'linear', net).bias = kept
    @ step, layer, backward, hook, checkpoint, backward inside

weight exchanged
    = 1.0
    > getattr(net, 'linear', net).weight.data = torch.ones(3, 3)
    < getattr(net, 'linear', net).weight.data = torch.zeros(3, 3)
    @ step, layer, backward, hook, checkpoint, backward inside

weight loaded
    = 1.0
    > net.load_state_dict({name: torch.ones_like(one) for name, one in net.state_dict().items()}, assign=True)
    < net.load_state_dict({name: torch.zeros_like(one) for name, one in net.state_dict().items()})
    @ layer, backward, hook, checkpoint, backward inside

weight parametrized
    from torch.nn.utils import parametrize
    class Doubled(nn.Module):
        def forward(self, w): return w * 2
        def right_inverse(self, w): return w
    = 1.0
    > parametrize.register_parametrization(getattr(net, 'linear', net), 'weight', Doubled())
    < parametrize.remove_parametrizations(getattr(net, 'linear', net), 'weight', leave_parametrized=False)
    @ layer, backward, hook, checkpoint

weight pruned
    from torch.nn.utils import prune
    = 1.0
    > prune.l1_unstructured(getattr(net, 'linear', net), 'weight', 3)
    < prune.remove(getattr(net, 'linear', net), 'weight')
    @ layer, backward, hook, checkpoint

hook of the weight
    = 1.0
    > handle = getattr(net, 'linear', net).weight.register_hook(lambda gradient: gradient * 3)
    < handle.remove()
    @ step, layer, backward, hook, checkpoint, backward inside

hook after the gradient of the weight
    def tripled(parameter): parameter.grad.mul_(3.0)
    = 1.0
    > handle = getattr(net, 'linear', net).weight.register_post_accumulate_grad_hook(tripled)
    < handle.remove()
    @ step, layer, backward, hook, checkpoint, backward inside

hook of a part
    = 1.0
    > handle = net.linear.register_forward_hook(lambda module, given, found: found * 3)
    < handle.remove()
    @ layer, backward, hook, checkpoint

hook before a part
    = 1.0
    > handle = net.linear.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    < handle.remove()
    @ layer, backward, hook, checkpoint

hook of a part's backward
    = 1.0
    > handle = net.linear.register_full_backward_pre_hook(lambda module, given: (given[0] * 3,))
    < handle.remove()
    @ layer, backward, hook

forward of a part
    = 1.0
    > net.linear.forward = lambda x: x * 3
    < del net.linear.forward
    @ layer, backward, checkpoint

part exchanged
    = 1.0
    > old, net.linear = net.linear, nn.Tanh()
    < net.linear = old
    @ layer, backward, checkpoint

class of a part
    class Other(nn.Linear):
        def forward(self, x): return super().forward(x) * 3
    = 1.0
    > net.linear.__class__ = Other
    < net.linear.__class__ = nn.Linear
    @ layer, backward, hook, checkpoint

method of the layer
    = 1.0
    > old, type(net).forward = type(net).forward, lambda self, x: self.linear(x) * 3
    < type(net).forward = old
    @ layer, backward, hook

double precision
    = 1.0
    > net.double().float(), net.linear.weight.data.round_()
    < net.half().float()
    @ layer, backward, hook, checkpoint

inference
    = 1.0
    > torch.set_grad_enabled(False)
    < torch.set_grad_enabled(True)
    @ layer, backward, checkpoint
"""
