"""Ways on which Python reaches a number, and what happens to it between calls: programs for `test_access_paths`.

A program is a leaf (what holds the number), a route (how code gets to the leaf), a change and a scope (what is wrapped,
and where in it the number is read). Others have the name of their kind for a change: those whose parts do not vary with
each other; those in which Python hands a list (the leaf) one by one to code in C (the route); and those that change
something inside of the call. `python -m tests.guards.access_paths [--sample N] [PARTS ...]` plays them.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import operator
import random
import sys
import textwrap
import time
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from graphmod import CUDAGraphModule
from graphmod.train.settings import TrainGraphConfig
from tests.guards.access_inside import INSIDE
from tests.guards.access_leaves import LEAVES
from tests.guards.access_modules import MODULES, PARTS, WALKS
from tests.guards.access_routes import EXPRESSIONS, HANDING, PRELUDE, SINKS, SOURCES, STATEMENTS
from tests.guards.access_single import ATTRIBUTES, IN_C, SINGLE

CHANGES = ("inside it", "another in its place", "one in front", "order")
CALLS, CHANGED, BACK = 8, 4, 6
_prelude = compile(PRELUDE, "prelude.py", "exec")

SCOPES = {
    "function": """
        def call(x):
            STATEMENTS
            return x * (NUMBER)
    """,
    "layer": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = linear()
            def forward(self, x):
                hidden = self.linear(x)
                STATEMENTS
                return hidden * (NUMBER)
        call = net = Net()
    """,
    "step": """
        net = linear()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
        def call(x):
            hidden = net(x)
            STATEMENTS
            loss = (hidden * (NUMBER)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()
    """,
    "backward": """
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1
            @staticmethod
            def backward(ctx, gradient):
                x = gradient
                STATEMENTS
                return x * (NUMBER)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = linear()
            def forward(self, x):
                return Scaled.apply(self.linear(x)) * 1
        call = net = Net()
    """,
    "hook": """
        def scaled(x):
            STATEMENTS
            return x * (NUMBER)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = linear()
            def forward(self, x):
                hidden = self.linear(x)
                hidden.register_hook(scaled)
                return hidden * 1
        call = net = Net()
    """,
    "hook of a parameter": """
        def scaled(x):
            STATEMENTS
            return x * (NUMBER)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = linear()
                self.linear.weight.register_hook(scaled)
            def forward(self, x):
                return self.linear(x)
        call = net = Net()
    """,
    "hook of a module": """
        def scaled(module, gradients, given):
            x = gradients[0]
            STATEMENTS
            return (x * (NUMBER),)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.act = linear(), nn.Tanh()
                self.act.register_full_backward_hook(scaled)
            def forward(self, x):
                return self.act(self.linear(x)) * 1
        call = net = Net()
    """,
    "checkpoint": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = linear()
            def forward(self, x):
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            def inner(self, x):
                hidden = self.linear(x).tanh()
                STATEMENTS
                return hidden * (NUMBER)
        call = net = Net()
    """,
    "backward inside": """
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1
            @staticmethod
            def backward(ctx, gradient):
                x = gradient
                STATEMENTS
                return x * (NUMBER)
        net = linear()
        def call(x):
            Scaled.apply(net(x)).sum().backward()
            found = net.weight.grad.clone()
            net.zero_grad()
            return found
    """,
}
_LATE = "late "  # where the change comes between a forward and its backward
SCOPES |= {_LATE + name: SCOPES[name] for name in ("backward", "hook", "hook of a parameter", "hook of a module")}
_scopes = {name: textwrap.dedent(text) for name, text in SCOPES.items()}


SINGLES, HANDED, CHANGING = "outside", "handed to C", "inside of the call"
_ATTRIBUTE = """
class T:
    def __init__(self, v=2.0): self.v = v
    def m(self): return self.v
t = T()
l = [t]
"""
_PART = "parts.parts[0].k = parts.named['a'].k = parts.line[0].k = parts.plain[0].k ="


class Program(NamedTuple):
    """A program by the names of its parts; some have no route."""

    leaf: str
    route: str
    change: str
    scope: str

    def __str__(self) -> str:
        return " / ".join(part for part in self if part)


class _Text(NamedTuple):
    """The lines of a program.

    Attributes:
        setup: run once.
        read: make the number, the last of them; the others are statements before it.
        there, back: change it between calls, and back.
        look: tells what else is to be compared.
        scopes: all where empty.
    """

    setup: str
    read: str
    there: str = ""
    back: str = ""
    look: str = "None"
    scopes: tuple[str, ...] = ()


def _blocks(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Name -> the lines of each mark, those without one under ""."""
    for block in text.strip("\n").split("\n\n"):
        name, *lines = block.split("\n")
        found: dict[str, list[str]] = {}
        for line in lines:
            mark = next((mark for mark in _MARKS if line.startswith(f"    {mark}")), "")
            found.setdefault(mark, []).append(line[4 + len(mark) :])
        yield name, {mark.strip(): "\n".join(those) for mark, those in found.items()}


_MARKS = ("= ", "> ", "< ", "@ ", "* ", "? ", "! ", "one: ", "two: ")


def _single(block: dict[str, str]) -> _Text:
    scopes = tuple(one for one in block.get("@", "").split(", ") if one)
    setup = block.get("", "").replace("PARTS", PARTS)
    return _Text(setup, block["="], block[">"], block["<"], scopes=scopes)


def _inside(block: dict[str, str]) -> _Text:
    scopes = tuple(one for one in block.get("@", "").split(", ") if one)
    return _Text(block[""], f"{block['*']}\n1.0", look=block["?"], scopes=scopes)


_ROUTES = {
    **{line: line for line in EXPRESSIONS.strip("\n").split("\n")},
    **{name: block["="] for name, block in _blocks(STATEMENTS)},
}
_LEAVES = {name: {"one": "Leaf(2.0)", "two": "Leaf(5.0)", "!": "", **block} for name, block in _blocks(LEAVES)}
_SINGLES = {
    **{line: _Text(PARTS, line, f"{_PART} 6.0", f"{_PART} 2.0") for line in WALKS.strip("\n").split("\n")},
    **{line: _Text(_ATTRIBUTE, line, "t.v = 6.0", "t.v = 2.0") for line in ATTRIBUTES.strip("\n").split("\n")},
    **{name: _single(block) for text in (MODULES, IN_C, SINGLE) for name, block in _blocks(text)},
}
_INSIDE = {name: _inside(block) for name, block in _blocks(INSIDE)}


class Outcome(NamedTuple):
    """What became of a program.

    Attributes:
        wrong: in what it differs from eager; empty where it does not.
        captured: whether a graph was captured, and used, before anything changed.
        reason: why not.
    """

    wrong: str
    captured: bool
    reason: str


def _go_together(leaf: str, route: str) -> bool:
    """Whether one of `_LEAVES` can be reached by one of `_ROUTES`."""
    needs, text = _LEAVES[leaf]["!"], _ROUTES[route]
    if "unhashable" in needs and any(part in route for part in ("{o", "[(o,", "set(", "ref(", "Weak")):
        return False
    if "no_weak" in needs and "weak" in text:
        return False
    return not ("no_truth" in needs and any(part in text for part in (" or p", "filter(None", "q == 1")))


def _text(program: Program) -> _Text | None:
    """The lines of a program; None where its parts do not go together."""
    if program.change == SINGLES:
        return _SINGLES[program.leaf]
    if program.change == CHANGING:
        return _INSIDE[program.leaf]
    if program.change == HANDED:
        first, read, there, back = SINKS[program.route]
        return _Text(HANDING.replace("FIRST", first), read.replace("SOURCE", SOURCES[program.leaf]), there, back)
    if not _go_together(program.leaf, program.route):
        return None
    leaf, route = _LEAVES[program.leaf], _ROUTES[program.route]
    *statements, last = route.split("\n")
    setup = f"{leaf['']}\n{HOMES.replace('ONE', leaf['one']).replace('TWO', leaf['two'])}"
    read = "\n".join([*statements, leaf["="].replace("IT", f"({last})")])
    there, back = {
        "inside it": (leaf[">"], leaf["<"]),
        "another in its place": ("put(other)", "put(first)"),
        "one in front": ("in_front(other)", "no_more_in_front()"),
        "order": ("other_order()", "other_order()"),
    }[program.change]
    return _Text(setup, read, there, back)


HOMES = """
o = first = ONE
other, p = TWO, TWO
items, table, pairs, queue = [o, p], {"a": o, "b": p}, [(o, 1), (p, 2)], collections.deque([o, p])
nested, several = [[o], [p]], (o, p)
holder = Holder(o)
slotted = Slotted(o)
Holder.shared = o
context.set(o)
local.o = o
ordered = collections.OrderedDict(table)
mapping = types.MappingProxyType(table)
chained, own = collections.ChainMap({}, table), collections.UserDict(table)
default = collections.defaultdict(list, table)
record = Record(o)
space = types.SimpleNamespace(o=o)
def with_default(o=o): return o
def with_keyword(*, o=o): return o
def closing():
    kept = o
    def inner(): return kept
    def exchange(new):
        nonlocal kept
        kept = new
    return inner, exchange
closed, exchange = closing()
kept_partial = functools.partial(same, o)

def put(new):
    global o, several
    o = new
    items[0] = table["a"] = nested[0][0] = queue[0] = new
    ordered["a"] = own["a"] = default["a"] = new
    pairs[0] = (new, 1)
    several = (new, p)
    holder.o = slotted.o = Holder.shared = local.o = record.o = space.o = new
    context.set(new)
    with_default.__defaults__ = (new,)
    with_keyword.__kwdefaults__["o"] = new
    exchange(new)
    kept_partial.__setstate__((same, (new,), {}, {}))

def in_front(new):
    global several
    several = (new, *several)
    items.insert(0, new), queue.appendleft(new), pairs.insert(0, (new, 3)), nested.insert(0, [new])
    for one in (table, ordered, own, default):
        kept = dict(one)
        one.clear()
        one.update({"0": new, **kept})

def no_more_in_front():
    global several
    several = several[1:]
    items.pop(0), queue.popleft(), pairs.pop(0), nested.pop(0)
    for one in (table, ordered, own, default):
        del one["0"]

def other_order():
    global several
    several = several[::-1]
    for one in (items, queue, pairs, nested):
        one.reverse()
    for one in (table, ordered, own, default):
        kept = dict(reversed(list(one.items())))
        one.clear()
        one.update(kept)
"""


def source(program: Program) -> str | None:
    """The program, as it could be run by itself."""
    text = _text(program)
    if text is None:
        return None
    *statements, number = text.read.strip("\n").split("\n")
    lines = []
    for line in _scopes[program.scope].split("\n"):
        if line.strip() == "STATEMENTS":
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + one for one in statements]
        else:
            lines.append(line.replace("NUMBER", number))
    return f"{text.setup}\n" + "\n".join(lines)


def _x(step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(step))


def play(program: Program, graphed: bool) -> tuple[list, bool, str]:
    """What each call gives and leaves behind; whether a graph was used before the change; why not."""
    text, own = _text(program), types.ModuleType("own_program")
    sys.modules["own_program"] = own
    space = own.__dict__
    exec(_prelude, space)
    exec(compile(source(program), "program.py", "exec"), space)
    look = compile(text.look, "look.py", "eval")
    call = space["call"]
    wrapper = call = CUDAGraphModule(call, TrainGraphConfig(warmup_steps=2)) if graphed else call
    found, captured = [], False
    for step in range(CALLS):
        change = text.there if step == CHANGED else text.back if step == BACK else ""
        late = program.scope.startswith(_LATE)
        if not late:
            exec(change, space)
        torch.manual_seed(step)
        result = call(_x(step))
        if late:
            exec(change, space)
        gradients = []
        if result.requires_grad and "net" in space:
            result.sum().backward()
            gradients = [None if one.grad is None else one.grad.clone() for one in space["net"].parameters()]
            space["net"].zero_grad()
        found.append(([result.detach().clone(), *gradients], eval(look, space)))
        if graphed and step == CHANGED - 1:
            captured = wrapper.stats.captures > 0 and wrapper.stats.replays > 0
    return found, captured, wrapper.last_failure if graphed else ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def outcome(program: Program) -> Outcome | None:
    """Plays a program on both twins. None where its parts make no program, which only running it tells."""
    try:
        eager, _, _ = play(program, False)
    except Exception:
        if program.change in CHANGES:
            return None
        raise
    try:
        graphed, captured, reason = play(program, True)
    except Exception as error:
        return Outcome(f"raises {type(error).__name__}: {str(error)[:200]}", False, "")
    wrong = [index for index, pair in enumerate(zip(eager, graphed, strict=True)) if not _same(*pair)]
    return Outcome(f"differs in calls {wrong}" if wrong else "", captured, reason)


def programs() -> Iterator[Program]:
    """Every program there is."""
    at_once = [scope for scope in SCOPES if not scope.startswith(_LATE)]
    for kind, those, scopes in ((SINGLES, _SINGLES, SCOPES), (CHANGING, _INSIDE, at_once)):
        for name, text in those.items():
            yield from (Program(name, "", kind, scope) for scope in text.scopes or scopes)
    for leaf, route in itertools.product(SOURCES, SINKS):
        yield from (Program(leaf, route, HANDED, scope) for scope in SCOPES)
    for leaf, route, change in itertools.product(_LEAVES, _ROUTES, CHANGES):
        if (change == CHANGES[0] or leaf == "attribute") and _go_together(leaf, route):
            yield from (Program(leaf, route, change, scope) for scope in SCOPES)


def sampled(count: int, seed: int = 0) -> list[Program]:
    """Each part of the table in one program in which nothing changes late, and a choice among all others."""
    every, draw = list(programs()), random.Random(seed)
    by_part: dict[tuple[str, str], list[Program]] = {}
    for _, alike in itertools.groupby(every, key=operator.itemgetter(0, 1, 2)):  # the same in several scopes
        program, *others = alike
        at_once = [one for one in (program, *others) if not one.scope.startswith(_LATE)]
        for part in _parts(program) if at_once else ():
            by_part.setdefault(part, []).extend(at_once)
    chosen: dict[Program, None] = {}
    covered: set[tuple[str, str]] = set()
    for part, those in sorted(by_part.items(), key=lambda one: -len(one[0][0])):  # routes first, which lead to leaves
        if part not in covered:
            program = draw.choice(those)
            chosen[program] = None
            covered.update(_parts(program))
    more = draw.sample(every, min(max(0, count - len(chosen)), len(every)))
    return list(dict.fromkeys([*chosen, *more]))


def _parts(program: Program) -> list[tuple[str, str]]:
    kind = program.change if program.change in (SINGLES, HANDED, CHANGING) else "any"
    return [(kind, program.leaf), *([(f"{kind} route", program.route)] if program.route else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("names", nargs="*", help="LEAF / ROUTE / CHANGE / SCOPE, * for any")
    options = parser.parse_args()
    chosen = sampled(options.sample, options.seed) if options.sample else list(programs())
    if options.names:
        wanted = [[part.strip() for part in name.split(" / ")] for name in options.names]
        chosen = [p for p in chosen if any(all(a in ("*", b) for a, b in zip(w, p, strict=False)) for w in wanted)]
    logging.getLogger("graphmod").setLevel(logging.CRITICAL)
    count = {"wrong": 0, "eager": 0, "fine": 0, "none": 0, "error": 0}
    began = time.perf_counter()
    for program in chosen:
        if options.show:
            print(source(program))
        try:
            found = outcome(program)
        except Exception as error:
            count["error"] += 1
            print(f"ERROR   {program}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        served = found is None or found.captured or program.change == CHANGING
        kind = "none" if found is None else "wrong" if found.wrong else "fine" if served else "eager"
        count[kind] += 1
        if kind in ("wrong", "eager"):
            print(f"{kind.upper():7} {program}: {found.wrong or found.reason[:200]!r}", flush=True)
    print(count, f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
