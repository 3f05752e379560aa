"""A model with another attention in the place of its own, for a while."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator

from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

STATIC = "causal_sdpa"
"""The attention of training on whole sequences (`train.attention`), which knows no cache and no mask."""
BESIDE = frozenset(
    [
        "dropout",
        "sliding_window",
        "is_causal",
        "use_cache",
        "position_ids",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
    ]
)
"""Keywords that come to an attention function and ask it for nothing more than its mask says."""
PROBE = "graphmod_probe"
"""The name under which what looks at a model stands in for its attention."""


def takes(model: PreTrainedModel, name: str) -> bool:
    """Whether a model's forward has a parameter of this name."""
    return name in inspect.signature(model.forward).parameters


@contextlib.contextmanager
def attention(
    model: PreTrainedModel, name: str | None, function: Callable | None = None, mask: Callable | None = None
) -> Iterator[None]:
    """Lets `model` use the attention function `name` while it is active; None leaves it its own.

    Args:
        function, mask: registered under that name for as long; None where they are registered already.
    """
    if name is None:
        yield
        return
    if function is not None:
        ALL_ATTENTION_FUNCTIONS.register(name, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    before = [(one, one._attn_implementation) for one in _configs(model.config)]
    try:
        model.config._attn_implementation = name  # which is set in the configs of its parts too
        yield
    finally:
        for one, old in before:
            one._attn_implementation = old
        if function is not None:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
            ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A config, then those of its parts."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)
