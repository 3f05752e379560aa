"""What code read before a capture is looked at before each replay, wherever it lives and however the code got to it:
a sample of the table that `python -m tests.guards.staleness --all` goes through."""

import random

import pytest

from tests.guards import staleness
from tests.guards import staleness_pieces as pieces

pytestmark = pytest.mark.usefixtures("quiet")

# Each of these was silent once.
FOUND = [
    "float / descriptor / variable / no_grad",
    "float / globals() / variable / no_grad",
    "float / imported module / variable / no_grad",
    "float / import inside / variable / no_grad",
    "float / default argument / variable / no_grad",
    "float / default keyword / variable / no_grad",
    "float / item of a weak dict / variable / no_grad",
    "float / vars(self) / variable / no_grad",
    "float / container of modules / variable / no_grad",
    "float / metaclass / variable / no_grad",
    "nested list / attribute / variable / no_grad",
    "list of objects, map / attribute / variable / no_grad",
    "chain map / attribute / variable / no_grad",
    "function's default / attribute / variable / no_grad",
    "function's code / attribute / variable / no_grad",
    "partial's keyword / attribute / variable / no_grad",
    "class's method / attribute / variable / no_grad",
    "class assigned / attribute / variable / no_grad",
    "class asked / attribute / variable / no_grad",
    "tensor's attribute / attribute / variable / no_grad",
    "dataclass, vars / attribute / variable / no_grad",
    "target of a weak reference / attribute / variable / no_grad",
    "weak proxy / attribute / variable / no_grad",
    "float / attribute / or / no_grad",
    "float / attribute / eval / step",
    "float / attribute / exec / backward",
    "float / attribute / attrgetter / layers",
    "float / attribute / map of getattr / layers",
    "float / attribute / thread / layers",
    "float / attribute / sort key / no_grad",
    "float / attribute / base of a call / no_grad",
    "dataclass / helper / inline list / no_grad",
    "dataclass / helper / inline next / no_grad",
    "list append / field of a named tuple / inline / no_grad",
    "dict item / context variable / conditional / no_grad",
    "function / container of modules / match class / no_grad",
    "list of dicts / attribute / variable / no_grad",
]
CELLS = [staleness.Cell(*name.split(" / ")) for name in FOUND]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_change_that_went_unnoticed_once_is_noticed(cell, device):
    found = staleness.outcome(cell, device)
    assert not found.wrong, found
    if cell.form != "thread":
        assert all(found.served[:3]), found


@pytest.fixture(scope="module")
def chosen():
    return random.Random(20).sample(list(dict.fromkeys(staleness.cells())), 160)


@pytest.mark.parametrize("part", [*range(3), *(pytest.param(part, marks=pytest.mark.slow) for part in range(3, 8))])
def test_no_cell_of_a_sample_is_silent_and_nearly_all_come_from_graphs(part, chosen, device):
    outcomes = {cell: staleness.outcome(cell, device) for cell in chosen[part::8]}
    programs = {cell: found for cell, found in outcomes.items() if found is not None}
    assert not {str(cell): found for cell, found in programs.items() if found.wrong}
    eager = [cell for cell, found in programs.items() if not all(found.served[:3])]
    allowed = {"getattribute", "attribute of a method"}
    unexpected = [c for c in eager if c.form not in ("thread", "asyncio", "coroutine") and c.home not in allowed]
    assert not {str(cell): programs[cell].reason for cell in unexpected}


def test_the_pieces_make_thousands_of_programs():
    cells = set(staleness.cells())
    assert len(cells) > 10_000
    assert {cell.value for cell in cells} == set(pieces.VALUES)
    assert {cell.home for cell in cells} == set(pieces.HOMES)
    assert {cell.form for cell in cells} == set(pieces.FORMS)
