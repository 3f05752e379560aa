"""The KV cache: where keys and values are, and how they are stored and read."""

from __future__ import annotations

import weakref
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from graphmod.decode.cache.branch import Branch
from graphmod.decode.cache.extents import Reader
from graphmod.decode.cache.foreign import bytes_at, shaped
from graphmod.decode.cache.layers import Layer
from graphmod.decode.cache.pages import Ordinary, Pages, zeros
from graphmod.decode.cache.ring import Passage, Ring, buffer_sizes, far_layers
from graphmod.errors import ConfigError
from graphmod.wrap.extension import between_captures

NULL_BLOCK = 0
"""Pads block tables. It is never written, so that reading it adds finite numbers that the mask takes out again."""


class Offload(NamedTuple):
    """What is kept in the memory of the host.

    Attributes:
        buffers: on the device, which the layers take in turn.
        resident: share of the layers that stay on the device, 0 to 1.
    """

    buffers: int
    resident: float


_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class _Pinned:
    """Keeps memory pinned. Once nothing refers to it any more, it is unpinned, as soon as no capture is under way."""

    def __init__(self, memory: Tensor) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_AND_MAPPED))
        if code:
            raise torch.cuda.CudaError(code)
        # What ends gives everything back.
        weakref.finalize(self, between_captures, partial(_unpin, memory)).atexit = False


def _unpin(memory: Tensor) -> None:
    torch.cuda.synchronize()  # what was launched may still work on it
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def host_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in memory of the host, as a tensor of `device`.

    For a GPU the memory is pinned, and kernels reach it over the bus (unified virtual addressing: CUDA Programming
    Guide, "Page-Locked Host Memory"). For a CPU it is an ordinary tensor.

    Raises:
        ConfigError: the system does not let so much be pinned.
    """
    if device.type != "cuda":
        return torch.zeros(size, dtype=dtype, device=device)
    with torch.cuda.device(device):
        memory = torch.zeros(size, dtype=dtype)
        try:
            pinned = _Pinned(memory)
        except RuntimeError as error:
            raise ConfigError(
                f"{memory.nbytes / 2**30:.2f} GiB more of the host's memory cannot be pinned for the KV cache "
                f"({error}); lower cache_tokens, max_batch_size or max_seq_len, raise offload_resident, or use "
                "offload=none"
            ) from error
        return shaped(bytes_at(memory.data_ptr(), memory.nbytes, pinned, device), size, dtype)


class PagedCache:
    """Keys and values of all layers at fixed addresses.

    `keys[i]` and `values[i]` are (blocks, block_size, kv_heads, head_dim) tensors of layer i, whose sizes
    are its own. The first blocks are not for sequences: `NULL_BLOCK`, and then those that padded rows write to, one
    slot for each row, which nobody reads. Those of far layers are in the memory of the host (`Offload`), where anything
    can read them, and slowly; `near` has what a decode step reads.
    `scratch` is what attentions write to beside their results, by their names, for as long as the cache lives.
    `kernel_options` are what an attention found to fit this cache. `pages` is the memory below keys and values.

    Args:
        layers: what each layer keeps.
        blocks: blocks for sequences.
        rows: the most rows in a batch.
        block_size: tokens of a block.
        offload: which layers are far; None keeps all on the device.
    """

    def __init__(
        self,
        layers: tuple[Layer, ...],
        blocks: int,
        block_size: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        offload: Offload | None = None,
    ) -> None:
        self.layers, self.rows, self.block_size = layers, rows, block_size
        self.first_block = 1 + -(-rows // block_size)
        self.blocks = blocks + self.first_block
        self.dtype, self.device = dtype, device
        self.spare_slots = torch.arange(block_size, block_size + rows, device=device)
        self.pages: Pages | Ordinary | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.scratch: dict[str, tuple[Tensor, ...]] = {}
        self.kernel_options: dict[str, int] = {}
        self._buffers = offload.buffers if offload else 0
        self._far = far_layers(len(layers), offload.resident) if offload else []
        self._branches = (Branch(device), Branch(device)) if self._far else None
        self.ring: Ring | None = None
        self.allocate()

    @property
    def allocated(self) -> bool:
        """Whether it has addresses, be there memory behind them or not."""
        return self.pages is not None

    @property
    def mapped(self) -> bool:
        """Whether there is memory; without it keys and values may not be touched."""
        return self.pages is not None and self.pages.mapped

    @property
    def nbytes(self) -> int:
        """On the device."""
        ring = [] if self.ring is None else self.ring.tensors()
        return sum(tensor.nbytes for tensor in (*self._here(), *ring)) if self.mapped else 0

    @property
    def host_nbytes(self) -> int:
        """In the memory of the host, beside it."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values)) - sum(one.nbytes for one in self._here())

    def _here(self) -> list[Tensor]:
        far = {*self._far}
        return [one for kept in (self.keys, self.values) for number, one in enumerate(kept) if number not in far]

    def allocate(self) -> None:
        """Takes the memory, zeroed: what is not written yet must be finite, since masks multiply by zero."""
        self.release()
        shapes = []
        for layer in self.layers:
            size = self.blocks, self.block_size, layer.kv_heads
            shapes.append((torch.Size((*size, layer.head_dim)), torch.Size((*size, layer.value_dim))))
        far = {number: shapes[number] for number in self._far}
        here = [shape for number, both in enumerate(shapes) if number not in far for shape in both]
        tensors, pages = zeros([*here, *buffer_sizes(far, self._buffers)], self.dtype, self.device)
        found, pairs = iter(tensors), []
        for number, both in enumerate(shapes):
            pairs.append([host_zeros(s, self.dtype, self.device) if number in far else next(found) for s in both])
        self.keys += [key for key, _ in pairs]
        self.values += [value for _, value in pairs]
        if self._branches is not None:
            kept = {number: (self.keys[number], self.values[number]) for number in far}
            rules = {number: self.layers[number].rule for number in far}
            self.ring = Ring(kept, rules, list(zip(found, found, strict=True)), self._branches)
        self.pages = pages  # last: `mapped` says that all is there

    def unmap(self) -> None:
        """Gives the memory on the device back and keeps its addresses. Waits until nothing uses it.

        Raises:
            DecodeError: that cannot be done with this memory.
        """
        self.pages.unmap()

    def map(self) -> None:
        """Takes memory again, all zeros: at the addresses there are, or at others if these were given back too.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        if self.pages is None:
            self.allocate()
        else:
            self.pages.map()
            if self.ring is not None:
                self.ring.renew()

    def release(self) -> None:
        """Gives the memory back, and the addresses."""
        self.pages = None
        self.keys.clear()
        self.values.clear()
        self.ring = None

    def near(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as attention in a decode step reads them, on the device."""
        found = None if self.ring is None else self.ring.near(layer)
        return (self.keys[layer], self.values[layer]) if found is None else found

    def clear(self, blocks: list[int]) -> None:
        """Zeroes blocks that may hold NaN, before another sequence gets them."""
        if not self.mapped:
            return  # then nobody has held any
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)  # which may be none
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0)
        if self.ring is not None and blocks:
            self.ring.clear()

    def write(self, layer: int, places: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """Stores `key` and `value`, (B, kv_heads, S, head_dim), at `places`: block and offset in it, each (B * S,)."""
        _store((self.keys[layer], self.values[layer]), places, key, value)

    def write_near(self, layer: int, places: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        """As `write`, where `near` is another place."""
        if self.ring is not None and self.ring.near(layer) is not None:
            _store(self.ring.near(layer), places, key, value)

    def expect(self, readers: list[Reader]) -> None:
        """Says what the decode steps that are launched next will read. Without it they find nothing in far layers."""
        if self.ring is not None:
            self.ring.expect(readers)

    def passage(self) -> Passage | None:
        """What brings far layers near in one step; None if there are none."""
        return None if self.ring is None else Passage(self.ring)

    def read(self, layer: int, block_table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` keys and values of each row near by, two (B, kv_heads, tokens, head_dim) tensors.

        Args:
            block_table: (B, blocks of a sequence).
            tokens: at most one block, or a multiple of the block size.
        """
        found = []
        rows, count = len(block_table), max(1, tokens // self.block_size)
        index = block_table[:, :count].reshape(-1)
        for memory in self.near(layer):
            part = memory[:, :tokens] if tokens < self.block_size else memory
            taken = part.index_select(0, index).view(rows, tokens, *memory.shape[2:])
            found.append(taken.transpose(1, 2))
        return found[0], found[1]


def _store(into: tuple[Tensor, Tensor], places: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
    for memory, new in zip(into, (key, value), strict=True):
        # Straight into the tensor and not into a view of it, so that a compiler can see that no copy is needed.
        memory.index_put_(places, new.transpose(1, 2).reshape(-1, *memory.shape[2:]).to(memory.dtype))
