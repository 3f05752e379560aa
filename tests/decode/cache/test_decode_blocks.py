"""The block allocator: nothing is lost, nothing handed out twice, shared blocks live as long as anyone holds them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphmod.decode.cache.blocks import BlockAllocator
from graphmod.decode.errors import DecodeError

COUNT, SIZE, FIRST = 12, 4, 3


class Sequences(RuleBasedStateMachine):
    """Sequences come, fork and go in any order; `held` is what each of them believes it has."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(COUNT, SIZE, FIRST)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, COUNT))
    def allocate(self, count):
        free = self.allocator.free_blocks
        if count > free:
            with pytest.raises(DecodeError):
                self.allocator.allocate(count)
            assert self.allocator.free_blocks == free
        else:
            self.held.append(self.allocator.allocate(count))
            assert len(self.held[-1]) == count

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.held))
        length = data.draw(st.integers(0, len(parent) * SIZE))
        total = data.draw(st.integers(-(-length // SIZE), COUNT))
        before = self.allocator.free_blocks
        try:
            child, copies = self.allocator.fork(parent, length, total)
        except DecodeError:
            assert self.allocator.free_blocks == before < total - length // SIZE
            return
        full = length // SIZE
        assert len(child) == total and child[:full] == parent[:full]
        assert not set(child[full:]) & {block for other in self.held for block in other}, "its own blocks are new"
        assert copies == ([(parent[full], child[full])] if length % SIZE else [])
        self.held.append(child)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.allocator.free(self.held.pop(index))

    @invariant()
    def every_block_is_held_as_often_as_believed_or_free(self):
        used = {block for blocks in self.held for block in blocks}
        assert used <= set(range(FIRST, FIRST + COUNT))
        assert self.allocator.free_blocks == COUNT - len(used)
        for block in range(FIRST, FIRST + COUNT):
            assert self.allocator.holders(block) == sum(blocks.count(block) for blocks in self.held)


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_giving_a_block_back_twice_is_an_error():
    allocator = BlockAllocator(2, SIZE)
    blocks = allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(DecodeError, match="twice"):
        allocator.free(blocks)
