"""What requests may say: the fields of OpenAI's API that are understood, and those that are refused.

A field that would change the answer and is not supported is an error that names it; others are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

# Fields that would change the answer -> the values of them that would not.
_UNSUPPORTED = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "top_logprobs": (None, 0),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "min_tokens": (None, 0),
    "use_beam_search": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "prompt_logprobs": (None,),
    "logits_processors": (None, []),
}
_MOST_STOPS, _LONGEST_STOP = 16, 1000


def _stops(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


StopText = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Strict):
    """What else a stream tells."""

    include_usage: bool | None = None


class _Request(_Strict):
    """What both kinds of requests may say.

    Attributes:
        top_k, ignore_eos, stop_token_ids: as other servers have them: keep the k most likely tokens (0 or -1 keeps
            all), go on after the end of a text, tokens that end it.
        return_token_ids: tell the ids of the generated tokens too.
    """

    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=1000)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[StopText] | None, BeforeValidator(_stops)] = Field(None, max_length=_MOST_STOPS)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=_MOST_STOPS)
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("the body must be a JSON object")
        for name, value in given.items():
            if name in _UNSUPPORTED and not any(
                # By type too: to Python, 1 is True.
                value == one and isinstance(value, bool) == isinstance(one, bool)
                for one in _UNSUPPORTED[name]
            ):
                raise Unsupported(name)
        form = given.get("response_format")
        if isinstance(form, dict) and form.get("type", "text") != "text":
            raise Unsupported("response_format")
        return given


class Unsupported(Exception):
    """A field that would change the answer; its name."""


class Message(_Strict):
    """A message of a chat; text that comes in parts is joined."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        for part in given:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError('only parts like {"type": "text", "text": "..."} are supported')
        return "".join(part["text"] for part in given)


class ChatRequest(_Request):
    """Of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None


def _are_ids(given: list) -> bool:
    return set(map(type, given)) == {int}


def _prompts(given: Any) -> list[str] | list[list[int]]:
    """The prompts, each a text or token ids."""
    ids = isinstance(given, list) and _are_ids(given)
    prompts = [given] if isinstance(given, str) or ids else given
    if isinstance(prompts, list) and prompts:
        if all(isinstance(one, str) for one in prompts):
            return prompts
        if all(isinstance(one, list) and _are_ids(one) for one in prompts):
            return prompts
    raise ValueError("must be a text, token ids, or a list of either, and not empty")


class CompletionRequest(_Request):
    """Of `/v1/completions`.

    Attributes:
        logprobs: 0 or 1 tells the log-probability of each token that was drawn; those of others are not known.
    """

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    logprobs: Literal[0, 1] | None = None
    best_of: int | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _sampled_only(cls, given: Any) -> Any:
        if given is not None and (type(given) is not int or given not in (0, 1)):
            raise ValueError("must be 0 or 1: only the log-probability of the token that was drawn is known")
        return given

    @model_validator(mode="after")
    def _all_of_them(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise Unsupported("best_of")
        return self
