"""Programs that change something themselves each time they are called, for `access_paths`.

Blocks begin with a name. Lines after it are run once, but those that begin with

    *  run in each call
    ?  tell what is there, after each call
    @  name the scopes, where not all make sense
"""

INSIDE = """
global counted
    n = 0
    * global n
    * n += 1
    ? n
    @ function

attribute counted
    s = types.SimpleNamespace(n=0)
    * s.n += 1
    ? s.n

attribute of an item counted
    l = [types.SimpleNamespace(n=0)]
    * list(l)[0].n += 1
    ? l[0].n

slot counted
    s = Slotted(0)
    * s.o += 1
    ? s.o

class's attribute counted
    class T: n = 0
    * T.n += 1
    ? T.n

attribute that hides one of the class
    class T: n = 0
    t = T()
    * t.n += 1
    ? t.n

attribute that was absent
    class T: pass
    t = T()
    * t.n = getattr(t, 'n', 0) + 1
    ? getattr(t, 'n', 0)

attribute of a function counted
    def f(): pass
    f.n = 0
    * f.n += 1
    ? f.n

item counted
    l = [0]
    * l[0] += 1
    ? l[0]

key counted
    d = {'n': 0}
    * d['n'] += 1
    ? d['n']

key that was absent
    d = {}
    * d['n'] = d.get('n', 0) + 1
    ? d.get('n')

Counter
    c = collections.Counter()
    * c['n'] += 1
    ? c['n']

default dict filled
    d = collections.defaultdict(int)
    * d['n'] += 1
    ? dict(d)

list appended
    l = []
    * l.append(1)
    ? len(l)

list extended
    l = []
    * global l
    * l += [1]
    ? len(l)
    @ function

list inserted
    l = [1]
    * l.insert(0, 2)
    ? len(l)

list of a dict appended
    d = collections.defaultdict(list)
    * d['a'].append(1)
    ? len(d['a'])

list of an item appended
    d = {'a': []}
    * [*d.values()][0].append(1)
    ? len(d['a'])

list reversed
    l = [1, 2]
    * l.reverse()
    ? list(l)

list sorted
    l = [1, 2]
    * l.sort(reverse=l[0] == 1)
    ? list(l)

list popped
    l = list(range(99))
    * l.pop()
    ? len(l)

list sliced
    l = [1]
    * l[len(l):] = [1]
    ? len(l)

deque appended
    q = collections.deque(maxlen=3)
    * q.append(len(q))
    ? list(q)

deque rotated
    q = collections.deque([1, 2, 3])
    * q.rotate()
    ? list(q)

set added to
    s = set()
    * s.add(len(s))
    ? len(s)

dict updated
    d = {}
    * d.update({len(d): 1})
    ? len(d)

dict popped
    d = dict.fromkeys(range(99))
    * d.popitem()
    ? len(d)

order of a dict
    d = {'a': 1, 'b': 2}
    * k = next(iter(d))
    * d[k] = d.pop(k)
    ? list(d)

order of an ordered dict
    d = collections.OrderedDict(a=1, b=2)
    * d.move_to_end(next(iter(d)))
    ? list(d)

array
    a = array.array('d', [0.0])
    * a[0] += 1
    ? a[0]

bytes
    a = bytearray(b'a')
    * a[0] += 1
    ? a[0]

array of numpy
    a = np.zeros(1)
    * a[0] += 1
    ? float(a[0])

array of numpy as a whole
    a = np.zeros(2)
    * b = a
    * b += 1
    ? float(a[0])

array of numpy, function
    a = np.zeros(2)
    * np.add(a, 1, out=a)
    ? float(a[0])

array of numpy, fill
    a = np.zeros(2)
    * a.fill(a[0] + 1)
    ? float(a[0])

large array of numpy
    a = np.zeros(200_000)
    * a[5] += 1
    ? float(a[5])

iterator
    i = iter(range(99))
    * next(i)
    ? i.__reduce__()[2] if len(i.__reduce__()) > 2 else 0

count
    i = itertools.count()
    * next(i)
    ? repr(i)

generator
    seen = []
    def made():
        n = 0
        while True:
            n += 1
            yield n
    g = made()
    * next(g)
    ? g.gi_frame.f_locals.get('n')

closure counted
    def made():
        n = 0
        def one():
            nonlocal n
            n += 1
            return n
        return one
    one = made()
    * one()
    ? one.__closure__[0].cell_contents

context variable
    v = contextvars.ContextVar('v', default=0)
    v.set(0)
    * v.set(v.get() + 1)
    ? v.get()

thread's
    v = threading.local()
    v.n = 0
    * v.n += 1
    ? v.n

class exchanged
    class A: pass
    class B: pass
    a = A()
    * a.__class__ = B if type(a) is A else A
    ? type(a).__name__

default exchanged
    def f(k=0): return k
    * f.__defaults__ = (f() + 1,)
    ? f()

cache filled
    n = [0]
    @functools.lru_cache(maxsize=1)
    def f(k): return k
    * f(f.cache_info().misses)
    ? f.cache_info().misses

setattr
    s = types.SimpleNamespace(n=0)
    * setattr(s, 'n', s.n + 1)
    ? s.n

vars
    s = types.SimpleNamespace(n=0)
    * vars(s)['n'] += 1
    ? s.n

vars updated
    s = types.SimpleNamespace(n=0)
    * vars(s).update(n=s.n + 1)
    ? s.n

__setattr__
    class T:
        n = 0
        def __setattr__(self, k, v): object.__setattr__(self, k, v)
    t = T()
    * t.n = t.n + 1
    ? t.n

__setitem__
    class T:
        def __init__(self): self.k = {}
        def __setitem__(self, k, v): self.k[k] = v
    t = T()
    * t['n'] = len(t.k) and t.k['n'] + 1
    ? t.k

__iadd__
    class T:
        n = 0
        def __iadd__(self, o):
            self.n += o
            return self
    l = [T()]
    * l[0] += 1
    ? l[0].n

map of setattr
    l = [types.SimpleNamespace(n=0)]
    * list(map(lambda q: setattr(q, 'n', q.n + 1), l))
    ? l[0].n

module's attribute
    m = nn.ReLU()
    m.n = 0
    * m.n += 1
    ? m.n

attribute of each module
    m = nn.Sequential(nn.ReLU())
    m[0].n = 0
    * for q in m.modules(): q.n = getattr(q, 'n', 0) + 1
    ? m[0].n

module's parameter exchanged
    m = nn.Linear(1, 1, bias=False).requires_grad_(False)
    * m.weight = nn.Parameter(m.weight * 2, False)
    ? m.weight.item()

buffer exchanged
    m = nn.Module()
    m.register_buffer('b', torch.zeros(1))
    * m.b = m.b + 1
    ? m.b.item()

buffer that was absent
    m = nn.Module()
    m.register_buffer('b', None)
    * m.b = torch.zeros(1) if m.b is None else m.b + 1
    ? m.b.item()

module added
    m = nn.ModuleList()
    * m.append(nn.ReLU())
    ? len(m)

mode of a module
    m = nn.ReLU()
    * m.train(not m.training)
    ? m.training

data of a tensor
    t = torch.ones(1)
    * t.data = 0.5 * t.data + 1
    ? t.item()

data of a tensor in a list
    l = [torch.ones(1)]
    * for q in l: q.data = 0.5 * q.data + 1
    ? l[0].item()

data of a tensor in a dict
    d = {'a': torch.ones(1)}
    * for q in d.values(): q.data = 0.5 * q.data + 1
    ? d['a'].item()

data of a tensor in a copy
    l = [torch.ones(1)]
    * for q in list(l): q.data = 0.5 * q.data + 1
    ? l[0].item()

data of a tensor in pairs
    l, k = [torch.ones(1)], [torch.ones(1)]
    * for q, r in zip(l, k): q.data = 0.5 * q.data + r
    ? l[0].item()

data of parameters
    m = nn.Linear(1, 1).requires_grad_(False)
    * for q in m.parameters(): q.data = 0.5 * q.data + 1
    ? m.weight.item()

data of named parameters
    m = nn.Linear(1, 1).requires_grad_(False)
    * for n, q in m.named_parameters(): q.data = 0.5 * q.data + 1
    ? m.weight.item()

data by a comprehension
    l = [torch.ones(1)]
    * [setattr(q, 'data', 0.5 * q.data + 1) for q in l]
    ? l[0].item()

data of a tensor of an attribute
    s = [types.SimpleNamespace(t=torch.ones(1))]
    * [*s][0].t.data = 0.5 * [*s][0].t.data + 1
    ? s[0].t.item()

data of a buffer
    m = nn.BatchNorm1d(1)
    * for q in m.buffers(): q.data = q.data + 1
    ? m.running_mean.item()

set_ of a tensor in a list
    l = [torch.ones(1)]
    * for q in l: q.set_(q + 1)
    ? l[0].item()

t_ of a tensor in a list
    l = [torch.ones(2, 3)]
    * for q in l: q.t_()
    ? tuple(l[0].shape)

t_ of a tensor in a tuple
    l = (torch.ones(2, 3), 1)
    * l[0].t_()
    ? tuple(l[0].shape)

t_ of a tensor of a fresh dict
    l = [torch.ones(2, 3)]
    * {'k': l[0]}['k'].t_()
    ? tuple(l[0].shape)

squeeze_ of a tensor
    l = [torch.ones(1)]
    * for q in l: q.unsqueeze_(0)
    ? tuple(l[0].shape)

resize_ of a tensor in a list
    l = [torch.ones(1)]
    * for q in l: q.resize_(q.numel() + 1)
    ? l[0].numel()

requires_grad_ of a tensor in a list
    l = [torch.ones(1)]
    * for q in l: q.requires_grad_(not q.requires_grad)
    ? l[0].requires_grad

requires_grad_ of a module
    m = nn.Linear(1, 1)
    * m.requires_grad_(not m.weight.requires_grad)
    ? m.weight.requires_grad

requires_grad set
    t = torch.ones(1)
    * t.requires_grad = not t.requires_grad
    ? t.requires_grad

swap_tensors
    l = [torch.ones(1)]
    * for q in l: torch.utils.swap_tensors(q, q + 1)
    ? l[0].item()

gradient exchanged
    l = [torch.ones(1, requires_grad=True)]
    * for q in l: q.grad = (torch.zeros(1) if q.grad is None else q.grad) + 1
    ? l[0].grad.item()

gradient dropped
    l = [torch.ones(1, requires_grad=True)]
    l[0].grad = torch.ones(1)
    * for q in l: q.grad = None if q.grad is not None else torch.ones(1)
    ? l[0].grad is None

tag of a tensor in a list
    l = [torch.ones(1)]
    l[0].n = 0
    * for q in l: q.n += 1
    ? l[0].n

tensor in a list exchanged
    l = [torch.ones(1)]
    * l[0] = l[0] + 1
    ? l[0].item()

tensor in a list of a dict exchanged
    d = {'a': [torch.ones(1)]}
    * [*d.values()][0][0] = d['a'][0] + 1
    ? d['a'][0].item()

tensor attribute exchanged
    s = types.SimpleNamespace(t=torch.ones(1))
    * s.t = 0.5 * s.t + 1
    ? s.t.item()

tensor global exchanged
    T = torch.ones(1)
    * globals()['T'] = T + 1
    ? T.item()

tensor appended
    l = []
    * l.append(x.detach().sum())
    ? len(l)

tensor kept
    s = types.SimpleNamespace(t=None)
    * s.t = x.detach().sum()
    ? s.t.item()

tensor in place
    t = torch.ones(1)
    * t.mul_(0.5).add_(1)
    ? t.item()

tensor in a list in place
    l = [torch.ones(1)]
    * for q in l: q.mul_(0.5).add_(1)
    ? l[0].item()

tensor in place by data
    l = [torch.ones(1)]
    * for q in l: q.data.mul_(0.5).add_(1)
    ? l[0].item()

tensor in place by a view
    l = [torch.ones(2)]
    * for q in l: q[:1] += 1
    ? l[0].sum().item()

rate of an optimizer
    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    * for g in opt.param_groups: g['lr'] *= 0.5
    ? opt.param_groups[0]['lr']

random numbers
    import random
    random.seed(0)
    * random.random()
    ? random.getstate()[1][-1]

random numbers of numpy
    np.random.seed(0)
    * np.random.rand()
    ? np.random.get_state()[2]

a random generator of numpy
    g = np.random.default_rng(0)
    * g.random()
    ? str(g.bit_generator.state)

a random generator
    import random
    g = random.Random(0)
    * g.random()
    ? hash(g.getstate())

hook registered
    m = nn.ReLU()
    * m.register_forward_hook(lambda *_: None)
    ? len(m._forward_hooks)

weak dict filled
    class T: pass
    d = weakref.WeakValueDictionary()
    kept = [T() for _ in range(99)]
    * d[len(d)] = kept[len(d)]
    ? len(d)

attribute through a proxy
    class T: n = 0
    t = T()
    p = weakref.proxy(t)
    * p.n += 1
    ? t.n

queue
    import queue
    q = queue.SimpleQueue()
    * q.put(1)
    ? q.qsize()

text written
    import io
    s = io.StringIO()
    * s.write('a')
    ? len(s.getvalue())

event
    e = threading.Event()
    * (e.clear if e.is_set() else e.set)()
    ? e.is_set()
"""
