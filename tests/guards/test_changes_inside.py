"""What a call itself changes in Python: eager's numbers, Python run once for each call, and a graph only where the call
changes nothing in the end."""

import contextlib
import copy
import functools
import pickle
import random
import types

import numpy
import pytest
import torch

from graphmod import CUDAGraphModule
from graphmod.train.settings import TrainGraphConfig
from tests.guards import staleness_pieces as pieces

pytestmark = pytest.mark.usefixtures("quiet")

CALLS = 9

# name -> lines before the function, lines in it (`h` is the result so far), what is left outside.
CHANGES = {
    "counter": ("S = Holder(); S.n = 0", "S.n += 1; h = h * S.n", "S.n"),
    "counter, not used": ("S = Holder(); S.n = 0", "S.n += 1", "S.n"),
    "list append": ("L = []", "L.append(1.0); h = h * len(L)", "len(L)"),
    "list append, method kept": ("L = []\nadd = L.append", "add(1.0)", "len(L)"),
    "list item": ("L = [0]", "L[0] += 1; h = h * L[0]", "L[0]"),
    "list extended in place": ("L = []", "L2 = L; L2 += [1]; h = h * len(L)", "len(L)"),
    "list slice": ("L = [0]", "L[:] = [L[0] + 1]; h = h * L[0]", "L[0]"),
    "dict fill": ("D = {}", "D[len(D)] = 1.0; h = h * len(D)", "len(D)"),
    "dict update": ("D = {'a': 0}", "D.update(a=D['a'] + 1); h = h * D['a']", "D['a']"),
    "nested dict": ("D = {'a': {'b': 0}}", "D['a']['b'] += 1; h = h * D['a']['b']", "D['a']['b']"),
    "default dict": ("D = collections.defaultdict(int)", "D['a'] += 1; h = h * D['a']", "D['a']"),
    "counter object": ("D = collections.Counter()", "D.update('a'); h = h * D['a']", "D['a']"),
    "set": ("D = set()", "D.add(len(D)); h = h * len(D)", "len(D)"),
    "a dict filled, and another left": (
        "S = Holder(); S.d = {}; HELD = S.d", "S.d['a'] = 2.0; h = h * S.d['a']; S.d = {}", "len(HELD)"
    ),
    "deque": ("D = deque([0])", "D.append(D[-1] + 1); h = h * D[-1]", "D[-1]"),
    "queue": ("import queue\nQ = queue.Queue()", "Q.put(1); h = h * Q.qsize()", "Q.qsize()"),
    "numpy item": ("A = np.zeros(2)", "A[0] += 1; h = h * float(A[0])", "float(A[0])"),
    "array": ("A = array.array('d', [0])", "A[0] += 1; h = h * A[0]", "A[0]"),
    "global": ("N = 0", "global N; N += 1; h = h * N", "N"),
    "nonlocal": (
        "def made_counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n        return n\n"
        "    return up\nUP = made_counter()",
        "h = h * UP()",
        "UP.__closure__[0].cell_contents",
    ),
    "class attribute": ("class C:\n    n = 0", "C.n += 1; h = h * C.n", "C.n"),
    "function attribute": ("def f(): pass\nf.n = 0", "f.n += 1; h = h * f.n", "f.n"),
    "default argument": (
        "def f(seen=[]):\n    seen.append(1)\n    return len(seen)", "h = h * f()", "len(f.__defaults__[0])"),
    "slots": ("S = Slotted(0)", "S.scale += 1; h = h * S.scale", "S.scale"),
    "property": ("S = Lazy(0)", "S._scale = S.scale + 1; h = h * S.scale", "S.scale"),
    "setattr": ("S = Holder(); S.n = 0", "setattr(S, 'n', getattr(S, 'n') + 1); h = h * S.n", "S.n"),
    "vars": ("S = Holder(); S.n = 0", "vars(S)['n'] += 1; h = h * S.n", "S.n"),
    "dataclass": ("S = Settings(0.0)", "S.scale += 1; h = h * S.scale", "S.scale"),
    "iterator": ("I = itertools.count(1)", "n = next(I); h = h * n", "0"),
    "list iterator": ("I = iter(range(1, 100))", "h = h * next(I)", "0"),
    "generator": (
        "def g():\n    n = 0\n    while True:\n        n += 1\n        yield n\nI = g()", "h = h * next(I)",
        "0",
    ),
    "random": ("import random", "h = h * random.random()", "0"),
    "random's own": ("import random\nR = random.Random(1)", "h = h * R.random()", "0"),
    "numpy random": ("", "h = h * np.random.rand()", "0"),
    "numpy generator": ("G = np.random.default_rng(1)", "h = h * G.random()", "0"),
    "torch on the host": ("", "h = h * (2 if torch.rand([]) > 0.5 else 3)", "0"),
    "environment": (
        "os.environ['OWN_COUNT'] = '0'",
        "os.environ['OWN_COUNT'] = str(int(os.environ['OWN_COUNT']) + 1); h = h * int(os.environ['OWN_COUNT'])",
        "os.environ['OWN_COUNT']",
    ),
    "context variable": (
        "V = contextvars.ContextVar('v', default=0); V.set(0)", "V.set(V.get() + 1); h = h * V.get()", "V.get()"
    ),
    "thread's": ("T = threading.local(); T.n = 0", "T.n += 1; h = h * T.n", "T.n"),
    "mode": ("M = nn.Dropout(0.5)", "M.train(not M.training); h = h * (2 if M.training else 3)", "M.training"),
    "requires_grad": ("M = linear()", "M.requires_grad_(not M.weight.requires_grad)", "M.weight.requires_grad"),
    "attribute set to a new tensor, and the old one told apart": (
        "S = Holder(); S.t = full(1.0)", "h = h * (2 if S.t is h else 3); S.t = h.mean(0)", "S.t.tolist()"
    ),
    "parameter exchanged": (
        "M = linear()", "M.weight = nn.Parameter(M.weight.detach() * 0.5); h = M(h)", "M.weight.tolist()"
    ),
    "memory of a tensor in a dict": (
        "D = {'a': full(2.0)}", "for p in D.values(): p.set_(p * 0.5)", "D['a'].tolist()"
    ),
    "strides of a tensor in a list": ("L = [full(2.0, 2, 3)]", "for p in L: p.t_()", "tuple(L[0].shape)"),
    "size of a tensor in a list": ("L = [full(2.0)]", "for p in L: p.resize_(p.numel() + 1)", "L[0].numel()"),
    "requires_grad of a tensor in a list": (
        "L = [full(2.0)]", "for p in L: p.requires_grad_(not p.requires_grad)", "L[0].requires_grad"
    ),
    "tensors swapped": ("L = [full(2.0)]", "for p in L: torch.utils.swap_tensors(p, p * 0.5)", "L[0].tolist()"),
    "class assigned": (
        "O = Doubler()", "O.__class__ = Tripler if type(O) is Doubler else Doubler; h = O(h)", "type(O).__name__"
    ),
    "weak dict": (
        "W = weakref.WeakKeyDictionary(); K = Holder(); W[K] = 0", "W[K] += 1; h = h * W[K]", "W[K]"
    ),
    "partial's keyword": (
        "F = partial(scale, by=0.0)", "F.keywords['by'] += 1; h = F(h)", "F.keywords['by']"
    ),
    "cached with a growing key": (
        "S = Holder(); S.n = 0\n@functools.lru_cache\ndef f(n):\n    return n", "S.n += 1; h = h * f(S.n)", "S.n"
    ),
    "optimizer's rate": (
        "O = optimizer()", "O.param_groups[0]['lr'] *= 0.5; h = h * O.param_groups[0]['lr']", "O.param_groups[0]['lr']"
    ),
    "module appended": ("M = nn.ModuleList()", "M.append(Scale(2.0)); h = through(M, h)", "len(M)"),
    "hook": ("M = linear()", "M.register_forward_hook(twice); h = M(h)", "len(M._forward_hooks)"),
    "bound after a look at all attributes": (
        "S = Holder()", "h = h * len(vars(S)); S.t = h.mean(0)", "S.t.tolist()"
    ),
    "bound and looked at by a copy of all": (
        "S = Holder(); S.t = full(1.0)", "h = h * copy.copy(S).t; S.t = h.mean(0)", "S.t.tolist()"
    ),
    "item bound after a look at all items": (
        "D = {'a': full(1.0)}", "h = h * sum(D.values()); D['a'] = h.mean(0)", "D['a'].tolist()"
    ),
    "bound and kept": ("S = Holder(); L = []", "S.t = h.mean(0); L.append(S.t)", "[t.tolist() for t in L]"),
    "bound to a list from outside": (
        "S = Holder(); L = [full(1.0)]", "S.t = [L, h.mean(0)]", "(S.t[0] is L, S.t[1].tolist())"
    ),
    "bound to an object of C": ("S = Holder()", "S.t = partial(scale, by=h.mean(0))", "S.t(1.0).tolist()"),
    "bound to a module": ("S = Holder()", "S.t = nn.Module(); S.t.u = h * 2", "S.t.u.tolist()"),
    "bound to an object that minds its end": (
        "S = Holder()\nclass Ends:\n    def __del__(self): pass", "S.t = Ends(); S.t.t = h * 2", "S.t.t.tolist()"
    ),
    "bound to an object from outside": (
        "S = Holder(); S.u = Holder(); S.u.v = full(1.0)", "S.t = [S.u, h * 2]", "S.t[0] is S.u, S.t[1].tolist()"
    ),
    "bound to a tensor whose backward may come": (
        "S = Holder(); M = linear()", "S.t = M(h.detach()).sum()", "torch.autograd.grad(S.t, M.weight)[0].tolist()"
    ),
    "bound to a tensor whose backward may come again": (
        "S = Holder(); M = linear()",
        "S.t = M(h.detach()).square().sum(); torch.autograd.grad(S.t, M.weight, retain_graph=True)",
        "torch.autograd.grad(S.t, M.weight)[0].tolist()",
    ),
    "bound to a leaf that is made inside": (
        "S = Holder()", "S.t = h.detach().requires_grad_()", "S.t.is_leaf, S.t.tolist()"
    ),
    "bound to what counts": (
        "S = Holder(); S.n = 0", "import time; S.t = h.mean(0), time.perf_counter_ns()", "S.t[0].tolist()"
    ),
    "bound in one thread": ("S = threading.local()", "S.t = h.mean(0)", "S.t.tolist()"),
    "bound in one branch": (
        "S = Holder(); S.t = full(1.0); S.n = 0\ndef count(): S.n += 1; return S.t.tolist()",
        "if S.n % 2: S.t = h.mean(0)\n    else: h = h * S.t", "count()",
    ),
}  # fmt: skip

# name -> as above: what is bound to tensors of the call before anybody looks at what was there.
BOUND = {
    "an attribute": ("S = Holder()", "S.t = h.mean(0)", "S.t.tolist()"),
    "an attribute that was read": ("S = Holder(); S.t = full(1.0)", "h = h * S.t; S.t = h.mean(0)", "S.t.tolist()"),
    "bound after hasattr": (
        "S = Holder()", "h = h * (2 if hasattr(S, 't') else 3); S.t = h.mean(0)", "S.t.tolist()"
    ),
    "bound by a setter that adds to what was there": (
        "class Sums:\n    def __setattr__(self, name, value):\n        "
        "object.__setattr__(self, name, value + getattr(self, name, 0))\nS = Sums()",
        "S.t = h.mean(0)", "S.t.tolist()",
    ),
    "read by another way and bound": (
        "S = Holder(); S.t = full(1.0); D = S.__dict__", "h = h * D['t']; S.t = h.mean(0)", "S.t.tolist()"
    ),
    "data exchanged": ("P = full(2.0)", "h = h * P; P.data = P.data * 0.5", "P.tolist()"),
    "data of a tensor in a list": ("L = [full(2.0)]", "for p in L: p.data = p.data * 0.5", "L[0].tolist()"),
    "data of a tensor in a list of lists": (
        "L = [[full(2.0)]]", "for l in L:\n        for p in l: p.data = p.data * 0.5", "L[0][0].tolist()"
    ),
    "data by setattr": ("L = [full(2.0)]", "[setattr(p, 'data', p.data * 0.5) for p in L]", "L[0].tolist()"),
    "data of parameters": ("M = linear()", "for p in M.parameters(): p.data = p.data * 0.5", "M.weight.tolist()"),
    "attribute set to a new tensor, and the old one changed": (
        "S = Holder(); S.t = full(1.0)", "S.t.mul_(1.5); h = h * S.t; S.t = h.mean(0)", "S.t.tolist()"
    ),
    "a slot that was read": ("S = Slotted(full(1.0))", "S.scale = S.scale + h.mean(0)", "S.scale.tolist()"),
    "a global that was read": ("T = full(1.0)", "global T; T = T * h.mean(0)", "T.tolist()"),
    "one of a class that was read": ("class C:\n    t = full(1.0)", "C.t = C.t + h.mean(0)", "C.t.tolist()"),
    "an attribute that is read then": ("S = Holder()", "S.t = h.mean(0); h = h * S.t; S.t = S.t * 2", "S.t.tolist()"),
    "an attribute of a module": ("M = linear()", "M.last = M(h).detach(); h = h + M.last", "M.last.tolist()"),
    "an attribute of a class": ("class C:\n    t = None", "C.t = h.mean(0)", "C.t.tolist()"),
    "a slot": ("S = Slotted(0)", "S.scale = h.mean(0)", "S.scale.tolist()"),
    "setattr": ("S = Holder()", "setattr(S, 't', h.mean(0))", "S.t.tolist()"),
    "by the dict of an object": ("S = Holder()", "S.__dict__['t'] = h.mean(0); h = h * S.t", "S.t.tolist()"),
    "a setter of its own": (
        "class Sets:\n    def __setattr__(self, name, value): object.__setattr__(self, name, value * 2)\nS = Sets()",
        "S.t = h.mean(0)", "S.t.tolist()",
    ),
    "a slot with a setter": (
        "class Sets:\n    __slots__ = ('t', '__weakref__')\n"
        "    def __setattr__(self, name, value): object.__setattr__(self, name, value * 2)\nS = Sets()",
        "S.t = h.mean(0)", "S.t.tolist()",
    ),
    "an item of a dict": ("D = {'a': 1, 'b': 2}", "D['a'] = h.mean(0)", "D['a'].tolist(), list(D)"),
    "an item of a list": ("L = [1, 2]", "L[0] = h.mean(0); L[-1] = h.sum(0)", "[t.tolist() for t in L]"),
    "a dict": ("S = Holder()", "S.t = {'a': h * 2, 'b': [h, 3.0]}", "S.t['a'].tolist(), S.t['b'][0].tolist()"),
    "a dataclass": ("S = Holder()", "S.t = Settings(h * 2, (h, 'a'))", "S.t.scale.tolist(), S.t.inner[1]"),
    "an object": (
        "S = Holder()", "S.t = torch.distributions.Normal(h, full(2.0, 3, 4)); h = S.t.log_prob(h)",
        "type(S.t), S.t.loc.tolist(), S.t.icdf(full(0.3)).tolist()",
    ),
    "an object of objects": (
        "S = Holder()", "S.t = Holder(); S.t.me, S.t.u = S.t, [Lazy(h * 2)]", "S.t.me is S.t, S.t.u[0].scale.tolist()"
    ),
    "the result": ("S = Holder()", "h = h * 2; S.t = h", "S.t.tolist()"),
    "a part of the result": ("S = Holder()", "h = h * 2; S.t = h[0]", "S.t.tolist()"),
    "the argument": ("S = Holder()", "S.t = x", "S.t.tolist()"),
    "a part of the argument": ("S = Holder()", "S.t = {'a': x[0]}", "S.t['a'].tolist()"),
    "a parameter": ("S = Holder(); M = linear()", "S.t = [M.weight, h * 2]", "S.t[0] is M.weight, S.t[1].tolist()"),
    "one tensor twice": ("S = Holder()", "S.t = S.u = h.mean(0)", "S.t is S.u, S.t.tolist()"),
    "one dict twice": ("S = Holder()", "S.t = S.u = {'a': h * 2}", "S.t is S.u, S.t['a'].tolist()"),
    "what is held over calls": (
        "S = Holder(); HELD = []", "S.t = {'a': h * 2}",
        "HELD.append((S.t, S.t['a'][0])), [[a['a'].tolist(), b.tolist()] for a, b in HELD]",
    ),
    "what is changed outside": ("S = Holder()", "S.t = h * 2", "S.t.add_(1).tolist(), S.t.resize_(2).tolist()"),
    "what is copied outside": ("S = Holder()", "S.t = h * 2", "copy.deepcopy(S).t.tolist()"),
    "what is saved outside": (
        "M = linear()", "M.last = h * 2", "pickle.loads(pickle.dumps(M)).last.tolist(), list(M.state_dict())"
    ),
    "what is taken away outside": ("S = Holder()", "S.t = h * 2", "vars(S).pop('t').tolist()"),
    "what is exchanged outside": ("S = Holder()", "S.t = h * 2", "setattr(S, 't', S.t * 2), S.t.tolist()"),
    "in a dict that is exchanged for a copy": (
        "S = Holder(); S.d = {'a': 1}", "S.d['a'] = h * 2", "setattr(S, 'd', dict(S.d)), S.d['a'].tolist()"
    ),
    "a tensor whose backward has run": (
        "S = Holder(); M = linear()",
        "S.t = M.weight * h.mean(); torch.autograd.grad(S.t.square().sum(), M.weight)",
        "S.t.requires_grad, S.t.is_leaf, S.t.tolist(), len(raises(S.t.sum().backward)) > 9",
    ),
}  # fmt: skip

HARMLESS = {
    "set to itself": ("S = Holder(); S.n = 2.0", "S.n = S.n; h = h * S.n", "S.n"),
    "set and put back": ("S = Holder(); S.n = 2.0", "n = S.n; S.n = 5.0; h = h * S.n; S.n = n", "S.n"),
    "appended and taken away": ("L = [1.0]", "L.append(2.0); h = h * sum(L); L.pop()", "len(L)"),
    "an equal list in each call": ("S = Holder(); S.l = [1.0]", "S.l = [1.0]; h = h * S.l[0]", "S.l"),
    "an equal dict in each call": ("S = Holder(); S.d = {'a': 2.0}", "S.d = dict(a=2.0); h = h * S.d['a']", "S.d"),
    "a list of its own": ("", "own = []; own.append(2.0); h = h * sum(own)", "0"),
    "an iterator of its own": ("L = [1.0, 2.0]", "h = h * next(iter(L)); h = h * sum(i for i in L)", "L"),
    "a cache that stays": ("D = {}", "h = h * D.setdefault('a', 2.0)", "D"),
    "a lazily made attribute": (
        "S = Holder(); S.t = None", "S.t = full(2.0) if S.t is None else S.t; h = h * S.t", "S.t.tolist()"
    ),
    "functools.cache": ("@functools.cache\ndef f(n):\n    return n * 2.0", "h = h * f(2)", "0"),
    "lru_cache": ("@functools.lru_cache(2)\ndef f(n):\n    return n * 2.0", "h = h * f(2)", "0"),
    "mode set to what it is": ("M = nn.Dropout(0.5)", "M.eval(); h = M(h)", "M.training"),
    "a clock": ("import time", "time.perf_counter()", "0"),
    "a log line": ("import logging", "logging.getLogger('own').info('step %d', 1)", "0"),
    "a text": ("S = Holder(); S.n = 2.0", "text = f'{S.n:.1f} {h.shape}'; h = h * len(text.split())", "0"),
    "an object of its own": ("", "own = Settings(2.0); own.scale += 1; h = h * own.scale", "0"),
    "a closure of its own": ("", "f = made(2.0); h = f(h)", "0"),
    "a context manager": ("", "c = contextlib.nullcontext(2.0)\n    with c as n:\n        h = h * n", "0"),
    "a patterns cache": ("import re", "n = len(re.split(' -> ', 'a b -> c')); h = h * n", "0"),
    "requires_grad switched there and back": (
        "M = linear()", "M.requires_grad_(False); h = M(h); M.requires_grad_(True)", "M.weight.requires_grad"
    ),
    "a tensor in place": ("T = full(1.0)", "T.mul_(2); h = h * T", "T.tolist()"),
}  # fmt: skip


def raises(function):
    """The message of the error that a function raises."""
    with pytest.raises(RuntimeError) as error:
        function()
    return str(error.value)


def play(parts, device, graphed, **settings):
    """What each call of a program gives, and what it leaves outside; and the wrapper."""
    before, inside, left = parts
    space = {"DEVICE": device, "__name__": "own_changes", "copy": copy, "pickle": pickle, "raises": raises}
    exec(pieces.PRELUDE, space)
    random.seed(5)
    numpy.random.seed(5)
    code = f"{before}\ndef step(x):\n    h = x * 1.5\n    {inside}\n    return h\n"
    exec(compile(code, "changes.py", "exec"), space)
    step = CUDAGraphModule(space["step"], TrainGraphConfig(warmup_steps=2, **settings)) if graphed else space["step"]
    results = []
    for call in range(CALLS):
        torch.manual_seed(call)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(call)).to(device)
        results.append((step(x).detach().clone(), eval(left, space)))
    return results, step


def assert_equal(eager, graphed):
    for call, ((one, left), (other, other_left)) in enumerate(zip(eager, graphed, strict=True)):
        assert left == other_left, f"call {call} left {left}, and {other_left} with a graph"
        assert torch.equal(one, other), f"call {call}"


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_call_changes_itself_is_never_frozen_and_happens_once_a_call(name, device):
    eager, _ = play(CHANGES[name], device, False)
    graphed, step = play(CHANGES[name], device, True)
    assert_equal(eager, graphed)
    assert not step.stats.replays or len({str(left) for _, left in eager}) == 1


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_call_leaves_as_it_was_is_captured(name, device):
    eager, _ = play(HARMLESS[name], device, False)
    graphed, step = play(HARMLESS[name], device, True)
    assert_equal(eager, graphed)
    assert step.stats.replays >= CALLS - 4, step.last_failure


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("attribute set to a new tensor, and the old one told apart", "change it in place (copy_, add_)"),
        ("bound to an object of C", "bind tensors instead"),
        ("bound to a tensor whose backward may come", "return it, bind it detached, or capture the whole step"),
    ],
)
def test_what_is_bound_and_keeps_a_call_eager_is_told_with_what_helps(name, remedy, device):
    assert remedy in play(CHANGES[name], device, True)[1].last_failure


@pytest.mark.parametrize("settings", [{}, {"verify": "always"}, {"clone_outputs": True}], ids=str)
@pytest.mark.parametrize("name", BOUND)
def test_what_a_call_binds_is_bound_anew_by_each_replay(name, settings, device):
    eager, _ = play(BOUND[name], device, False)
    graphed, step = play(BOUND[name], device, True, **settings)
    assert_equal(eager, graphed)
    assert step.stats.captures == 1 and not step.stats.failures, step.last_failure
    assert step.stats.replays >= (1 if "verify" in settings else CALLS - 4)


@pytest.mark.parametrize("bound", [None, 2])
def test_a_cache_that_the_recorded_call_is_the_first_to_fill_keeps_it_out_of_no_graph(bound, device):
    scale = functools.lru_cache(bound)(lambda n: n * 2.0)
    step = CUDAGraphModule(lambda x: x * scale(len(x)), TrainGraphConfig(warmup_steps=1))
    for call in range(4):
        if call < 2:
            scale.cache_clear()
        x = torch.full((3,), float(call), device=device)
        assert torch.equal(step(x), x * 6.0)
    assert step.stats.replays == 3 and not step.stats.failures, step.last_failure


@pytest.mark.parametrize("bound", [None, 2])
def test_what_is_first_kept_in_a_cache_by_the_recorded_call_and_changes_later_is_seen(bound, device):
    scale = functools.lru_cache(bound)(lambda n: [n * 2.0])
    step, told = CUDAGraphModule(lambda x: x * scale(len(x))[0], TrainGraphConfig(warmup_steps=1)), ""
    for call in range(8):
        if call < 2:
            scale.cache_clear()
        if call > 3:
            scale(3)[0] = 0.5 * (call // 2)
        x = torch.full((3,), float(call), device=device)
        assert torch.equal(step(x), x * scale(3)[0]), call
        told = told or step.last_failure
    assert "keeps its result (one list)" in told and step.stats.replays, told


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_an_error_in_the_middle_leaves_pythons_state_as_eager_does(fails_at, device):
    """Also where it is raised by a call that is recorded, captured or would be replayed."""

    def run(graphed):
        state = {"calls": 0, "log": []}
        held = type("Held", (), {"bad": False})()

        def step(x):
            if held.bad:
                state["log"].append(len(state["log"]))
                raise ValueError("of the user's")
            return x * 2

        call = CUDAGraphModule(step, TrainGraphConfig(warmup_steps=2)) if graphed else step
        seen = []
        for index in range(8):
            held.bad = index == fails_at
            with contextlib.suppress(ValueError):
                seen.append(call(torch.full((3,), float(index), device=device)).tolist())
        return seen, state

    assert run(True) == run(False)


def hook_of_a_module(model, log):
    model[0].register_full_backward_hook(lambda *_: log.update(count=log.get("count", 0) + 1))


def hook_that_appends(model, log):
    log["sizes"] = []
    model[2].register_full_backward_hook(lambda _, given, got: log["sizes"].append(got[0].numel()))


def backward_of_a_function(model, log):
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            log["count"] = log.get("count", 0) + 1
            return grad

    model[1].forward = Counts.apply


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", [hook_of_a_module, hook_that_appends, backward_of_a_function])
def test_what_a_backward_changes_in_python_happens_once_a_call(change, late, device):
    def run(graphed):
        torch.manual_seed(0)
        model, log = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).to(device), {}
        call = CUDAGraphModule(model, TrainGraphConfig(warmup_steps=2)) if graphed else model
        seen = []
        for index in range(CALLS + 3):
            if index == (5 if late else 0):
                change(model, log)
            call(torch.full((3, 4), float(index), device=device)).sum().backward()
            seen.append(copy.deepcopy(log))
        return seen

    assert run(True) == run(False)


@pytest.mark.parametrize("warmup_steps", [1, 2])
@pytest.mark.parametrize("fills", [{}, {"a": {}}], ids=["empty", "nested"])
def test_an_empty_dict_that_the_recorded_call_is_the_first_to_fill_is_changed(fills, warmup_steps, device):
    """The collector tracks a dict from when it holds more than plain values."""

    def run(graphed):
        held = copy.deepcopy(fills)

        def function(x):
            (held["a"] if fills else held).setdefault("seen", []).append(1)
            return x * 2

        call = CUDAGraphModule(function, TrainGraphConfig(warmup_steps=warmup_steps)) if graphed else function
        for index in range(CALLS):
            call(torch.full((3,), float(index), device=device))
        return held

    assert run(True) == run(False)


def test_instructions_with_prefixes_are_read_too(device):
    """More than 255 names, in a function with a line that assigns and reads through a variable."""
    many = "; ".join(f"h.n{i} = 0" for i in range(300))
    code = (
        f"class Holder: pass\nS = Holder(); S.scale = 2.0\n"
        f"def step(x):\n    h = Holder(); {many}\n    held = S; h.rate = held.scale; return x * h.rate\n"
    )
    space = {}
    exec(compile(code, "long_function.py", "exec"), space)
    step = CUDAGraphModule(space["step"], TrainGraphConfig(warmup_steps=1))
    for call in range(8):
        if call == 4:
            space["S"].scale = 3.0
        assert step(torch.ones(2, device=device)).tolist() == [2.0 if call < 4 else 3.0] * 2, call
    assert step.stats.replays and step.stats.captures == 2


def test_one_list_that_has_become_two_is_seen(device):
    """What replaces it is equal, but code may ask which object it is, or change one of the two."""
    one, other, shared = types.SimpleNamespace(), types.SimpleNamespace(), [2.0]
    one.held = other.held = shared
    wrapper = CUDAGraphModule(lambda x: x * one.held[0] + other.held[0], TrainGraphConfig(warmup_steps=1))
    x = torch.ones(3, device=device)
    for step in range(8):
        if step == 4:
            assert wrapper.stats.replays > 2
            one.held, other.held = [2.0], [2.0]
            wrapper(x)
            assert "one list that it reads in two places has become two" in wrapper.last_failure
        assert wrapper(x).tolist() == [4.0] * 3
