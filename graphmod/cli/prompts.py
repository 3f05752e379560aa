"""The prompts of a file, and the file of completions that `generate.py` writes. No torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from graphmod.cli.start import OutputError
from graphmod.errors import ConfigError
from graphmod.text import Codec, TokenizerCodec, not_utf8

if TYPE_CHECKING:
    from graphmod.cli.settings import DecodeSettings
    from graphmod.decode.types import Completion

# -- prompts, and the line of JSON that a completion becomes -----------------------------------------------------------

_LIKE = '{"prompt": "a text"} or {"messages": [{"role": "user", "content": "a text"}]}'


@dataclass
class Prompt:
    """A prompt."""

    text: str = ""  # as given; of messages, what the template made of them
    line: int = 0  # in its file
    fields: dict[str, Any] = field(default_factory=dict)  # what else its line of JSON says
    messages: list[dict[str, Any]] | None = None  # of a chat; None for a text to go on from
    tokens: list[int] | None = None  # of a chat, once the template has been applied

    @property
    def asked(self) -> str | list[int]:
        """What the engine is given."""
        return self.text if self.tokens is None else self.tokens

    @property
    def shown(self) -> str:
        """What is printed before the completion: an answer stands alone."""
        return self.text if self.messages is None else ""

    def as_chat(self) -> Prompt:
        """This prompt with its text as what a user says."""
        if self.messages is not None:
            return self
        return Prompt(self.text, self.line, self.fields, [{"role": "user", "content": self.text}])

    def apply_template(self, codec: Codec, source: str | None) -> None:
        """Makes text and tokens of the messages, if there are any. Raises ConfigError, with the line in `source`."""
        if self.messages is None:
            return
        try:
            if not isinstance(codec, TokenizerCodec):
                raise ConfigError("bytes have no chat template; give tokenizer=FOLDER, or plain prompts (chat=false)")
            text = codec.chat(self.messages)
            self.text, self.tokens = self.text or text, codec.encode_as_is(text)
        except ConfigError as error:
            raise ConfigError(f"line {self.line} of {source}: {error}" if source else f"chat=true: {error}") from error


def _are_messages(found: Any) -> bool:
    """Whether they are messages; what they hold is told by who applies the template."""
    if not isinstance(found, list) or not found:
        return False
    return all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in found)


def _prompt(read: Any, line: int, path: Path) -> Prompt:
    keys = [key for key in ("prompt", "messages") if isinstance(read, dict) and key in read]
    if keys == ["prompt"] and isinstance(read["prompt"], str):
        return Prompt(read.pop("prompt"), line, read)
    if keys == ["messages"] and _are_messages(read["messages"]):
        return Prompt(line=line, fields=read, messages=read["messages"])
    raise ConfigError(f"line {line} of {path} must be like {_LIKE}, got {read!r:.80}")


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file. Raises ConfigError."""
    try:
        # Not splitlines(), which also splits at characters that may stand in a text or a string of JSON.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        no_text = f"{path} holds no text; give one with a prompt a line, or JSON lines, in UTF-8"
        raise ConfigError(f"prompts_file: {not_utf8(path) or no_text}") from error
    except OSError as error:
        raise ConfigError(f"prompts_file={path} cannot be read: {error.strerror or error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"prompts_file={path} holds no prompt")
    if path.suffix != ".jsonl":
        return [Prompt(line, number) for number, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            read = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"line {number} of {path} is not JSON like {_LIKE}: {error}") from None
        prompts.append(_prompt(read, number, path))
    return prompts


def line_of(completion: Completion, prompt: Prompt, asked: DecodeSettings) -> str:
    """The completion as JSON, with the other fields of its prompt's line."""
    line: dict[str, Any] = prompt.fields | {  # the fields of a completion win
        "index": completion.request,
        "sample": completion.sample,
        "prompt": prompt.text,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": completion.tokens,
    }
    if asked.logprobs:
        line["logprobs"] = completion.logprobs
    for name in ("top_logprobs", "prompt_logprobs", "prompt_top_logprobs"):
        if (found := getattr(completion, name)) is not None:
            line[name] = found
    if completion.error is not None:
        line["error"] = completion.error
    return json.dumps(line, ensure_ascii=False)


# -- the file of completions -------------------------------------------------------------------------------------------


def _same(one: Path, other: Path) -> bool:
    """Whether both are one file, links followed."""
    return one.resolve() == other.resolve() or (one.exists() and other.exists() and one.samefile(other))


def _wrong(path: Path, error: OSError) -> str:
    return f"out={path} cannot be written: {error.strerror or error}"


def _not_opened(path: Path, error: OSError) -> str:
    return f"{_wrong(path, error)}; give out=FILE a file in a folder you may write to"


class OutputFile:
    """The file of completions, one line each. The first one takes the place of what it held: what goes wrong before,
    such as a model that cannot be read, costs nobody their earlier results."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path, self._file, self._begun = path, file, False

    def line(self, text: str) -> None:
        """Writes a line, and passes it on at once. Raises OutputError."""
        regular = self.path.is_file()  # a device or a pipe cannot be cut, and holds nothing
        if regular and not self._begun:
            self._file.truncate(0)
        self._begun = True
        before = os.fstat(self._file.fileno()).st_size if regular else 0
        try:
            print(text, file=self._file, flush=True)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()  # which tries to write the rest of it once more
            if regular:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, before)  # half a line is no JSON
            raise OutputError(_wrong(self.path, error)) from error


def require_free(path: Path, prompts: Path, overwrite: bool) -> None:
    """Raises ConfigError where `path` is the file of the prompts, or holds something that is not to be overwritten, or
    may not be looked at."""
    try:
        if _same(path, prompts):
            raise ConfigError(f"out={path} is the file of the prompts and would replace them; give out another name")
        if not overwrite and path.is_file() and path.stat().st_size:
            raise ConfigError(
                f"out={path} exists and is not empty; give out=FILE another name, or overwrite=true to replace it"
            )
    except OSError as error:
        raise ConfigError(_not_opened(path, error)) from error


@contextlib.contextmanager
def open_output(path: Path, prompts: Path, overwrite: bool) -> Iterator[OutputFile]:
    """The file at `path`, opened for writing; folders above it are made. Raises ConfigError where it is the file of the
    prompts, holds something that is not to be overwritten, or cannot be opened, and OutputError where what was written
    did not reach it."""
    require_free(path, prompts, overwrite)
    try:
        new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(_not_opened(path, error)) from error
    try:
        yield OutputFile(path, file)
    except BaseException:
        with contextlib.suppress(OSError):  # of a line that could not be written; that is in flight already
            file.close()
        if new:
            with contextlib.suppress(OSError):  # an empty file would only tell that there was an error
                if path.is_file() and not path.stat().st_size:
                    path.unlink()
        raise
    try:
        file.close()
    except OSError as error:
        raise OutputError(_wrong(path, error)) from error
