"""Structured output: a completion that is JSON of a schema, a match of a regular expression, one of some choices, or a
text of a grammar. What a request asks for becomes a matcher, and that a mask of the tokens that may come next.

llguidance knows grammars, and is imported here alone, once somebody asks for it.
"""

from __future__ import annotations

import contextlib
import json
from functools import cache, cached_property, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphmod.decode.types import STRUCTURES, RequestError, said
from graphmod.errors import install, reason
from graphmod.text import Codec, token_bytes

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    Matcher = LLMatcher
else:
    Matcher = Any

_OLDEST = 1, 9  # whose tokenizers take several ends
_FEW = 8  # rows whose masks take less time than threads need to begin
_KEPT = 64  # matchers of what was asked for last


def mask_words(vocabulary: int) -> int:
    """Words of 32 bits in a mask: a bit for each token, and one for an end that no token stands for."""
    return vocabulary // 32 + 1


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


def fill_masks(matchers: list[Matcher | None], masks: Tensor) -> None:
    """Writes which tokens may come next.

    Args:
        matchers: of each row; None allows all tokens.
        masks: (rows, `mask_words`) int32, on the host.
    """
    from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

    found = masks.numpy()  # for PyTorch may set threads to it, which wait for a busy host
    found.fill(-1)
    asked = [(matcher, row) for row, matcher in enumerate(matchers) if matcher is not None]
    if len(asked) > _FEW:
        fill_next_token_bitmask_par(_executor(), asked, found)
    else:
        for matcher, row in asked:
            fill_next_token_bitmask(matcher, found, row)


def _require_llguidance() -> None:
    """Raises RequestError where there is none that can be used."""
    try:
        found = version("llguidance")
        import_module("llguidance")
        if tuple(map(int, found.split(".")[:2])) >= _OLDEST:
            return
        why = f"{found} is installed"
    except PackageNotFoundError:
        why = "it is not installed"
    except Exception as error:  # of its import: anything
        why = f"its import fails: {reason(error)}"
    raise RequestError(
        f"structured_outputs needs llguidance {'.'.join(map(str, _OLDEST))} or newer, and {why}: "
        f"{install('structured')}"
    )


class Grammars:
    """Makes matchers for the tokens of one codec.

    Args:
        codec: of the tokens; None where there is none.
        vocabulary: number of tokens.
        ends: tokens that end a sequence.
    """

    def __init__(self, codec: Codec | None, vocabulary: int, ends: list[int]) -> None:
        self._codec, self._vocabulary = codec, vocabulary
        self._ends = ends or [vocabulary]
        self._known = lru_cache(_KEPT)(self._made)

    def prepare(self) -> None:
        """Reads the tokens, which takes a second where they are many; else the first matcher waits for it. What cannot
        be used is said then."""
        with contextlib.suppress(RequestError):
            _require_llguidance()
            _ = self._tokenizer

    def matcher(self, asked: dict[str, Any]) -> Matcher:
        """A new matcher, which is to be given a completion token by token.

        Args:
            asked: `Sampling.structured_outputs`, checked.

        Raises:
            RequestError: it cannot be used, or there is no codec or no llguidance.
        """
        _require_llguidance()
        return self._known(json.dumps(said(asked))).deep_copy()

    def _made(self, asked: str) -> Matcher:
        from llguidance import LLMatcher, grammar_from

        given, tokenizer = json.loads(asked), self._tokenizer
        (form,) = given.keys() & STRUCTURES
        value: Any = {"type": "object"} if form == "json_object" else given[form]
        try:
            if form in ("json", "json_object"):
                spaces: Any = {"whitespace_pattern": given.get("whitespace_pattern")}
                spaces |= {"whitespace_flexible": False} if "disable_any_whitespace" in given else {}
                grammar = LLMatcher.grammar_from_json_schema(value, overrides=spaces)
            else:
                grammar = grammar_from(form, json.dumps(value) if form == "choice" else value)
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        except ValueError as error:
            why = " ".join(str(error).split())  # it draws in several lines where the fault is
            raise RequestError(f"structured_outputs: this {form} cannot be used: {why}") from None
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper
        from llguidance.hf import from_tokenizer
        from transformers import PreTrainedTokenizerFast

        codec, count = self._codec, self._vocabulary + 1
        if codec is None:
            raise RequestError(
                "structured_outputs are texts, and the engine has no codec; make it with "
                "codec=TokenizerCodec(tokenizer), of graphmod.text"
            )
        tokenizer = getattr(codec, "tokenizer", None)
        try:
            if isinstance(tokenizer, PreTrainedTokenizerFast):
                return from_tokenizer(tokenizer, count, self._ends)
            tokens = _Tokens(codec, self._vocabulary, self._ends)
            tokens.made = LLTokenizer(TokenizerWrapper(tokens), count, self._ends)
            return tokens.made
        except ValueError as error:
            raise RequestError(
                "structured_outputs need a tokenizer whose tokens stand for bytes, as those of byte-level BPE and of "
                f"SentencePiece with bytes; this one cannot be used: {error}"
            ) from None


class _Tokens:
    """The tokens of a codec, as llguidance's wrapper wants to have them."""

    bos_token_id = None
    made: LLTokenizer

    def __init__(self, codec: Codec, vocabulary: int, ends: list[int]) -> None:
        known = len(getattr(codec, "tokenizer", range(vocabulary)))  # a model may have room for more
        texts = [*map(token_bytes(codec), range(min(known, vocabulary)))]
        if not any(texts):
            raise ValueError("its tokens depend on their neighbours")
        texts += [None] * (vocabulary + 1 - len(texts))
        special = dict.fromkeys(ends, b"<end>")
        special |= {number: name.encode() for name, number in getattr(codec, "special", {}).items()}
        self.tokens = [special.get(number, text or b"") for number, text in enumerate(texts)]
        self.special_token_ids, self.eos_token_id = [*special], ends[0]

    def __call__(self, text: str) -> list[int]:
        """The tokens of what a grammar leaves no choice about."""
        return self.made.greedy_tokenize(text)
