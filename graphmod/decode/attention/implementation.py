"""What an attention for decode steps consists of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from graphmod.decode.cache.cache import PagedCache


class Implementation(NamedTuple):
    """An attention for decode steps.

    Attributes:
        name: under which transformers finds it; None leaves a model its own.
        function: as transformers calls it, with `cache_view` among the keywords; None with the model's own.
        stops_at_context: whether it does no work beyond the real context. If not, a graph is captured for each of a
            few numbers of visited tokens.
        unavailable: why it cannot be used with a cache, or None; asked of every implementation, so it must be quick.
        prepare: what takes long, for the one that is to be used: loads it, takes memory. Why that failed, or None.
        compiled: whether dynamo compiles it, in the first step of each batch size.
    """

    name: str | None
    function: Callable[..., tuple[Tensor, None]] | None
    stops_at_context: bool
    unavailable: Callable[[PagedCache], str | None]
    prepare: Callable[[PagedCache], str | None] = lambda _: None
    compiled: bool = False
