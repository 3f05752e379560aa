"""Chats as tokens, through the tokenizer's own chat template: whole ones, and a prompt with its completion."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphmod.decode.text.codec import TokenizerCodec
from graphmod.errors import ConfigError, reason
from graphmod.train.data.encode import Encoder, array, halves, masked_before
from graphmod.train.loss import masked

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SAYS = ("content", "tool_calls", "function_call", "reasoning_content", "thinking")


@dataclass
class Chat:
    """A list of messages.

    Attributes:
        messages: each with `role` and `content`, or what else its template knows.
        prompted: how many of them are the prompt, where the others are its completion; 0 where the chat is whole.
        place: says where it was read, for errors.
    """

    messages: list[dict[str, Any]]
    prompted: int
    place: Callable[[], str]

    @property
    def characters(self) -> int:
        """About how long it is."""
        return sum(len(str(message.get("content"))) for message in self.messages)


def messages_of(value: Any, where: Callable[[], str]) -> list[dict[str, Any]]:
    """The messages in a column, without the keys that are null: readers of tables give each message those of all.

    Args:
        value: what the column holds.
        where: says which row and column that is, for errors.

    Raises:
        ConfigError: it is no list of messages.
    """
    if not isinstance(value, list):
        raise ConfigError(f"{where()} must be a list of messages, got {type(value).__name__}")
    found = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise ConfigError(
                f"{where()}: message {number} must have the keys 'role' and 'content', got {type(message).__name__}"
            )
        had = {key: inner for key, inner in message.items() if inner is not None}
        for wanted, keys in (("role", ("role",)), ("content", _SAYS)):
            if not had.keys() & set(keys):
                raise ConfigError(
                    f"{where()}: message {number} has no {wanted!r}; a message has 'role' and 'content', and this one "
                    f"{', '.join(map(repr, had)) or 'nothing'}"
                )
        found.append({**had, "content": had.get("content")})
    return found


def _tokenizer_of(codec: TokenizerCodec | None) -> Any:
    """That of a codec. Raises ConfigError where there is no chat template."""
    tokenizer = None if codec is None else codec.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ConfigError(
            "the data has chats (lists of messages), and "
            + ("bytes have no chat template" if tokenizer is None else "the tokenizer has no chat template")
            + "; give the tokenizer of a chat model (data.tokenizer=FOLDER), or set its chat_template and save it again"
        )
    return tokenizer


def _applied(tokenizer: Any, chats: Sequence[Chat], messages: Sequence[list[dict[str, Any]]], **options: Any) -> Any:
    """What the template makes of `messages`, which are those of `chats` or their prompts."""
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # whatever the template raises about the messages
        place, cause = "a chat of the data", error
        for chat, alone in zip(chats, messages, strict=True):
            try:
                tokenizer.apply_chat_template([alone], **options)
            except Exception as its:
                place, cause = chat.place(), its
                break
        raise ConfigError(
            f"the tokenizer's chat template cannot be applied to {place}: {reason(cause)}; it takes a list of messages "
            "with 'role' and 'content', in the order that the template allows"
        ) from cause


def chat_encoder(codec: TokenizerCodec | None, everything: bool) -> Encoder:
    """Encodes whole chats, of which what the assistant says is trained on.

    Args:
        codec: of the tokenizer, or None for bytes.
        everything: train on all tokens and not on the assistant's alone.

    Raises:
        ConfigError: there is no template, or it does not mark what the assistant says.
    """
    tokenizer = _tokenizer_of(codec)
    if not everything and not _GENERATION.search(tokenizer.get_chat_template()):
        raise ConfigError(
            "the tokenizer's chat template does not mark what the assistant says; put {% generation %} and "
            "{% endgeneration %} around it in chat_template.jinja, train on all tokens (data.train_on=all), or give "
            "each chat as 'prompt' and 'completion', which need no marks"
        )

    def encode(chats: Sequence[Chat]) -> list[np.ndarray]:
        encoding = _applied(
            tokenizer,
            chats,
            [chat.messages for chat in chats],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=not everything,
            tokenizer_kwargs={"verbose": False},
        )
        rows = [array(tokens) for tokens in encoding["input_ids"]]
        if everything:
            return rows
        marks = [np.asarray(mask, dtype=bool) for mask in encoding["assistant_masks"]]
        return [masked(tokens, mask) for tokens, mask in zip(rows, marks, strict=True)]

    return encode


def chat_pair_encoder(codec: TokenizerCodec | None) -> Encoder:
    """Encodes chats whose first messages are a prompt, of which only the completion is trained on: what the template
    writes after the prompt and its invitation to answer (`add_generation_prompt`), which the model is sampled from.

    Raises:
        ConfigError: there is no template.
    """
    tokenizer = _tokenizer_of(codec)

    def encode(chats: Sequence[Chat]) -> list[np.ndarray]:
        wholes = _applied(tokenizer, chats, [chat.messages for chat in chats], tokenize=False)
        given = [chat.messages[: chat.prompted] for chat in chats]
        prompts = _applied(tokenizer, chats, given, tokenize=False, add_generation_prompt=True)
        pairs = []
        for chat, prompt, whole in zip(chats, prompts, wholes, strict=True):
            if not whole.startswith(prompt):
                raise ConfigError(
                    f"{chat.place()}: the chat template writes the prompt otherwise where the completion follows, so "
                    f"that it is not known where that begins: {prompt[-40:]!r} is not in {whole[-120:]!r}. Train on "
                    "all of it (data.train_on=all), or on whole chats in a column 'messages'"
                )
            pairs.append((prompt, whole[len(prompt) :]))
        return [masked_before(array(before), array(after)) for before, after in halves(tokenizer, pairs)]

    return encode
