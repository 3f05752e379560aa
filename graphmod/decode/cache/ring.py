"""Buffers near the computation, in turn for the layers whose keys and values are kept in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphmod.attention import Rule
from graphmod.decode.cache.branch import Branch
from graphmod.decode.cache.copy_nodes import CopyNodes
from graphmod.decode.cache.extents import Portions, Reader, portions, read_blocks
from graphmod.decode.cache.fetch import HEADER, Pair, fetch
from graphmod.decode.errors import DecodeError

_EXTENTS = 8  # of a layer, for its keys and for its values: nodes that do nothing cost next to nothing
_LEAST_BYTES = 2**21  # of the keys of an extent: a node needs 3 us beside its copy, and a kernel copies 8 % slower
_BRIDGE_BYTES = 2**17  # the time that one more node takes


def far_layers(count: int, resident: float) -> list[int]:
    """Which of `count` layers are kept in the memory of the host, the others spread evenly among them. The last layer
    is far: nothing is copied while a step computes what comes after its last copy, so that is to be little.

    Args:
        resident: the share that stays on the device, 0 to 1.
    """
    return [
        number for number in range(count) if int((count - number) * resident) == int((count - number - 1) * resident)
    ]


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

    What is copied the host says before it launches steps (`expect`): extents of blocks by the copy engine, the others
    by a kernel. One graph serves all lengths, and a block that several rows hold is copied once.

    Args:
        kept: keys and values of each far layer, by the number of the layer.
        rules: which tokens each of them sees.
        buffers: tensors of `buffer_sizes`.
        branches: where the kernels of copies run, and where the copy engine does.
    """

    def __init__(
        self, kept: dict[int, Pair], rules: dict[int, Rule], buffers: list[Pair], branches: tuple[Branch, Branch]
    ) -> None:
        self.far = list(kept)
        self.branch, self._nodes_branch = branches
        self._kept, self._rules = kept, rules
        self._buffers, self.count = buffers, len(buffers)
        self._near = {
            layer: tuple(
                one[: kind.numel()].view(kind.shape) for one, kind in zip(buffers[k % self.count], both, strict=True)
            )
            for k, (layer, both) in enumerate(kept.items())
        }
        blocks, device = len(next(iter(kept.values()))[0]), buffers[0][0].device
        self._listed = {
            rule: torch.zeros(HEADER + blocks, dtype=torch.int64, device=device)
            for rule in dict.fromkeys(rules.values())
        }
        self._portions: dict[Rule, Portions] = {}
        self._nodes = CopyNodes(_EXTENTS, device) if device.type == "cuda" else None

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

    def renew(self) -> None:
        """To be called when there is other memory at the addresses of the buffers."""
        if self._nodes is not None:
            self._nodes.renew()

    def expect(self, readers: list[Reader]) -> None:
        """Says what the steps that are launched next will read; what was launched before goes on as it was."""
        for rule, listed in self._listed.items():
            layers = [layer for layer in self.far if self._rules[layer] == rule]
            keys = self._kept[layers[0]][0]
            nbytes = keys[0].nbytes
            read = read_blocks(readers, rule, keys.shape[1])
            found = portions(read, _BRIDGE_BYTES // nbytes, -(-_LEAST_BYTES // nbytes), _EXTENTS)
            before = self._portions.get(rule)
            if found == before:
                continue
            self._portions.pop(rule, None)  # till all is done: who is interrupted leaves nothing that seems to be done
            new = torch.tensor([found.within, len(found.blocks), *found.blocks], device="cpu")
            listed[: len(new)].copy_(new.pin_memory() if listed.is_cuda else new, non_blocking=True)
            if self._nodes is not None and (before is None or before.extents != found.extents):
                for layer in layers:
                    for kept, near in zip(self._kept[layer], self._near[layer], strict=True):
                        size = kept[0].nbytes
                        self._nodes.set(kept, near, [(first * size, many * size) for first, many in found.extents])
            self._portions[rule] = found

    def bring(self, layer: int, after: Any) -> list[Callable[[], None]]:
        """Copies what is expected of a layer, after a place in the step; returns what waits for the copies.

        Kernel and copy engine have a branch each: those of one would only ever wait for those of the other.
        """
        kept, near = self._kept[layer], self._near[layer]
        acts = [(self.branch, partial(fetch, kept, near, self._listed[self._rules[layer]]))]
        if self._nodes is not None:
            acts.append((self._nodes_branch, partial(self._nodes.capture, list(zip(kept, near, strict=True)))))
        return [partial(branch.wait, branch.run(act, after)) for branch, act in acts]


class Passage:
    """One step's way along the layers, in a ring."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._reached = -1
        self._copied = 0  # far layers whose copies were launched
        self._waits: dict[int, list[Callable[[], None]]] = {}

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
        after = ring.branch.here() if wanted else None
        for far in wanted:
            self._waits[far] = ring.bring(far, after)
        for wait in self._waits.pop(layer, ()):
            wait()

    def _due(self, layer: int) -> int:
        """How many far layers may have been copied when a step reaches a layer, and has done with those before."""
        return sum(far < layer for far in self._ring.far) + self._ring.count
