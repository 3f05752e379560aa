"""The site: `make docs` builds it without a warning, with what is generated, and it loads nothing from elsewhere."""

import json
import re
import subprocess
import sys
from html import unescape

import pytest

pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")

import graphmod
from benchmarks import tables
from graphmod.cli.settings import GenerateConfig, ServeConfig
from graphmod.train.settings import RunConfig
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
        assert name in ("check", "BackendName") or f'id="graphmod.{name}"' in text, name
    assert "graphmod.check" in text and "name patterns" in words(site / "api.html")


@pytest.mark.parametrize("schema", [RunConfig, GenerateConfig, ServeConfig], ids=lambda one: one.__name__)
def test_the_settings_are_there_with_their_defaults(site, schema):
    text = words(site / "settings.html")
    for group, settings in vars(schema()).items():
        if hasattr(settings, "__dataclass_fields__"):
            assert all(f" {group}.{name} " in text for name in vars(settings)), group
    assert "train.seed" in text and " data.batch_size 8 " in text
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
