"""Which blocks of the KV cache belong to whom: a free list and reference counts. Knows numbers, no tensors."""

from collections import deque

from graphmod.decode.errors import DecodeError


class BlockAllocator:
    """Hands out blocks `first .. first + count - 1`. Several sequences may hold a block that none of them writes.

    Args:
        count: blocks there are.
        block_size: tokens of a block.
        first: number of the first one; those before it are not for sequences.
    """

    def __init__(self, count: int, block_size: int, first: int = 0) -> None:
        self.count, self.block_size, self.first = count, block_size, first
        self._free = deque(range(first, first + count))
        self._holders = [0] * count

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block - self.first]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks nobody holds.

        Raises:
            DecodeError: there are fewer; nothing was taken.
        """
        if count > len(self._free):
            raise DecodeError(f"{count} blocks of KV memory were requested and {len(self._free)} are free")
        taken = [self._free.popleft() for _ in range(count)]
        for block in taken:
            self._holders[block - self.first] = 1
        return taken

    def fork(self, blocks: list[int], length: int, total: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Blocks for another sequence that begins with the first `length` tokens held in `blocks`.

        Full blocks are shared. A last one that is partly filled will be written by both, so the new sequence gets a
        block of its own for it.

        Args:
            total: blocks the new sequence needs in all.

        Returns:
            Its blocks, and the `(from, to)` copies to make before either sequence goes on.

        Raises:
            DecodeError: not enough blocks are free; nothing was taken.
        """
        full = length // self.block_size
        own = self.allocate(total - full)
        shared = blocks[:full]
        for block in shared:
            self._holders[block - self.first] += 1
        copies = [(blocks[full], own[0])] if length % self.block_size else []
        return shared + own, copies

    def free(self, blocks: list[int]) -> None:
        """Gives up one hold on each of `blocks`.

        Raises:
            DecodeError: nobody holds one of them; a bug in the caller.
        """
        for block in blocks:
            if self._holders[block - self.first] < 1:
                raise DecodeError(f"block {block} was freed twice")
            self._holders[block - self.first] -= 1
            if not self._holders[block - self.first]:
                self._free.append(block)
