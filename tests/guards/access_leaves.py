"""What holds the number that a program of `access_paths` reads.

Blocks begin with a name. Lines after it make `Leaf(v)`, which makes what holds it, but those that begin with

    =  make the number of IT
    >  change that of `first` between two calls
    <  change it back
    !  say what it cannot: be in a set (unhashable), be asked for its truth (no_truth), be referred to weakly (no_weak)
"""

LEAVES = """
attribute
    class Leaf:
        def __init__(self, v): self.v = v
    = IT.v
    > first.v = 6.0
    < first.v = 2.0

attribute over one of the class
    class Leaf:
        v = 2.0
        def __init__(self, v): pass
    = IT.v
    > first.v = 6.0
    < del first.v

attribute of the class
    class Leaf:
        v = 2.0
        def __init__(self, v): pass
    = IT.v
    > Leaf.v = 6.0
    < Leaf.v = 2.0

attribute of a base
    class Base:
        v = 2.0
    class Leaf(Base):
        def __init__(self, v): pass
    = IT.v
    > Leaf.v = 6.0
    < del Leaf.v

slot
    class Leaf:
        __slots__ = ('v',)
        def __init__(self, v): self.v = v
    = IT.v
    > first.v = 6.0
    < first.v = 2.0
    ! no_weak

dataclass
    @dataclasses.dataclass(eq=False)
    class Leaf:
        v: float
    = IT.v
    > first.v = 6.0
    < first.v = 2.0

dataclass with slots
    @dataclasses.dataclass(eq=False, slots=True)
    class Leaf:
        v: float
    = IT.v
    > first.v = 6.0
    < first.v = 2.0
    ! no_weak

namespace
    def Leaf(v): return types.SimpleNamespace(v=v)
    = IT.v
    > first.v = 6.0
    < first.v = 2.0
    ! unhashable

property
    class Leaf:
        def __init__(self, v): self._v = v
        @property
        def v(self): return self._v
    = IT.v
    > first._v = 6.0
    < first._v = 2.0

descriptor
    class Described:
        def __get__(self, one, kind): return one._v
    class Leaf:
        v = Described()
        def __init__(self, v): self._v = v
    = IT.v
    > first._v = 6.0
    < first._v = 2.0

cached property
    class Leaf:
        def __init__(self, v): self._v = v
        @functools.cached_property
        def v(self): return self._v
    = IT.v
    > first.__dict__['v'] = 6.0
    < first.__dict__['v'] = 2.0

__getattr__
    class Leaf:
        def __init__(self, v): self.kept = {'v': v}
        def __getattr__(self, name):
            return self.kept[name]
    = IT.v
    > first.kept['v'] = 6.0
    < first.kept['v'] = 2.0

__getattribute__
    class Leaf:
        def __init__(self, v): self._v = v
        def __getattribute__(self, name):
            return object.__getattribute__(self, '_' + name if name == 'v' else name)
    = IT.v
    > first._v = 6.0
    < first._v = 2.0

enumeration
    class Kinds(enum.Enum):
        a = 2.0
        b = 5.0
    def Leaf(v):
        one = Kinds(v)
        one.v = v
        return one
    = IT.v
    > first.v = 6.0
    < first.v = 2.0

method
    class Leaf:
        def __init__(self, v): self._v = v
        def m(self): return self._v
    = IT.m()
    > first._v = 6.0
    < first._v = 2.0

methods of methods
    class Leaf:
        def __init__(self, v): self._v = v
        def m(self): return self
    = IT.m().m()._v
    > first._v = 6.0
    < first._v = 2.0

method of a base
    class Base:
        def m(self): return self._v
    class Leaf(Base):
        def __init__(self, v): self._v = v
        def m(self): return super().m()
    = IT.m()
    > first._v = 6.0
    < first._v = 2.0

class method
    class Leaf:
        k = 2.0
        def __init__(self, v): pass
        @classmethod
        def m(cls): return cls.k
    = IT.m()
    > Leaf.k = 6.0
    < Leaf.k = 2.0

bound method
    class Made:
        def __init__(self, v): self._v = v
        def m(self): return self._v
    def Leaf(v): return Made(v).m
    = IT()
    > first.__self__._v = 6.0
    < first.__self__._v = 2.0
    ! no_weak

__call__
    class Leaf:
        def __init__(self, v): self._v = v
        def __call__(self): return self._v
    = IT()
    > first._v = 6.0
    < first._v = 2.0

__getitem__
    class Leaf:
        def __init__(self, v): self._v = v
        def __getitem__(self, key): return self._v
    = IT['k']
    > first._v = 6.0
    < first._v = 2.0

__iter__
    class Leaf:
        def __init__(self, v): self._v = v
        def __iter__(self): return iter([self._v])
    = sum(IT)
    > first._v = 6.0
    < first._v = 2.0

__iter__ that yields
    class Leaf:
        def __init__(self, v): self._v = v
        def __iter__(self): yield self._v
    = max(IT)
    > first._v = 6.0
    < first._v = 2.0

__contains__
    class Leaf:
        def __init__(self, v): self._v = v
        def __contains__(self, key): return self._v > 3
    = (7.0 if 1 in IT else 3.0)
    > first._v = 6.0
    < first._v = 2.0

__len__
    class Leaf:
        def __init__(self, v): self._v = v
        def __len__(self): return int(self._v)
    = len(IT)
    > first._v = 6.0
    < first._v = 2.0

__bool__
    class Leaf:
        def __init__(self, v): self._v = v
        def __bool__(self): return self._v > 3
    = (7.0 if IT else 3.0)
    > first._v = 6.0
    < first._v = 2.0
    ! no_truth

__float__
    class Leaf:
        def __init__(self, v): self._v = v
        def __float__(self): return self._v
    = float(IT)
    > first._v = 6.0
    < first._v = 2.0

__int__
    class Leaf:
        def __init__(self, v): self._v = v
        def __int__(self): return int(self._v)
    = int(IT)
    > first._v = 6.0
    < first._v = 2.0

__index__
    class Leaf:
        def __init__(self, v): self._v = v
        def __index__(self): return int(self._v)
    = range(9)[IT]
    > first._v = 6.0
    < first._v = 2.0

__round__
    class Leaf:
        def __init__(self, v): self._v = v
        def __round__(self): return int(self._v)
    = round(IT)
    > first._v = 6.0
    < first._v = 2.0

__abs__
    class Leaf:
        def __init__(self, v): self._v = v
        def __abs__(self): return self._v
    = abs(IT)
    > first._v = 6.0
    < first._v = 2.0

__neg__
    class Leaf:
        def __init__(self, v): self._v = v
        def __neg__(self): return -self._v
    = (-IT)
    > first._v = 6.0
    < first._v = 2.0

__mul__
    class Leaf:
        def __init__(self, v): self._v = v
        def __mul__(self, other): return self._v * other
    = (IT * 2.0)
    > first._v = 6.0
    < first._v = 2.0

__radd__
    class Leaf:
        def __init__(self, v): self._v = v
        def __radd__(self, other): return self._v + other
    = (2.0 + IT)
    > first._v = 6.0
    < first._v = 2.0

__eq__
    class Leaf:
        def __init__(self, v): self._v = v
        def __eq__(self, other): return self._v == other
        __hash__ = object.__hash__
    = (7.0 if IT == 2.0 else 3.0)
    > first._v = 6.0
    < first._v = 2.0

__lt__
    class Leaf:
        def __init__(self, v): self._v = v
        def __lt__(self, other): return self._v < other
    = (7.0 if IT < 3.0 else 3.0)
    > first._v = 6.0
    < first._v = 2.0

__hash__
    class Leaf:
        def __init__(self, v): self._v = v
        def __hash__(self): return int(self._v)
    = hash(IT)
    > first._v = 6.0
    < first._v = 2.0
    ! unhashable

__str__
    class Leaf:
        def __init__(self, v): self._v = v
        def __str__(self): return str(self._v)
    = float(str(IT))
    > first._v = 6.0
    < first._v = 2.0

__repr__
    class Leaf:
        def __init__(self, v): self._v = v
        def __repr__(self): return str(self._v)
    = float(repr(IT))
    > first._v = 6.0
    < first._v = 2.0

__repr__ in text
    class Leaf:
        def __init__(self, v): self._v = v
        def __repr__(self): return str(self._v)
    = float(shown(IT))
    > first._v = 6.0
    < first._v = 2.0

__str__ in text
    class Leaf:
        def __init__(self, v): self._v = v
        def __str__(self): return str(self._v)
    = float(text(IT))
    > first._v = 6.0
    < first._v = 2.0

__format__
    class Leaf:
        def __init__(self, v): self._v = v
        def __format__(self, how): return str(self._v)
    = float(formatted(IT))
    > first._v = 6.0
    < first._v = 2.0

__str__ by percent
    class Leaf:
        def __init__(self, v): self._v = v
        def __str__(self): return str(self._v)
    = float('%s' % (IT,))
    > first._v = 6.0
    < first._v = 2.0

__str__ of a container
    class Leaf:
        def __init__(self, v): self._v = v
        def __repr__(self): return str(self._v)
    = float(str([IT])[1:-1])
    > first._v = 6.0
    < first._v = 2.0

__instancecheck__
    class Meta(type):
        def __instancecheck__(cls, one): return one._v > 3
    class Asked(metaclass=Meta): pass
    class Leaf:
        def __init__(self, v): self._v = v
    = (7.0 if isinstance(IT, Asked) else 3.0)
    > first._v = 6.0
    < first._v = 2.0

isinstance
    class Leaf:
        def __init__(self, v): pass
    class Other(Leaf): pass
    = (7.0 if isinstance(IT, Other) else 3.0)
    > first.__class__ = Other
    < first.__class__ = Leaf

type
    class Leaf:
        def __init__(self, v): pass
    class Other(Leaf): pass
    = (7.0 if type(IT) is Other else 3.0)
    > first.__class__ = Other
    < first.__class__ = Leaf

name of the class
    class Leaf:
        def __init__(self, v): pass
    class Others(Leaf): pass
    = len(IT.__class__.__name__)
    > first.__class__ = Others
    < first.__class__ = Leaf

method of another class
    class Leaf:
        def __init__(self, v): pass
        def m(self): return 2.0
    class Other(Leaf):
        def m(self): return 6.0
    = IT.m()
    > first.__class__ = Other
    < first.__class__ = Leaf

method exchanged
    class Leaf:
        def __init__(self, v): pass
        def m(self): return 2.0
    old = Leaf.m
    = IT.m()
    > Leaf.m = lambda self: 6.0
    < Leaf.m = old

method of the object
    class Leaf:
        def __init__(self, v): pass
        def m(self): return 2.0
    = IT.m()
    > first.m = lambda: 6.0
    < del first.m

code of a method
    class Leaf:
        def __init__(self, v): pass
        def m(self): return 2.0
    old, new = Leaf.m.__code__, (lambda self: 6.0).__code__
    = IT.m()
    > Leaf.m.__code__ = new
    < Leaf.m.__code__ = old

default of a method
    class Leaf:
        def __init__(self, v): pass
        def m(self, k=2.0): return k
    = IT.m()
    > Leaf.m.__defaults__ = (6.0,)
    < Leaf.m.__defaults__ = (2.0,)

property exchanged
    class Leaf:
        def __init__(self, v): pass
        v = property(lambda self: 2.0)
    old = Leaf.v
    = IT.v
    > Leaf.v = property(lambda self: 6.0)
    < Leaf.v = old

absent, hasattr
    class Leaf:
        def __init__(self, v): pass
    = (7.0 if hasattr(IT, 'v') else 3.0)
    > first.v = 6.0
    < del first.v

absent, with a default
    class Leaf:
        def __init__(self, v): pass
    = getattr(IT, 'v', 3.0)
    > first.v = 6.0
    < del first.v

absent in the class
    class Leaf:
        def __init__(self, v): pass
    = getattr(IT, 'v', 3.0)
    > Leaf.v = 6.0
    < del Leaf.v

absent in slots
    class Leaf:
        __slots__ = ('v', 'w', '__weakref__')
        def __init__(self, v): pass
    = getattr(IT, 'v', 3.0)
    > first.v = 6.0
    < del first.v

vars
    class Leaf:
        def __init__(self, v): self.v = v
    = vars(IT)['v']
    > first.v = 6.0
    < first.v = 2.0

sum of vars
    class Leaf:
        def __init__(self, v): self.v = v
    = sum(vars(IT).values())
    > first.v = 6.0
    < first.v = 2.0

attrgetter
    class Leaf:
        def __init__(self, v): self.v = v
    = operator.attrgetter('v')(IT)
    > first.v = 6.0
    < first.v = 2.0

methodcaller
    class Leaf:
        def __init__(self, v): self._v = v
        def m(self): return self._v
    = operator.methodcaller('m')(IT)
    > first._v = 6.0
    < first._v = 2.0

match
    class Leaf:
        __match_args__ = ('v',)
        def __init__(self, v): self.v = v
    def matched(one):
        match one:
            case Leaf(2.0): return 7.0
            case Leaf(v=v): return v
    = matched(IT)
    > first.v = 6.0
    < first.v = 2.0

try
    class Leaf:
        def __init__(self, v): pass
    def tried(one):
        try: return one.v
        except AttributeError: return 3.0
    = tried(IT)
    > first.v = 6.0
    < first.v = 2.0

dict
    def Leaf(v): return {'v': v}
    = IT['v']
    > first['v'] = 6.0
    < first['v'] = 2.0
    ! unhashable no_weak

get of a dict
    def Leaf(v): return {'v': v}
    = IT.get('v', 1.0)
    > first['v'] = 6.0
    < first['v'] = 2.0
    ! unhashable no_weak

absent in a dict
    def Leaf(v): return {'k': v}
    = IT.get('v', 3.0)
    > first['v'] = 6.0
    < del first['v']
    ! unhashable no_weak

empty dict
    def Leaf(v): return {}
    = sum(IT.values(), 3.0)
    > first['v'] = 6.0
    < del first['v']
    ! unhashable no_truth no_weak

dict in a dict
    def Leaf(v): return {'v': {'v': v}}
    = IT['v']['v']
    > first['v']['v'] = 6.0
    < first['v']['v'] = 2.0
    ! unhashable no_weak

list
    def Leaf(v): return [v]
    = IT[0]
    > first[0] = 6.0
    < first[0] = 2.0
    ! unhashable no_weak

list appended
    def Leaf(v): return [v]
    = IT[-1]
    > first.append(6.0)
    < first.pop()
    ! unhashable no_weak

empty list
    def Leaf(v): return []
    = sum(IT, 3.0)
    > first.append(6.0)
    < first.pop()
    ! unhashable no_truth no_weak

list, slice
    def Leaf(v): return [v]
    = sum(IT[:])
    > first.append(6.0)
    < first.pop()
    ! unhashable no_weak

set
    def Leaf(v): return {v}
    = sum(IT)
    > first.add(6.0)
    < first.remove(6.0)
    ! unhashable

deque
    def Leaf(v): return collections.deque([v])
    = IT[0]
    > first[0] = 6.0
    < first[0] = 2.0
    ! unhashable

ordered dict
    def Leaf(v): return collections.OrderedDict(v=v)
    = IT['v']
    > first['v'] = 6.0
    < first['v'] = 2.0
    ! unhashable

order of an ordered dict
    def Leaf(v): return collections.OrderedDict(a=v, b=7.0)
    = next(iter(IT.values()))
    > first.move_to_end('a')
    < first.move_to_end('b')
    ! unhashable

default dict
    def Leaf(v): return collections.defaultdict(float, v=v)
    = IT['v']
    > first['v'] = 6.0
    < first['v'] = 2.0
    ! unhashable

user's dict
    def Leaf(v): return collections.UserDict(v=v)
    = IT['v']
    > first['v'] = 6.0
    < first['v'] = 2.0
    ! unhashable

chain of dicts
    def Leaf(v): return collections.ChainMap({}, {'v': v})
    = IT['v']
    > first.maps[1]['v'] = 6.0
    < first.maps[1]['v'] = 2.0
    ! unhashable

chain of dicts, in front
    def Leaf(v): return collections.ChainMap({}, {'v': v})
    = IT['v']
    > first['v'] = 6.0
    < del first['v']
    ! unhashable

view of a dict
    under = {'v': 2.0}
    def Leaf(v): return types.MappingProxyType(under)
    = IT['v']
    > under['v'] = 6.0
    < under['v'] = 2.0
    ! unhashable no_weak

array
    def Leaf(v): return array.array('d', [v])
    = IT[0]
    > first[0] = 6.0
    < first[0] = 2.0
    ! unhashable

array of numpy
    def Leaf(v): return np.array([v])
    = float(IT[0])
    > first[0] = 6.0
    < first[0] = 2.0
    ! unhashable

large array of numpy
    def Leaf(v): return np.full(150_000, v)
    = float(IT[5])
    > first[5] = 6.0
    < first[5] = 2.0
    ! unhashable no_truth

named tuple of a list
    class Named(NamedTuple):
        v: list
    def Leaf(v): return Named([v])
    = IT.v[0]
    > first.v[0] = 6.0
    < first.v[0] = 2.0
    ! unhashable no_weak

weak reference
    class Target:
        def __init__(self, v): self._v = v
    kept = []
    def Leaf(v):
        kept.append(Target(v))
        return weakref.ref(kept[-1])
    = IT()._v
    > first()._v = 6.0
    < first()._v = 2.0
    ! no_weak

weak proxy
    class Target:
        def __init__(self, v): self._v = v
    kept = []
    def Leaf(v):
        kept.append(Target(v))
        return weakref.proxy(kept[-1])
    = IT._v
    > first._v = 6.0
    < first._v = 2.0
    ! unhashable no_weak

partial
    def Leaf(v): return functools.partial(lambda held: held['v'], {'v': v})
    = IT()
    > first.args[0]['v'] = 6.0
    < first.args[0]['v'] = 2.0

keyword of a partial
    def Leaf(v): return functools.partial(lambda k: k, k=v)
    = IT()
    > first.keywords['k'] = 6.0
    < first.keywords['k'] = 2.0

default
    def Leaf(v): return lambda k=v: k
    = IT()
    > first.__defaults__ = (6.0,)
    < first.__defaults__ = (2.0,)

closure
    def Leaf(v): return lambda: v
    = IT()
    > first.__closure__[0].cell_contents = 6.0
    < first.__closure__[0].cell_contents = 2.0

attribute of a function
    def Leaf(v):
        def one(): return one.v
        one.v = v
        return one
    = IT()
    > first.v = 6.0
    < first.v = 2.0

cached function
    def Leaf(v):
        kept = {'v': v}
        return functools.lru_cache(lambda: kept)
    = IT()['v']
    > first()['v'] = 6.0
    < first()['v'] = 2.0

class
    def Leaf(v): return type('Made', (), {'v': v})
    = IT.v
    > first.v = 6.0
    < first.v = 2.0

instance of a class
    def Leaf(v): return type('Made', (), {'v': v})
    = IT().v
    > first.v = 6.0
    < first.v = 2.0

array of a class
    def Leaf(v): return type('Made', (), {'v': np.array([v])})
    = float(IT().v[0])
    > first.v[0] = 6.0
    < first.v[0] = 2.0

context variable
    def Leaf(v):
        one = contextvars.ContextVar('one')
        one.set(v)
        return one
    = IT.get()
    > first.set(6.0)
    < first.set(2.0)
    ! no_weak

thread's
    def Leaf(v):
        one = threading.local()
        one.v = v
        return one
    = IT.v
    > first.v = 6.0
    < first.v = 2.0

event
    def Leaf(v): return threading.Event()
    = (7.0 if IT.is_set() else 3.0)
    > first.set()
    < first.clear()

module
    class Leaf(nn.Module):
        def __init__(self, v):
            super().__init__()
            self.v = v
    = IT.v
    > first.v = 6.0
    < first.v = 2.0

forward of a module
    class Leaf(nn.Module):
        def __init__(self, v):
            super().__init__()
            self.v = v
        def forward(self): return self.v
    = IT()
    > first.v = 6.0
    < first.v = 2.0

buffer
    class Leaf(nn.Module):
        def __init__(self, v):
            super().__init__()
            self.register_buffer('v', torch.tensor([v]))
    = IT.v
    > first.v = torch.tensor([6.0])
    < first.v = torch.tensor([2.0])

data of a parameter
    class Leaf(nn.Module):
        def __init__(self, v):
            super().__init__()
            self.v = nn.Parameter(torch.tensor([v]), False)
    = IT.v
    > first.v.data = torch.tensor([6.0])
    < first.v.data = torch.tensor([2.0])

mode of a module
    class Leaf(nn.Module):
        def __init__(self, v): super().__init__()
    = (7.0 if IT.training else 3.0)
    > first.eval()
    < first.train()

absent in a module, attribute
    class Leaf(nn.Module):
        def __init__(self, v): super().__init__()
    = getattr(IT, 'v', 3.0)
    > first.v = 6.0
    < del first.v

absent in a module, buffer
    class Leaf(nn.Module):
        def __init__(self, v): super().__init__()
    = getattr(IT, 'v', 3.0)
    > first.register_buffer('v', torch.tensor([6.0]))
    < del first.v

absent in a module, parameter
    class Leaf(nn.Module):
        def __init__(self, v): super().__init__()
    = (7.0 if hasattr(IT, 'v') else 3.0)
    > first.v = nn.Parameter(torch.ones(1))
    < del first.v

absent in a module, module
    class Leaf(nn.Module):
        def __init__(self, v): super().__init__()
    = (7.0 if hasattr(IT, 'v') else 3.0)
    > first.v = nn.ReLU()
    < del first.v

parameters of a module
    class Leaf(nn.Module):
        def __init__(self, v): super().__init__()
    = len(list(IT.parameters()))
    > first.v = nn.Parameter(torch.ones(1))
    < del first.v

names in a module
    class Leaf(nn.Module):
        def __init__(self, v): super().__init__()
    = len(IT.state_dict())
    > first.register_buffer('v', torch.ones(1))
    < del first.v

children of a module
    class Leaf(nn.Module):
        def __init__(self, v): super().__init__()
    = len([*IT.modules()])
    > first.v = nn.ReLU()
    < del first.v

tensor
    def Leaf(v): return torch.tensor([v])
    = IT
    > first.data = torch.tensor([6.0])
    < first.data = torch.tensor([2.0])
    ! no_truth

set_ of a tensor
    def Leaf(v): return torch.tensor([v])
    = IT
    > first.set_(torch.tensor([6.0]))
    < first.set_(torch.tensor([2.0]))
    ! no_truth

tensor in place
    def Leaf(v): return torch.tensor([v])
    = IT
    > first.fill_(6.0)
    < first.fill_(2.0)
    ! no_truth

transposed tensor
    def Leaf(v): return torch.arange(9.0).view(3, 3) * v
    = IT[0]
    > first.t_()
    < first.t_()
    ! no_truth

shape of a tensor
    def Leaf(v): return torch.ones(2)
    = len(IT)
    > first.resize_(4)
    < first.resize_(2)
    ! no_truth

requires_grad of a tensor
    def Leaf(v): return torch.ones(2)
    = (7.0 if IT.requires_grad else 3.0)
    > first.requires_grad_(True)
    < first.requires_grad_(False)
    ! no_truth

tag of a tensor
    def Leaf(v): return torch.ones(2)
    = getattr(IT, 'tag', 3.0)
    > first.tag = 6.0
    < del first.tag
    ! no_truth
"""
