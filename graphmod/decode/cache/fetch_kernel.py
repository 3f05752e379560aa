"""The kernel of `fetch`. Importing this module needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 64  # fill the bus, and leave the multiprocessors to what computes
_BYTES = 8192  # of a copy that is on its way, in each program


@triton.jit
def _copy(
    keys,
    values,
    near_keys,
    near_values,
    table,
    contexts,
    firsts,
    table_row,
    BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Some blocks of a row."""
    row, lane, lanes = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    before = tl.load(contexts + row) - 1
    first = tl.load(firsts + row) if WINDOW else before * 0
    others = tl.arange(0, ROWS)
    ahead = others < row
    other_before = tl.load(contexts + others, mask=ahead, other=0) - 1
    other_first = tl.load(firsts + others, mask=ahead, other=0) if WINDOW else other_before * 0
    step = tl.arange(0, CHUNK)
    for place in tl.range(tl.maximum(first, 0) // BLOCK + lane, (before + BLOCK - 1) // BLOCK, lanes):
        block = tl.load(table + row * table_row + place).to(tl.int64)
        # Who shares a block holds it at the same place, and the first of them copies it.
        held = ahead & (place * BLOCK < other_before) & ((place + 1) * BLOCK > other_first)
        same = tl.load(table + others * table_row + place, mask=held, other=-1) == block
        if tl.sum(same.to(tl.int32), 0) == 0:
            for start in tl.range(0, KEY_BLOCK, CHUNK):
                at = block * KEY_BLOCK + start + step
                inside = start + step < KEY_BLOCK
                tl.store(near_keys + at, tl.load(keys + at, mask=inside), mask=inside)
            for start in tl.range(0, VALUE_BLOCK, CHUNK):
                at = block * VALUE_BLOCK + start + step
                inside = start + step < VALUE_BLOCK
                tl.store(near_values + at, tl.load(values + at, mask=inside), mask=inside)


def copy(
    keys: Tensor,
    values: Tensor,
    near_keys: Tensor,
    near_values: Tensor,
    table: Tensor,
    context: Tensor,
    first: Tensor | None,
) -> None:
    """See `fetch`, whose arguments these are."""
    rows = len(context)
    _copy[(rows, triton.cdiv(_PROGRAMS, rows))](
        keys,
        values,
        near_keys,
        near_values,
        table,
        context,
        context if first is None else first,
        table.stride(0),
        BLOCK=keys.shape[1],
        KEY_BLOCK=keys[0].numel(),
        VALUE_BLOCK=values[0].numel(),
        ROWS=triton.next_power_of_2(rows),
        WINDOW=first is not None,
        CHUNK=_BYTES // keys.element_size(),
        num_warps=4,
    )
