"""What requests may say: each field of OpenAI's and vLLM's API, whether it is supported, ignored or refused.

Nothing that was said is dropped without a word. A refused field is taken with values that ask for nothing; null is the
same as leaving a field out; one that is in no list here is refused with the name of the one most like it.
`docs/fields.py` makes the tables of docs/fields.md from these lists.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WrapValidator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from graphmod.decode.types import MOST_TOP
from graphmod.serve.tools import parameters_of, schema_of_calls

_MOST_STOPS, _LONGEST_STOP = 16, 1000

# Fields of both kinds of requests that change nothing in an answer.
_IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
# Fields of both kinds that are not supported -> the values of them that ask for nothing.
_REFUSED = {
    "cache_salt": (),
    "ec_transfer_params": (),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": (),
    "return_mm_kwargs": (True,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
_REFUSED_IN_CHATS = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "return_prompt_text": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def _refusal(kind: Literal["unsupported_field", "unknown_field"], said: str, field: str = "") -> PydanticCustomError:
    """An error whose message goes on after the path to a field."""
    return PydanticCustomError(kind, "{said}", {"said": said, "field": field})


def _same(value: Any, other: Any) -> bool:
    """By type too: to Python, 1 is True."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class Object(BaseModel):
    """An object of JSON.

    Attributes:
        ignored: fields that change nothing.
        refused: fields that are not supported -> the values of them that ask for nothing.
        open: take fields in no list: another one judges them.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    ignored: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[dict[str, tuple]] = {}
    open: ClassVar[bool] = False
    _taken: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls._taken = frozenset((*cls.fields(), *cls.ignored))

    @classmethod
    def fields(cls) -> dict[str, FieldInfo]:
        """Those that are supported, by the names that JSON has."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            raise ValueError("must be a JSON object")
        if given.keys() <= cls._taken:  # so it mostly is
            return given
        for name, value in given.items():
            if value is None or name in cls._taken:
                continue
            if name not in cls.refused:
                if cls.open:
                    continue
                raise _refusal("unknown_field", cls._like(name), name)
            if not any(_same(value, nothing) for nothing in cls.refused[name]):
                raise _refusal("unsupported_field", "is not supported by this server; leave it out", name)
        return given

    @classmethod
    def _like(cls, name: str) -> str:
        if name.startswith("guided_"):
            return f'is no field any more, as in vLLM; write structured_outputs={{"{name[7:]}": ...}}'
        known = [*cls.fields(), *cls.refused, *cls.ignored]
        like = get_close_matches(name.lower(), known, 1)
        hint = f"is {like[0]} meant?" if like else "leave it out"
        if like and like[0] in cls.refused:
            hint = f"{like[0]}, which is most like it, is not supported either; leave it out"
        return f"is no field that this server knows; {hint}"


def _as_sent(given: Any, check: Any) -> Any:
    check(given)
    return given


def _in_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def _parts(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


StopText = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
KeyOfToken = Annotated[int, Field(ge=0, lt=2**31, strict=False)]  # JSON has texts alone as keys
Count = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Object):
    """What else a stream tells."""

    refused = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(None, description="end the stream with the number of tokens")
    continuous_usage_stats: bool | None = Field(None, description="tell with each event how many there are so far")


class JsonSchema(Object):
    """A JSON schema of an answer."""

    ignored = ("name", "description", "strict")

    schema_: dict[str, Any] = Field(alias="schema", description="what is not supported in one is an error")


class ResponseFormat(Object):
    """The form of an answer."""

    refused = {"format": (), "structures": (), "triggers": ()}

    type: Literal["text", "json_object", "json_schema"] = Field("text", description="what the answer is")
    json_schema: JsonSchema | None = Field(None, description="with `type` `json_schema`")

    @model_validator(mode="after")
    def _with_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            said = "is missing; type=json_schema needs it" if self.json_schema is None else "goes with type=json_schema"
            raise _refusal("unsupported_field", said, "json_schema")
        return self


class StructuredOutputs(Object):
    """The form of an answer, as vLLM has it."""

    refused = {"disable_additional_properties": (False,), "structural_tag": ()}

    json_: Any = Field(None, alias="json", description="a JSON schema, or its text")
    json_object: bool | None = Field(None, description="any JSON object")
    regex: str | None = Field(None, description="the whole answer matches it")
    choice: list[str] | None = Field(None, description="the answer is one of these texts")
    grammar: str | None = Field(None, description="in GBNF, or as Lark has it")
    disable_any_whitespace: bool | None = Field(None, description="of JSON: no spaces between its parts")
    whitespace_pattern: str | None = Field(None, description="of JSON: a regex for the spaces between its parts")


class _Request(Object):
    """What both kinds of requests may say."""

    ignored = _IGNORED
    refused = _REFUSED

    model: str | None = Field(None, description="the name of the model that is served, or of an adapter")
    n: int | None = Field(None, ge=1, le=128, description="completions of each prompt, at most 128; default 1")
    stream: bool | None = Field(
        None,
        description="server-sent events, each with up to `decode.steps_per_sync` (8) tokens (one with "
        "`decode.offload=layers`)",
    )
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    max_tokens: Count | None = Field(None, description="as in completions; default `serve.default_max_tokens`")
    temperature: float | None = Field(
        None, ge=0, le=1000, description="default of the model, else 1; 0 takes the most likely token"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="default of the model, else 1")
    top_k: int | None = Field(
        None, ge=-1, lt=2**31, description="default of the model, else 0, which means all, as -1 does"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="default of the model, else 0; keeps tokens of this share of the likeliest's"
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=1000, description="default of the model, else 1; of tokens in prompt or completion"
    )
    presence_penalty: Penalty | None = Field(None, description="of tokens in the completion, -2 to 2")
    frequency_penalty: Penalty | None = Field(None, description="as often as they are there, -2 to 2")
    logit_bias: dict[KeyOfToken, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="token id to what is added to its logit, -100 to 100"
    )
    min_tokens: int | None = Field(None, ge=0, lt=2**31, description="at least; a stop before does not count")
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, description="no others are chosen")
    bad_words: list[StopText] | None = Field(None, max_length=512, description="up to 512 texts that must not come")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="the same request draws the same tokens in any batch: those of `DecodeEngine.generate` with this "
        "seed",
    )
    stop: Annotated[list[StopText] | None, BeforeValidator(_in_list)] = Field(
        None,
        max_length=_MOST_STOPS,
        description="up to 16 texts. The stop is not part of the text, and nothing of it is streamed while it could "
        "still complete",
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=_MOST_STOPS, description="ids that end a text")
    ignore_eos: bool | None = Field(None, description="go on after the end-of-text token")
    return_token_ids: bool | None = Field(None, description="answers have `prompt_token_ids`, and choices `token_ids`")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="with `logprobs`: write tokens there as `token_id:5`"
    )
    response_format: ResponseFormat | None = Field(None, description="the answer is JSON, of a schema if there is one")
    structured_outputs: StructuredOutputs | None = Field(None, description="one of the first five")

    @model_validator(mode="after")
    def _together(self) -> _Request:
        if self.stream_options is not None and not self.stream:
            raise _refusal("unsupported_field", "goes with stream=true", "stream_options")
        if self.return_tokens_as_token_ids and vars(self)["logprobs"] in (None, False):
            raise _refusal("unsupported_field", "goes with logprobs", "return_tokens_as_token_ids")
        if self.response_format is not None and self.response_format.type != "text" and self.structured_outputs:
            raise _refusal("unsupported_field", "goes without structured_outputs", "response_format")
        return self

    @property
    def structure(self) -> tuple[str, dict[str, Any] | None]:
        """What an answer must look like, for `Sampling.structured_outputs`, and the field that says it."""
        if self.structured_outputs is not None:
            return "structured_outputs", self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        form = self.response_format
        if form is None or form.type == "text":
            return "response_format", None
        return "response_format", {"json_object": True} if form.json_schema is None else {
            "json": form.json_schema.schema_
        }


class ToolFunction(Object):
    """What an assistant called."""

    name: str | None = None
    arguments: Any = Field(
        None, description="a text of JSON, as clients have it, or an object; a template that fails at a text gets that"
    )


class ToolCall(Object):
    """A call of a tool that an assistant made."""

    refused = {"custom": ()}

    id: str | None = None
    type: str | None = None
    index: int | None = None
    function: ToolFunction | None = None


class Part(Object):
    """A part of the content of a message."""

    ignored = ("prompt_cache_breakpoint", "cache_control")
    refused = dict.fromkeys(
        (
            *("image_url", "input_audio", "file", "refusal", "video_url", "audio_url", "thinking", "closed", "uuid"),
            *("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil", "tool_reference"),
        ),
        (),
    )

    type: Literal["text"] = Field(description="`text` alone")
    text: str


class Message(Object):
    """A message of a chat. It goes to the template as it was sent: the template judges fields in no list here."""

    refused = {"audio": ()}
    open = True

    role: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="what the chat template knows")
    content: Annotated[list[Part] | None, BeforeValidator(_parts)] = Field(
        None, description="a text, or parts, whichever the template reads; an assistant's may be null"
    )
    name: str | None = Field(None, description="given to the template, which may leave it out")
    tool_calls: list[ToolCall] | None = Field(None, description="if the template reads them")
    tool_call_id: str | None = Field(None, description="given to the template, which may leave it out")
    reasoning_content: str | None = Field(None, description="or `reasoning`, whichever the template reads")
    reasoning: str | None = None
    refusal: str | None = Field(None, description="if the template reads it")
    function_call: ToolFunction | None = Field(None, description="if the template reads it")
    annotations: list[Any] | None = None


class FunctionDefinition(Object):
    """A tool that may be called."""

    refused = {"defer_loading": (False,)}

    name: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="what calls name it")
    description: str | None = Field(None, description="given to the template")
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema; arguments of forced calls keep to it")
    strict: bool | None = Field(None, description="arguments of other calls are not checked, whatever it says")


class ToolDefinition(Object):
    """What may be called. It goes to the template as it was sent."""

    refused = {"custom": (), "defer_loading": (False,)}

    type: Literal["function"] = Field(description="`function` alone")
    function: FunctionDefinition = Field(description="given to the template")


class ChosenFunction(Object):
    """The tool that an answer must call."""

    name: str = Field(description="of one of `tools`")


class ToolChoice(Object):
    """Whether an answer may or must call tools."""

    refused = {"allowed_tools": (), "custom": ()}

    type: Literal["none", "auto", "required", "function"] = Field(description="a word alone stands for it")
    function: ChosenFunction | None = Field(None, description="with `type` `function`")


def _as_type(given: Any) -> Any:
    return {"type": given} if isinstance(given, str) else given


class ChatRequest(_Request):
    """Of `/v1/chat/completions`."""

    refused = _REFUSED | _REFUSED_IN_CHATS

    messages: list[Annotated[Message, WrapValidator(_as_sent)]] = Field(
        min_length=1, description="go through the tokenizer's chat template"
    )
    max_completion_tokens: Count | None = Field(None, description="the same as `max_tokens`, and wins")
    logprobs: bool | None = Field(None, description="tell those of the tokens, under the model's own distribution")
    top_logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP, description="with `logprobs`: and of so many most likely ones, at most 20"
    )
    tools: list[Annotated[ToolDefinition, WrapValidator(_as_sent)]] | None = Field(
        None, max_length=128, description="go to the chat template, which must read them"
    )
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_as_type)] = Field(
        None, description="`auto`, the default; `none` keeps tools from the template; `required` or one of them by name"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")

    has_text: ClassVar[bool] = True
    """Whether there is something to tokenize."""

    @property
    def samples(self) -> int:
        """How many completions it asks for."""
        return self.n or 1

    @model_validator(mode="after")
    def _with_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _refusal("unsupported_field", "goes with logprobs=true", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _with_tools(self) -> ChatRequest:
        choice, names = self.tool_choice, self.tool_names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise _refusal("unsupported_field", f"has {twice[0]!r} twice; give each tool a name of its own", "tools")
        if choice is not None and (choice.type == "function") != (choice.function is not None):
            said = "is missing; type=function needs it" if choice.function is None else "goes with type=function"
            raise _refusal("unsupported_field", said, "tool_choice.function")
        if choice is not None and choice.type in ("required", "function") and not self.tools:
            raise _refusal("unsupported_field", "goes with tools", "tool_choice")
        if choice is not None and choice.function is not None and choice.function.name not in names:
            raise _refusal("unsupported_field", f"must be one of {', '.join(names)}", "tool_choice.function.name")
        for name in ("logprobs", "response_format", "structured_outputs") if self.calls != "none" else ():
            if getattr(self, name) and (name != "response_format" or super().structure[1] is not None):
                raise _refusal("unsupported_field", "goes without tools, or with tool_choice=none", name)
        return self

    @property
    def tool_names(self) -> list[str]:
        """Of its tools: dicts, as they were sent."""
        return [one["function"]["name"] for one in cast(list, self.tools or [])]

    @property
    def calls(self) -> Literal["none", "auto", "required", "function"]:
        """Whether an answer may or must call tools."""
        return "none" if not self.tools else "auto" if self.tool_choice is None else self.tool_choice.type

    @property
    def structure(self) -> tuple[str, dict[str, Any] | None]:
        """What an answer must look like, and the field that says it."""
        tools: Any = self.tools
        if self.calls == "required":
            return "tools", {"json": schema_of_calls(tools, self.parallel_tool_calls is not False)}
        if self.calls == "function" and self.tool_choice and self.tool_choice.function:
            return "tools", {"json": parameters_of(tools[self.tool_names.index(self.tool_choice.function.name)])}
        return super().structure


def _are_ids(given: list) -> bool:
    return set(map(type, given)) == {int}


def _prompts(given: Any) -> list[str] | list[list[int]]:
    """The prompts, each a text or token ids."""
    ids = isinstance(given, list) and _are_ids(given)
    prompts: Any = [given] if isinstance(given, str) or ids else given
    if isinstance(prompts, list) and prompts:
        if all(isinstance(one, str) for one in prompts):
            return prompts
        if all(isinstance(one, list) and _are_ids(one) for one in prompts):
            return prompts
    raise ValueError("must be a text, token ids, or a list of either, and not empty")


class CompletionRequest(_Request):
    """Of `/v1/completions`."""

    refused = _REFUSED | {"add_special_tokens": (True,), "prompt_embeds": (), "suffix": ("",)}

    max_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="reduced to what fits into `decode.max_seq_len` and into the cache; default 16; with `echo` it may "
        "be 0, for the prompt alone",
    )
    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)] = Field(
        description="a text or token ids, or several of one kind, which share batches"
    )
    logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP, description="those of the tokens, and of so many most likely ones, at most 20"
    )
    echo: bool | None = Field(None, description="begin the text with the prompt")
    best_of: int | None = Field(None, description="as many as `n` alone")

    @property
    def samples(self) -> int:
        """How many completions it asks for."""
        return len(self.prompt) * (self.n or 1)

    @property
    def has_text(self) -> bool:
        """Whether there is something to tokenize: prompts are of one kind."""
        return isinstance(self.prompt[0], str)

    @model_validator(mode="after")
    def _all_of_them(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise _refusal("unsupported_field", "of 0 goes with echo=true, else there is nothing to tell", "max_tokens")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _refusal("unsupported_field", "is not supported by this server; leave it out", "best_of")
        return self


class _OfTokens(Object):
    model: str | None = Field(None, description="the name of the model that is served")


class TokenizeRequest(_OfTokens):
    """Of `/tokenize`."""

    refused = {"add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": ()}

    prompt: str | None = Field(None, description="a text, or")
    messages: list[Annotated[Message, WrapValidator(_as_sent)]] | None = Field(None, description="those of a chat")
    tools: list[Annotated[ToolDefinition, WrapValidator(_as_sent)]] | None = Field(None, description="of the chat")
    add_special_tokens: bool | None = Field(None, description="false: of a text, none of those that begin a prompt")
    return_token_strs: bool | None = Field(None, description="tell the tokens' names, too")

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _refusal("unsupported_field", "or messages must be given, and not both", "prompt")
        return self


class DetokenizeRequest(_OfTokens):
    """Of `/detokenize`."""

    tokens: list[TokenId] = Field(description="token ids")


class ManageRequest(Object):
    """Of `/wake_up` and `/reset_prefix_cache`, which know no fields."""


class SleepRequest(Object):
    """Of `/sleep`."""

    level: Annotated[Literal["1", "2"], BeforeValidator(str)] = Field("1", description="1: graphs stay; 2: they go")


class UpdateRequest(_OfTokens):
    """Of `/update_weights`."""

    path: str = Field(min_length=1, description="a folder that the server can read, as `model.path` is")


class LoadAdapterRequest(Object):
    """Of `/v1/load_lora_adapter`."""

    refused = {"load_inplace": (False,), "is_3d_lora_weight": (False,)}

    lora_name: str = Field(min_length=1, description="what requests name as their `model`")
    lora_path: str = Field(min_length=1, description="a folder that the server can read, as peft saves one")


class UnloadAdapterRequest(Object):
    """Of `/v1/unload_lora_adapter`."""

    ignored = ("lora_int_id",)

    lora_name: str = Field(min_length=1, description="of one that is loaded")
