"""Which blocks decode steps will read, and in what portions they are copied."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from graphmod.attention import Rule


class Reader(NamedTuple):
    """Some steps of a sequence that are about to be launched.

    Attributes:
        blocks: of the sequence.
        first, last: tokens in the sequence at the first and the last of these steps, the one that a step adds included.
    """

    blocks: list[int]
    first: int
    last: int


class Portions(NamedTuple):
    """Blocks that are read, for two ways to copy them.

    Attributes:
        blocks: each once, those within extents first.
        within: how many these are.
        extents: first block and number of blocks of each. Blocks that nobody reads may lie in them.
    """

    blocks: list[int]
    within: int
    extents: list[tuple[int, int]]


def read_blocks(readers: list[Reader], rule: Rule, block_size: int) -> set[int]:
    """The blocks that hold what steps will see, their own tokens left out."""
    seen = rule.first_seen(torch.tensor([reader.first for reader in readers], device="cpu"))
    begins = [0] * len(readers) if seen is None else seen.tolist()
    return {
        block
        for reader, begin in zip(readers, begins, strict=True)
        for block in reader.blocks[begin // block_size : -(-(reader.last - 1) // block_size)]
    }


def portions(blocks: set[int], bridge: int, least: int, most: int) -> Portions:
    """Parts blocks into extents of consecutive ones, and single ones.

    Args:
        bridge: so many blocks that nobody reads may lie between two others of an extent.
        least: blocks of an extent, from its first to its last.
        most: extents; the longest ones.
    """
    ordered = sorted(blocks)
    ends = [at for at in range(1, len(ordered)) if ordered[at] - ordered[at - 1] > bridge + 1]
    runs = [ordered[at:end] for at, end in itertools.pairwise([0, *ends, len(ordered)]) if at < end]
    runs.sort(key=lambda run: run[0] - run[-1])
    long = [run for run in runs[:most] if run[-1] - run[0] + 1 >= least]
    within = sum(map(len, long))
    extents = [(run[0], run[-1] - run[0] + 1) for run in long]
    return Portions([block for run in runs for block in run], within, extents)
