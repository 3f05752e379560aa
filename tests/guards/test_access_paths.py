"""Whichever way Python takes to a number, and whatever becomes of it: eager's numbers, or an eager call. Where nothing
changes, a graph.

A sample of the table that `python tests/guards/access_paths.py` goes through; GRAPHMOD_PATHS=20000 takes a larger one.
"""

import os
import sys

import access_paths
import pytest
from access_paths import CHANGING, HANDED, SCOPES, SINGLES, Program

pytestmark = pytest.mark.usefixtures("quiet")

CHOSEN = access_paths.sampled(int(os.environ.get("GRAPHMOD_PATHS", "1000")), seed=3)
_OUTSIDE = ("backward", "hook", "hook of a module")
_WITHOUT_ONE_INSIDE = ("function", "layer", "checkpoint", *_OUTSIDE)
_RUN_EACH_TIME = ("hook of a parameter", "late hook of a parameter")  # nothing of these is in a graph
_TAKEN_APART = {"list", "values", "expression of items", "expression of variables", "map of a lambda"}
_TAKEN_APART |= {
    "map of get",
    "map of getattr",
    "map of itemgetter",
    "map of attrgetter",
    "map of methodcaller",
    "reversed",
}
_READ_AGAIN = {"key of a sort", "list, then tensor", "text", "comparison", "deque", "extend"}

# What is not as it should be, by kind: kind -> names of programs; with the scopes, where it is not all of them.
# A program that does what it should again stays here only until somebody takes it out.
KNOWN: dict[str, tuple] = {
    "names that a module did not have": (
        *("absent in a module, buffer", "absent in a module, parameter", "absent in a module, module"),
        *("absent in a part of a module", "absent in a module with others", "absent in a module, buffers there"),
        *("absent in a module, try", "attribute over that of a wrapped module"),
    ),
    "names that a module of Python did not have": (
        *("absent in a module of Python", "hasattr of a module of Python", "import of an absent name"),
        *("import that failed", "import inside, module exchanged"),
    ),
    "dicts that were empty": (
        *("parameters, one more", "named parameters, one more", "buffers, one more", "named buffers, one more"),
        *("named modules, one more below", "parameters of a module", "children of a module", "empty dict of a cache"),
    ),
    "an attribute and an item of one name": (
        *("dict of the user's", "dict of the user's with get", "dict of the user's with __getitem__"),
        *("dict of the user's with get, absent", "dict of the user's, an attribute and a key"),
        "dict of the user's, a key and an attribute",
    ),
    "what iterators hand to attrgetter and getattr": (
        "sum(map(operator.attrgetter('k'), parts.parts))",
        "sum(map(operator.attrgetter('v'), iter(l)))",
        "sum(map(operator.attrgetter('v'), reversed(l)))",
        "sum(map(operator.attrgetter('v'), walk(l)))",
        "sum(map(operator.attrgetter('v'), (q for q in l)))",
        "sum(map(operator.attrgetter('v'), filter(None, l)))",
        "sum(map(operator.attrgetter('v'), {1: t}.values()))",
        "sum(map(operator.attrgetter('v'), itertools.chain(l)))",
        "sum(map(getattr, walk(l), 'v'))",
        "sum(itertools.starmap(getattr, [(t, 'v')]))",
        *("attribute of modules", "attribute of all modules", "getattr of modules"),
    ),
    "what functions and generators hand to code in C": (
        *("sort key with a fresh list", "key of max with a tuple", "array in an expression in C"),
    ),
    "arrays, views and variables in containers": (
        *("arrays in a list, sum", "array in a tuple", "arrays as a tensor", "bytes in a list", "views in a list"),
        *("context variables in a list", "numpy, array of arrays"),
    ),
    "tensors in tuples": tuple(
        (name, ("function", "layer", "step", "checkpoint", "backward inside"))
        for name in (
            *("tensors in a named tuple", "tensor in a named tuple in a list", "tensor in a named tuple of an object"),
            *("tensor in a tuple", "tensor in a tuple in a tuple"),
        )
    ),
    "metadata of tensors in containers": (
        *("data of a tensor in a list", "data of a tensor in a dict", "data of a tensor in a copy"),
        *("data of a tensor in pairs", "data of parameters", "data of named parameters", "data by a comprehension"),
        *("data of a buffer", "set_ of a tensor in a list", "t_ of a tensor in a list", "t_ of a tensor in a tuple"),
        *("squeeze_ of a tensor", "requires_grad_ of a tensor in a list", "swap_tensors"),
    ),
    "tensors that weak references lead to": ("tensors swapped",),
    "gradients that are asked for": (
        ("gradients of parameters", _WITHOUT_ONE_INSIDE),
        ("gradient", _WITHOUT_ONE_INSIDE),
        ("gradient in a list", _WITHOUT_ONE_INSIDE),
        ("gradient dropped", _OUTSIDE),
    ),
    "versions of tensors": ("version of a tensor",),
    "large arrays": ("large array of numpy",),
    "weak references that die": ("weak dict, in", "weak reference that dies"),
    "proxies taken for iterators": ("weak proxy",),
    "descriptors exchanged": (
        *("property exchanged", "property exchanged for a number", "property of a module exchanged"),
        "descriptor that sets, exchanged",
    ),
    "classes changed": (
        *(
            "method between, super",
            "subclass asked",
            "instance asked, bases",
            "attribute by bases",
            "subclasses",
            "dir",
        ),
    ),
    "attributes kept in C": (
        *("name of a function", "doc", "factory of a default dict", "numpy, flags", "shape of numpy", "cell"),
        "arguments of an error exchanged",
    ),
    "other contexts": ("context", "code that runs in a context"),
    "what the design lists as its limits": (
        *("__init__ exchanged", "__getattr__ exchanged", "__len__ exchanged", "__enter__ exchanged", "text written"),
        *("forward of a library's module", "function of torch", "function of math", "built-in exchanged"),
        "step of the optimizer's class",
    ),
    "what a backward outside of the call changes": tuple(
        (name, _OUTSIDE)
        for name in (
            *("slot counted", "class's attribute counted", "array", "bytes", "array of numpy"),
            *("array of numpy as a whole", "array of numpy, function", "array of numpy, fill", "iterator", "count"),
            *("generator", "context variable", "class exchanged", "default exchanged", "cache filled"),
            *("data of a tensor", "data of a tensor of an attribute", "t_ of a tensor of a fresh dict"),
            *("resize_ of a tensor in a list", "requires_grad_ of a module", "requires_grad set"),
            *("gradient exchanged", "tensor attribute exchanged", "tensor global exchanged"),
            *("random numbers", "random numbers of numpy", "a random generator of numpy", "a random generator"),
            *("queue", "gradient dropped"),
        )
    ),
}
_INSIDE_TOO = {"metadata of tensors in containers", "large arrays", "what the design lists as its limits"}
_INSIDE_TOO |= {"what a backward outside of the call changes"}


def known(program: Program) -> str | None:
    """The kind of what is not as it should be; None where all is."""
    if program.scope in _RUN_EACH_TIME:
        return None
    if program.scope.startswith("late "):
        return "what changes between a forward and its backward"
    if program.change == HANDED and program.leaf not in _TAKEN_APART and program.route not in _READ_AGAIN:
        return "what functions and generators hand to code in C"
    for kind, those in KNOWN.items():
        if program.change == CHANGING and kind not in _INSIDE_TOO:
            continue
        if program.change != CHANGING and kind == "what a backward outside of the call changes":
            continue
        for one in those:
            name, scopes = (one, SCOPES) if isinstance(one, str) else one
            if program.leaf == name and program.scope in scopes:
                return kind
    if program.route == "pairs[0][0]" and "tensor" in program.leaf:
        return "tensors in tuples"
    return None


def _marked(program: Program):
    kind = known(program)
    return pytest.param(program, id=str(program), marks=pytest.mark.xfail(reason=kind) if kind else ())


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Modules that programs make are gone after them."""
    for name in ("own_program", "own_other", "own_absent"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]


@pytest.mark.parametrize("program", map(_marked, CHOSEN))
def test_a_program_gives_eagers_numbers_and_has_a_graph_until_something_changes(program):
    found = access_paths.outcome(program)
    if found is None:
        pytest.skip("its parts make no program")
    assert not found.wrong, f"{found.wrong}\n{access_paths.source(program)}"
    if program.change != CHANGING:
        assert found.captured, f"{found.reason}\n{access_paths.source(program)}"


def test_the_pieces_make_a_hundred_thousand_programs():
    every = list(access_paths.programs())
    assert len(every) == len(set(every)) > 100_000
    assert {program.scope for program in every} == set(SCOPES)


def test_what_is_known_to_fail_is_named_as_a_program_is():
    names = {program.leaf for program in access_paths.programs() if program.change != HANDED}
    listed = {one if isinstance(one, str) else one[0] for those in KNOWN.values() for one in those}
    assert listed <= names
    assert SINGLES in {program.change for program in CHOSEN}
