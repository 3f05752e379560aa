"""Text to tokens and back: one policy for training, prompts, samples and stops."""

from graphmod.decode.text.codec import ByteCodec, Codec, SpecialTokens, TokenizerCodec, codec_for
from graphmod.decode.text.stream import TextStream, completion_text

__all__ = [
    "ByteCodec",
    "Codec",
    "SpecialTokens",
    "TextStream",
    "TokenizerCodec",
    "codec_for",
    "completion_text",
]
