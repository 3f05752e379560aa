"""Several documents in one row, none of which sees another, at one fixed shape. Imports torch and `train/data.py`.

A packed batch is int64 (A, 2 B, S + 1): B rows of tokens and, below them, B rows of document numbers. The attention
mask and the positions are computed from the numbers on the device, so that one graph serves every packing.
"""

import torch
from torch import Tensor, nn

from graphmod.train.attention import BLOCK_MASK
from graphmod.train.data import WindowSampler

_IGNORED = -100


def document_numbers(starts: Tensor, count: int) -> Tensor:
    """(count,) int32: the number of the document that each token belongs to; `starts` are ascending from 0."""
    begins = torch.zeros(count, dtype=torch.int32)
    begins[starts[starts < count]] = 1
    return begins.cumsum(0, dtype=torch.int32) - 1


def positions(documents: Tensor) -> Tensor:
    """(B, S) int64: how far each token is from the first one of its document in its row."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(new, index, 0).cummax(dim=1).values
    return index - first


def block_mask(documents: Tensor) -> Tensor:
    """(B, 1, S, S) bool: whether a query (third dimension) may see a key: not later, and of the same document."""
    index = torch.arange(documents.shape[1], device=documents.device)
    causal = index[:, None] >= index[None, :]
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def packed_next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross entropy, in nats per token, of the next token within each document.

    Args:
        model: a transformers causal LM with the attention of `train/attention.py`.
        rows: (2 B, S + 1) int64, tokens over document numbers.
    """
    tokens, documents = rows.chunk(2)
    seen = documents[:, :-1]
    extra = {"position_ids": positions(seen), BLOCK_MASK: block_mask(seen)}
    logits = model(input_ids=tokens[:, :-1], use_cache=False, **extra).logits
    targets = torch.where(documents[:, 1:] == seen, tokens[:, 1:], _IGNORED)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)


class PackedSampler:
    """Windows at random places, as `WindowSampler` draws them, with the documents they are cut from."""

    def __init__(self, tokens: Tensor, documents: Tensor, shape: tuple[int, int, int], seed: int) -> None:
        self._tokens, self._documents = (WindowSampler(row, shape, seed) for row in (tokens, documents))

    def __call__(self, step: int) -> Tensor:
        """The batch of `step`, counted from 0: (A, 2 B, S + 1) int64."""
        return torch.cat([self._tokens(step), self._documents(step)], dim=1)
