"""Whichever way Python takes to a number, and whatever becomes of it: eager's numbers, or an eager call. Where nothing
changes, a graph.

A sample of the table that `python -m tests.guards.access_paths` goes through; GRAPHMOD_PATHS=20000 takes a larger one.
"""

import os
import sys

import pytest

from tests.guards import access_paths
from tests.guards.access_paths import CHANGING, HANDED, SCOPES, SINGLES, Program

pytestmark = pytest.mark.usefixtures("quiet")

CHOSEN = access_paths.sampled(int(os.environ.get("GRAPHMOD_PATHS", "600")), seed=3)
_EAGER = ("gradient", "gradient in a list", "gradient exchanged", "gradient exchanged, in a list", "gradient dropped")
_IN_BACKWARDS = ("backward", "hook", "hook of a module", "checkpoint")  # where these are refused
_RUN_EACH_TIME = ("hook of a parameter", "late hook of a parameter")  # nothing of these is in a graph

# What is silently wrong, by kind, as the page on the design lists it -> names of programs.
KNOWN: dict[str, tuple[str, ...]] = {
    "functions of libraries exchanged": (
        *("forward of a library's module", "function of torch", "function of math", "built-in exchanged"),
        "step of the optimizer's class",
    ),
    "bases of classes exchanged": ("subclass asked", "instance asked, bases", "attribute by bases", "subclasses"),
    "attributes kept in C": (
        *("name of a function", "doc", "factory of a default dict", "numpy, flags", "shape of numpy", "cell"),
        *("arguments of an error exchanged", "empty dict of a cache"),
    ),
    "other contexts": ("context", "code that runs in a context"),
    "texts written": ("text written",),
}


def known(program: Program) -> str | None:
    """The kind of what is not as it should be; None where all is."""
    if program.scope in _RUN_EACH_TIME:
        return None
    return next((kind for kind, names in KNOWN.items() if program.leaf in names), None)


def is_refused(program: Program) -> bool:
    """Whether a program is one that stays eager by design."""
    return program.leaf in _EAGER and program.scope.removeprefix("late ") in _IN_BACKWARDS


def _marked(program: Program):
    kind = known(program)
    return pytest.param(program, id=str(program), marks=pytest.mark.xfail(reason=kind, strict=True) if kind else ())


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
    if program.change != CHANGING and not is_refused(program):
        assert found.captured, f"{found.reason}\n{access_paths.source(program)}"


def test_the_pieces_make_a_hundred_thousand_programs():
    every = list(access_paths.programs())
    assert len(every) == len(set(every)) > 100_000
    assert {program.scope for program in every} == set(SCOPES)


def test_what_is_known_to_fail_is_named_as_a_program_is():
    names = {program.leaf for program in access_paths.programs() if program.change != HANDED}
    assert {name for those in KNOWN.values() for name in those} | set(_EAGER) <= names
    assert SINGLES in {program.change for program in CHOSEN}
