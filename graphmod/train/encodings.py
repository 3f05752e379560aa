"""Texts that are not UTF-8: what they are, and how they become it. Standard library only."""

import codecs
import shlex
from pathlib import Path

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


def unmarked(content: bytes) -> bytes:
    """`content` without the mark at the beginning with which some editors say that a text is UTF-8."""
    return content.removeprefix(codecs.BOM_UTF8)


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
