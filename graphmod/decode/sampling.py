"""The choice of a token on the device: penalties and what is ruled out, then greedy, or temperature, top-k, top-p and
min-p, with random numbers that a request owns.

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
CHOICE = 3
"""The bits of a kind that say one of these. Others are flags."""
TOP = 4
"""The most likely tokens are told too."""
MASKED = 8
"""Some rows may only have tokens that a mask of the host allows, so a step is launched in two halves."""
FORWARD = CHOICE | MASKED
"""The first of them, which chooses nothing. It may be ADAPTED, which the second never is."""
ADAPTED = 16
"""Some rows have an adapter."""
ADJUSTED = 32
"""Logits are changed before the choice. Bits above it tell which chains of logits processors there are: `ADJUSTED << n`
the n-th, from 1 on."""
MOST_CHAINS = 32
MOST_WORDS, LONGEST_WORD = 1024, 16
"""Bad words of several tokens that a request may have, and tokens of the longest."""


def is_adjusted(sampling: Sampling) -> bool:
    """Whether it changes logits before the choice."""
    return bool(
        sampling.repetition_penalty not in (None, 1)
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or sampling.min_tokens
        or sampling.allowed_token_ids is not None
        or sampling.bad_words
        or sampling.logits_processors
    )


def kind_of_row(sampling: Sampling) -> int:
    """What one sample needs, but for its chain of logits processors."""
    filtered = sampling.top_k or sampling.top_p not in (None, 1) or sampling.min_p
    choice = GREEDY if not sampling.temperature else FILTERED if filtered else PLAIN
    flags = TOP * bool(sampling.top_logprobs) | MASKED * bool(sampling.structured_outputs)
    flags |= ADAPTED * (sampling.adapter is not None)
    return choice | flags | ADJUSTED * is_adjusted(sampling)


def kind_of_rows(kinds: set[int]) -> int:
    """What a batch needs, by the kinds of its rows."""
    choice = flags = 0
    for kind in kinds:
        choice, flags = max(choice, kind & CHOICE), flags | kind & ~CHOICE
    return choice | flags


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
            penalties and temperature.
        bad: (B,) bool, whether the logits hold a NaN or an infinity, so that the token means nothing.
        left: (B,) bool, whether the adjusted logits leave a token to choose; None where none are.
        top: the most likely tokens, where the kind has TOP; else None.
    """

    tokens: Tensor
    logprobs: Tensor
    bad: Tensor
    left: Tensor | None = None
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


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`logits` with -inf for what top-k, then top-p, and min-p leave out.

    Values equal to the last one kept are kept too. Probabilities are added as integers of 2^-40, so that the sum does
    not depend on the order in which a device adds.

    Args:
        logits: (B, V) float32, already divided by the temperature.
        top_k: (B,) int64, 0 keeps all.
        top_p: (B,) float32, 1 keeps all.
        min_p: (B,) float32, 0 keeps all.
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
    least = ordered.gather(1, (kept - 1).unsqueeze(1)).maximum(ordered[:, :1] + min_p.log().unsqueeze(1))
    return logits.masked_fill(logits < least, float("-inf"))


class Adjustments(NamedTuple):
    """What changes the logits of the rows of a batch.

    Attributes:
        tokens: (B, L) int64, of the prompt and the completion so far, then -1.
        bias: (B, V) float32, added to the logits; -inf rules a token out.
        words: (B, MOST_WORDS, LONGEST_WORD) int32, bad words of several tokens, each with -1 before it; -1 where
            unused.
    """

    tokens: Tensor
    bias: Tensor
    words: Tensor


class Masks(NamedTuple):
    """What a step in two halves hands over, and what its second half may choose.

    Attributes:
        logits: (B, V) float32, of the first half.
        allowed: (B, W) int32, 32 tokens each, the first in the lowest bit.
    """

    logits: Tensor
    allowed: Tensor


class Adjustment(NamedTuple):
    """What changes the logits of one row, beside numbers.

    Attributes:
        base: the bias of all tokens that `bias` does not name: 0, or -inf.
        bias: of single tokens.
        words: bad words of several tokens.
        chain: the number of its chain of logits processors; 0 is none.
    """

    base: float
    bias: dict[int, float]
    words: list[list[int]]
    chain: int


def penalized(
    logits: Tensor, tokens: Tensor, first: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """`logits` after the penalties.

    Args:
        logits: (B, V) float32.
        tokens: of `Adjustments`.
        first: (B,) int64, where in `tokens` the completion begins.
        repetition: (B,) float32; divides the positive logits of tokens in prompt or completion, and multiplies others.
        presence: (B,) float32; taken from the logits of tokens in the completion.
        frequency: (B,) float32; taken from them as often as they are there.
    """
    known, place = tokens >= 0, torch.arange(tokens.shape[1], device=tokens.device)
    # What is no token adds 0, each to another id: additions to the same one would wait for each other.
    ids = torch.where(known, tokens, place % logits.shape[1])
    zeros = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    seen = zeros.scatter_add(1, ids, known.int()) > 0
    made = zeros.scatter_add(1, ids, (known & (place >= first.unsqueeze(1))).int())
    rate = repetition.unsqueeze(1)
    logits = torch.where(seen, torch.where(logits < 0, logits * rate, logits / rate), logits)
    return logits - frequency.unsqueeze(1) * made - presence.unsqueeze(1) * (made > 0)


def ruled_out(tokens: Tensor, words: Tensor, position: Tensor, stops: Tensor, early: Tensor, vocabulary: int) -> Tensor:
    """(B, V) bool: the tokens that would complete a bad word, or end a row that is too short.

    Args:
        tokens, words: of `Adjustments`.
        position: (B,) int64, where in its sequence the token will stand.
        stops: (B, stops) int64; -1 where unused.
        early: (B,) bool, whether stops are ruled out.
    """
    places = position.unsqueeze(1) + torch.arange(1 - words.shape[2], 0, device=tokens.device)
    recent = tokens.gather(1, places.clamp(min=0)).masked_fill(places < 0, -1).unsqueeze(1)
    before, last = words[:, :, :-1], words[:, :, -1]
    met = ((recent == before) | (before < 0)).all(dim=2)
    ids = torch.cat((last.long(), stops), dim=1)
    out = torch.cat((met, early.unsqueeze(1).expand_as(stops)), dim=1) & (ids >= 0)
    zeros = torch.zeros((len(tokens), vocabulary), dtype=torch.int32, device=tokens.device)
    return zeros.scatter_add(1, ids.clamp(min=0), out.int()) > 0


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """`logits` with -inf for the tokens that a mask does not allow.

    Args:
        logits: (B, V) float32.
        allowed: of `Masks`.
    """
    bits = (allowed.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=allowed.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
    kind: int,
    adjusted: Tensor | None = None,
) -> Choice:
    """One token for each row, by the Gumbel-max trick: argmax(logits / temperature + Gumbel) is distributed as softmax.

    Args:
        logits: (B, V), any float dtype.
        temperature: (B,) float32; 0 takes the most likely token.
        top_k: (B,) int64.
        top_p, min_p: (B,) float32.
        seed: (B,) int64, of the request.
        position: (B,) int64, where in its sequence the token will stand.
        kind: GREEDY, PLAIN or FILTERED, at least what the rows need; with TOP, the most likely tokens too.
        adjusted: (B, V) float32, logits to choose by; None is `logits`, whose log-probabilities are told.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=1)
    chosen_by = logits if adjusted is None else adjusted
    tokens, left = chosen_by.argmax(dim=1), None if adjusted is None else torch.isfinite(adjusted.amax(dim=1))
    top = most_likely(logits, total) if kind & TOP else None
    if kind & CHOICE != GREEDY:
        greedy = temperature <= 0
        scaled = chosen_by / torch.where(greedy, 1.0, temperature).unsqueeze(1)
        if kind & CHOICE == FILTERED:
            scaled = keep_likely(scaled, top_k, top_p, min_p)
        drawn = (scaled + gumbel(row_keys(seed, position), logits.shape[1])).argmax(dim=1)
        tokens = torch.where(greedy, tokens, drawn)
    logprobs = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - total
    return Choice(tokens, logprobs, ~torch.isfinite(total), left, top)
