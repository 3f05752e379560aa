"""Documents of different lengths in batches of a few fixed shapes.

A batch is int64 (A, B, S + 1) for one of the bucket lengths S; padding, at the end of each row, is a
token 0 that is only read (`train/loss.py`). All buckets
hold the same number of tokens: shorter ones have more rows. Attention is causal, so real tokens see no padding.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from graphmod.errors import ConfigError
from graphmod.train.data.windows import ALL, Place, Sampler, ShuffledEpochs
from graphmod.train.loss import (
    PADDING,
    Criterion,
    Forward,
    has_masks,
    inputs_of,
    mean_cross_entropy,
    require_tokens,
    targets_counted_by,
    targets_of,
    transformers_logits,
)


@targets_counted_by(lambda tokens: (tokens[:, 1:] >= 0).sum())
def padded_next_token_loss(
    model: nn.Module,
    tokens: Tensor,
    criterion: Criterion = mean_cross_entropy,
    forward: Forward = transformers_logits,
) -> Tensor:
    """Mean cross entropy, in nats per token, over the targets that are neither padding nor only read.

    Args:
        model: a transformers causal LM, or what `forward` calls.
        tokens: (B, S + 1) int64, padding at the end of rows; tokens that are only read as their complement.
        criterion: the loss of logits and targets.
        forward: from model and tokens to logits; `own_logits` for models that are not of transformers.

    Raises:
        ValueError: `tokens` have another dtype or number of dimensions.
    """
    require_tokens(tokens)
    return criterion(forward(model, inputs_of(tokens[:, :-1])), targets_of(tokens[:, 1:]))


def cut(starts: np.ndarray, end: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents into pieces of at most `longest` + 1 tokens; a piece begins with the last token of the one before.

    Args:
        starts: of the documents, ascending.
        end: of the last one.

    Returns:
        Start and length of each piece; those of a single token, in which there is nothing to predict, are left out.
    """
    predictions = np.diff(starts, append=end) - 1
    counts = -(-predictions // longest)
    numbers = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    begins = np.repeat(starts, counts) + numbers * longest
    return begins, np.minimum(np.repeat(predictions, counts) - numbers * longest, longest) + 1


def _with_targets(tokens: Tensor, begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not has_masks(tokens):
        return begins, lengths
    trained = np.concatenate([[0], (tokens >= 0).numpy().cumsum()])
    kept = trained[begins + lengths] > trained[begins + 1]
    return begins[kept], lengths[kept]


class BucketSampler(Sampler):
    """Pieces of documents in the bucket they fit, each once in an epoch; a pure function of (seed, step).

    A batch that its bucket's pieces do not fill is filled up with more of them. Pieces in which there is nothing to
    train on are left out.

    Args:
        tokens: (N,) of any integer dtype.
        starts: where documents begin in `tokens`, ascending, the first at 0.
        buckets: lengths in tokens, ascending.
        shape: (A, B): microbatches, and rows of the longest bucket.
        seed: of the order.
        place: of this rank. All ranks have the same bucket in a step.

    Raises:
        ConfigError: there is no document of two tokens.
    """

    def __init__(
        self,
        tokens: Tensor,
        starts: Tensor,
        buckets: Sequence[int],
        shape: tuple[int, int],
        seed: int,
        place: Place = ALL,
    ) -> None:
        self._tokens, self.buckets, self._whose = tokens, list(buckets), place
        self._microbatches = shape[0]
        begins, lengths = _with_targets(tokens, *cut(starts.numpy(), len(tokens), self.buckets[-1]))
        if not len(begins):
            raise ConfigError("data.buckets: there is no document of at least two tokens with one to train on")
        which = np.searchsorted(np.asarray(self.buckets), lengths - 1)
        self._pieces = [(begins[which == i], lengths[which == i]) for i in range(len(self.buckets))]
        self.rows = [shape[1] * self.buckets[-1] // length for length in self.buckets]
        all_rows = [self._microbatches * place.ranks * n for n in self.rows]
        batches = [-(-len(p[0]) // n) for p, n in zip(self._pieces, all_rows, strict=True)]
        self._bucket_of = np.repeat(np.arange(len(batches)), batches)
        self._number_in_bucket = np.concatenate([np.arange(count) for count in batches])
        self._orders = [ShuffledEpochs(max(len(p[0]), 1), seed + 1 + i) for i, p in enumerate(self._pieces)]
        super().__init__(len(self._bucket_of), 1, seed, replace(place, rank=0, ranks=1))  # batches, which all share

    def __call__(self, step: int) -> Tensor:
        """The batch of `step`, counted from 0: (A, rows of its bucket, bucket length + 1) int64."""
        position, in_epoch = self.seen(step)
        batch_number = int(self.chosen(step)[0])
        which, number = int(self._bucket_of[batch_number]), int(self._number_in_bucket[batch_number])
        begins, lengths = self._pieces[which]
        rows = self._microbatches * self.rows[which]
        before = number * self._whose.ranks + self._whose.rank  # parts of the bucket's pieces
        chosen = self._orders[which](position // in_epoch * len(begins) + before * rows, rows)
        batch = torch.full((rows, self.buckets[which] + 1), PADDING, dtype=torch.int64)
        for row, piece in enumerate(chosen.tolist()):
            begin, length = int(begins[piece]), int(lengths[piece])
            batch[row, :length] = self._tokens[begin : begin + length].long()
        return batch.view(self._microbatches, self.rows[which], -1)

    def waste(self) -> dict[str, dict[str, float]]:
        """By bucket length: how many `pieces` are in it and which share of its positions is `padding`; under `all` the
        same of everything, and under `one bucket` if everything were padded to the longest."""
        report, slots, filled, count = {}, 0, 0, 0
        for length, (begins, lengths) in zip(self.buckets, self._pieces, strict=True):
            real, room = int((lengths - 1).sum()), len(begins) * length
            report[str(length)] = {"pieces": len(begins), "padding": 1 - real / room if room else 0.0}
            slots, filled, count = slots + room, filled + real, count + len(begins)
        report["all"] = {"pieces": count, "padding": 1 - filled / slots}
        report["one bucket"] = {"pieces": count, "padding": 1 - filled / (count * self.buckets[-1])}
        return report
