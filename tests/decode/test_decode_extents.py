"""Which blocks decode steps read, and in what portions they are copied."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from graphmod.attention import Rule
from graphmod.decode.offload import Reader, portions, read_blocks

BLOCKS = st.sets(st.integers(0, 80), max_size=60)


@given(BLOCKS, st.integers(0, 4), st.integers(1, 12), st.integers(0, 5))
def test_extents_and_single_blocks_are_all_that_is_read(blocks, bridge, least, most):
    found = portions(blocks, bridge, least, most)
    covered = {block for first, count in found.extents for block in range(first, first + count)}
    assert sorted(found.blocks) == sorted(blocks)
    assert {*found.blocks[: found.within]} == blocks & covered
    assert len(found.extents) <= most and all(count >= least for _, count in found.extents)
    assert sum(count for _, count in found.extents) == len(covered)  # nothing twice
    for first, count in found.extents:
        assert {first, first + count - 1} <= blocks
        gaps = "".join(".x"[block in blocks] for block in range(first, first + count)).split("x")
        assert max(map(len, gaps)) <= bridge
    others = [count for _, count in portions(blocks, bridge, least, 99).extents]
    assert [count for _, count in found.extents] == others[:most] == sorted(others, reverse=True)[:most]


@given(st.data(), st.integers(1, 5), st.integers(1, 40), st.integers(1, 9))
def test_blocks_of_all_tokens_that_steps_see_are_read(data, size, first, steps):
    last = first + steps - 1
    blocks = data.draw(st.permutations(range(100)))[: -(-last // size)]
    rule = data.draw(st.sampled_from([Rule(), Rule(window=3), Rule(window=11), Rule(chunk=4), Rule(chunk=16)]))
    token = torch.arange(last)
    expected = set()
    for context in range(first, last + 1):
        seen = rule.sees(torch.tensor(context - 1), token[: context - 1])  # its own token is none of them
        expected |= {blocks[at // size] for at in token[: context - 1][seen].tolist()}
    found = read_blocks([Reader(blocks, first, last)], rule, size)
    assert expected <= found
    assert len(found) <= len(expected) + 2  # a first and a last one
