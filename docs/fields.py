"""The fields of requests as tables, from the lists that the server goes by; `make docs` puts them into a page."""

import json
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from graphmod.serve.schema import ChatRequest, CompletionRequest, Object

# What is in fields that are refused or ignored with all that they hold.
WITHIN = {
    "audio": "format voice voice.id",
    "custom": "name input",
    "file": "file_data file_id filename",
    "function_call": "name",
    "functions": "name description parameters",
    "image_url": "url detail",
    "input_audio": "data format",
    "messages.audio": "id",
    "moderation": "model policy policy.input policy.input.mode policy.output policy.output.mode",
    "prompt_cache_breakpoint": "mode ttl",
    "prompt_cache_options": "mode ttl",
    "prediction": "type content content.type content.text content.prompt_cache_breakpoint "
    "content.prompt_cache_breakpoint.mode content.prompt_cache_breakpoint.ttl",
    "repetition_detection": "max_pattern_size min_pattern_size min_count",
    "tool_choice.allowed_tools": "mode tools",
    "tool_choice.custom": "name",
    "tools.custom": "name description format format.type format.grammar format.grammar.definition "
    "format.grammar.syntax",
    "web_search_options": "search_context_size user_location user_location.type user_location.approximate "
    "user_location.approximate.city user_location.approximate.country user_location.approximate.region "
    "user_location.approximate.timezone",
}


class Known(NamedTuple):
    """A field.

    Attributes:
        path: to it; of a field in an object, also of one in a list, `messages.role`.
        state: `supported`, `ignored` or `refused`.
        said: what it means; of one that is refused, the values that are taken, as JSON.
    """

    path: str
    state: Literal["supported", "ignored", "refused"]
    said: str | tuple[str, ...]


def known_fields(kind: type[Object], before: str = "") -> Iterator[Known]:
    """The fields of an object, and of those in it."""
    for name, field in kind.fields().items():
        yield Known(before + name, "supported", field.description or "")
        for inner in _objects(field.annotation):
            yield from known_fields(inner, f"{before}{name}.")
    for name, state, values in (
        *((name, "refused", values) for name, values in kind.refused.items()),
        *((name, "ignored", ()) for name in kind.ignored),
    ):
        yield Known(before + name, state, tuple(map(json.dumps, values)))
        for one in WITHIN.get(before + name, WITHIN.get(name, "")).split():
            yield Known(f"{before}{name}.{one}", state, ())


def _objects(annotation: Any) -> Iterator[type[Object]]:
    if isinstance(annotation, type) and issubclass(annotation, Object):
        yield annotation
    for one in typing.get_args(annotation):
        yield from _objects(one)


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
