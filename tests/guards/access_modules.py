"""Programs whose parts do not vary with each other, for `access_paths`: numbers that Python reads out of modules.

Blocks begin with a name. Lines after it are run once, but those that begin with

    =  make the number, the last one of them; the others are statements before it
    >  change it from outside, between two calls
    <  change it back
    @  name the scopes, where not all make sense
"""

PARTS = """
class Part(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k
        self.register_buffer('b', torch.tensor([k]))
        self.w = nn.Parameter(torch.tensor([k]), False)
    def forward(self, x): return x * self.k
class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part(2.0), Part(3.0)])
        self.named = nn.ModuleDict({'a': Part(2.0), 'b': Part(3.0)})
        self.line = nn.Sequential(Part(2.0), Part(3.0))
        self.numbers = nn.ParameterList([nn.Parameter(torch.tensor([2.0]), False)])
        self.table = nn.ParameterDict({'a': nn.Parameter(torch.tensor([2.0]), False)})
        self.plain = [Part(2.0)]
    def pick(self): return self.parts[0]
parts = Parts()
"""

WALKS = """
parts.parts[0].k
parts.parts[:1][0].k
list(parts.parts)[0].k
next(iter(parts.parts)).k
parts.parts[-2].k
parts.parts.__getitem__(0).k
[*parts.parts][0].k
tuple(parts.parts)[0].k
sum(q.k for q in parts.parts)
sum([q.k for q in parts.parts])
max(parts.parts, key=lambda q: q.k).k
list(parts.children())[0][0].k
next(parts.children())[0].k
dict(parts.named_children())['parts'][0].k
[q for q in parts.modules() if isinstance(q, Part)][0].k
dict(parts.named_modules())['parts.0'].k
next(q for n, q in parts.named_modules() if n == 'parts.0').k
parts.get_submodule('parts.0').k
parts._modules['parts']._modules['0'].k
list(parts.parts._modules.values())[0].k
parts.named['a'].k
list(parts.named.values())[0].k
dict(parts.named.items())['a'].k
next(iter(parts.named.values())).k
[parts.named[k] for k in parts.named][0].k
list(parts.named.items())[0][1].k
parts.line[0].k
parts.line[:1][0].k
list(parts.line)[0].k
parts.line[0:2][0].k
parts.plain[0].k
[*parts.plain][0].k
parts.pick().k
parts.line(torch.ones(1))
parts.line[:1](torch.ones(1))
functools.reduce(lambda h, q: q(h), parts.parts, torch.ones(1))
list(zip(parts.parts, range(9)))[0][0].k
list(reversed(parts.parts))[-1].k
list(enumerate(parts.parts))[0][1].k
(parts.parts + parts.parts)[0].k
dict(zip('ab', parts.parts))['a'].k
sum(map(lambda q: q.k, parts.parts))
list(map(lambda q: q, parts.parts))[0].k
sum(map(operator.attrgetter('k'), parts.parts))
next(filter(lambda q: q.k, parts.parts)).k
sum(q.k for q in parts.modules() if hasattr(q, 'k'))
sum(getattr(q, 'k', 0.0) for q in parts.modules())
itertools.chain(parts.parts).__next__().k
sorted(parts.parts, key=lambda q: q.k)[0].k
"""
"""Ways to get at a part of `parts`, whose `k` changes."""

MODULES = """
ModuleList appended
    PARTS
    = sum(q.k for q in parts.parts)
    > parts.parts.append(Part(7.0))
    < del parts.parts[-1]

ModuleList, length
    PARTS
    = len(parts.parts)
    > parts.parts.append(Part(7.0))
    < del parts.parts[-1]

ModuleList, last
    PARTS
    = parts.parts[-1].k
    > parts.parts.append(Part(7.0))
    < del parts.parts[-1]

ModuleList, slice
    PARTS
    = len(parts.parts[1:])
    > parts.parts.append(Part(7.0))
    < del parts.parts[-1]

ModuleList, item exchanged
    PARTS
    = parts.parts[0].k
    > old = parts.parts[0]
    > parts.parts[0] = Part(7.0)
    < parts.parts[0] = old

ModuleDict, name in
    PARTS
    = (7.0 if 'c' in parts.named else 3.0)
    > parts.named['c'] = Part(7.0)
    < del parts.named['c']

ModuleDict, keys
    PARTS
    = len(list(parts.named))
    > parts.named['c'] = Part(7.0)
    < del parts.named['c']

Sequential appended
    PARTS
    = parts.line(torch.ones(1))
    > parts.line.append(Part(7.0))
    < del parts.line[-1]

Sequential, item exchanged
    PARTS
    = parts.line(torch.ones(1))
    > old = parts.line[0]
    > parts.line[0] = Part(7.0)
    < parts.line[0] = old

parameters, one more
    PARTS
    = len(list(parts.parameters()))
    > parts.extra = nn.Parameter(torch.ones(1))
    < del parts.extra

parameters, one more below
    PARTS
    = len(list(parts.parameters()))
    > parts.parts[0].extra = nn.Parameter(torch.ones(1))
    < del parts.parts[0].extra

named parameters, one more
    PARTS
    = len(dict(parts.named_parameters()))
    > parts.extra = nn.Parameter(torch.ones(1))
    < del parts.extra

buffers, one more
    PARTS
    = len(list(parts.buffers()))
    > parts.register_buffer('extra', torch.ones(1))
    < del parts.extra

named buffers, one more
    PARTS
    = len(dict(parts.named_buffers()))
    > parts.register_buffer('extra', torch.ones(1))
    < del parts.extra

modules, one more
    PARTS
    = len(list(parts.modules()))
    > parts.extra = nn.ReLU()
    < del parts.extra

children, one more
    PARTS
    = len(list(parts.children()))
    > parts.extra = nn.ReLU()
    < del parts.extra

named modules, one more below
    PARTS
    = len(dict(parts.named_modules()))
    > parts.parts[0].extra = nn.ReLU()
    < del parts.parts[0].extra

state_dict, one more
    PARTS
    = len(parts.state_dict())
    > parts.register_buffer('extra', torch.ones(1))
    < del parts.extra

_parameters, one more
    PARTS
    = len(parts._parameters)
    > parts.extra = nn.Parameter(torch.ones(1))
    < del parts.extra

_buffers, one more
    PARTS
    = sum(1 for _ in parts._buffers)
    > parts.register_buffer('extra', torch.ones(1))
    < del parts.extra

_modules, name in
    PARTS
    = (7.0 if 'extra' in parts._modules else 3.0)
    > parts.extra = nn.ReLU()
    < del parts.extra

_buffers of the part, get
    PARTS
    = (7.0 if parts._buffers.get('extra') is not None else 3.0)
    > parts.register_buffer('extra', torch.ones(1))
    < del parts.extra

parameter exchanged, parameters
    PARTS
    = sum(q.detach().sum() for q in parts.parameters())
    > old = parts.parts[0].w
    > parts.parts[0].w = nn.Parameter(torch.tensor([7.0]), False)
    < parts.parts[0].w = old

parameter's data, parameters
    PARTS
    = sum(q.detach().sum() for q in parts.parameters())
    > parts.parts[0].w.data = torch.tensor([7.0])
    < parts.parts[0].w.data = torch.tensor([2.0])

buffer exchanged, buffers
    PARTS
    = sum(q.sum() for q in parts.buffers())
    > parts.parts[0].b = torch.tensor([7.0])
    < parts.parts[0].b = torch.tensor([2.0])

buffer exchanged, item of buffers
    PARTS
    = list(parts.buffers())[0]
    > parts.parts[0].b = torch.tensor([7.0])
    < parts.parts[0].b = torch.tensor([2.0])

buffer exchanged, state_dict
    PARTS
    = parts.state_dict()['parts.0.b']
    > parts.parts[0].b = torch.tensor([7.0])
    < parts.parts[0].b = torch.tensor([2.0])

buffer exchanged, get_buffer
    PARTS
    = parts.get_buffer('parts.0.b')
    > parts.parts[0].b = torch.tensor([7.0])
    < parts.parts[0].b = torch.tensor([2.0])

buffer exchanged, by name
    PARTS
    = dict(parts.named_buffers())['parts.0.b']
    > parts.parts[0].b = torch.tensor([7.0])
    < parts.parts[0].b = torch.tensor([2.0])

parameter in a list exchanged
    PARTS
    = parts.numbers[0]
    > old = parts.numbers[0]
    > parts.numbers[0] = nn.Parameter(torch.tensor([7.0]), False)
    < parts.numbers[0] = old

parameter in a list, walked
    PARTS
    = [*parts.numbers][0]
    > old = parts.numbers[0]
    > parts.numbers[0] = nn.Parameter(torch.tensor([7.0]), False)
    < parts.numbers[0] = old

parameter list appended
    PARTS
    = len(parts.numbers)
    > parts.numbers.append(nn.Parameter(torch.tensor([7.0]), False))
    < parts.numbers = parts.numbers[:1]

parameter in a dict exchanged
    PARTS
    = parts.table['a']
    > old = parts.table['a']
    > parts.table['a'] = nn.Parameter(torch.tensor([7.0]), False)
    < parts.table['a'] = old

parameter in a dict, walked
    PARTS
    = list(parts.table.values())[0]
    > old = parts.table['a']
    > parts.table['a'] = nn.Parameter(torch.tensor([7.0]), False)
    < parts.table['a'] = old

parameter dict, one more
    PARTS
    = len(list(parts.table.keys()))
    > parts.table['c'] = nn.Parameter(torch.tensor([7.0]), False)
    < parts.table.pop('c')

parameter list slice
    PARTS
    = parts.numbers[:1][0]
    > old = parts.numbers[0]
    > parts.numbers[0] = nn.Parameter(torch.tensor([7.0]), False)
    < parts.numbers[0] = old

forward of one of the parts
    PARTS
    = parts.line(torch.ones(1))
    > parts.line[0].forward = lambda h: h * 7.0
    < del parts.line[0].forward

forward of the class of the parts
    PARTS
    = parts.line(torch.ones(1))
    > old = Part.forward
    > Part.forward = lambda self, h: h * 7.0
    < Part.forward = old

class of one of the parts
    PARTS
    = parts.line(torch.ones(1))
    > parts.line[0].__class__ = type('Other', (Part,), {'forward': lambda self, h: h * 7.0})
    < parts.line[0].__class__ = Part

hook on one of the parts
    PARTS
    = parts.line(torch.ones(1))
    > old = parts.line[0].register_forward_hook(lambda m, a, h: h * 7.0)
    < old.remove()

mode of one of the parts
    PARTS
    = sum(float(q.training) for q in parts.parts)
    > parts.parts[0].eval()
    < parts.parts[0].train()

parts apply
    PARTS
    = found = []
    = parts.apply(lambda q: found.append(getattr(q, 'k', 0.0)))
    = sum(found)
    > parts.parts[0].k = 6.0
    < parts.parts[0].k = 2.0

requires_grad of parameters
    PARTS
    = sum(1.0 for q in parts.parameters() if q.requires_grad)
    > parts.parts[0].w.requires_grad_(True)
    < parts.parts[0].w.requires_grad_(False)

gradients of parameters
    PARTS
    = sum(1.0 for q in parts.parameters() if q.grad is not None)
    > parts.parts[0].w.grad = torch.ones(1)
    < parts.parts[0].w.grad = None

shapes of parameters
    PARTS
    = sum(q.numel() for q in parts.parameters())
    > parts.parts[0].w.data = torch.ones(4)
    < parts.parts[0].w.data = torch.ones(1)
"""
