"""Which special tokens surround a text, in training and in prompts alike.

A document is what the tokenizer by default puts before a text, the text, what the tokenizer by default puts after it,
and EOS if that is not among these. A prompt is the beginning of a document: the same without anything after the text.
What the text itself already begins or ends with is not added again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of one tokenizer.

    Attributes:
        before: ids that begin documents and prompts, such as BOS; often none.
        after: ids that end documents, such as EOS.
        end: the id at which generation stops, EOS or the last of `after`; None if nothing ends documents.
    """

    before: list[int]
    after: list[int]
    end: int | None

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

    def document(self, ids: list[int]) -> list[int]:
        """The ids of a document, from those of its text alone."""
        begun = self.prompt(ids)
        return begun if not self.after or begun[-len(self.after) :] == self.after else [*begun, *self.after]


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
