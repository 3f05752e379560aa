"""From the messages of a chat, as clients send them, to the text of a prompt, as the tokenizer's template writes it.

A template is a program, and says of no message whether it reads it. So it is tried: with words of which each can be
found again in what it writes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from graphmod.errors import ConfigError, reason

Message = dict[str, Any]

# Fields that a template may leave out, for what was said is in others.
_BESIDE = {"role", "content", "name", "tool_call_id", "annotations"}
# What was thought is left out of what was said before, but should go by the name that the template has for it.
_THOUGHT = {"reasoning": "reasoning_content", "reasoning_content": "reasoning"}
_KNOWN = {*_BESIDE, *_THOUGHT, "tool_calls", "function_call", "refusal", "audio"}
_WHOLE = {"user", "system", "developer"}  # roles whose messages a template has no reason to leave out
# By role, in which form a template may want contents: as they are, all as texts, all as parts, or some as either.
_FORMS = (
    lambda role: None,
    lambda role: str,
    lambda role: list,
    lambda role: list if role == "user" else str,
    lambda role: str if role == "assistant" else list,
)


class ChatError(ConfigError):
    """Messages that cannot become a prompt.

    Args:
        said: what is wrong.
        field: where, such as `messages.1.content`.
    """

    def __init__(self, said: str, field: str = "messages") -> None:
        super().__init__(said)
        self.field = field


def chat_prompt(tokenizer: Any, messages: list[Message]) -> str:
    """The text of a prompt for an answer to messages: what `apply_chat_template` writes for them.

    A content goes to the template as it was sent, as a text or as parts, if the template writes it; otherwise in the
    other form. Likewise a template that fails at fields that are null, or at the arguments of a tool call as a text,
    gets them left out and as an object.

    Raises:
        ChatError: the template refuses the messages, or leaves out something that they say.
    """
    for number, message in enumerate(messages):
        _require_text(number, message)

    def write(given: list[Message]) -> str:
        return tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False)

    changed, shown = _as_it_reads(write, messages)
    try:
        prompt = write(changed)
    except Exception as error:  # whatever a template raises
        raise _refused(write, changed, error) from error
    _require_read(write, changed, shown, prompt)
    return prompt


def _refused(write: Callable[[list[Message]], str], messages: list[Message], error: Exception) -> ChatError:
    """What is wrong with messages that a template fails at."""
    nulls = [number for number, message in enumerate(messages) if message.get("content") is None]
    if nulls:
        try:
            write([message | {"content": message.get("content") or ""} for message in messages])
        except Exception as other:  # whatever a template raises
            error = other
        else:
            return _null(messages, nulls[0], "fails at that")
    return ChatError(f"the tokenizer's chat template refuses the messages: {reason(error)}")


def _null(messages: list[Message], number: int, what: str) -> ChatError:
    field, beside = f"messages.{number}.content", " beside tool_calls" if messages[number].get("tool_calls") else ""
    return ChatError(f'{field} is null{beside}, and the chat template of this model {what}; send ""', field)


def _require_text(number: int, message: Message) -> None:
    field = f"messages.{number}.content"
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise ChatError(f"{field} is required: a text, or a list of parts; only an assistant's may be null", field)
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise ChatError(f"{field} must be a text or a list of parts, got {content!r:.80}", field)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatError(f'{field}: only parts like {{"type": "text", "text": "..."}} are supported', field)


def _in_form(message: Message, form: type | None, texts: list[str] | None = None) -> Message:
    """A message with its content as `str` or as a `list` of parts; with None as it is.

    Args:
        texts: put these into it, in place of its own.
    """
    content = message.get("content")
    if not content or (form in (None, type(content)) and texts is None):
        return message
    if texts is None:
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    as_text = (form or type(content)) is str
    return {**message, "content": "".join(texts) if as_text else [{"type": "text", "text": one} for one in texts]}


def _as_sent(message: Message) -> Message:
    return message


def _without_nulls(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _with_objects(message: Message) -> Message:
    """Without nulls, and with the arguments of its tool calls as objects."""
    kept = _without_nulls(message)
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_with_arguments(call) for call in kept["tool_calls"]]
    return kept


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    try:
        read = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "arguments": read} if isinstance(read, dict) else call


def _as_it_reads(write: Callable[[list[Message]], str], messages: list[Message]) -> tuple[list[Message], set[int]]:
    """The messages in the way of which a template writes most, that in which they were sent first of all; and the
    numbers of those whose text it writes."""
    words = [[f"first{number}word ", f"second{number}word"] for number in range(len(messages))]
    with_text = {number for number, message in enumerate(messages) if message.get("content")}
    best, shown, tried = [_in_form(message, str) for message in messages], None, []  # most templates take texts
    for change, form in itertools.product((_as_sent, _without_nulls, _with_objects), _FORMS):
        changed = [_in_form(change(message), form(message["role"])) for message in messages]
        try:
            if changed in tried:
                continue
            tried.append(changed)
            written = write([_in_form(message, None, text) for message, text in zip(changed, words, strict=True)])
        except Exception:  # whatever a template raises, and what is nested too deeply to compare
            continue
        found = with_text & _whole(written)
        if shown is None or len(found) > len(shown):
            best, shown = changed if found else best, found
        if found == with_text:
            break
    return best, shown or set()


def _whole(written: str) -> set[int]:
    """The messages of whose words a template has written both, as texts and not as what Python or JSON shows of
    parts."""
    begun, found = {}, set()
    written = written.lower()
    for word in re.finditer(r"(first|second)(\d+)word", written):
        number = int(word[2])
        if word[1] == "first":
            begun.setdefault(number, word.end())
        elif number in begun and "type" not in written[begun[number] : word.start()]:
            found.add(number)
    return found


def _require_read(write: Callable[[list[Message]], str], messages: list[Message], shown: set[int], prompt: str) -> None:
    """Raises ChatError where a template writes the same whatever a message or a field says, or null as a word.

    Args:
        shown: the messages whose text it writes.
    """

    def same(change: Callable[[Message], Message], only: int | None = None) -> bool:
        try:
            changed = [change(one) if only in (None, number) else one for number, one in enumerate(messages)]
            return write(changed) == prompt
        except Exception:  # whatever a template raises
            return False

    for number, message in enumerate(messages):
        must_show = number == len(messages) - 1 or message["role"] in _WHOLE
        if not must_show or number in shown or not message.get("content"):
            continue
        if same(lambda one: _in_form(one, None, ["other", "text"]), only=number):
            raise ChatError(
                f"the chat template of this model leaves out messages.{number}, of role {message['role']!r}; say it in "
                "a message of another role, or leave it out",
                f"messages.{number}",
            )

    def with_content(text: str) -> bool:
        return same(lambda one: one | {"content": text} if one.get("content", "") is None else one)

    nulls = [number for number, one in enumerate(messages) if one.get("content", "") is None]
    if nulls and with_content("None") and not with_content(""):
        raise _null(messages, nulls[0], "writes None for it")
    said = {name: number for number, one in reversed([*enumerate(messages)]) for name in one if one[name]}
    for name in sorted(said.keys() - _BESIDE):
        field, other = f"messages.{said[name]}.{name}", _THOUGHT.get(name)
        if not same(lambda one, name=name: {key: one[key] for key in one if key != name}):
            continue
        if other is None:
            like = [] if name in _KNOWN else get_close_matches(name.lower(), _KNOWN, 1)
            hint = f"is {like[0]} meant?" if like else "leave it out, or say it in the content"
            raise ChatError(f"{field} is nothing that the chat template of this model reads; {hint}", field)
        if other not in said and not same(lambda one, name=name, other=other: one | {other: one.get(name)}):
            raise ChatError(f"{field}: the chat template of this model reads {other}; send it by that name", field)
