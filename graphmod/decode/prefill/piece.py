"""What prefill is given."""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """Part of a prompt, whose tokens before it are in the cache.

    Attributes:
        tokens: of this part.
        start: how many come before it.
        blocks: of the cache, for the whole sequence.
        last: whether the prompt ends with it, so that the logits after its last token are needed.
    """

    tokens: list[int]
    start: int
    blocks: list[int]
    last: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Limits(NamedTuple):
    """Of what is prefilled at once.

    Attributes:
        tokens: of all pieces together.
        pieces: how many.
        columns: tokens that they attend to, all together; at least those of one whole sequence.
    """

    tokens: int
    pieces: int
    columns: int
