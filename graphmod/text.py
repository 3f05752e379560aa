"""Text to tokens and back, by one policy for training, prompts, samples and stops.

A saved tokenizer, or bytes as tokens; the special tokens around a text; the prompt that a chat template makes of
messages; text that comes token by token; and texts that are not UTF-8.

A template is a program, and says of no message whether it reads it. So it is tried: with words of which each can be
found again in what it writes.

A token's text depends on its neighbours: decoders strip the first space, join bytes to characters and pieces to words.
So a completion is always decoded together with its prompt, and its text is what follows the prompt's. Pieces of it,
joined, equal what decoding all tokens at once gives.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from graphmod.errors import ConfigError, reason

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream

Message = dict[str, Any]


# -- chats -------------------------------------------------------------------------------------------------------------

# Fields that a template may leave out, for what was said is in others.
_BESIDE = {"role", "content", "name", "tool_call_id", "annotations"}
# What was thought is left out of what was said before, but should go by the name that the template has for it.
_THOUGHT = {"reasoning": "reasoning_content", "reasoning_content": "reasoning"}
_KNOWN = {*_BESIDE, *_THOUGHT, "tool_calls", "function_call", "refusal", "audio"}
_WHOLE = {"user", "system", "developer"}  # roles whose messages a template has no reason to leave out
# By role, in which form a template may want contents: as they are, all as texts, all as parts, or some as either.
_FORMS = (
    lambda role: None,
    lambda role: str,
    lambda role: list,
    lambda role: list if role == "user" else str,
    lambda role: str if role == "assistant" else list,
)


class ChatError(ConfigError):
    """Messages that cannot become a prompt; `field` says where, such as `messages.1.content`."""

    def __init__(self, said: str, field: str = "messages") -> None:
        super().__init__(said)
        self.field = field


def chat_prompt(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    """The text of a prompt for an answer to messages: what `apply_chat_template` writes for them.

    A content goes to the template as it was sent, as a text or as parts, if the template writes it; otherwise in the
    other form. A template that fails at fields that are null, or at the arguments of a tool call as a text, gets them
    left out and as an object.

    Args:
        tools: that the answer may call.

    Raises:
        ChatError: the template refuses the messages, or leaves out something that they say, or the tools.
    """
    for number, message in enumerate(messages):
        _require_text(number, message)

    def write(given: list[Message]) -> str:
        return tokenizer.apply_chat_template(given, tools=tools, add_generation_prompt=True, tokenize=False)

    changed, shown = _as_it_reads(write, messages)
    try:
        prompt = write(changed)
    except Exception as error:  # whatever a template raises
        raise _refused(write, changed, error) from error
    _require_read(write, changed, shown, prompt)
    if tools and prompt == tokenizer.apply_chat_template(changed, add_generation_prompt=True, tokenize=False):
        raise ChatError("tools is nothing that the chat template of this model reads; leave them out", "tools")
    return prompt


def _refused(write: Callable[[list[Message]], str], messages: list[Message], error: Exception) -> ChatError:
    """What is wrong with messages that a template fails at."""
    nulls = [number for number, message in enumerate(messages) if message.get("content") is None]
    if nulls:
        try:
            write([message | {"content": message.get("content") or ""} for message in messages])
        except Exception as other:  # whatever a template raises
            error = other
        else:
            return _null(messages, nulls[0], "fails at that")
    return ChatError(f"the tokenizer's chat template refuses the messages: {reason(error)}")


def _null(messages: list[Message], number: int, what: str) -> ChatError:
    field, beside = f"messages.{number}.content", " beside tool_calls" if messages[number].get("tool_calls") else ""
    return ChatError(f'{field} is null{beside}, and the chat template of this model {what}; send ""', field)


def _require_text(number: int, message: Message) -> None:
    field = f"messages.{number}.content"
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise ChatError(f"{field} is required: a text, or a list of parts; only an assistant's may be null", field)
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise ChatError(f"{field} must be a text or a list of parts, got {content!r:.80}", field)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatError(f'{field}: only parts like {{"type": "text", "text": "..."}} are supported', field)


def _in_form(message: Message, form: type | None, texts: list[str] | None = None) -> Message:
    """A message with its content as `str` or as a `list` of parts, with None as it is; `texts` go in the place of its
    own."""
    content = message.get("content")
    if not content or (form in (None, type(content)) and texts is None):
        return message
    if texts is None:
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    as_text = (form or type(content)) is str
    return {**message, "content": "".join(texts) if as_text else [{"type": "text", "text": one} for one in texts]}


def _without_nulls(message: Message) -> Message:
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _with_objects(message: Message) -> Message:
    """Without nulls, and with the arguments of its tool calls as objects."""
    kept = _without_nulls(message)
    if isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_with_arguments(call) for call in kept["tool_calls"]]
    return kept


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    try:
        read = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "arguments": read} if isinstance(read, dict) else call


def _as_it_reads(write: Callable[[list[Message]], str], messages: list[Message]) -> tuple[list[Message], set[int]]:
    """The messages in the way of which a template writes most, that in which they were sent first of all; and the
    numbers of those whose text it writes."""
    words = [[f"first{number}word ", f"second{number}word"] for number in range(len(messages))]
    with_text = {number for number, message in enumerate(messages) if message.get("content")}
    best, shown, tried = [_in_form(message, str) for message in messages], None, []  # most templates take texts
    for change, form in itertools.product((dict, _without_nulls, _with_objects), _FORMS):
        changed = [_in_form(change(message), form(message["role"])) for message in messages]
        try:
            if changed in tried:
                continue
            tried.append(changed)
            written = write([_in_form(message, None, text) for message, text in zip(changed, words, strict=True)])
        except Exception:  # whatever a template raises, and what is nested too deeply to compare
            continue
        found = with_text & _whole(written)
        if shown is None or len(found) > len(shown):
            best, shown = changed if found else best, found
        if found == with_text:
            break
    return best, shown or set()


def _whole(written: str) -> set[int]:
    """The messages of whose words a template has written both, as texts and not as what Python or JSON shows of
    parts."""
    begun, found = {}, set()
    written = written.lower()
    for word in re.finditer(r"(first|second)(\d+)word", written):
        number = int(word[2])
        if word[1] == "first":
            begun.setdefault(number, word.end())
        elif number in begun and "type" not in written[begun[number] : word.start()]:
            found.add(number)
    return found


def _require_read(write: Callable[[list[Message]], str], messages: list[Message], shown: set[int], prompt: str) -> None:
    """Raises ChatError where a template writes the same whatever a message or a field says, or null as a word; of the
    messages in `shown` it writes the text."""

    def same(change: Callable[[Message], Message], only: int | None = None) -> bool:
        try:
            changed = [change(one) if only in (None, number) else one for number, one in enumerate(messages)]
            return write(changed) == prompt
        except Exception:  # whatever a template raises
            return False

    for number, message in enumerate(messages):
        must_show = number == len(messages) - 1 or message["role"] in _WHOLE
        if not must_show or number in shown or not message.get("content"):
            continue
        if same(lambda one: _in_form(one, None, ["other", "text"]), only=number):
            raise ChatError(
                f"the chat template of this model leaves out messages.{number}, of role {message['role']!r}; say it in "
                "a message of another role, or leave it out",
                f"messages.{number}",
            )

    def with_content(text: str) -> bool:
        return same(lambda one: one | {"content": text} if one.get("content", "") is None else one)

    nulls = [number for number, one in enumerate(messages) if one.get("content", "") is None]
    if nulls and with_content("None") and not with_content(""):
        raise _null(messages, nulls[0], "writes None for it")
    said = {name: number for number, one in reversed([*enumerate(messages)]) for name in one if one[name]}
    for name in sorted(said.keys() - _BESIDE):
        field, other = f"messages.{said[name]}.{name}", _THOUGHT.get(name)
        if not same(lambda one, name=name: {key: one[key] for key in one if key != name}):
            continue
        if other is None:
            like = [] if name in _KNOWN else get_close_matches(name.lower(), _KNOWN, 1)
            hint = f"is {like[0]} meant?" if like else "leave it out, or say it in the content"
            raise ChatError(f"{field} is nothing that the chat template of this model reads; {hint}", field)
        if other not in said and not same(lambda one, name=name, other=other: one | {other: one.get(name)}):
            raise ChatError(f"{field}: the chat template of this model reads {other}; send it by that name", field)


# -- text to tokens ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of one tokenizer.

    A document is what the tokenizer by default puts before a text, the text, what the tokenizer by default puts after
    it, and EOS if that is not among these. A prompt is the beginning of a document: all that without anything after the
    text. What the text itself already begins or ends with is not added again.
    """

    before: list[int]  # ids that begin documents and prompts, such as BOS; often none
    after: list[int]  # ids that end documents, such as EOS
    end: int | None  # the id at which generation stops, EOS or the last of `after`; None if nothing ends documents

    @classmethod
    def of(cls, tokenizer: Any) -> SpecialTokens:
        """The special tokens of a transformers tokenizer, found by tokenizing a text with and without them."""
        before, after = _around(tokenizer)
        eos = tokenizer.eos_token_id
        if eos is not None and eos not in after:
            after = [*after, eos]
        return cls(before, after, eos if eos is not None else after[-1] if after else None)

    def prompt(self, ids: list[int]) -> list[int]:
        """The ids of a prompt, from those of its text alone."""
        return list(ids) if ids[: len(self.before)] == self.before else [*self.before, *ids]

    def ended(self, ids: list[int]) -> list[int]:
        """These ids and those that end documents."""
        return ids if not self.after or ids[-len(self.after) :] == self.after else [*ids, *self.after]


def special_ids(tokenizer: Any) -> dict[str, int]:
    """The special tokens of a transformers tokenizer, named ones and others: text -> id."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)) | added


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    special = set(special_ids(tokenizer).values())
    vocabulary = (tokenizer.decode([number]) for number in range(len(tokenizer)))
    for text in chain(["a"], vocabulary):
        inner = tokenizer(text, add_special_tokens=False)["input_ids"]
        # A special token could be mistaken for one of those around the text.
        if not inner or special & set(inner):
            continue
        whole = tokenizer(text)["input_ids"]
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return whole[:start], whole[start + len(inner) :]
    return [], []


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_TRAINING_STATE = "training_state.pt"  # beside the model in a checkpoint of train.py


class Codec(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteCodec:
    """Each byte of UTF-8 is a token, 0 to 255."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        """Ids from 256 on, which pad a vocabulary, stand for nothing."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class TokenizerCodec:
    """A transformers tokenizer.

    Args:
        tokenizer: fast or slow.

    Attributes:
        tokenizer: the one given.
        around: the special tokens of documents and prompts.
        special: every special token: text -> id.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.around = SpecialTokens.of(tokenizer)
        self.special = special_ids(tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt: the beginning of a document, without what ends one."""
        return self.around.prompt(self.encode_as_is(text))

    def document(self, text: str) -> list[int]:
        """The ids of a document to train on: `encode(text)` and what ends it."""
        return self.around.ended(self.encode(text))

    def encode_as_is(self, text: str) -> list[int]:
        """The ids of a text that already has its special tokens, such as that of `chat`."""
        # A text may be longer than what the model sees in one go and is cut later: the warning about that is no use.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, tokens: list[int], special_tokens: bool = False) -> str:
        """The text of tokens; special ones show with `special_tokens` only."""
        return self.tokenizer.decode(tokens, skip_special_tokens=not special_tokens)

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The text of a prompt for an answer to `messages`, with all special tokens that the template puts there.

        Args:
            messages: as transformers and OpenAI's API take them: {"role": "user", "content": "..."}; a content may be
                a list of parts, whether or not the template reads such, and that of an assistant null.
            tools: that the answer may call, as OpenAI's API has them.

        Raises:
            ChatError: the tokenizer has no chat template, or its template refuses the messages or leaves out what they
                say; `field` says where.
        """
        if not self.tokenizer.chat_template:
            raise ChatError(
                "the tokenizer has no chat template; put one in its folder (chat_template.jinja), use the tokenizer of "
                'a chat model (tokenizer=FOLDER), or give plain prompts (chat=false, {"prompt": ...})'
            )
        return chat_prompt(self.tokenizer, messages, tools)


def token_bytes(codec: Codec) -> Callable[[int], bytes | None]:
    """What finds the bytes that a token stands for, which may be a part of a character; None where only its text is
    known. A special token stands for none."""
    if not isinstance(codec, TokenizerCodec):
        return lambda token: bytes([token] if token < 256 else [])
    special, read, tokenizer = {*codec.special.values()}, _reader(codec.tokenizer), codec.tokenizer

    def found(token: int) -> bytes | None:
        if token in special:
            return b""
        name = tokenizer.convert_ids_to_tokens(token)
        return name if isinstance(name, bytes) else None if name is None or read is None else read(name)

    return found


def _reader(tokenizer: Any) -> Callable[[str], bytes | None] | None:
    """What makes bytes of a token as the vocabulary writes it; None where those write characters."""

    def shown(*tokens: str) -> str | None:
        try:
            return tokenizer.convert_tokens_to_string([*tokens])
        except Exception:  # of a tokenizer that has not these tokens: anything
            return None

    if shown("Ã", "©", "Ġ") == "é ":  # the bytes of a character, each written as a character: as GPT-2 does
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        table = {written: byte for byte, written in bytes_to_unicode().items()}
        return lambda name: bytes(table[one] for one in name) if table.keys() >= {*name} else None
    if (shown("<0xC3>", "<0xA9>") or "").strip() == "é":  # what is no word of the vocabulary
        digits = re.compile("<0x([0-9A-F]{2})>")
        return lambda name: bytes.fromhex(of[1]) if (of := digits.fullmatch(name)) else name.replace("▁", " ").encode()
    if shown("Ã", "©") == "é":
        return lambda name: bytes(map(ord, name)) if max(map(ord, name)) < 256 else None
    return None


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was saved in a folder."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def tokenizer_folder(folder: Path, tokenizer: str | None) -> Path | None:
    """Where the tokenizer of the model in a folder (which may be a checkpoint of `train.py`, or the averaged or merged
    weights in it) is; None for bytes. `tokenizer` is a folder, `bytes`, or None to find out: the one saved with the
    model, or bytes for a checkpoint of `train.py` without one. Raises ConfigError where there is none."""
    if tokenizer == "bytes":
        return None
    if tokenizer is not None:
        if not Path(tokenizer).is_dir():  # transformers would look for a repository of that name
            raise ConfigError(
                f"tokenizer={tokenizer} is not a folder; give the folder of a saved tokenizer, or tokenizer=bytes"
            )
        if not any(Path(tokenizer).iterdir()):
            raise ConfigError(
                f"tokenizer={tokenizer} is empty; give the folder of a saved tokenizer, or tokenizer=bytes"
            )
        return Path(tokenizer)
    if has_tokenizer(folder):
        return folder
    checkpoint = next((path for path in (folder, *folder.parents[:2]) if (path / _TRAINING_STATE).is_file()), None)
    if checkpoint is None:
        raise ConfigError(f"{folder} holds no tokenizer; set tokenizer=FOLDER, or tokenizer=bytes")
    return checkpoint if has_tokenizer(checkpoint) else None


def codec_for(folder: Path, tokenizer: str | None) -> Codec:
    """The codec of a model; arguments as of `tokenizer_folder`. Raises ConfigError where there is none, or it cannot be
    read."""
    source = tokenizer_folder(folder, tokenizer)
    if source is None:
        return ByteCodec()
    return TokenizerCodec(load_tokenizer(source))


def load_tokenizer(folder: str | Path, setting: str = "tokenizer") -> Any:
    """The transformers tokenizer saved in a folder, which a setting names; nothing is downloaded. Raises ConfigError
    where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever its file readers raise
        # All lines: the first may end in a colon, with the reasons below it.
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{setting}={folder} holds no tokenizer that transformers can read; give a folder with a tokenizer.json or "
            f"similar, as written by save_pretrained of a tokenizer. transformers reports: {why}"
        ) from error


# -- tokens to text, as they come --------------------------------------------------------------------------------------

_UNFINISHED = "\ufffd"  # what decoders put for bytes that are no character yet


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    if other.startswith(one):
        return len(one)
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


def _without(before: str, whole: str) -> str:
    # If the tokens complete the last character of the prompt, that character counts as theirs.
    return whole[_common(before, whole) :]


class _Watched:
    def __init__(self, stream: TextStream, texts: list[str]) -> None:
        self._stream, self._texts = stream, texts
        self._kept = max(map(len, texts)) - 1
        self._tail = ""

    def met(self, token: int, early: bool) -> bool:
        tail, piece = self._tail, self._stream.add(token)
        text = tail + piece + ("" if early else self._stream.pending)
        self._tail = (tail + piece)[-self._kept :] if self._kept else ""
        # A stop that ended within the tail was met before, or came too early.
        return not early and any(text.find(stop, max(0, len(tail) - len(stop) + 1)) >= 0 for stop in self._texts)


class StopTexts:
    """Looks for texts, none empty, in a completion; nothing in the prompt counts. One that holds a special token is
    looked for in the text with special tokens, others in the text without."""

    def __init__(self, codec: Codec, texts: list[str], prompt: Sequence[int]) -> None:
        names = getattr(codec, "special", {})
        special = [text for text in texts if any(name in text for name in names)]
        plain = [text for text in texts if text not in special]
        self._watched = [
            _Watched(TextStream(codec, prompt, special_tokens=shown), group)
            for shown, group in ((False, plain), (True, special))
            if group
        ]

    def met(self, token: int, early: bool = False) -> bool:
        """Whether one of the texts is complete with `token`, the next one of the completion.

        Args:
            early: then no text counts that ends in what is known with it.
        """
        return any(watched.met(token, early) for watched in self._watched)


def completion_text(codec: Codec, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text of `tokens` after `prompt`: the text of both together, without that of the prompt."""
    return _without(codec.decode(list(prompt)) if prompt else "", codec.decode([*prompt, *tokens]))


def _streamable(codec: Codec) -> Any | None:
    """The `tokenizers.Tokenizer` whose DecodeStream gives what the codec decodes; None where there is none."""
    if not isinstance(codec, TokenizerCodec):
        return None
    from transformers import PreTrainedTokenizerFast  # loads PyTorch; whoever has made such a codec has done so

    tokenizer = codec.tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    kind = type(tokenizer)
    if kind.decode is not PreTrainedTokenizerFast.decode or kind._decode is not PreTrainedTokenizerFast._decode:
        return None
    backend = tokenizer.backend_tokenizer
    if not tokenizer.clean_up_tokenization_spaces:
        return backend
    # transformers removes spaces from the text afterwards, but for BPE not unless it is told twice.
    forced = tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    return backend if type(backend.model).__name__ == "BPE" and not forced else None


def _bytes(backend: Any) -> set[int]:
    """The tokens that are a single byte, if the decoder takes a row of them as a whole: one wrong byte turns all of the
    row into U+FFFD. Empty for other decoders."""
    if backend.decoder is None or backend.decoder.decode(["<0x41>"]) != "A":
        return set()
    return {number for byte in range(256) if (number := backend.token_to_id(f"<0x{byte:02X}>")) is not None}


class TextStream:
    """Turns tokens that come one by one into pieces of text, each as soon as no later token can change it.

    All pieces and `rest()` joined are `completion_text` of the tokens. Fast tokenizers are streamed by `DecodeStream`
    of `tokenizers`. With other codecs a token may change the text before it: each token decodes everything again, and a
    piece is returned once two different decodings in a row begin with it.

    Args:
        codec: decodes the tokens.
        prompt: ids of the prompt, which come before the tokens.
        special_tokens: show special tokens; only with a `TokenizerCodec`.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int] = (), special_tokens: bool = False) -> None:
        self._codec, self._special = codec, special_tokens
        self._prompt, self._tokens = list(prompt), []
        self._before: str | None = None
        self._given = self._latest = ""
        self._complete = True
        self._backend = _streamable(codec)
        self._stream: DecodeStream | None = None
        self._held: list[int] = []
        self._last: list[int] = []
        self._since: list[int] = []
        self._open: set[int] = set()
        if self._backend is not None and isinstance(codec, TokenizerCodec) and (found := _bytes(self._backend)):
            self._open = found if special_tokens else found | set(codec.special.values())

    def add(self, token: int) -> str:
        """The text that is final with this token, "" if none."""
        self._tokens.append(token)
        self._held.append(token)
        self._since.append(token)
        self._complete = False
        backend = self._backend
        if self._open and backend is not None and (token in self._open or backend.id_to_token(token) is None):
            return ""
        piece = self._decoded_again() if self._stream is None else self._streamed(self._stream)
        self._held = []
        if piece:
            self._given += piece
            self._last, self._since = self._since, []
        self._complete = bool(piece) and (self._stream is not None or self._given == self._latest)
        if self._complete and isinstance(self._codec, ByteCodec):  # text of bytes depends on nothing before a character
            self._prompt, self._tokens, self._before, self._given, self._latest = [], [], "", "", ""
        return piece

    def add_all(self, tokens: Sequence[int]) -> str:
        """The text that is final with these tokens. Where the last one ends within a character, their text may come
        with what follows: a stream takes about half the time where it is given a run of tokens at once."""
        pieces, left = [], list(tokens)
        while left and (self._stream is None or self._open):
            pieces.append(self.add(left.pop(0)))
        if left:
            self._tokens += left[:-1]
            self._held += left[:-1]
            self._since += left[:-1]
            pieces.append(self.add(left[-1]))
        return "".join(pieces)

    @property
    def complete(self) -> bool:
        """Whether the text of all tokens was given out."""
        return self._complete

    @property
    def ahead(self) -> int:
        """How many more characters the tokens so far stand for, unless the next one changes that."""
        return max(0, len(self._latest.rstrip(_UNFINISHED)) - len(self._given)) if self._stream is None else 0

    @property
    def pending(self) -> str:
        """The text of the tokens whose piece is still to come, as it would be if no other came."""
        if self._complete:
            return ""
        if self._stream is None:
            return self._left()
        # As the stream does it: the tokens of the last piece are all that this text depends on.
        return _without(self._decode(self._last), self._decode([*self._last, *self._since]))

    def rest(self) -> str:
        """What is left at the end, incomplete characters included."""
        piece = "" if self._complete else self._left()
        self._given += piece
        self._complete = True
        return piece

    def _left(self) -> str:
        text = self._text()
        return text[len(self._given) :] if text.startswith(self._given) else ""

    def _decode(self, tokens: list[int]) -> str:
        if self._backend is not None:
            return self._backend.decode(tokens, skip_special_tokens=not self._special)
        if self._special and isinstance(self._codec, TokenizerCodec):
            return self._codec.decode(tokens, special_tokens=True)
        return self._codec.decode(tokens)

    def _text(self) -> str:
        if self._before is None:
            self._before = self._decode(self._prompt) if self._prompt else ""
        return _without(self._before, self._decode([*self._prompt, *self._tokens]))

    def _streamed(self, stream: DecodeStream) -> str:
        assert self._backend is not None
        try:
            return stream.step(self._backend, self._held) or ""
        except Exception:  # the text before has changed; tokenizers has no class of its own for that
            self._stream = None
            return self._decoded_again()

    def _decoded_again(self) -> str:
        """What is new when everything is decoded; if it ends in a whole character, a new stream begins after it."""
        text, before = self._text(), self._latest
        if text == before:  # after a special token, for example; that the two agree proves nothing
            return ""
        settled = text.rstrip(_UNFINISHED)
        if self._backend is None and not isinstance(self._codec, ByteCodec):
            settled = settled[: _common(settled, before)]
        self._latest = text
        if self._backend is not None and text and settled == text:
            from tokenizers.decoders import DecodeStream

            self._stream = DecodeStream([*self._prompt, *self._tokens], skip_special_tokens=not self._special)
        return settled[len(self._given) :] if settled.startswith(self._given) else ""


class TokenText(NamedTuple):
    """What one token adds to a text."""

    token: int  # its id
    text: str  # the characters that it completes; all joined are the text
    # What it stands for in UTF-8, which may be a part of a character; all joined are the text. Where they are not
    # known, or a decoder left some out, those of `text`.
    bytes: bytes
    offset: int  # where its text begins, in characters


class TokenTexts:
    """The text of tokens that come one by one after a prompt, and what each of them adds to it."""

    def __init__(self, codec: Codec, prompt: Sequence[int] = ()) -> None:
        self._stream, self._bytes = TextStream(codec, prompt), token_bytes(codec)
        self._open: list[tuple[int, int]] = []  # tokens whose text may still change, and where it ends by now
        self._text, self._start = "", 0  # of these, as far as it is final

    def add(self, token: int) -> tuple[str, list[TokenText]]:
        """The text that is final with this token, and the tokens whose texts are."""
        piece = self._stream.add(token)
        self._text += piece
        self._open.append((token, self._start + len(self._text) + self._stream.ahead))
        return piece, self._settle(len(self._open) - (not self._stream.complete)) if piece else []

    def rest(self) -> tuple[str, list[TokenText]]:
        """What is left of both at the end."""
        piece = self._stream.rest()
        self._text += piece
        return piece, self._settle(len(self._open))

    def _settle(self, count: int) -> list[TokenText]:
        found: list[TokenText] = []
        done = 0
        begin, at, end = self._start, self._start, self._start + len(self._text)
        for number, (_, reach) in enumerate(self._open[:count], start=1):
            last = number == len(self._open)
            to = end if last else max(at, min(reach, end))
            if to > at or last:  # what has no text may be the beginning of the next token's character
                tokens = [token for token, _ in self._open[done:number]]
                found += self._parted(tokens, self._text[at - begin : to - begin], at)
                done, at = number, to
        held = [(token, min(reach, end)) for token, reach in self._open[done:count]]
        self._text, self._start, self._open = self._text[at - begin :], at, [*held, *self._open[count:]]
        return found

    def _parted(self, tokens: list[int], text: str, offset: int) -> list[TokenText]:
        """Each token with its part of the text of all: with the characters that its bytes complete."""
        raw = [self._bytes(token) for token in tokens]
        whole = [one for one in raw if one is not None]
        known = len(whole) == len(raw) and _alike(b"".join(whole).decode("utf-8", "replace"), text)
        texts = ["" for _ in tokens[1:]] + [text]
        if known:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            parts = [decoder.decode(one, number == len(raw)) for number, one in enumerate(whole, start=1)]
            texts = parts if "".join(parts) == text else texts
        found = []
        for token, own, given in zip(tokens, texts, raw, strict=True):
            found.append(
                TokenText(token, own, given if known and given is not None else own.encode("utf-8", "replace"), offset)
            )
            offset += len(own)
        return found


def _alike(one: str, other: str) -> bool:
    """Whether two texts are the same, whatever number of signs they have for bytes that are no character."""
    return one == other or re.sub(f"{_UNFINISHED}+", _UNFINISHED, one) == re.sub(f"{_UNFINISHED}+", _UNFINISHED, other)


# -- texts that are not UTF-8: what they are, and how they become it ---------------------------------------------------

_MARKS = (  # the longer ones first, because one begins like a shorter one
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def wide_encoding(content: bytes) -> str | None:
    """`UTF-16` or `UTF-32` for the beginning of a text that says it is that; else None. Not every file that begins so
    is a text: it also has to be one in that encoding."""
    for mark, name in _MARKS:
        if content.startswith(mark):
            try:
                codecs.getincrementaldecoder(name)().decode(content)
            except UnicodeDecodeError:
                continue
            return name
    return None


def not_utf8(path: Path) -> str | None:
    """What the text in `path` is in place of UTF-8, and the command that converts it; None where it is UTF-8, no
    text, or cannot be read."""
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        content = error.object
        name = wide_encoding(content)
        if name is None and b"\0" in content:
            return None  # no text at all, such as a compressed file
        what = name or f"another encoding, such as Latin-1 (byte {error.start:,} is {content[error.start]:#04x})"
        quoted = shlex.quote(str(path))
        return f"{path} is not UTF-8 but {what}; convert it: iconv -f {name or 'latin1'} -t UTF-8 {quoted} > NEW_FILE"
    except OSError:
        return None
    return None
