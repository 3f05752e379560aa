"""Texts that end a completion."""

from __future__ import annotations

from collections.abc import Sequence

from graphmod.decode.text.codec import Codec
from graphmod.decode.text.stream import TextStream


class _Watched:
    def __init__(self, stream: TextStream, texts: list[str]) -> None:
        self._stream, self._texts = stream, texts
        self._kept = max(map(len, texts)) - 1
        self._tail = ""

    def met(self, token: int) -> bool:
        tail = self._tail + self._stream.add(token)
        text = tail + self._stream.pending
        self._tail = tail[-self._kept :] if self._kept else ""
        return any(stop in text for stop in self._texts)


class StopTexts:
    """Looks for texts in a completion. One that holds a special token is looked for in the text with special tokens,
    others in the text without.

    Args:
        codec: of the tokens.
        texts: none empty.
        prompt: what comes before the completion; nothing in it counts.
    """

    def __init__(self, codec: Codec, texts: list[str], prompt: Sequence[int]) -> None:
        names = getattr(codec, "special", {})
        special = [text for text in texts if any(name in text for name in names)]
        plain = [text for text in texts if text not in special]
        self._watched = [
            _Watched(TextStream(codec, prompt, special_tokens=shown), group)
            for shown, group in ((False, plain), (True, special))
            if group
        ]

    def met(self, token: int) -> bool:
        """Whether one of the texts is complete with `token`, the next one of the completion."""
        return any(watched.met(token) for watched in self._watched)
