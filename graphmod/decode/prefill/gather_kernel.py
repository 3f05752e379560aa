"""The kernel of `gather_columns`. Importing this module needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 256  # of each chunk of a row
_ROWS = 8  # that a program has on their way
_CHUNK = 1024  # numbers


@triton.jit
def _copy(source, target, slot, at, there, chunk, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    within = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = there[:, None] & (within < WIDTH)[None, :]
    found = tl.load(source + slot[:, None] * WIDTH + within[None, :], mask=inside)
    tl.store(target + at.to(tl.int64)[:, None] * WIDTH + within[None, :], found, mask=inside)


@triton.jit
def _gather(
    keys,
    values,
    slots,
    count,
    to_keys,
    to_values,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Every so many rows, a chunk of their keys or values."""
    key_chunks: tl.constexpr = (KEY + CHUNK - 1) // CHUNK
    chunk, there_are = tl.program_id(1), tl.load(count)
    for begin in tl.range(tl.program_id(0) * ROWS, there_are, tl.num_programs(0) * ROWS):
        at = begin + tl.arange(0, ROWS)
        there = at < there_are
        slot = tl.load(slots + at, mask=there, other=0)
        if chunk < key_chunks:
            _copy(keys, to_keys, slot, at, there, chunk, KEY, CHUNK)
        else:
            _copy(values, to_values, slot, at, there, chunk - key_chunks, VALUE, CHUNK)


def gather(keys: Tensor, values: Tensor, slots: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """See `gather.gather_columns`.

    Args:
        count: int32, whose first number is how many there are.
    """
    found = tuple(kept.new_empty((len(slots), *kept.shape[2:])) for kept in (keys, values))
    key, value = keys[0, 0].numel(), values[0, 0].numel()
    chunk = min(_CHUNK, triton.next_power_of_2(max(key, value)))
    programs = min(_PROGRAMS, triton.cdiv(len(slots), _ROWS))
    _gather[(programs, triton.cdiv(key, chunk) + triton.cdiv(value, chunk))](
        *(keys, values, slots, count, *found), KEY=key, VALUE=value, ROWS=_ROWS, CHUNK=chunk, num_warps=4
    )
    return found
