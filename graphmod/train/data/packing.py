"""Several documents in one row, none of which sees another, at one fixed shape.

A packed batch is int64 (A, 2 B, S + 1): B rows of tokens and, below them, B rows of document numbers. The attention
mask, or the bounds of the documents, and the positions are computed from the numbers on the device, so that one graph
serves every packing.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.errors import ConfigError
from graphmod.train.attention import BLOCK_MASK, DOCUMENT_BOUNDS, unavailable
from graphmod.train.data.windows import ALL, Place, WindowSampler, windows_at
from graphmod.train.loss import IGNORED, Criterion, inputs_of, mean_cross_entropy, targets_counted_by, targets_of
from graphmod.train.settings import PackingAttention, Precision

log = logging.getLogger("graphmod")


def document_numbers(starts: Tensor, count: int) -> Tensor:
    """(count,) int32: the number of the document that each token belongs to; `starts` are ascending from 0."""
    begins = torch.zeros(count, dtype=torch.int32)
    begins[starts[starts < count]] = 1
    return begins.cumsum(0, dtype=torch.int32) - 1


def most_documents(starts: Tensor, length: int) -> int:
    """At most so many documents share `length` tokens in a row, wherever these begin; `starts` are ascending from 0."""
    starts = starts.unique()
    # The worst windows begin with the last token of a document.
    after = torch.searchsorted(starts, starts + length - 1)
    return min(length, int((after - torch.arange(len(starts))).max()) + 1)


def _begins(documents: Tensor) -> Tensor:
    """(B, S) bool: the first token of each document in each row."""
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return new


def positions(documents: Tensor) -> Tensor:
    """(B, S) int64: how far each token is from the first one of its document in its row."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.where(_begins(documents), index, 0).cummax(dim=1).values
    return index - first


def document_bounds(documents: Tensor, most: int) -> Tensor:
    """(B * most + 1,) int32: where each document begins in the B * S tokens, row after row; B * S from the last on.

    Args:
        documents: (B, S), the document of each token.
        most: documents that a row may have.
    """
    so_far = _begins(documents).flatten().cumsum(0)
    wanted = torch.arange(1, documents.shape[0] * most + 2, device=documents.device)
    return torch.searchsorted(so_far, wanted, out_int32=True)


def block_mask(documents: Tensor) -> Tensor:
    """(B, 1, S, S) bool: whether a query (third dimension) may see a key: not later, and of the same document."""
    index = torch.arange(documents.shape[1], device=documents.device)
    causal = index[:, None] >= index[None, :]
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def _count_targets(rows: Tensor) -> Tensor:
    tokens, documents = rows.chunk(2)
    return ((documents[:, 1:] == documents[:, :-1]) & (tokens[:, 1:] >= 0)).sum()


@targets_counted_by(_count_targets)
def packed_next_token_loss(
    model: nn.Module, rows: Tensor, most: int | None = None, criterion: Criterion = mean_cross_entropy
) -> Tensor:
    """Mean cross entropy, in nats per token, of the next token within each document.

    Args:
        model: a transformers causal LM with the attention of `train/attention.py`.
        rows: (2 B, S + 1) int64, tokens over document numbers.
        most: documents that a row may have, for attention that is given their bounds; None gives it a mask.
        criterion: the loss of logits and targets.
    """
    tokens, documents = rows.chunk(2)
    seen, inputs = documents[:, :-1], inputs_of(tokens[:, :-1])
    apart = {BLOCK_MASK: block_mask(seen)} if most is None else {DOCUMENT_BOUNDS: document_bounds(seen, most)}
    logits = model(input_ids=inputs, position_ids=positions(seen), use_cache=False, **apart).logits
    targets = torch.where(documents[:, 1:] == seen, targets_of(tokens[:, 1:]), IGNORED)
    return criterion(logits, targets)


def choose_attention(
    wanted: PackingAttention, device: torch.device, precision: Precision, dims: Any
) -> PackingAttention:
    """What `data.packing_attention` stands for, `mask` or `varlen`.

    Args:
        wanted: the setting.
        device: of the run.
        precision: of the run.
        dims: the transformers config of the model.

    Raises:
        ConfigError: it was asked for and cannot be used; the message says why.
    """
    if wanted is PackingAttention.mask:
        return wanted
    reason = unavailable(device, precision, dims)
    if reason is None:
        return PackingAttention.varlen
    if wanted is PackingAttention.varlen:
        raise ConfigError(f"data.packing_attention=varlen cannot be used: {reason}; use mask, or auto")
    if device.type == "cuda":
        log.info(f"packed documents are kept apart by a mask and not by varlen attention: {reason}")
    return PackingAttention.mask


class PackedSampler(WindowSampler):
    """The windows of `WindowSampler`, with the documents they are cut from."""

    def __init__(
        self, tokens: Tensor, documents: Tensor, shape: tuple[int, int, int], seed: int, place: Place = ALL
    ) -> None:
        super().__init__(tokens, shape, seed, place)
        self._documents = documents

    def __call__(self, step: int) -> Tensor:
        """The batch of `step`, counted from 0: (A, 2 B, S + 1) int64."""
        parts = (self._tokens, self._documents)
        return torch.cat([windows_at(part, self.starts(step), self._shape) for part in parts], dim=1)
