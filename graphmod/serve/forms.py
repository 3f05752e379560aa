"""The answers of the two kinds of requests, as OpenAI's API has them: whole, and in pieces."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from graphmod.serve.asked import Asked, of_chat, of_completion
from graphmod.serve.schema import ChatRequest, CompletionRequest
from graphmod.serve.text import Likely, Piece, Scored
from graphmod.text import Codec


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

    def whole(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        """The fields of a choice that hold its text and log-probabilities."""
        raise NotImplementedError

    def head_ids(self, asked: Asked) -> dict[str, Any]:
        """What is told of ids beside the choices: in a stream, with the first events."""
        return {}

    def ids(self, asked: Asked, index: int, tokens: list[int], first: bool) -> dict[str, Any]:
        """What a choice tells of ids: of `tokens`, and of its prompt if it is the first that is told of it."""
        return {"token_ids": tokens} if asked.token_ids else {}

    def first(self) -> dict[str, Any] | None:
        """The fields of a choice in a stream, before any text; None where it begins with text."""
        return None

    def chunk(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        """The fields of a choice in a stream that hold a piece of its text, and its log-probabilities."""
        return self.whole(piece, asked)


def _name(one: Scored | Likely, asked: Asked) -> str:
    return f"token_id:{one.token}" if asked.as_ids else one.text


class ChatForm(Form):
    """Of `/v1/chat/completions`."""

    endpoint, request = "chat", ChatRequest
    _prefix, _object, _chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def samples(self, request: ChatRequest) -> int:
        return request.n or 1

    def reader(self, request: ChatRequest, codec: Codec, default_tokens: int) -> Callable[[], Asked]:
        return lambda: of_chat(request, codec, default_tokens)

    def whole(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece.scored, asked),
        }

    def head_ids(self, asked: Asked) -> dict[str, Any]:
        return {"prompt_token_ids": asked.prompts[0]} if asked.token_ids else {}

    def first(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        return {
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece.scored, asked),
        }

    def _logprobs(self, scored: Sequence[Scored], asked: Asked) -> dict[str, Any] | None:
        def told(one: Scored | Likely) -> dict[str, Any]:
            return {"token": _name(one, asked), "logprob": one.logprob, "bytes": list(one.bytes)}

        if not asked.score:
            return None
        return {"content": [told(one) | {"top_logprobs": [*map(told, one.top)]} for one in scored], "refusal": None}


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

    def ids(self, asked: Asked, index: int, tokens: list[int], first: bool) -> dict[str, Any]:
        of_prompt = {"prompt_token_ids": asked.prompts[index // asked.n]} if asked.token_ids and first else {}
        return super().ids(asked, index, tokens, first) | of_prompt

    def whole(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        return {"text": piece.text, "logprobs": self._logprobs(piece.scored, asked)}

    def _logprobs(self, scored: Sequence[Scored], asked: Asked) -> dict[str, Any] | None:
        if not asked.score:
            return None
        return {
            "tokens": [_name(one, asked) for one in scored],
            "token_logprobs": [one.logprob for one in scored],
            "top_logprobs": [self._top(one, asked) for one in scored],
            "text_offset": [one.offset for one in scored],
        }

    def _top(self, scored: Scored, asked: Asked) -> dict[str, float] | None:
        """The most likely tokens by their texts, and the one that is there. What has the text of another goes by its
        id."""
        if scored.logprob is None:  # the first token of a prompt
            return None
        own = _name(scored, asked)
        found = {own: scored.logprob}
        for one in scored.top:
            if one.token != scored.token:
                name = _name(one, asked)
                found[name if name not in found else f"token_id:{one.token}"] = one.logprob
        return dict(sorted(found.items(), key=lambda item: -item[1]))
