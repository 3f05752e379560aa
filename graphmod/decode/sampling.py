"""The choice of a token on the device: greedy, temperature, top-k, top-p, with random numbers that a request owns.

Functions of tensors, without host reads and without state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphmod.decode.types import MOST_TOP, Sampling

GREEDY, PLAIN, FILTERED = 0, 1, 2
"""What a batch needs: greedy rows only; temperatures; also top-k or top-p. A row gets the same token in each that
covers it, so the cheapest may be chosen for every batch anew."""
TOP = 4
"""Added to one of these where the most likely tokens are told too."""


def kind_of_row(sampling: Sampling) -> int:
    """What one sample needs."""
    if not sampling.temperature:
        return GREEDY
    return FILTERED if sampling.top_k or sampling.top_p not in (None, 1) else PLAIN


# SplitMix64: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the constants
# of its output function are D. Stafford's "mix13". Multiplication of int64 wraps, as theirs of uint64 does.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_FIXED_POINT = 2.0**40


class Choice(NamedTuple):
    """What was sampled for each row.

    Attributes:
        tokens: (B,) int64.
        logprobs: (B,) float32, log-probability (nats) of the token under the model's own distribution, before
            temperature, top-k and top-p.
        bad: (B,) bool, whether the logits hold a NaN or an infinity, so that the token means nothing.
        top: the most likely tokens, where the kind has TOP; else None.
    """

    tokens: Tensor
    logprobs: Tensor
    bad: Tensor
    top: Top | None = None


class Top(NamedTuple):
    """The most likely tokens of each row, the likeliest first; MOST_TOP, or as many as a smaller vocabulary has.

    Attributes:
        tokens: (B, MOST_TOP) int64.
        logprobs: (B, MOST_TOP) float32, under the model's own distribution.
    """

    tokens: Tensor
    logprobs: Tensor


def most_likely(logits: Tensor, total: Tensor) -> Top:
    """The most likely tokens.

    Args:
        logits: (B, V) float32.
        total: (B,) their logsumexp.
    """
    found = logits.topk(min(MOST_TOP, logits.shape[1]), dim=1)
    return Top(found.indices, found.values - total.unsqueeze(1))


def _shift_right(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts copy the sign bit


def mix64(value: Tensor) -> Tensor:
    """SplitMix64's output function: a bijection of int64 that scatters neighbouring values."""
    value = (value ^ _shift_right(value, 30)) * _MIX_1
    value = (value ^ _shift_right(value, 27)) * _MIX_2
    return value ^ _shift_right(value, 31)


def row_keys(seed: Tensor, position: Tensor) -> Tensor:
    """(B,) int64: the state of the random stream of a request at a position. Both arguments: (B,) int64."""
    return mix64(mix64(seed + _GAMMA) + position * _GAMMA)


def gumbel(keys: Tensor, count: int) -> Tensor:
    """(B, count) float32 standard Gumbel numbers; element v of row b depends on `keys[b]` and v alone.

    The uniform number behind them keeps its 53 bits where it is small, which is where the largest results come from.
    """
    steps = torch.arange(1, count + 1, device=keys.device) * _GAMMA
    bits = _shift_right(mix64(keys.unsqueeze(1) + steps), 11)
    uniform = (bits.to(torch.float32) * 2.0**-53).clamp(2.0**-54, 1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`logits` with -inf for what top-k and then top-p leave out.

    Values equal to the last one kept are kept too. Probabilities are added as integers of 2^-40, so that the sum does
    not depend on the order in which a device adds.

    Args:
        logits: (B, V) float32, already divided by the temperature.
        top_k: (B,) int64, 0 keeps all.
        top_p: (B,) float32, 1 keeps all.
    """
    count = logits.shape[1]
    ordered = logits.sort(dim=1, descending=True).values
    rank = torch.arange(count, device=logits.device)
    most = torch.where(top_k > 0, top_k, count).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= most, float("-inf"))
    weight = (ordered.softmax(dim=1) * _FIXED_POINT).to(torch.int64)
    before = weight.cumsum(dim=1) - weight
    reached = torch.where(top_p < 1, top_p.double() * _FIXED_POINT, float("inf")).unsqueeze(1)
    kept = ((before < reached) & (rank < most)).sum(dim=1).clamp(1, count)
    least = ordered.gather(1, (kept - 1).unsqueeze(1))
    return logits.masked_fill(logits < least, float("-inf"))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    kind: int,
) -> Choice:
    """One token for each row, by the Gumbel-max trick: argmax(logits / temperature + Gumbel) is distributed as softmax.

    Args:
        logits: (B, V), any float dtype.
        temperature: (B,) float32; 0 takes the most likely token.
        top_k: (B,) int64.
        top_p: (B,) float32.
        seed: (B,) int64, of the request.
        position: (B,) int64, where in its sequence the token will stand.
        kind: GREEDY, PLAIN or FILTERED, at least what the rows need; with TOP, the most likely tokens too.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=1)
    tokens = logits.argmax(dim=1)
    top, kind = (most_likely(logits, total), kind - TOP) if kind >= TOP else (None, kind)
    if kind != GREEDY:
        greedy = temperature <= 0
        scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
        if kind == FILTERED:
            scaled = keep_likely(scaled, top_k, top_p)
        drawn = (scaled + gumbel(row_keys(seed, position), logits.shape[1])).argmax(dim=1)
        tokens = torch.where(greedy, tokens, drawn)
    logprobs = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - total
    return Choice(tokens, logprobs, ~torch.isfinite(total), top)
