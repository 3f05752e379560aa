"""The answers of the two kinds of requests, as OpenAI's API has them: whole, and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from graphmod.decode.text.codec import Codec
from graphmod.serve.asked import Asked, of_chat, of_completion
from graphmod.serve.schema import ChatRequest, CompletionRequest
from graphmod.serve.text import Scored


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """The number of tokens of a request, all its prompts and completions together."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


class Form:
    """How one kind of request is read and answered.

    Attributes:
        endpoint: the word for it in the metrics.
        request: the schema of its body.
    """

    endpoint: str
    request: type
    _prefix: str
    _object: str
    _chunk_object: str

    def samples(self, request: Any) -> int:
        """How many completions it asks for."""
        raise NotImplementedError

    def has_text(self, request: Any) -> bool:
        """Whether there is something to tokenize."""
        return True

    def reader(self, request: Any, codec: Codec, default_tokens: int) -> Callable[[], Asked]:
        """Makes of a request what the engine is asked for."""
        raise NotImplementedError

    def head(self, model: str, streamed: bool) -> dict[str, Any]:
        """What each part of an answer begins with."""
        kind = self._chunk_object if streamed else self._object
        return {"id": f"{self._prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}

    def whole(self, text: str, scored: list[Scored] | None) -> dict[str, Any]:
        """The fields of a choice that hold its text and log-probabilities."""
        raise NotImplementedError

    def first(self) -> dict[str, Any] | None:
        """The fields of a choice in a stream, before any text; None where it begins with text."""
        return None

    def chunk(self, text: str, scored: list[Scored] | None) -> dict[str, Any]:
        """Likewise with a piece of its text."""
        return self.whole(text, scored)


class ChatForm(Form):
    """Of `/v1/chat/completions`."""

    endpoint, request = "chat", ChatRequest
    _prefix, _object, _chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def samples(self, request: ChatRequest) -> int:
        return request.n or 1

    def reader(self, request: ChatRequest, codec: Codec, default_tokens: int) -> Callable[[], Asked]:
        return lambda: of_chat(request, codec, default_tokens)

    def whole(self, text: str, scored: list[Scored] | None) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(scored),
        }

    def first(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, text: str, scored: list[Scored] | None) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(scored)}

    def _logprobs(self, scored: Sequence[Scored] | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        content = [
            {"token": one.text, "logprob": one.logprob, "bytes": one.bytes, "top_logprobs": []} for one in scored
        ]
        return {"content": content, "refusal": None}


class CompletionForm(Form):
    """Of `/v1/completions`."""

    endpoint, request = "completions", CompletionRequest
    _prefix, _object, _chunk_object = "cmpl", "text_completion", "text_completion"

    def samples(self, request: CompletionRequest) -> int:
        return len(request.prompt) * (request.n or 1)

    def has_text(self, request: CompletionRequest) -> bool:
        return any(isinstance(prompt, str) for prompt in request.prompt)

    def reader(self, request: CompletionRequest, codec: Codec, default_tokens: int) -> Callable[[], Asked]:
        return lambda: of_completion(request, codec)

    def whole(self, text: str, scored: list[Scored] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": self._logprobs(scored)}

    def _logprobs(self, scored: Sequence[Scored] | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        return {
            "tokens": [one.text for one in scored],
            "token_logprobs": [one.logprob for one in scored],
            "top_logprobs": None,
            "text_offset": [one.offset for one in scored],
        }
