"""The pages: short and plain; what they name is there, and each known limit has the test that shows it."""

import ast
import re

import pytest

from tests.support.settings import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
DESIGN, LIMITS = [page for page in DOCS if page.stem.startswith("design")], ROOT / "docs" / "limits.md"
UNTESTED = "## Without a test here"


def sentences(page):
    """Those of a page, without its tables, drawings and code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-|#>]|\d+\.) ?)", text):
        if not block.lstrip().startswith(("|", "#")):
            yield from re.split(r"(?<=[.?!])\s+(?=[A-Z*`(])", " ".join(block.split()))


def limits():
    """Each known limit: what it is about, and the rest of its lines."""
    text = LIMITS.read_text().partition(UNTESTED)[0]
    return re.findall(r"^- \*\*(.+?)\*\*(.*?)(?=^- |^#|\Z)", text, flags=re.M | re.S)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_a_page_is_read_in_minutes(page):
    assert len(page.read_text().split()) <= 1500


def test_all_pages_are_read_in_two_hours():
    assert sum(len(page.read_text().split()) for page in (ROOT / "README.md", *DOCS)) <= 30_000


@pytest.mark.parametrize("page", [*DESIGN, LIMITS], ids=lambda page: page.name)
def test_sentences_are_short(page):
    long = [one for one in sentences(page) if len(one.split()) > 35]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.name)
def test_the_files_and_rooms_that_it_names_are_there(page):
    for name in re.findall(r"`([a-z_]+/(?:[a-z_]+\.py)?)`", page.read_text()):
        assert (ROOT / "graphmod" / name).exists() or (ROOT / name).exists(), name


def test_the_house_has_all_rooms():
    house = (ROOT / "CONTRIBUTING.md").read_text().partition("    graphmod/\n")[2].partition("    configs/")[0]
    rooms = {path.parent.name for path in (ROOT / "graphmod").glob("*/*.py")}
    assert {*re.findall(r"^      (\w+)/ ", house, flags=re.M)} == rooms


def test_each_limit_names_the_test_that_shows_it():
    assert len(limits()) > 30
    for about, rest in limits():
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", rest)
        assert named or "](measurements.md#" in rest, f"{about}: which test shows it?"
        for file, name in named:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            assert name in {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}, f"{file}::{name}"
