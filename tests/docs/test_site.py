"""The site: `make docs` builds it without a warning, with what is generated, and it loads nothing from elsewhere."""

import inspect
import json
import pydoc
import re
import subprocess
import sys
from dataclasses import is_dataclass
from html import unescape

import pytest

pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")

import graphmod
from benchmarks import tables
from docs.hooks import _shown
from graphmod.cli.app import TRAIN
from graphmod.cli.generate import GENERATE
from graphmod.cli.serve import SERVE
from tests.support.settings import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. Builds it as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def words(page):
    """What a reader sees of a page."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page.read_text())).split())


def test_make_docs_builds_it_the_same_way():
    recipe = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "mkdocs build --strict" in recipe


def test_the_reference_has_all_public_names_with_their_docstrings(site):
    text = (site / "api.html").read_text()
    for name in graphmod.__all__:
        assert name == "check" or f'id="graphmod.{name}"' in text, name
    assert "graphmod.check" in text and "name patterns" in words(site / "api.html")


def test_the_reference_has_what_public_signatures_and_docstrings_name(site):
    ids = re.findall(r'id="(graphmod\.[\w.]+)"', (site / "api.html").read_text())
    inner = {"LayerContext", "LayerGroup", "OverRanks", "Traffic"}  # which no user makes or gets
    shown = {one.rpartition(".")[2] for one in ids} | inner
    lacking = {}
    for path in ids:
        found = pydoc.locate(path)
        plain = found.fget if isinstance(found, property) else found
        told = str(getattr(plain, "__annotations__", "")) + (inspect.getdoc(plain) or "").partition("Raises:")[2]
        if isinstance(plain, type):
            told += str(inspect.signature(plain.__init__))
        around = vars(sys.modules[getattr(plain, "__module__", None) or "graphmod"])
        for name in set(re.findall(r"\b[A-Z]\w+", told)) - shown:
            kind = around.get(name) or getattr(graphmod.errors, name, None) or getattr(graphmod.check, name, None)
            if isinstance(kind, type) and kind.__module__.startswith("graphmod."):
                lacking.setdefault(name, path)
    assert len(ids) > 100 and not lacking, lacking


def test_what_is_returned_is_one_row_with_its_type(site):
    tables = re.findall(r"Returns:</span>.*?</table>", (site / "api.html").read_text(), re.DOTALL)
    kinds = [re.findall(r'<tr class="doc-section-item">\s*<td>(.*?)</td>', table, re.DOTALL) for table in tables]
    assert tables and all(len(found) == 1 and "<code>" in found[0] for found in kinds), kinds


@pytest.mark.parametrize("app", [TRAIN, GENERATE, SERVE], ids=lambda one: one.name)
def test_the_settings_are_there_with_the_defaults_of_the_command(site, app):
    text = words(site / "settings.html")
    for group, settings in vars(app.typed(app.compose([]))).items():
        for name, value in vars(settings).items() if is_dataclass(settings) else ():
            assert is_dataclass(value) or f" {group}.{name} {_shown(value)}".rstrip() + " " in text, f"{group}.{name}"
    rows = re.findall(r"<tr>.*?</tr>", (site / "settings.html").read_text(), re.DOTALL)
    bare = [row for row in rows if re.search(r"<td[^>]*>\s*</td>\s*</tr>", row)]
    assert rows and not bare, f"without a description: {bare}"


@pytest.mark.parametrize("name", tables.TABLES)
def test_each_table_is_on_a_page(site, name):
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    (page,) = [page for page in pages if f"<!-- table: {name} -->" in page.read_text()]
    shown = words(site / ("index.html" if page.stem == "README" else f"{page.stem}.html"))
    rows = [line.replace("|", " ").split() for line in tables.render(name).splitlines() if line.startswith("|")]
    plain = [" ".join(row) for row in rows if not {*"`*"} & {*"".join(row)} and row[0] != "---"]
    assert plain and all(row in shown for row in plain)


def test_nothing_is_left_to_be_filled_in_and_nothing_comes_from_elsewhere(site):
    for page in site.glob("*.html"):
        text = page.read_text()
        assert not re.search(r"<!-- (?:settings|fields)", text), page.name
        assert not re.search(r'(?:src|<link[^>]*stylesheet[^>]*href)="https?:', text), page.name
    assert "stop_token_ids" in words(site / "fields.html")
    assert (site / "examples" / "own_loop.py").is_file()


def test_it_can_be_searched(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any("use_static_causal_attention" in one["text"] for one in index["docs"])
