"""A model with another attention in the place of its own, for a while."""

from __future__ import annotations

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
        self._config, self._name, self._function, self._mask = model.config, name, function, mask
        self._before = [(one, one._attn_implementation) for one in _configs(model.config)]

    def __enter__(self) -> None:
        if self._function is not None:
            ALL_ATTENTION_FUNCTIONS.register(self._name, self._function)
            ALL_MASK_ATTENTION_FUNCTIONS.register(self._name, self._mask)
        try:
            if self._name is not None:
                self._config._attn_implementation = self._name  # which is set in the configs of its parts too
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for one, old in self._before:
            one._attn_implementation = old
        if self._function is not None:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(self._name, None)
            ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(self._name, None)


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A config, then those of its parts."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)
