"""What mkdocs does with the pages before it builds the site: tables from results, settings from where they are defined.

A page says `<!-- table: NAME -->` (of benchmarks/tables.py), `<!-- settings: MODULE.NAME -->` or `<!-- fields -->`.
The README, CONTRIBUTING and CHANGELOG become pages of the site, and the programs of examples/ lie beside them.
"""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import tables
from docs import fields
from docs.meanings import meanings
from graphmod.cli.app import App
from graphmod.decode import EngineConfig

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and programs that lie outside of docs/."""
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, its_page in OUTSIDE.items():
            text = text.replace(f"]({other}", f"]({its_page}")
        files.append(File.generated(config, page, content=text.replace("](LICENSE)", "](LICENSE.txt)")))
    files.append(File.generated(config, "LICENSE.txt", content=(ROOT / "LICENSE").read_text(encoding="utf-8")))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fills in what is generated, and turns links out of docs/ into those of the site."""
    markdown = re.sub(r"<!-- table: ([\w ]+) -->(?!\n\n\|)", lambda found: tables.render(found[1]), markdown)
    markdown = re.sub(r"<!-- settings: ([\w.]+) -->", lambda found: settings(found[1]), markdown)
    markdown = re.sub("<!-- fields -->", lambda _: fields.tables(), markdown)
    markdown = markdown.replace("](../examples/", "](examples/")
    for name, page in OUTSIDE.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    return markdown


def settings(name: str) -> str:
    """The tables of a command, with the values that it takes by default, or of a schema: one for each group."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    return "\n\n".join(_groups(found.typed(found.compose([])) if isinstance(found, App) else found(), ""))


def _groups(given: object, before: str) -> list[str]:
    """The tables of an object of settings: its own keys, then those of the groups in it."""
    said, rows, groups = meanings(type(given)), [], []
    for field in dataclasses.fields(given):
        key, value = before + field.name, getattr(given, field.name)
        if dataclasses.is_dataclass(value):
            groups += _groups(value, f"{key}.")
        else:
            meaning = said.get(field.name, "")
            if meaning.startswith("of `EngineConfig`"):
                meaning = meanings(EngineConfig)[field.name]
            meaning = " ".join(meaning.replace("|", "\\|").split()).removesuffix(".")
            rows.append([f"`{key}`", f"`{_shown(value)}`", meaning and f"{meaning}."])
    heading = [f"### {before.removesuffix('.')}"] if before else []
    return [*heading, tables.table(["key", "default", ""], rows, numbers=False), *groups] if rows else groups


def _shown(value: object) -> str:
    """A value as one writes it in a shell."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
