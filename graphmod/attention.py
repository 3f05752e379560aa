"""What attention a transformers model does, asked of its own code; another attention in the place of its own; and a
training model in the state for decoding, and back."""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.interrupts import Held
from graphmod.wrap.layers import without_graphs


class Unclear(Exception):
    """An attention, or a mask, that is not understood; the message says what of it."""


class Rule(NamedTuple):
    """Which tokens a token sees, among those before it and itself.

    Attributes:
        window: so many, the last ones; None for all.
        chunk: those of its own chunk of so many; None for all.
    """

    window: int | None = None
    chunk: int | None = None

    def first_seen(self, context: Tensor) -> Tensor | None:
        """(B,) int64: the first token that the last of `context` tokens sees; None if that is always the first."""
        if self.window is not None:
            return (context - self.window).clamp(min=0)
        if self.chunk is not None:
            return torch.div((context - 1).clamp(min=0), self.chunk, rounding_mode="floor") * self.chunk
        return None

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the token at position `query` sees the one at `key`; bool, as the two broadcast."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen

    def mask(self, length: int, device: torch.device) -> Tensor:
        """(length, length) bool: whether a query, in rows, sees a key."""
        token = torch.arange(length, device=device)
        return self.sees(token[:, None], token[None, :])

    def __str__(self) -> str:
        if self.window is not None:
            return f"a window of {self.window} tokens"
        return "everything before" if self.chunk is None else f"chunks of {self.chunk} tokens"

    def matters(self, length: int) -> bool:
        """Whether a sequence is so long that transformers makes a mask of this rule: as long as what a token sees."""
        return any(one is not None and one <= length for one in self)


def asker(reach: int) -> Callable[..., Rule]:
    """What stands in for a mask function of transformers, and gives the rule in the place of a mask.

    Args:
        reach: how many tokens a sequence may have.
    """

    def ask(mask_function: Callable, device: Any = "cpu", **given: Any) -> Rule:
        if given.get("attention_mask") is not None:
            raise Unclear("it makes a padding mask of its own")
        return rule_of(mask_function, reach, torch.device(device))

    return ask


def rule_of(mask_function: Callable, reach: int, device: torch.device) -> Rule:
    """The rule that a mask function of transformers stands for.

    It is called with numbers, for up to 64 tokens of a sequence and all that come before and after them.

    Args:
        reach: how many tokens a sequence may have.

    Raises:
        Unclear: it is none of these.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(reach, device=device)
    last = int(mask_function(zero, zero, keys[-1], keys).sum())
    blind = ~mask_function(zero, zero, keys, zero).expand(reach)
    chunk = int(blind.to(torch.int8).argmax())  # the first token that does not see token 0
    near = [one + step for edge in (0, last, chunk, reach) for one in (edge, 2 * edge) for step in range(-4, 5)]
    spread = range(0, reach, max(1, reach // 32))
    queries = torch.tensor(sorted({one for one in (*near, *spread) if 0 <= one < reach}), device=device)
    seen = mask_function(zero, zero, queries[:, None], keys[None, :]).expand(len(queries), reach)
    causal = keys[None, :] <= queries[:, None]
    if torch.equal(seen, causal):
        return Rule()
    if torch.equal(seen, causal & (keys[None, :] > queries[:, None] - last)):
        return Rule(window=last)
    if chunk and torch.equal(seen, causal & (keys[None, :] // chunk == queries[:, None] // chunk)):
        return Rule(chunk=chunk)
    raise Unclear("it has a mask that is neither causal, nor of a window, nor of chunks")


STATIC = "causal_sdpa"
"""The attention of training on whole sequences (`train.attention`), which knows no cache and no mask."""
BESIDE = {
    *("dropout", "sliding_window", "is_causal", "use_cache", "position_ids", "cache_position", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
}
"""Keywords that come to an attention function and ask it for nothing more than its mask says."""
PROBE = "graphmod_probe"
"""The name under which what looks at a model stands in for its attention."""


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether a model's forward has a parameter of this name."""
    return name in inspect.signature(model.forward).parameters


class attention:
    """Lets `model` use the attention function `name` while it is entered; None leaves it its own. At the end it has
    what it had, whatever was exchanged within.

    No generator: one that Ctrl-C leaves half-way would put things back when garbage is collected, at any later time.

    Args:
        function, mask: registered under that name for as long; None where they are registered already.
    """

    def __init__(
        self, model: PreTrainedModel, name: str | None, function: Callable | None = None, mask: Callable | None = None
    ) -> None:
        self._config, self._name = model.config, name
        self._added = None if name is None or function is None or mask is None else (name, function, mask)
        self._before = [(one, one._attn_implementation) for one in _configs(model.config)]

    def __enter__(self) -> None:
        if self._added is not None:
            name, function, mask = self._added
            ALL_ATTENTION_FUNCTIONS.register(name, function)
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
        try:
            if self._name is not None:
                self._config._attn_implementation = self._name  # which is set in the configs of its parts too
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for one, old in self._before:
            one._attn_implementation = old
        if self._added is not None:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(self._added[0], None)
            ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(self._added[0], None)


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A config, then those of its parts."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)


T = TypeVar("T")
_training = operator.attrgetter("training")


def _set(training: list[dict], value: bool) -> None:
    # In one call, which nothing can interrupt: some modules would stay in the other mode.
    deque(map(dict.update, training, repeat({"training": value})), maxlen=0)


def decoding(modules: list[nn.Module], act: Callable[..., T], *given: Any) -> T:
    """What `act(*given)` returns in inference mode, with every module in evaluation mode, without the graphs of
    `graph_layers`, and with SDPA with masks in the place of the attention of training, whose numbers it has.

    All is restored after, also where Ctrl-C comes at any moment: no context manager for a `with`, which it could leave
    half-way entered or left.

    Args:
        modules: all of the model's, which is the first. Walking them costs more than a decode step, so the caller keeps
            the list.
    """
    model: Any = modules[0]
    training = [vars(module) for module in filter(_training, modules)]
    attends = "sdpa" if model.config._attn_implementation == STATIC else None
    with Held() as interrupts:
        try:
            _set(training, False)
            with without_graphs(modules), attention(model, attends), torch.inference_mode(), interrupts.heard():
                return act(*given)
        finally:
            _set(training, True)
