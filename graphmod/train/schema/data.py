"""The settings of `data`, and what they cannot be."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from graphmod.train.schema.limits import at_least, require
from graphmod.train.schema.model import ModelConfig
from graphmod.train.targets import check_target


class Source(str, Enum):
    """Where the training tokens come from."""

    stdlib = "stdlib"
    text = "text"
    hf = "hf"
    synthetic = "synthetic"
    custom = "custom"


class Documents(str, Enum):
    """What counts as one document."""

    file = "file"
    line = "line"


class TrainOn(str, Enum):
    """Which tokens of pairs and chats are trained on: what completes a prompt and what the assistant says, or `all`."""

    completion = "completion"
    all = "all"


class PackingAttention(str, Enum):
    """How attention keeps packed documents apart: `mask` has a value for each pair of tokens; `varlen` is told where
    documents begin and skips the rest (on a GPU, in 16 bits); `auto` takes `varlen` where it can be used."""

    auto = "auto"
    mask = "mask"
    varlen = "varlen"


@dataclass
class DataConfig:
    """The data and the shape of a batch.

    Attributes:
        source: `stdlib`, `text`, `hf` (rows of files, read with the datasets library), `synthetic` or `custom` (a data
            set of your own).
        path: file, folder, or list of them (`text` and `hf`).
        target: `custom` only; `_target_`, the full name of a class or function, and arguments for it. Of the other
            settings of this group it gets those that it takes by name.
        pattern: which files of a folder are read, such as `*.txt`.
        column: `hf` only; the column that holds the text. null takes chats in `messages`, pairs of `prompt` and
            `completion` (texts, or lists of messages), or `text`, whichever is there.
        train_on: `hf` only; in pairs and chats, `completion` (which is also what the assistant says) or `all`.
        split: `hf` only; the split of a folder that has several.
        cache: folder where tokens are kept for the next run on the same data; null keeps none.
        tokenizer: folder of a saved tokenizer, or `bytes`; null means bytes, unless `model.path` brings a tokenizer.
        max_bytes: read no more than this many bytes; null reads everything.
        vocab_size: `synthetic` only; null takes `model.vocab_size`, or 256.
        seq_len: tokens of one sequence the model sees.
        batch_size: sequences in one microbatch.
        eval_fraction: share of the tokens, from the end, kept for evaluation; in [0, 1).
        documents: what `buckets` and `packing` keep apart: the files, or the lines of all files.
        buckets: lengths in tokens, such as [256,512,1024], in place of `seq_len`: a batch holds documents of about
            equal length, padded to the next of these. `batch_size` is that of the longest; shorter ones have more rows.
        packing: documents that share a window do not see each other.
        packing_attention: `auto`, `mask` or `varlen`: how attention sees to that. They differ by rounding.
    """

    source: Source = Source.stdlib
    path: Any = None
    target: Any = None  # a dict; omegaconf cannot put values into one that may be null
    pattern: str = "*"
    column: str | None = None
    train_on: TrainOn = TrainOn.completion
    split: str = "train"
    cache: str | None = "~/.cache/graphmod"
    tokenizer: str | None = None
    max_bytes: int | None = None
    vocab_size: int | None = None
    seq_len: int = 256
    batch_size: int = 8
    eval_fraction: float = 0.05
    documents: Documents = Documents.file
    buckets: list[int] | None = None
    packing: bool = False
    packing_attention: PackingAttention = PackingAttention.auto


def _check_own(data: DataConfig) -> None:
    """What it makes of the other settings is known when it is loaded (`train/data/items.py`)."""
    require(data.target is not None, "data=custom needs data._target_=my_package.Items, the name of your data set")
    check_target("data", data.target)
    for name in ("buckets", "packing"):
        require(
            not getattr(data, name),
            f"data.{name}={getattr(data, name)} is for texts that this trainer cuts, and data=custom brings whole "
            "items; leave it out",
        )


def check_data(data: DataConfig, model: ModelConfig) -> None:
    """Raises ConfigError for a path that is missing or not there; makes `data.path` a list of str, or None."""
    at_least("data", data, 1, "max_bytes", "vocab_size", "seq_len", "batch_size")
    require(0 <= data.eval_fraction < 1, f"data.eval_fraction must be at least 0 and below 1, got {data.eval_fraction}")
    if data.source is Source.custom:
        _check_own(data)
        return
    require(
        data.target is None,
        f"data._target_ names data of your own, and data={data.source.value}; use data=custom (in an experiment: "
        "`override /data: custom`; in a file of the group: `source: custom`), or leave it out",
    )
    if data.source in (Source.text, Source.hf):
        require(
            isinstance(data.path, bool) or not isinstance(data.path, (int, float)),
            f"data.path={data.path} was read as a number; write data.path=./{data.path}",
        )
        paths: Any = [data.path] if isinstance(data.path, (str, Path)) else data.path
        require(
            bool(paths) and isinstance(paths, (list, tuple)),
            f"data={data.source.value} needs data.path=FILE_OR_FOLDER, or a list",
        )
        data.path = [str(path) for path in paths]
        for path in data.path:
            where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
            require(Path(path).exists(), f"data.path: there is no file or folder {path!r}{where}")
    else:
        require(
            data.path is None,
            f"data.path is not read with data={data.source.value}; add data=text, or data=hf for rows (JSON lines, "
            "Parquet, CSV)",
        )
    if data.source is Source.synthetic:
        require(data.tokenizer is None, "data.tokenizer has no meaning with data=synthetic: its tokens are random")
    else:
        require(data.vocab_size is None, "data.vocab_size is for data=synthetic only; set model.vocab_size instead")
    if data.source is Source.hf:
        require(data.max_bytes is None, "data.max_bytes has no meaning with data=hf, which reads rows; leave it out")
    else:
        require(
            data.column is None and data.train_on is TrainOn.completion,
            f"data.column and data.train_on do nothing with data={data.source.value}; add data=hf, or leave them out",
        )
    if data.tokenizer not in (None, "bytes"):
        require(
            not Path(data.tokenizer).is_file(),
            f"data.tokenizer={data.tokenizer} is a file; give its folder, in which its name must be one that "
            "transformers looks for, such as tokenizer.json",
        )
        require(Path(data.tokenizer).is_dir(), f"data.tokenizer={data.tokenizer} is neither a folder nor 'bytes'")
    if data.buckets is not None:
        sizes = list(data.buckets)
        require(
            bool(sizes) and all(size >= 1 for size in sizes) and sizes == sorted(set(sizes)),
            f"data.buckets must be lengths in ascending order, such as [256,512,1024], got {sizes}",
        )
        require(not data.packing, "data.buckets pads documents and data.packing=true packs them; use one of the two")
        data.seq_len = sizes[-1]
    require(
        data.packing or data.packing_attention is PackingAttention.auto,
        f"data.packing_attention={data.packing_attention.value} needs data.packing=true; add that, or drop it",
    )
    length = f"data.seq_len={data.seq_len}" if data.buckets is None else f"the longest of data.buckets, {data.seq_len},"
    limit = model.max_positions
    require(
        limit is None or data.seq_len <= limit,
        f"{length} is longer than model.max_positions={limit}; lower one or raise the other",
    )
