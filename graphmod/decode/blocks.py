"""Blocks of the KV cache: who holds them, which are free, what is known to be in them. Knows numbers, no tensors."""

from __future__ import annotations

from collections import OrderedDict

from graphmod.decode.types import DecodeError

# The block before, by its serial number, and the tokens of this one. Before the first comes the adapter, as a number
# that is not positive.
_Place = tuple[int, tuple[int, ...]]


class BlockAllocator:
    """Hands out blocks `first .. first + count - 1`, counts who holds them, and finds prompts' beginnings in them.

    A full block that is known keeps its content after its last holder has gone, until it is handed out again: blocks
    that nobody knows first, then those that were freed longest ago. Lookups compare tokens, so that none goes wrong.

    Args:
        count: blocks there are.
        block_size: tokens of a block.
        first: number of the first one; those before it are not for sequences.

    Attributes:
        epoch: how often everything known was forgotten.
    """

    def __init__(self, count: int, block_size: int, first: int = 0) -> None:
        self.count, self.block_size, self.first = count, block_size, first
        self.epoch = 0
        self._known: dict[_Place, int] = {}
        self._place: dict[int, tuple[_Place, int]] = {}  # block -> where it is known, and its serial number
        self._serial = 0
        self.reset()

    @property
    def knows(self) -> bool:
        """Whether something is known to be in any block."""
        return bool(self._known)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, known ones included."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block - self.first]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks nobody holds; what was known to be in them is forgotten.

        Raises:
            DecodeError: there are fewer; nothing was taken.
        """
        if count > len(self._free):
            raise DecodeError(f"{count} blocks of KV memory were requested and {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._holders[block - self.first] = 1
            self.unknow(block)
        return taken

    def hold(self, blocks: list[int]) -> None:
        """Lets one more sequence hold `blocks`, which none of them may write to."""
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block - self.first] += 1

    def free(self, blocks: list[int]) -> None:
        """Gives up one hold on each of the blocks of a sequence.

        Raises:
            DecodeError: nobody holds one of them; a bug in the caller.
        """
        for block in reversed(blocks):  # the end of a sequence goes before its beginning, which more others share
            if self._holders[block - self.first] < 1:
                raise DecodeError(f"block {block} was freed twice")
            self._holders[block - self.first] -= 1
            if not self._holders[block - self.first]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._place)

    def match(self, tokens: list[int], adapter: int = 0) -> list[int]:
        """The known blocks that hold the beginning of `tokens`, all but the last token at most. None is held by that.

        The last token is left, since somebody has to compute what comes after it.

        Args:
            adapter: the number of that which computed them; 0 is none.
        """
        found: list[int] = []
        serial, size = -adapter, self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            block = self._known.get((serial, tuple(tokens[start : start + size])))
            if block is None:
                break
            found.append(block)
            serial = self._place[block][1]
        return found

    def know(self, tokens: list[int], blocks: list[int], adapter: int = 0) -> None:
        """Notes that `blocks` hold `tokens`, as far as they fill them. Where others are known to hold the same, those
        stay the known ones.

        Args:
            adapter: see `match`.
        """
        serial, size = -adapter, self.block_size
        for start, block in zip(range(0, len(tokens) // size * size, size), blocks, strict=False):
            place = (serial, tuple(tokens[start : start + size]))
            known = self._known.get(place)
            if known is None:
                if block in self._place:
                    return  # it is known to come after another block, whose content was replaced since
                self._serial += 1
                self._known[place] = known = block
                self._place[block] = (place, self._serial)
            serial = self._place[known][1]

    def unknow(self, block: int) -> None:
        """Forgets what is in a block; what came after it is not found any more."""
        place, _ = self._place.pop(block, (None, 0))
        if place is not None:
            del self._known[place]

    def forget(self) -> None:
        """Forgets what is in all blocks, as after the weights have changed."""
        self._known.clear()
        self._place.clear()
        self.epoch += 1

    def reset(self) -> None:
        """Takes all blocks back, whoever holds them, and forgets what is in them."""
        self._free = OrderedDict.fromkeys(range(self.first, self.first + self.count))  # in the order of handing out
        self._holders = [0] * self.count
        self.forget()
