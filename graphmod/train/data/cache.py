"""Tokens on the disk, so that the next run on the same data reads them and tokenizes nothing.

A file of tokens is written under another name and renamed: processes that make the same one at once do no harm.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

log = logging.getLogger("graphmod")

_FORMAT = 1  # to be raised when the same text and tokenizer give other tokens than before


def files_key(files: list[Path]) -> list[list[Any]]:
    """What tells whether any of `files` has changed: the path, size and time of each."""
    found = []
    for path in files:
        with suppress(OSError):  # whoever reads it says so, and better
            stat = path.stat()
            found.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    return found


def tokenizer_key(tokenizer: Any) -> str | None:
    """A checksum of all that decides what `tokenizer` makes of a text or chat; None of None."""
    if tokenizer is None:
        return None
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    said = [type(tokenizer).__name__, rules, tokenizer.chat_template, tokenizer.special_tokens_map]
    versions = [transformers.__version__, tokenizers.__version__]
    return hashlib.sha256(json.dumps([said, versions], default=str).encode()).hexdigest()


def cached(folder: str | None, key: dict[str, Any], make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The tokens and where documents begin, from the file of `key` in `folder`, or else from `make`, and kept there.

    Args:
        folder: made if need be; None keeps nothing.
        key: plain values, all that the tokens depend on.
        make: the tokens, as `train.data.encode.flattened` returns them.
    """
    if folder is None:
        return make()
    name = hashlib.sha256(json.dumps({"format": _FORMAT, **key}, sort_keys=True).encode()).hexdigest()[:32]
    path = Path(folder).expanduser() / f"{name}.safetensors"
    if path.is_file():
        try:
            kept = load_file(path)
            os.utime(path)  # so that what is no longer used can be told by its age
            return kept["tokens"], kept["starts"]
        except (OSError, SafetensorError, KeyError) as error:
            log.warning(f"{path} cannot be read ({error}); tokenizing again")
    tokens, starts = make()
    _write(path, {"tokens": tokens, "starts": starts}, key)
    return tokens, starts


def _write(path: Path, tensors: dict[str, Tensor], key: dict[str, Any]) -> None:
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".partial")
        os.close(handle)
        save_file(tensors, partial, metadata={"key": json.dumps(key)[:4096]})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        if partial is not None:
            with suppress(OSError):
                os.unlink(partial)
        log.warning(
            f"cannot keep the tokens in {path.parent} ({error}); the next run tokenizes again. Choose another "
            "folder with data.cache=FOLDER, or data.cache=null"
        )
