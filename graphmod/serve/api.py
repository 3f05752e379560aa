"""Requests and answers as OpenAI's API has them: what a request asks the engine for; what is sent of a completion, as a
whole and in pieces; errors, as a status and a body `{"error": {"message", "type", "param", "code"}}`.

Of a text nothing is sent while a stop could still complete in it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.responses import Response

from graphmod.decode.types import Completion, Sampling, prompt_seed
from graphmod.serve.schema import ChatRequest, CompletionRequest
from graphmod.serve.tools import (
    LIST,
    MARKS,
    ArgumentReader,
    Call,
    CallReader,
    notation_of,
    whole_calls,
)
from graphmod.text import ChatError, Codec, TextStream, TokenizerCodec, TokenText, TokenTexts, token_bytes

# -- errors ------------------------------------------------------------------------------------------------------------

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
}
# What engines call a setting -> the field of a request that gives it.
_PARAMS = {one.name: one.name for one in dataclasses.fields(Sampling)}
_PARAMS |= {"max_new_tokens": "max_tokens", "adapter": "model"}
_PARAMS |= {name: name for name in ("n", "response_format", "tools")}


class ApiError(Exception):
    """A request that is not served.

    Args:
        status: of HTTP.
        message: what was given, what is expected.
        param: the field of the request that is wrong.
        code: a word for programs.
        retry_after: seconds after which another attempt may do better.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def outcome(self) -> str:
        """The word for it in the metrics."""
        return {429: "full", 500: "error", 503: "unavailable"}.get(self.status, "refused")

    def response(self) -> Response:
        """The answer."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        # Escaped, for a message may quote half of a surrogate pair, which UTF-8 cannot hold.
        return Response(json.dumps(self.body), self.status, headers, "application/json")


_SHOWN = 60  # characters of a wrong value


def wrong_field(error: ValidationError) -> ApiError:
    """The first field that a schema does not take: what was given, and what it may be."""
    first = error.errors(include_url=False)[0]
    kind, context, given = first["type"], first.get("ctx", {}), json.dumps(first["input"], ensure_ascii=False)
    listed = kind in ("unsupported_field", "unknown_field")
    path = [*first["loc"], context["field"]] if listed else first["loc"]
    param = ".".join(str(part) for part in path if part != "") or None
    said = re.sub(r"^\w+ should ", "must ", first["msg"].removeprefix("Value error, "))
    if kind == "missing":
        said = "is missing; a request needs it"
    elif not listed:
        said += f", got {given if len(given) <= _SHOWN else given[:_SHOWN] + ' ...'}"
    return ApiError(400, f"{param or 'the body'} {said}", param, kind if listed else None)


def refused(said: str, prompt_field: str) -> ApiError:
    """What an engine does not take and why, with the field that it came from."""
    word = said.replace("unknown ", "").partition(" ")[0].rstrip(":")
    if word.isdigit():  # "9 stop tokens are more than ..."
        word = "stop"
    param = prompt_field if word == "prompt" else _PARAMS.get(word)
    too_long = "max_seq_len=" in said or "the KV cache holds" in said
    code = "context_length_exceeded" if too_long else None
    return ApiError(400, said, param, code)


# -- what a request asks for -------------------------------------------------------------------------------------------

_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
_COLDEST = 1e-5  # below, float32 divides logits to infinity; the most likely token is all that is left anyway


@dataclasses.dataclass
class Asked:
    """What a request asks for.

    Attributes:
        request: it.
        prompts: token ids of each.
        texts: of the prompts, where they were given as texts.
        n: completions of each.
        sampling: of each prompt.
        most: tokens of a completion, at most; 0 tells the prompt alone.
        echo: tell each prompt with its completions.
        reader: makes what finds calls of tools in a completion; None where none may be.
        score: tell log-probabilities.
    """

    request: ChatRequest | CompletionRequest
    prompts: list[list[int]]
    texts: list[str] | None
    n: int
    sampling: list[Sampling]
    most: int
    echo: bool
    score: bool
    reader: Callable[[], CallReader | ArgumentReader] | None = None


def asked_of(
    request: ChatRequest | CompletionRequest, codec: Codec, default_tokens: int, adapter: str | None = None
) -> Asked:
    """What a request asks for. Tokenizes.

    Args:
        adapter: that its model is.
        default_tokens: of a chat's answer where the request does not say how many.

    Raises:
        ApiError: there is no chat template, or it refuses the messages.
    """
    texts, echo, reader = None, False, None
    if isinstance(request, CompletionRequest):
        score, top, echo = request.logprobs is not None, request.logprobs or 0, bool(request.echo)
        most = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        prompts = [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]
        texts = [one for one in request.prompt if isinstance(one, str)] or None
    else:
        score, top = bool(request.logprobs), request.top_logprobs or 0
        most = request.max_completion_tokens or request.max_tokens or default_tokens
        tools: Any = None if request.calls == "none" else request.tools
        prompts, reader = [chat_tokens(codec, request.messages, tools)], _reader(request, codec)
    temperature, top_k, top_p = request.temperature, request.top_k, request.top_p  # None is the engine's default
    common = Sampling(
        temperature=0.0 if temperature is not None and temperature < _COLDEST else temperature,
        top_k=None if top_k is None else max(0, top_k),
        top_p=None if top_p is None else max(top_p, _COLDEST),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=request.logit_bias or {},
        min_tokens=request.min_tokens or 0,
        allowed_token_ids=request.allowed_token_ids,
        bad_words=[*(request.bad_words or [])],
        structured_outputs=request.structure[1],
        max_new_tokens=max(1, most),
        stop=[*(request.stop or []), *(request.stop_token_ids or [])],
        ignore_eos=bool(request.ignore_eos),
        adapter=adapter,
        top_logprobs=top,
        prompt_logprobs=score and echo,
    )
    seeds = [None if request.seed is None else prompt_seed(request.seed, number) for number in range(len(prompts))]
    sampling = [dataclasses.replace(common, seed=seed) for seed in seeds]
    return Asked(request, prompts, texts, request.n or 1, sampling, most, echo, score, reader)


def chat_tokens(codec: Codec, messages: Any, tools: Any) -> list[int]:
    """The prompt that a chat template makes.

    Args:
        messages, tools: dicts, as they were sent.

    Raises:
        ApiError: there is no chat template, or it refuses them.
    """
    if not isinstance(codec, TokenizerCodec) or not codec.tokenizer.chat_template:
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions, or serve it with the tokenizer of a chat model "
            "(tokenizer=FOLDER)",
            "messages",
            "no_chat_template",
        )
    try:
        return codec.encode_as_is(codec.chat(messages, tools))
    except ChatError as error:
        raise ApiError(400, str(error), error.field) from None


def _reader(request: ChatRequest, codec: Codec) -> Callable[[], CallReader | ArgumentReader] | None:
    """What finds the calls in an answer. Raises ApiError where nobody knows how the model writes them."""
    if request.calls == "none" or not isinstance(codec, TokenizerCodec):
        return None
    if request.calls == "function" and request.tool_choice and request.tool_choice.function:
        return partial(ArgumentReader, request.tool_choice.function.name)
    notation = LIST
    if request.calls == "auto":
        notation = notation_of(codec.tokenizer.get_chat_template(tools=request.tools))
    if notation is None:
        raise ApiError(
            400,
            "tools: how this model writes calls is not known (it is not as Hermes, Qwen, Llama 3 or Mistral do); use "
            "tool_choice=required, a tool by name, or none",
            "tools",
        )
    return partial(CallReader, notation, request.tool_names, request.parallel_tool_calls is not False)


# -- texts and log-probabilities ---------------------------------------------------------------------------------------

_LEAST = -9999.0  # of log-probabilities, since JSON has no infinity


class Scored(NamedTuple):
    """A token and its log-probability.

    Attributes:
        token: its id.
        text: what it adds to the text; all joined are the text. Of a special token, its name.
        bytes: what it stands for in UTF-8, which may be a part of a character; all joined are the text.
        logprob: nats, under the model's own distribution; None of the first token of a prompt.
        offset: where its text begins, in characters of the text.
        top: the most likely tokens at its place, the likeliest first.
    """

    token: int
    text: str
    bytes: bytes
    logprob: float | None
    offset: int
    top: list[Likely]


class Likely(NamedTuple):
    """One of the most likely tokens at a place: its id, its text alone, its bytes, and its log-probability."""

    token: int
    text: str
    bytes: bytes
    logprob: float


class Scorer:
    """Makes `Scored` of the tokens of one codec.

    Args:
        codec: of the tokens.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec, self._bytes = codec, token_bytes(codec)
        self._names = {number: name for name, number in getattr(codec, "special", {}).items()}
        self._known: dict[int, tuple[str, bytes]] = {}

    def scored(self, own: TokenText, logprob: float | None, top: list[tuple[int, float]]) -> Scored:
        """A token with what is known of its place."""
        text = own.text or self._names.get(own.token, "")
        likely = [
            Likely(token, *((text, own.bytes) if token == own.token else self._alone(token)), max(value, _LEAST))
            for token, value in top
        ]
        value = None if logprob is None else max(logprob, _LEAST)
        return Scored(own.token, text, own.bytes, value, own.offset, likely)

    def _alone(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            raw, name = self._bytes(token), self._names.get(token)
            if name is not None or raw is None:
                text = name or self._codec.decode([token])
                self._known[token] = text, b"" if name else text.encode("utf-8", "replace")
            else:
                try:
                    text = raw.decode()
                except UnicodeDecodeError:  # of a part of a character, its bytes, as OpenAI writes them
                    text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
                self._known[token] = text, raw
        return self._known[token]

    def prompt(
        self, tokens: Sequence[int], given: str | None, logprobs: Sequence[float], top: list[list[tuple[int, float]]]
    ) -> Piece:
        """A prompt that is told with its completion.

        Args:
            given: its text, which is told as it is where the tokens' texts make it; None for ids.
            logprobs, top: of all its tokens but the first; empty where they are not asked for.
        """
        texts = TokenTexts(self._codec)
        parts = [texts.add(token) for token in tokens] + [texts.rest()]
        owns = [own for _, found in parts for own in found]
        values = [None, *logprobs] if logprobs or len(tokens) == 1 else [None] * len(owns)
        scored = [
            self.scored(own, value, likely)
            for own, value, likely in zip(owns, values, [[], *top] if top else [[]] * len(owns), strict=True)
        ]
        said = Piece("".join(piece for piece, _ in parts), scored)
        if given is None:
            return said
        at, placed = 0, []
        for one in scored:
            placed.append(one._replace(offset=at))
            # A special token may be one that the tokenizer has put around the text.
            at += len(one.text) if given.startswith(one.text, at) else 0 if one.token in self._names else len(given) + 1
        return Piece(given, placed) if at == len(given) else said


class Piece(NamedTuple):
    """What may be sent now: a text, the tokens it comes from as far as they are asked for, and calls of tools."""

    text: str
    scored: list[Scored]
    calls: Sequence[Call] = ()


class StopCut:
    """Ends a text that comes in pieces before the first of some stops.

    Args:
        stops: none empty.
        ends: are no stops by themselves, but kept back while the text ends with a part of one.

    Attributes:
        met: whether a stop has come.
    """

    def __init__(self, stops: Sequence[str], ends: Sequence[str]) -> None:
        self._stops, self._ends = list(stops), [end for end in ends if end]
        self._longest = max(map(len, [*self._stops, *self._ends]), default=0)
        self._held, self._early = "", 0  # characters at its beginning that no stop may end in
        self.met = False

    def add(self, piece: str, early: bool = False) -> str:
        """What is safe to send with this piece.

        Args:
            early: then no stop counts that ends in it.
        """
        if self.met or not self._longest:
            return "" if self.met else piece
        self._held += piece
        self._early = len(self._held) if early else self._early
        begins = [(stop, max(0, self._early - len(stop) + 1)) for stop in self._stops]
        found = [place for stop, begin in begins if (place := self._held.find(stop, begin)) >= 0]
        if found:
            self.met = True
            sent, self._held = self._held[: min(found)], ""
            return sent
        first = max(0, len(self._held) - self._longest)
        safe = next((at for at in range(first, len(self._held)) if self._could_begin_at(at)), len(self._held))
        sent, self._held, self._early = self._held[:safe], self._held[safe:], max(0, self._early - safe)
        return sent

    def _could_begin_at(self, place: int) -> bool:
        tail = self._held[place:]
        return any(stop.startswith(tail) for stop in (*self._stops, *self._ends))

    def rest(self, end: str = "") -> str:
        """What is left when nothing follows, without `end`, which it ends with."""
        sent, self._held = self._held.removesuffix(end), ""
        self.met = self.met or bool(end)
        return sent


class Answer:
    """The text of one completion, token by token.

    Args:
        codec: of the tokens.
        prompt: ids before the completion.
        stops: texts that end it and are not part of it.
        scorer: of log-probabilities, if they are told too.
        reader: of calls of tools, if there may be some; without a scorer.
        min_tokens: stops do not count that end in the text of so many tokens.
    """

    def __init__(
        self,
        codec: Codec,
        prompt: Sequence[int],
        stops: Sequence[str],
        scorer: Scorer | None,
        reader: CallReader | ArgumentReader | None = None,
        min_tokens: int = 0,
    ) -> None:
        self.reader, self._early = reader, min_tokens if stops else 0
        self._codec, self._scorer = codec, scorer
        self._names = {number: name for name, number in getattr(codec, "special", {}).items()}
        # The text has no special tokens: of a stop with some, only what is around them can be seen in it.
        self._special = {stop: plain for stop in stops if (plain := self._plain(stop)) != stop}
        # Marks of calls may be special tokens, which are shown then, and the others left out.
        self._hidden = {number for number, name in self._names.items() if name not in MARKS} if reader else set()
        with_marks = TextStream(codec, prompt, special_tokens=isinstance(codec, TokenizerCodec) and reader is not None)
        self._stream = with_marks if scorer is None else TokenTexts(codec, prompt)
        self._values: deque[tuple[float, list[tuple[int, float]]]] = deque()  # of tokens whose text is to come
        self._cut = StopCut([stop for stop in stops if stop not in self._special], [*self._special.values()])
        self._length = self._sent = 0
        self._scored: deque[tuple[Scored, int]] = deque()  # with how many characters of the text each is

    def _plain(self, stop: str) -> str:
        for name in self._names.values():
            stop = stop.replace(name, "")
        return stop

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: list[list[tuple[int, float]]] | None = None
    ) -> Piece:
        """What may be sent once these tokens have come."""
        stream, sent = self._stream, ""
        if isinstance(stream, TokenTexts):
            for number, (token, logprob, likely) in enumerate(
                zip(tokens, logprobs, top or [[]] * len(tokens), strict=True)
            ):
                self._values.append((logprob, likely))
                sent += self._cut.add(self._scored_piece(*stream.add(token)), early=number < self._early)
        else:
            for token in tokens[: self._early]:  # one by one, as the engine does it, which agrees on where they end
                sent += self._cut.add(self._plain_piece([token]), early=True)
            sent += self._cut.add(self._plain_piece(tokens[self._early :]))
        self._early = max(0, self._early - len(tokens))
        self._sent += len(sent)
        text, calls = (sent, []) if self.reader is None else self.reader.add(sent)
        return Piece(text, self._ready(), calls)

    def _plain_piece(self, tokens: Sequence[int]) -> str:
        assert isinstance(self._stream, TextStream)
        piece = self._stream.add_all([one for one in tokens if one not in self._hidden] if self._hidden else tokens)
        self._length += len(piece)
        return piece

    def _scored_piece(self, piece: str, owns: list[TokenText]) -> str:
        assert self._scorer is not None
        self._scored += [(self._scorer.scored(own, *self._values.popleft()), len(own.text)) for own in owns]
        self._length += len(piece)
        return piece

    def end(self, completion: Completion) -> Piece:
        """What is left to send of a completion that has ended."""
        if isinstance(self._stream, TokenTexts):
            left = self._scored_piece(*self._stream.rest())
        else:
            left = self._stream.rest()
            self._length += len(left)
        sent = self._cut.add(left)
        if not self._cut.met:
            sent += self._cut.rest(self._special_end(completion))
        self._sent += len(sent)
        text, calls = (sent, []) if self.reader is None else self.reader.add(sent)
        return Piece(text + (self.reader.end() if self.reader else ""), self._ready(last=True), calls)

    def _special_end(self, completion: Completion) -> str:
        if not self._special or completion.finish_reason != "stop" or not isinstance(self._codec, TokenizerCodec):
            return ""
        shown = self._codec.decode(completion.tokens, special_tokens=True)
        return max((plain for stop, plain in self._special.items() if shown.endswith(stop)), key=len, default="")

    def _ready(self, last: bool = False) -> list[Scored]:
        everything = self._sent == self._length or (last and not self._cut.met)
        over, ready = last or self._cut.met, []
        while self._scored:
            first, length = self._scored[0]
            left = length if everything else self._sent - first.offset
            if not everything and (left <= 0 or (left < length and not over)):
                break
            self._scored.popleft()
            if left < length:  # a stop begins in the middle of it
                text = first.text[:left]
                first = first._replace(text=text, bytes=text.encode("utf-8", "replace"))
            ready.append(first)
        return ready


# -- answers -----------------------------------------------------------------------------------------------------------


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """The number of tokens of a request, all its prompts and completions together."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}


class Form:
    """How one kind of request is answered.

    Attributes:
        endpoint: the word for it in the metrics.
        request: the schema of its body.
        source: the field that prompts come from.
    """

    endpoint: str
    source: str
    request: type[ChatRequest | CompletionRequest]
    _prefix: str
    _object: str
    _chunk_object: str

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
        return {"token_ids": tokens} if asked.request.return_token_ids else {}

    def first(self) -> dict[str, Any] | None:
        """The fields of a choice in a stream, before any text; None where it begins with text."""
        return None

    def chunk(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        """The fields of a choice in a stream that hold a piece of its text, and its log-probabilities."""
        return self.whole(piece, asked)


def _name(one: Scored | Likely, asked: Asked) -> str:
    return f"token_id:{one.token}" if asked.request.return_tokens_as_token_ids else one.text


class ChatForm(Form):
    """Of `/v1/chat/completions`."""

    endpoint, source, request = "chat", "messages", ChatRequest
    _prefix, _object, _chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": [one.told() for one in whole_calls(piece.calls)]}
        return {
            "message": message,
            "logprobs": self._logprobs(piece.scored, asked),
        }

    def head_ids(self, asked: Asked) -> dict[str, Any]:
        return {"prompt_token_ids": asked.prompts[0]} if asked.request.return_token_ids else {}

    def first(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def chunk(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = [{"index": one.index, **one.told()} for one in piece.calls]
        return {
            "delta": delta,
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

    endpoint, source, request = "completions", "prompt", CompletionRequest
    _prefix, _object, _chunk_object = "cmpl", "text_completion", "text_completion"

    def ids(self, asked: Asked, index: int, tokens: list[int], first: bool) -> dict[str, Any]:
        ids = super().ids(asked, index, tokens, first)
        return {**ids, "prompt_token_ids": asked.prompts[index // asked.n]} if ids and first else ids

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
