"""Calls of tools: the schema of those that an answer must have, and those that its text holds, in the notations of
Hermes and Qwen, Llama 3, and Mistral. What is no call of a tool that the request has stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

# -- which calls an answer must have -----------------------------------------------------------------------------------


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a tool's arguments."""
    return tool["function"].get("parameters") or {"type": "object"}


def schema_of_calls(tools: Sequence[dict[str, Any]], several: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls, one at least; what schemas define stays with each."""
    kinds, definitions = [], {}
    for number, tool in enumerate(tools):
        definitions[f"tool{number}"] = _moved(parameters_of(tool), f"#/$defs/tool{number}")
        properties = {"name": {"const": tool["function"]["name"]}, "arguments": {"$ref": f"#/$defs/tool{number}"}}
        kinds.append({"properties": properties, "required": [*properties]} | _OBJECT)
    most = {} if several else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": kinds}, "$defs": definitions}


_OBJECT = {"type": "object", "additionalProperties": False}


def refuse_constant(name: str) -> None:
    """For `json`, which reads NaN and infinities."""
    raise ValueError(f"{name} is no number of JSON")


_JSON = json.JSONDecoder(parse_constant=refuse_constant)


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to parts of itself find them once it lies at another place."""
    if isinstance(schema, dict):
        moved = {name: _moved(value, place) for name, value in schema.items()}
        own = schema.get("$ref")
        refers = isinstance(own, str) and (own == "#" or own.startswith("#/"))  # else to an anchor, which moves along
        return moved | {"$ref": place + own[1:]} if refers else moved
    return [_moved(one, place) for one in schema] if isinstance(schema, list) else schema


# -- which calls there are in a text -----------------------------------------------------------------------------------


class Notation(NamedTuple):
    """How calls are written.

    Attributes:
        begin, end: around one or several; no end is that of the answer.
        bare: whether calls may begin an answer without `begin`.
    """

    begin: str
    end: str | None = None
    bare: bool = False


LIST = Notation("", bare=True)
"""Of answers by `schema_of_calls`."""
MARKS = frozenset(("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"))
"""Special tokens that calls are written with."""


def notation_of(template: str) -> Notation | None:
    """That of a model, by its chat template; None for another one than those known."""
    if "<tool_call>" in template:
        return None if "<function=" in template else Notation("<tool_call>", "</tool_call>")
    if "[TOOL_CALLS]" in template:
        return Notation("[TOOL_CALLS]")
    is_llama = "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template)
    return Notation("<|python_tag|>", bare=True) if is_llama else None


class Call(NamedTuple):
    """A call, or a piece of its arguments.

    Attributes:
        index: of the call in its answer.
        arguments: JSON, or a piece of it.
        name, id: with the first piece.
    """

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None

    def told(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        if self.id is None:
            return {"function": {"arguments": self.arguments}}
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def whole_calls(pieces: Sequence[Call]) -> list[Call]:
    """Calls with all of their arguments."""
    found: list[Call] = []
    for one in pieces:
        before = None if one.id else found.pop()
        found.append(before._replace(arguments=before.arguments + one.arguments) if before else one)
    return found


# The name before the arguments of a call, in newer models of Mistral.
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


class CallReader:
    """Finds calls in a text that comes in pieces, each once it is complete.

    Args:
        notation: of calls.
        names: of tools.
        several: whether more than the first call is told.

    Attributes:
        count: of calls told.
    """

    def __init__(self, notation: Notation, names: Sequence[str], several: bool) -> None:
        self._notation, self._names, self._several = notation, {*names}, several
        self._held, self._mark = "", ""
        self._between = re.compile(rf"(?:{re.escape(notation.begin or ',')}|[\s,;\[\]])*")
        self._starts, self._inside = notation.bare, False
        self.count = 0

    def add(self, piece: str) -> tuple[str, list[Call]]:
        """The text, and the calls, that are known with this piece."""
        self._held += piece
        begun = self._held.lstrip()
        if self._starts and begun:
            self._starts, self._inside = False, begun[0] == "{" or not self._notation.begin
        text, calls = "", []
        while not self._starts and self._held:
            said, moves = self._read(calls) if self._inside else self._look()
            text += said
            if not moves:
                break
        return text, calls

    def end(self) -> str:
        """What is left as text when nothing follows."""
        left = self._mark + self._held
        return "" if self.count and self._between.fullmatch(left) else left

    def _look(self) -> tuple[str, bool]:
        """The text before the next mark, and whether there is one; what could begin one is kept back."""
        mark = self._notation.begin
        before, found, after = self._held.partition(mark) if mark else (self._held, "", "")
        if found:
            self._held, self._mark, self._inside = after, mark, True
            return before.rstrip(), True
        part = next((n for n in range(min(len(mark), len(before)), 0, -1) if before.endswith(mark[:n])), 0)
        said = before[: len(before) - part].rstrip()
        self._held = before[len(said) :]
        return said, False

    def _read(self, calls: list[Call]) -> tuple[str, bool]:
        """Takes a call off what is held, or the end of calls; whether there was one, and what is neither."""
        end, between = self._notation.end, self._between.match(self._held)
        start = between.end() if between else 0
        if end and self._held.startswith(end, start):
            self._held, self._mark, self._inside = self._held[start + len(end) :], "", False
            return "", True
        if (found := self._call(start)) is not None:
            name, arguments, after = found
            if self._several or not self.count:
                calls.append(Call(self.count, arguments, name, _new_id()))
                self.count += 1
            self._held, self._mark = self._held[after:], ""
            return "", True
        if end and end in self._held:  # closed, and no call
            said, _, self._held = self._held.partition(end)
            said, self._mark, self._inside = self._mark + said + end, "", False
            return said, True
        return "", False

    def _call(self, start: int) -> tuple[str, str, int] | None:
        """The call there: name, arguments, where it ends; None if there is none yet."""
        named = _NAMED.match(self._held, start)
        try:
            value, after = _JSON.raw_decode(self._held, named.end() if named else start)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict):
            return None
        name, arguments = named[1] if named else value.get("name"), value
        if not named:
            arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(name, str) or name not in self._names:
            return None
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False), after


def _new_id() -> str:
    """That of a call: nine letters and digits, as Mistral's templates want it to be when it is told again."""
    return uuid.uuid4().hex[:9]


class ArgumentReader:
    """Takes a whole text for the arguments of one call.

    Args:
        name: of the tool.

    Attributes:
        count: of calls told.
    """

    def __init__(self, name: str) -> None:
        self._name, self.count = name, 0

    def add(self, piece: str) -> tuple[str, list[Call]]:
        """No text, and a piece of the arguments."""
        if not piece:
            return "", []
        first = {} if self.count else {"name": self._name, "id": _new_id()}
        self.count = 1
        return "", [Call(0, piece, **first)]

    def end(self) -> str:
        """Nothing is left."""
        return ""
