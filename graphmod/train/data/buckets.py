"""Documents of different lengths in batches of a few fixed shapes.

A batch is int64 (A, B, S + 1) for one of the bucket lengths S; -1 marks padding, at the end of each row. All buckets
hold the same number of tokens: shorter ones have more rows. Attention is causal, so real tokens see no padding.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from graphmod.errors import ConfigError
from graphmod.train.step.losses import Criterion, mean_cross_entropy, require_tokens, targets_counted_by

PADDING = -1


def _count_targets(tokens: Tensor) -> Tensor:
    return (tokens[:, 1:] != PADDING).sum()


@targets_counted_by(_count_targets)
def padded_next_token_loss(model: nn.Module, tokens: Tensor, criterion: Criterion = mean_cross_entropy) -> Tensor:
    """Mean cross entropy, in nats per token, over the targets that are no padding.

    Args:
        model: a transformers causal LM, whose output has `.logits` of shape (B, S, V).
        tokens: (B, S + 1) int64, padding at the end of rows, each with at least two tokens.
        criterion: the loss of logits and targets.

    Raises:
        ValueError: `tokens` have another dtype or number of dimensions.
    """
    require_tokens(tokens)
    logits = model(input_ids=tokens[:, :-1].clamp(min=0), use_cache=False).logits
    return criterion(logits, tokens[:, 1:], ignore_index=PADDING)


def cut(starts: np.ndarray, end: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents into pieces of at most `longest` + 1 tokens; a piece begins with the last token of the one before.

    Args:
        starts: of the documents, ascending.
        end: of the last one.

    Returns:
        Start and length of each piece; those of a single token, in which there is nothing to predict, are left out.
    """
    begins, lengths = [], []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), end], strict=True):
        for begin in range(start, max(stop - 1, start), longest):
            begins.append(begin)
            lengths.append(min(longest + 1, stop - begin))
    return np.asarray(begins, dtype=np.int64), np.asarray(lengths, dtype=np.int64)


class BucketSampler:
    """Pieces of documents, drawn at random into the bucket they fit; a pure function of (seed, step).

    Args:
        tokens: (N,) of any integer dtype.
        starts: where documents begin in `tokens`, ascending, the first at 0.
        buckets: lengths in tokens, ascending.
        shape: (A, B): microbatches, and rows of the longest bucket.
        seed: of the choice.

    Raises:
        ConfigError: there is no document of two tokens.
    """

    def __init__(
        self, tokens: Tensor, starts: Tensor, buckets: Sequence[int], shape: tuple[int, int], seed: int
    ) -> None:
        self._tokens, self.buckets, self._seed = tokens, list(buckets), seed
        self._microbatches = shape[0]
        begins, lengths = cut(starts.numpy(), len(tokens), self.buckets[-1])
        if not len(begins):
            raise ConfigError("data.buckets: there is no document of at least two tokens")
        which = np.searchsorted(np.asarray(self.buckets), lengths - 1)
        self._pieces = [(begins[which == i], lengths[which == i]) for i in range(len(self.buckets))]
        self.rows = [shape[1] * self.buckets[-1] // length for length in self.buckets]
        # Each piece is as likely as any other, so a bucket is as likely as it takes batches to show all of it.
        weights = np.asarray([len(p[0]) / rows for p, rows in zip(self._pieces, self.rows, strict=True)])
        self._chances = weights / weights.sum()

    def __call__(self, step: int) -> Tensor:
        """The batch of `step`, counted from 0: (A, rows of its bucket, bucket length + 1) int64."""
        rng = np.random.default_rng([self._seed, step])
        which = int(rng.choice(len(self.buckets), p=self._chances))
        begins, lengths = self._pieces[which]
        rows = self._microbatches * self.rows[which]
        chosen = rng.integers(0, len(begins), rows)
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
