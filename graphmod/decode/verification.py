"""Compares what decode computes with the model's own forward, which knows nothing of this package's cache.

Twice: a few made-up tokens when an engine is made, and the first tokens that it generates, as graphs and kernels made
them. A difference is an error, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphmod.attention import attention, takes
from graphmod.decode.adapters import Adapters
from graphmod.decode.attention import Implementation, reference
from graphmod.decode.cache import PagedCache
from graphmod.decode.invariant import Invariant, batch_invariant
from graphmod.decode.model import refusal
from graphmod.decode.offload import Reader
from graphmod.decode.prefill import Piece
from graphmod.decode.step import BatchState, RowValues, context_sizes, next_logits
from graphmod.decode.types import Completion, DecodeError, Run
from graphmod.errors import ConfigError, reason

_TOKENS = 24
_MOST_TOKENS = 512  # beyond a window that is looked at
_NOISE = 4  # times what the model's own ways to compute the same differ by
_MOST_NOISE = 10  # times what is allowed without noise: a model that looks ahead agrees with itself even less
_LINEAR = 1e-3  # relative; int8 rounds by some 5e-3


def _half(model: PreTrainedModel) -> bool:
    """Whether it computes in 16 bits."""
    return model.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(model.device.type)


def _made_up(model: PreTrainedModel, memory: PagedCache, most: int) -> list[int]:
    """Tokens for a first look: more than windows and chunks, where these are not long."""
    text = model.config.get_text_config()
    edges = [edge for layer in memory.layers for edge in layer.rule if edge is not None and edge + 8 <= _MOST_TOKENS]
    count = min(most, max([_TOKENS, *(edge + 8 for edge in edges)]))
    configs = (text, model.config)
    ids = [value for one in configs for name, value in vars(one).items() if name.endswith("token_id")]
    special = {one for value in ids for one in (value if isinstance(value, list) else [value])}
    usual = [token for token in range(min(text.vocab_size, 4096)) if token not in special] or [0]
    return [usual[(7919 * number + 13) % len(usual)] for number in range(count)]


def compare_made_up(
    model: PreTrainedModel,
    memory: PagedCache,
    state: BatchState,
    prefill: Callable[[list[Piece]], Tensor],
    most: int,
    chosen: Implementation,
    exact: bool = False,
) -> None:
    """Compares the logits after the last two of some tokens: the first by prefill, the second by a decode step.

    Of the attentions of this package it uses the reference: others would be compiled for it. All that it writes to is
    zeroed again.

    Args:
        memory, state: of an engine that has no sequences yet.
        most: tokens that are prefilled at once.
        exact: whether decode computes in `batch_invariant`, with the very numbers of the model's forward in it.

    Raises:
        DecodeError: they differ from those of the model's own forward by more than kernels do.
        ConfigError: with `exact`, they differ at all, or the model computes what is refused there.
    """
    size = memory.block_size
    tokens = _made_up(model, memory, min(state.blocks, memory.blocks - memory.first_block) * size)
    if len(tokens) < 2:
        return
    try:
        own = _own_logits(model, tokens, 2)
        if not bool(torch.isfinite(own).all()):  # weights that hold NaN are told with the first token
            return
        plain = chosen if exact else reference(chosen, memory)
        found = _decoded(model, memory, state, prefill, most, plain, tokens, Invariant() if exact else nullcontext())
        if exact:
            _require_equal(model, found, tokens)
    except (torch.OutOfMemoryError, ConfigError):
        raise
    except Exception as error:  # of a model's own code: anything
        raise DecodeError(refusal(model, f"it fails on {len(tokens)} tokens: {reason(error)}")) from error
    error = _relative(found, own)
    allowed = 0.05 if _half(model) else 1e-2 if torch.get_float32_matmul_precision() != "highest" else 1e-4
    if error <= allowed or error <= _with_noise(allowed, _relative(_cached_logits(model, tokens, 2), own)):
        return
    why = f"after {len(tokens)} tokens its logits differ by {error:.1%} from those of its own forward"
    raise DecodeError(refusal(model, f"{why}: {_cause(model)}"))


def _require_equal(model: PreTrainedModel, found: Tensor, tokens: list[int]) -> None:
    with batch_invariant(model):
        same = _own_logits(model, tokens, 2)
    if not torch.equal(found, same):
        off = float((found - same).abs().max())
        raise ConfigError(
            f"batch_invariant=True cannot be used with {type(model).__name__}: its logits of one token at "
            f"a time differ by {off:.3g} from those of the whole sequence, so that some sum in it depends on the batch"
        )


def _cause(model: PreTrainedModel) -> str:
    """Why a model may not agree with itself, as far as it can be seen."""
    for name, layer in model.named_modules():
        size = getattr(layer, "in_features", None)
        if isinstance(size, int) and hasattr(layer, "out_features") and _bends(layer, size, model):
            return (
                f"its layer {name} ({type(layer).__qualname__}) is quantized dynamically: it rounds its inputs, so "
                "that a difference in their last digits may change a token. Quantize the weights alone"
            )
    return "it keeps or counts something that graphmod does not know"


def _bends(layer: torch.nn.Module, size: int, model: PreTrainedModel) -> bool:
    """Whether a linear layer is not linear, as one is that rounds its inputs, and one with rounded weights is not."""
    steps = torch.arange(size, device=model.device, dtype=torch.float32)
    one, other = (wave.to(model.dtype).unsqueeze(0) for wave in (steps.sin(), 0.1 * (3 * steps).cos()))
    try:
        with torch.no_grad():
            parts, whole = layer(one) + layer(other) - layer(one - one), layer(one + other)
        return _relative(parts, whole) > _LINEAR
    except Exception:  # it is called with something else
        return False


def _decoded(
    model: PreTrainedModel,
    memory: PagedCache,
    state: BatchState,
    prefill: Callable[[list[Piece]], Tensor],
    most: int,
    plain: Implementation,
    tokens: list[int],
    mode: AbstractContextManager,
) -> Tensor:
    """(2, vocabulary) float32: by prefill, and by a decode step for the last token."""
    size = memory.block_size
    blocks = list(range(memory.first_block, memory.first_block + -(-len(tokens) // size)))
    visited = min(
        one for one in context_sizes(size, state.blocks * size, False) if one is not None and one >= len(tokens)
    )
    last, step = len(tokens) - 1, min(most, -(-(len(tokens) - 1) // 2))  # in pieces, as long prompts are
    pieces = [(start, min(last, start + step)) for start in range(0, last, step)]
    *_, before = (prefill([Piece(tokens[start:end], start, blocks, end == last)]) for start, end in pieces)
    state.set_rows(0, [RowValues([tokens[-1], len(tokens) - 1, 1, *[0] * 6], [0.0] * 6, blocks, [], tokens)])
    memory.expect([Reader(blocks, len(tokens), len(tokens))])
    with attention(model, plain.name), mode:
        after = next_logits(model, memory, state.rows(1), visited, plain.name is None)
    state.restart()
    memory.clear([*range(memory.first_block), *blocks])
    return torch.cat((before, after)).float()


class FirstTokens:
    """Compares the first tokens that an engine generates, once, and again when modules were exchanged, or compiled code
    has taken over.

    Args:
        model: that generates.
        most: tokens of a prompt that are prefilled at once; no longer prompts are compared.
        where: tokens are made, for the message.
        adapters: that sequences may have.

    Attributes:
        awaited: whether some are to be compared.
    """

    def __init__(self, model: PreTrainedModel, most: int, where: str, adapters: Adapters) -> None:
        self._model, self._most, self._where, self._adapters = model, most, where, adapters
        self.awaited = True
        self._again, self._turns = False, 0
        self._mixed: set[int] = set()

    def await_again(self) -> None:
        """Compares those tokens that are launched from the next turn on: by other kernels than before."""
        self.awaited = self._again = True
        self._turns = 2  # until they come: one that launches, and those before it are read first

    def pass_over(self, completions: Iterable[Completion]) -> None:
        """Does not compare these: weights before and after a change have made them."""
        self._mixed = {id(one) for one in completions}

    def compare(self, runs: Iterable[Run]) -> None:
        """Compares the first of them that can be; called in each turn with what that found.

        Raises:
            DecodeError: its tokens are not those of the model's own forward.
        """
        if self._turns:
            self._turns -= 1
            return
        for run in runs:
            done = run.completion
            last = len(run.tokens) if self._again else len(done.tokens)
            if id(done) in self._mixed or last < 2 or len(done.prompt) + len(done.tokens) - last > self._most:
                continue
            adapter = next(one.adapter for one in run.handle.sequences if one.completion is done)
            with self._adapters.alone(adapter):
                compare_tokens(self._model, done, last, self._where)
            self.awaited = False
            return


def compare_tokens(model: PreTrainedModel, done: Completion, last: int, where: str) -> None:
    """Compares the log-probabilities of generated tokens.

    Args:
        done: with some tokens.
        last: how many of them are compared.
        where: they were made, for the message.

    Raises:
        DecodeError: they differ by more than kernels do.
    """
    tokens = done.prompt + done.tokens
    chosen = torch.tensor(done.tokens[-last:], device=model.device).unsqueeze(1)
    found = torch.tensor(done.logprobs[-last:], device=model.device)

    def logprobs(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(1, chosen).squeeze(1)

    own = logprobs(_own_logits(model, tokens[:-1], last))
    errors = (found - own).abs()
    error = float(errors.median() if _half(model) else errors.max())
    allowed = 0.5 if _half(model) else 0.02
    if error <= allowed or not bool(torch.isfinite(own).all()):
        return
    noise = (logprobs(_cached_logits(model, tokens[:-1], last)) - own).abs().max()
    if error <= _with_noise(allowed, float(noise)):
        return
    raise DecodeError(
        f"{where} produced tokens whose log-probabilities differ by {error:.3g} from those of the model's own forward "
        f"(prompt {done.request}, {len(done.tokens)} tokens); they are not returned. Try another attention=, "
        "compile=none or graphs=False, or use model.generate"
    )


def _with_noise(allowed: float, noise: float) -> float:
    return min(allowed + _NOISE * noise, _MOST_NOISE * allowed)


def _relative(found: Tensor, own: Tensor) -> float:
    return float((found - own).norm() / own.norm().clamp(min=1e-30))


def _own_logits(model: PreTrainedModel, tokens: list[int], last: int) -> Tensor:
    """(last, vocabulary) float32, after the last tokens, by one forward call without a cache."""
    return _logits(model, tokens, last, use_cache=False).logits[0, -last:].float()


def _cached_logits(model: PreTrainedModel, tokens: list[int], last: int) -> Tensor:
    """(last, vocabulary) float32, after the last tokens, with the model's own cache: for how far its own ways to
    compute them differ."""
    if len(tokens) <= last:
        return _own_logits(model, tokens, last)
    first = _logits(model, tokens[:-last], 1, use_cache=True)
    rest = []
    for token in tokens[-last:]:
        rest.append(_logits(model, [token], 1, use_cache=True, past_key_values=first.past_key_values).logits[0, -1:])
    return torch.cat(rest).float()


def _logits(model: PreTrainedModel, tokens: list[int], last: int, **more: object):
    kept = {"logits_to_keep": last} if takes(model, "logits_to_keep") else {}
    return model(input_ids=torch.tensor([tokens], device=model.device), **kept, **more)
