"""Buffers near the computation, in turn for the layers whose keys and values are kept in the memory of the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphmod.backend.branch import Branch
from graphmod.decode.cache.fetch import fetch
from graphmod.decode.cache.layers import Layer
from graphmod.decode.errors import DecodeError

Pair = tuple[Tensor, Tensor]


def far_layers(count: int, resident: float) -> list[int]:
    """Which of `count` layers are kept in the memory of the host, the others spread evenly among them.

    Args:
        resident: the share that stays on the device, 0 to 1.
    """
    return [number for number in range(count) if int((number + 1) * resident) == int(number * resident)]


def buffer_sizes(sizes: dict[int, tuple[torch.Size, torch.Size]], buffers: int) -> list[tuple[int]]:
    """The sizes of the tensors of a `Ring`: for each buffer that of its keys, then that of its values."""
    largest = [(max(size[part].numel() for size in sizes.values()),) for part in range(2)] if sizes else []
    return largest * min(buffers, len(sizes))


class Ring:
    """The far layer number k uses buffer k modulo their count.

    A step copies what it will see of as many far layers as there are buffers. When it reaches a layer, it has done with
    those before, and the next far layer is copied into the buffer of the last one. The copies are a branch of the
    step's graph, so that one launch does all. Its edges are the two that this needs: a copy comes after the computation
    that read the buffer before, and computation comes after the copy that it reads.

    Args:
        sizes: of the keys and the values of each far layer, by the number of the layer.
        buffers: tensors of `buffer_sizes`.
        branch: where copies run.
    """

    def __init__(
        self,
        sizes: dict[int, tuple[torch.Size, torch.Size]],
        buffers: list[Pair],
        branch: Branch,
    ) -> None:
        self.far, self.branch = list(sizes), branch
        self._buffers, self.count = buffers, len(buffers)
        self._near = {
            layer: tuple(
                one[: size.numel()].view(size) for one, size in zip(self._buffers[k % self.count], both, strict=True)
            )
            for k, (layer, both) in enumerate(sizes.items())
        }

    def near(self, layer: int) -> Pair | None:
        """Keys and values of a layer as a step sees them; None for one that is not far."""
        return self._near.get(layer)

    def tensors(self) -> list[Tensor]:
        """All of its memory."""
        return [tensor for both in self._buffers for tensor in both]

    def clear(self) -> None:
        """Zeroes what may hold NaN; between steps nothing that is in the buffers is needed."""
        for tensor in self.tensors():
            tensor.zero_()


class Passage:
    """One step's way along the layers.

    Args:
        ring: whose buffers it uses.
        kept: keys and values of each layer, where they are kept.
        layers: all of the model's.
        table, context: see `fetch`.
    """

    def __init__(
        self,
        ring: Ring,
        kept: tuple[list[Tensor], list[Tensor]],
        layers: tuple[Layer, ...],
        table: Tensor,
        context: Tensor,
    ) -> None:
        self._ring, self._kept, self._layers = ring, kept, layers
        self._table, self._context = table, context
        self._reached = -1
        self._copied = 0  # far layers whose copies were launched
        self._ends: dict[int, Any] = {}
        self._first: dict[Any, Tensor | None] = {}  # token that layers of a rule see

    def reach(self, layer: int) -> None:
        """Goes on to a layer; its keys and values are near by after it.

        Raises:
            DecodeError: it does not come after the last one.
        """
        ring = self._ring
        if layer <= self._reached:
            raise DecodeError("this model does not store the keys of its layers in their order; use offload=none")
        self._reached = layer
        wanted = ring.far[self._copied : self._due(layer)]
        self._copied += len(wanted)
        # Made here: what runs beside the step takes no memory.
        given = [(far, self._sees(far)) for far in wanted]
        after = ring.branch.here() if given else None
        for far, first in given:
            kept = self._kept[0][far], self._kept[1][far]
            copy = partial(fetch, kept, ring.near(far), self._table, self._context, first)
            self._ends[far] = ring.branch.run(copy, after)
        if layer in self._ends:
            ring.branch.wait(self._ends.pop(layer))

    def _due(self, layer: int) -> int:
        """How many far layers may have been copied when a step reaches a layer, and has done with those before."""
        return sum(far < layer for far in self._ring.far) + self._ring.count

    def _sees(self, layer: int) -> Tensor | None:
        rule = self._layers[layer].rule
        if rule not in self._first:
            self._first[rule] = rule.first_seen(self._context)
        return self._first[rule]
