"""The block allocator: nothing is lost, nothing handed out twice, shared blocks live as long as anyone holds them, and
what is found of a prompt is what was stored."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphmod.decode.blocks import BlockAllocator
from graphmod.decode.types import DecodeError

COUNT, SIZE, FIRST = 12, 2, 3
# Two tokens alone, so that prompts often begin alike.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=COUNT * SIZE)


class Sequences(RuleBasedStateMachine):
    """Sequences come and go in any order; `held` is what each of them believes it has, `content` what it wrote where,
    together with all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(COUNT, SIZE, FIRST)
        self.held: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=prompts, known=st.booleans(), more=st.integers(0, 2))
    def begin(self, tokens, known, more):
        found = self.allocator.match(tokens)
        for number, block in enumerate(found):
            assert self.content[block] == tuple(tokens[: (number + 1) * SIZE]), "other tokens than those asked for"
        assert len(found) * SIZE < len(tokens)
        free = self.allocator.free_blocks - sum(not self.allocator.holders(block) for block in found)
        missing = self.allocator.blocks_for(len(tokens) + more) - len(found)
        if missing > free:
            return
        self.allocator.hold(found)
        blocks = found + self.allocator.allocate(missing)
        used = {block for other, _ in self.held for block in other}
        assert not set(blocks[len(found) :]) & used, "its own blocks are new"
        for number, block in enumerate(blocks):
            self.content[block] = tuple(tokens[: (number + 1) * SIZE])
        if known:
            self.allocator.know(tokens, blocks)
            longest = self.allocator.match([*tokens, 0])
            assert len(longest) == len(tokens) // SIZE, "what was just stored is found"
        self.held.append((blocks, tokens))

    @rule(count=st.integers(COUNT + 1, COUNT + 3))
    def ask_for_too_many(self, count):
        free = self.allocator.free_blocks
        with pytest.raises(DecodeError):
            self.allocator.allocate(count)
        assert self.allocator.free_blocks == free

    @precondition(lambda self: self.held)
    @rule(data=st.data(), known=st.booleans())
    def end(self, data, known):
        blocks, tokens = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if known:
            self.allocator.know(tokens, blocks)
        self.allocator.free(blocks)

    @rule(block=st.integers(FIRST, FIRST + COUNT - 1))
    def unknow(self, block):
        self.allocator.unknow(block)

    @rule(tokens=prompts)
    def forget(self, tokens):
        epoch = self.allocator.epoch
        self.allocator.forget()
        assert self.allocator.match(tokens) == [] and self.allocator.epoch == epoch + 1

    @invariant()
    def every_block_is_held_as_often_as_believed_or_free(self):
        used = {block for blocks, _ in self.held for block in blocks}
        assert used <= set(range(FIRST, FIRST + COUNT))
        assert self.allocator.free_blocks == COUNT - len(used)
        for block in range(FIRST, FIRST + COUNT):
            assert self.allocator.holders(block) == sum(blocks.count(block) for blocks, _ in self.held)
        assert 0 <= len(self.allocator._known) <= COUNT


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_giving_a_block_back_twice_is_an_error():
    allocator = BlockAllocator(2, SIZE)
    blocks = allocator.allocate(1)
    allocator.free(blocks)
    with pytest.raises(DecodeError, match="twice"):
        allocator.free(blocks)


def test_what_was_freed_longest_ago_is_handed_out_first_and_what_nobody_knows_before_it():
    allocator = BlockAllocator(6, SIZE)
    old, new = [0, 0, 0, 1], [1, 1, 1, 0]
    blocks = {}
    for tokens in (old, new):
        blocks[tokens[0]] = allocator.allocate(2)
        allocator.know(tokens, blocks[tokens[0]])
    unknown = allocator.allocate(1)
    allocator.free(blocks[0])
    allocator.free(blocks[1])
    allocator.free(unknown)
    assert set(allocator.allocate(2)) == {5, *unknown}
    assert allocator.allocate(1) == blocks[0][1:], "the end before the beginning"
    assert allocator.match([*old, 0]) == blocks[0][:1] and allocator.match([*new, 0]) == blocks[1]


def test_the_last_token_of_a_prompt_is_left_to_be_computed():
    allocator = BlockAllocator(2, SIZE)
    blocks = allocator.allocate(2)
    allocator.know([0, 1, 0, 1], blocks)
    assert allocator.match([0, 1, 0, 1]) == blocks[:1]
    assert allocator.match([0, 1, 0, 1, 1]) == blocks
