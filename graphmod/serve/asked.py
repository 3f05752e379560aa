"""From a request to what the engine is asked for: prompts, settings, stops."""

from __future__ import annotations

import dataclasses
from typing import Any

from graphmod.decode.types import Sampling, prompt_seed
from graphmod.serve.errors import ApiError
from graphmod.serve.schema import ChatRequest, CompletionRequest, StreamOptions
from graphmod.text import ChatError, Codec, TokenizerCodec

_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
_COLDEST = 1e-5  # below, float32 divides logits to infinity; the most likely token is all that is left anyway


@dataclasses.dataclass
class Asked:
    """What a request asks for.

    Attributes:
        prompts: token ids of each.
        field: of the request that they come from.
        n: completions of each.
        sampling: of each prompt.
        stops: texts that end a completion.
        most: tokens of a completion, at most; 0 tells the prompt alone.
        texts: of the prompts, where they were given as texts.
        echo: tell each prompt with its completions.
        score: tell log-probabilities.
        token_ids: tell the ids of the prompt and of the generated tokens.
        as_ids: tell them in the place of the texts of tokens.
        stream: whether it is streamed.
        usage, usage_each: whether a stream ends with the number of tokens, and whether each event has that so far.
    """

    prompts: list[list[int]]
    field: str
    n: int
    sampling: list[Sampling]
    stops: list[str]
    most: int
    texts: list[str] | None
    echo: bool
    score: bool
    token_ids: bool
    as_ids: bool
    stream: bool
    usage: bool
    usage_each: bool

    @property
    def samples(self) -> int:
        """How many completions that makes."""
        return len(self.prompts) * self.n


def _asked(
    request: ChatRequest | CompletionRequest,
    prompts: list,
    field: str,
    most: int,
    *,
    score: bool,
    top: int,
    echo: bool = False,
    texts: list[str] | None = None,
) -> Asked:
    temperature, top_k, top_p = request.temperature, request.top_k, request.top_p  # None is the engine's default
    stops, options = request.stop or [], request.stream_options or StreamOptions()
    common = Sampling(
        temperature=0.0 if temperature is not None and temperature < _COLDEST else temperature,
        top_k=None if top_k is None else max(0, top_k),
        top_p=None if top_p is None else max(top_p, _COLDEST),
        max_new_tokens=max(1, most),
        stop=[*stops, *(request.stop_token_ids or [])],
        ignore_eos=bool(request.ignore_eos),
        top_logprobs=top,
        prompt_logprobs=score and echo,
    )
    seeds = [None if request.seed is None else prompt_seed(request.seed, number) for number in range(len(prompts))]
    return Asked(
        prompts=prompts,
        field=field,
        n=request.n or 1,
        sampling=[dataclasses.replace(common, seed=seed) for seed in seeds],
        stops=stops,
        most=most,
        texts=texts,
        echo=echo,
        score=score,
        token_ids=bool(request.return_token_ids),
        as_ids=bool(request.return_tokens_as_token_ids),
        stream=bool(request.stream),
        usage=bool(options.include_usage),
        usage_each=bool(options.continuous_usage_stats),
    )


def of_chat(request: ChatRequest, codec: Codec, default_tokens: int) -> Asked:
    """What a chat asks for. Tokenizes; raises ApiError where there is no chat template, or it refuses the messages."""
    if not isinstance(codec, TokenizerCodec) or not codec.tokenizer.chat_template:
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions, or serve it with the tokenizer of a chat model "
            "(tokenizer=FOLDER)",
            "messages",
            "no_chat_template",
        )
    messages: Any = request.messages  # dicts, as they were sent
    try:
        prompt = codec.encode_as_is(codec.chat(messages))
    except ChatError as error:
        raise ApiError(400, str(error), error.field) from None
    most = request.max_completion_tokens or request.max_tokens or default_tokens
    return _asked(request, [prompt], "messages", most, score=bool(request.logprobs), top=request.top_logprobs or 0)


def of_completion(request: CompletionRequest, codec: Codec) -> Asked:
    """What a request for completions asks for. Tokenizes."""
    most = _DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    prompts = [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]
    return _asked(
        request,
        prompts,
        "prompt",
        most,
        score=request.logprobs is not None,
        top=request.logprobs or 0,
        echo=bool(request.echo),
        texts=request.prompt if isinstance(request.prompt[0], str) else None,
    )
