"""From a request to what the engine is asked for: prompts, settings, stops."""

from __future__ import annotations

import dataclasses

from graphmod.decode.batching.seeds import prompt_seed
from graphmod.decode.config import Sampling
from graphmod.decode.text.codec import Codec, TokenizerCodec
from graphmod.errors import ConfigError
from graphmod.serve.errors import ApiError
from graphmod.serve.schema import ChatRequest, CompletionRequest

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
        score: tell log-probabilities.
        token_ids: tell the ids of the generated tokens.
        stream, usage: whether it is streamed, and whether a stream ends with the number of tokens.
    """

    prompts: list[list[int]]
    field: str
    n: int
    sampling: list[Sampling]
    stops: list[str]
    score: bool
    token_ids: bool
    stream: bool
    usage: bool

    @property
    def samples(self) -> int:
        """How many completions that makes."""
        return len(self.prompts) * self.n


def _asked(request: ChatRequest | CompletionRequest, prompts: list, field: str, score: bool, most: int) -> Asked:
    temperature = 1.0 if request.temperature is None else request.temperature
    stops = request.stop or []
    common = Sampling(
        temperature=0.0 if temperature < _COLDEST else temperature,
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if request.top_p is None else max(request.top_p, _COLDEST),
        max_new_tokens=most,
        stop=[*stops, *(request.stop_token_ids or [])],
        ignore_eos=bool(request.ignore_eos),
    )
    seeds = [None if request.seed is None else prompt_seed(request.seed, number) for number in range(len(prompts))]
    return Asked(
        prompts=prompts,
        field=field,
        n=request.n or 1,
        sampling=[dataclasses.replace(common, seed=seed) for seed in seeds],
        stops=stops,
        score=score,
        token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
        usage=bool(request.stream_options and request.stream_options.include_usage),
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
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    try:
        prompt = codec.encode_as_is(codec.chat(messages))
    except ConfigError as error:
        raise ApiError(400, str(error), "messages") from None
    most = request.max_completion_tokens or request.max_tokens or default_tokens
    return _asked(request, [prompt], "messages", bool(request.logprobs), most)


def of_completion(request: CompletionRequest, codec: Codec) -> Asked:
    """What a request for completions asks for. Tokenizes."""
    most = request.max_tokens or _DEFAULT_COMPLETION_TOKENS
    prompts = [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]
    return _asked(request, prompts, "prompt", request.logprobs is not None, most)
