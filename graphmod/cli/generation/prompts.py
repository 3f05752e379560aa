"""The prompts of a file, and the line of JSON that a completion becomes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphmod.decode.results import Completion
from graphmod.errors import ConfigError


@dataclass
class Prompt:
    """A prompt, its line in its file, and what else that says of it in JSON."""

    text: str
    line: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file. Raises ConfigError."""
    try:
        # Not splitlines(), which also splits at characters that may stand in a text or a string of JSON.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"prompts_file={path} cannot be read: {reason}") from error
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
            raise ConfigError(f'line {number} of {path} is not JSON like {{"prompt": "..."}}: {error}') from None
        if not isinstance(read, dict) or not isinstance(read.get("prompt"), str):
            got = read if not isinstance(read, dict) or "prompt" not in read else read["prompt"]
            raise ConfigError(f'line {number} of {path} must be like {{"prompt": "a text"}}, got {got!r:.80}')
        prompts.append(Prompt(read.pop("prompt"), number, read))
    return prompts


def line_of(completion: Completion, prompt: Prompt, logprobs: bool) -> str:
    """The completion as JSON, with the other fields of its prompt's line."""
    line: dict[str, Any] = prompt.fields | {  # the fields of a completion win
        "index": completion.request,
        "sample": completion.sample,
        "prompt": prompt.text,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": completion.tokens,
    }
    if logprobs:
        line["logprobs"] = completion.logprobs
    if completion.error is not None:
        line["error"] = completion.error
    return json.dumps(line, ensure_ascii=False)
