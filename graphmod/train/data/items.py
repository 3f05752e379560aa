"""A data set of one's own: items of any form, by their number.

Which items a step sees is decided as for windows of text (`windows.py`), so that resuming and ranks work alike.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from graphmod.errors import ConfigError
from graphmod.train.data.windows import ALL, Place, Sampler, evenly
from graphmod.train.loss import IGNORED, causal_lm_loss, next_token_loss
from graphmod.train.settings import DataConfig, Source
from graphmod.train.targets import in_words, located, made, named, passes_on, taken_by
from graphmod.words import counted

_COMPARED = 16  # items that the fingerprint is made of
_WHOLE = ""  # the name of the only part of an item that is one tensor
_OF_TRAINER = {"source", "target", "batch_size", "eval_fraction", "buckets", "packing"}


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _handed_on(data: DataConfig) -> dict[str, Any]:
    """The settings that the data set takes by name. Raises ConfigError for one that is set, and that it does not
    take."""
    taken = taken_by(located("data", data.target))
    found, default = {}, DataConfig(source=Source.custom)
    for one in fields(data):
        value = getattr(data, one.name)
        if one.name in _OF_TRAINER:
            continue
        if one.name in taken:
            if value is not None:
                found[one.name] = _plain(value)
        elif value != getattr(default, one.name):
            raise ConfigError(
                f"data.{one.name}={_plain(value)} does nothing: {named('data', data.target)} takes no argument "
                f"{one.name!r}; add that to it, or leave the setting out"
            )
    return found


def described(parts: dict[Any, Tensor]) -> str:
    """Shapes and dtypes of tensors with names, in words."""
    return ", ".join(
        f"{name}{': ' if name != _WHOLE else ''}{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"
        for name, part in parts.items()
    )


class Items:
    """The data of a run that one's own data set holds.

    Attributes:
        name: under which it was asked for.
        fingerprint: number of items, and a checksum of some of them.
        count, held_out: of all items, and of those at the end that are evaluated on.
        vocab_size: every token is below it; None where the data set does not say.
        tokenizer: the transformers tokenizer of the data set, or None.
        length: tokens of an item that the model sees: of its first part of whole numbers; 1 without any.
        loss_fn: the loss that goes with the form of the items; None where none does.

    Args:
        data: checked settings, with `target`.
        seed: torch's random state while the data set is made.

    Raises:
        ConfigError: the data set cannot be made, is none with `len` and `[]`, has too few items, or an item that is no
            tensor, tuple or dict of tensors, or another one each time that it is read.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        self.name = named("data", data.target)
        given = _handed_on(data)
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            self._items = made("data", data.target, **given)
            self.count = self._length()
            self._parts = self.read(0)
            self.fingerprint = self._fingerprint()
            if self.fingerprint != self._fingerprint():
                raise ConfigError(
                    f"{self.name}: items are others each time that they are read, so no run could be resumed; draw "
                    "random numbers from a generator that is seeded with the item's number"
                )
        self.tokenizer = getattr(self._items, "tokenizer", None)
        if not isinstance(self.tokenizer, PreTrainedTokenizerBase):
            self.tokenizer = None
        self.vocab_size = getattr(self._items, "vocab_size", None)
        if self.vocab_size is None and self.tokenizer is not None:
            self.vocab_size = len(self.tokenizer)
        if self.vocab_size is not None and (type(self.vocab_size) is not int or self.vocab_size < 1):
            raise ConfigError(f"{self.name}: vocab_size must be a whole number above 0, got {self.vocab_size!r}")
        self.held_out = int(self.count * data.eval_fraction)
        if self.count - self.held_out < 1 or (data.eval_fraction > 0 and not self.held_out):
            raise ConfigError(
                f"{self.name} has {counted(self.count, 'item')}, of which data.eval_fraction={data.eval_fraction} "
                f"leaves {self.count - self.held_out} to train on and {self.held_out} to evaluate on; give more items, "
                "or another data.eval_fraction (0, with train.eval_every=0, evaluates on none)"
            )
        self.loss_fn, self.length = self._fitting()

    def _length(self) -> int:
        kind = type(self._items).__name__
        usable = hasattr(self._items, "__getitem__") and hasattr(self._items, "__len__")
        if isinstance(self._items, IterableDataset) or not usable:
            raise ConfigError(
                f"{self.name} made a {kind}, whose items have no numbers; make a data set with __len__ and "
                "__getitem__, from which any item can be read: that is how a run is shuffled and resumed"
            )
        count = len(self._items)
        if not count:
            raise ConfigError(f"{self.name} made an empty {kind}; give it something to read")
        return count

    def read(self, index: int) -> dict[Any, Tensor]:
        """The parts of an item by name; by number in a tuple, and by `_WHOLE` where it is one tensor.

        Raises:
            ConfigError: it cannot be read, or does not consist of tensors on the host.
        """
        try:
            item = self._items[index]
        except Exception as error:
            if passes_on(error):
                raise
            raise ConfigError(f"{self.name}: item {index} cannot be read: {in_words(error)}") from error
        if isinstance(item, Mapping):
            parts = dict(item)
        else:
            parts = dict(enumerate(item)) if isinstance(item, (tuple, list)) else {_WHOLE: item}
        wrong = [
            f"{f'{n!r} is ' if n != _WHOLE else ''}a {type(v).__name__}" for n, v in parts.items() if not _is_dense(v)
        ]
        if wrong or not parts:
            some = ", ".join(wrong[:3]) or "it is empty"
            raise ConfigError(
                f"{self.name}: item {index} is not made of tensors on the host ({some}); "
                "return a tensor, or a tuple or dict of tensors (torch.tensor(...))"
            )
        return parts

    def _fitting(self) -> tuple[Callable | None, int]:
        """The loss for items of this form, and their length."""
        whole = [part for part in self._parts.values() if part.dtype is torch.int64]
        length = whole[0].numel() if whole else 1
        if {*self._parts} == {_WHOLE}:
            tokens = self._parts[_WHOLE]
            if tokens.dtype is torch.int64 and tokens.dim() == 1 and len(tokens) > 1:
                return next_token_loss, length - 1
        elif {"input_ids", "labels"} <= {*self._parts}:
            ids, labels = self._parts["input_ids"], self._parts["labels"]
            if ids.dtype is labels.dtype is torch.int64 and ids.dim() == 1 and ids.shape == labels.shape:
                return causal_lm_loss, len(ids)
        return None, length

    def require_loss(self) -> Callable:
        """`loss_fn`. Raises ConfigError where none goes with the items."""
        if self.loss_fn is None:
            raise ConfigError(
                f"no built-in loss is for the items of {self.name}, which are {described(self._parts)}; give items of "
                "tokens, (seq_len + 1,) int64, or a dict of input_ids and labels, (seq_len,) int64 both, or set "
                "train.loss._target_=my_package.loss, a function loss(model, microbatch)"
            )
        return self.loss_fn

    @property
    def names(self) -> list[Any]:
        """Of the parts of an item."""
        return [*self._parts]

    def _fingerprint(self) -> str:
        value = 0
        for index in dict.fromkeys(evenly(self.count, min(_COMPARED, self.count)).tolist()):
            value = _checksum(self.read(index), value)
        return f"{self.count}-items-{value:08x}"

    def summary(self) -> str:
        """What it is, in words."""
        return f"{counted(self.count, 'item')} of {self.name}, each {described(self._parts)}"

    def batch(self, chosen: np.ndarray, shape: tuple[int, int]) -> Any:
        """The items with these numbers in one batch of their form.

        Args:
            chosen: (A * B,).
            shape: (A, B).

        Returns:
            Each tensor is (A, B, ...).

        Raises:
            ConfigError: they have different shapes, or a token is not below `vocab_size`.
        """
        indices = chosen.tolist()
        read = [self.read(index) for index in indices]
        first = _form(read[0])
        for index, parts in zip(indices, read, strict=True):
            if _form(parts) != first:
                raise ConfigError(
                    f"{self.name}: the items of a batch must have equal shapes; item {indices[0]} is "
                    f"{described(read[0])}, and item {index} is {described(parts)}; pad them to one shape"
                )
        found = {name: torch.stack([parts[name] for parts in read]) for name in read[0]}
        if self.vocab_size is not None and self.loss_fn is not None:
            for name in (one for one in (_WHOLE, "input_ids", "labels") if one in found):
                self._require_in_vocabulary(name, found[name], indices, self.vocab_size)
        made_up = {name: part.view(*shape, *part.shape[1:]) for name, part in found.items()}
        if _WHOLE in made_up:
            return made_up[_WHOLE]
        return tuple(made_up.values()) if 0 in made_up else made_up

    def _require_in_vocabulary(self, name: str, tokens: Tensor, indices: list[int], size: int) -> None:
        wrong = (tokens >= size) | ((tokens < 0) & ((tokens != IGNORED) if name == "labels" else True))
        if wrong.any():
            row = int(wrong.flatten(1).any(1).nonzero()[0])
            raise ConfigError(
                f"{self.name}: item {indices[row]} holds the token {int(tokens[row][wrong[row]][0])}"
                f"{f' in {name!r}' if name else ''}, and the vocabulary is 0 to {size - 1}; raise the data "
                "set's vocab_size, or correct the item"
            )


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.layout is torch.strided


def _checksum(parts: dict[Any, Tensor], value: int = 0) -> int:
    for name, part in parts.items():
        value = zlib.crc32(f"{name} {part.dtype} {tuple(part.shape)}".encode(), value)
        value = zlib.crc32(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, value)
    return value


def _form(parts: dict[Any, Tensor]) -> list[tuple]:
    return [(name, part.shape, part.dtype) for name, part in parts.items()]


class ItemSampler(Sampler):
    """Batches of items, in the order of `ShuffledEpochs`; the last ones, which are held out, are not among them.

    Args:
        items: of the run.
        shape: (A, B), microbatches and items of each.
        seed: of the order.
        place: of this rank.
    """

    def __init__(self, items: Items, shape: tuple[int, int], seed: int, place: Place = ALL) -> None:
        super().__init__(items.count - items.held_out, shape[0] * shape[1], seed, place)
        self._items, self._shape = items, shape

    def __call__(self, step: int) -> Any:
        """The batch of `step`, counted from 0, of the form of the items; each tensor is (A, B, ...)."""
        return self._items.batch(self.chosen(step), self._shape)


def evaluation_batches(items: Items, rows: int, count: int) -> list[Any]:
    """So many batches of one microbatch of `rows` items, spread evenly over those that are held out."""
    places = items.count - items.held_out + evenly(items.held_out, count * rows)
    return [items.batch(some, (1, rows)) for some in places.reshape(count, rows)]
