"""Writes the fields of requests into docs/serve.md, from the lists that the server goes by (pip install -e '.[serve]').

python docs/make_fields.py            # writes the tables
python docs/make_fields.py --check    # exit status 1 if they are not up to date
"""

import re
import sys
from pathlib import Path

from graphmod.serve.schema import ChatRequest, CompletionRequest, Known, known_fields

PAGE = Path(__file__).resolve().parent / "serve.md"
BEGIN, END = "<!-- fields -->", "<!-- end fields -->"


def rows(state: str) -> dict[Known, str]:
    """The fields of one state, with the kinds of requests that have them."""
    found: dict[Known, str] = {}
    for kind, request in (("completions", CompletionRequest), ("chats", ChatRequest)):
        for one in known_fields(request):
            if one.state == state:
                found[one] = "both" if one in found else kind
    return found


def tables() -> str:
    """The tables, as Markdown."""
    lines = ["| field | requests | |", "|---|---|---|"]
    lines += [f"| `{one.path}` | {kind} | {one.said} |" for one, kind in rows("supported").items()]
    ignored = dict.fromkeys(f"`{one.path}`" for one in rows("ignored"))
    lines += ["", f"Ignored, for they change nothing in an answer: {', '.join(ignored)}.", ""]
    lines += ["| refused field | requests | but for |", "|---|---|---|"]
    refused = rows("refused")
    paths = dict.fromkeys(one.path for one in refused)
    for one, kind in refused.items():
        if one.path.rpartition(".")[0] in paths:
            continue  # with the field that it is in
        within = ", ".join(f"`{path.removeprefix(one.path)}`" for path in paths if path.startswith(one.path + "."))
        taken = ", ".join(f"`{value}`" for value in one.said)
        lines.append(f"| `{one.path}`{f' with {within}' if within else ''} | {kind} | {taken} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the tables in it."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{tables()}\n\n{END}", text, flags=re.S)


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        sys.exit(0 if page(before) == before else "docs/serve.md is not up to date: python docs/make_fields.py")
    PAGE.write_text(page(before), encoding="utf-8")
