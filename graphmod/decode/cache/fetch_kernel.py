"""The kernel of `fetch`. Importing this module needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 32  # as many as fill the bus, and leave the multiprocessors to what computes
_BYTES = 16384  # of a copy that is on its way, in each program


@triton.jit
def _copy(
    keys,
    values,
    near_keys,
    near_values,
    table,
    contexts,
    firsts,
    rows,
    table_row,
    BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Some chunks of the blocks of all rows: however long each row is, all programs have as much to do."""
    key_chunks: tl.constexpr = (KEY_BLOCK + CHUNK - 1) // CHUNK
    chunks: tl.constexpr = key_chunks + (VALUE_BLOCK + CHUNK - 1) // CHUNK
    row, step = tl.arange(0, ROWS), tl.arange(0, CHUNK)
    begin = tl.load(firsts + row, mask=row < rows, other=0) if WINDOW else row * 0
    begin = (tl.maximum(begin, 0) // BLOCK).to(tl.int32)
    end = ((tl.load(contexts + row, mask=row < rows, other=1) - 1 + BLOCK - 1) // BLOCK).to(tl.int32)
    count = tl.maximum(end - begin, 0) * chunks
    until = tl.cumsum(count, 0)
    for at in tl.range(tl.program_id(0), tl.sum(count, 0), tl.num_programs(0)):
        mine = tl.sum((until <= at).to(tl.int32), 0)
        within = at - tl.sum(tl.where(row < mine, count, 0), 0)
        place = tl.sum(tl.where(row == mine, begin, 0), 0) + within // chunks
        block = tl.load(table + mine * table_row + place).to(tl.int64)
        # Who shares a block holds it at the same place, and the first of them copies it.
        held = (row < mine) & (begin <= place) & (place < end)
        same = tl.load(table + row * table_row + place, mask=held, other=-1) == block
        if tl.sum(same.to(tl.int32), 0) == 0:
            chunk = within % chunks
            if chunk < key_chunks:
                inside = chunk * CHUNK + step < KEY_BLOCK
                where = block * KEY_BLOCK + chunk * CHUNK + step
                tl.store(near_keys + where, tl.load(keys + where, mask=inside), mask=inside)
            else:
                chunk -= key_chunks
                inside = chunk * CHUNK + step < VALUE_BLOCK
                where = block * VALUE_BLOCK + chunk * CHUNK + step
                tl.store(near_values + where, tl.load(values + where, mask=inside), mask=inside)


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
    _copy[(_PROGRAMS,)](
        keys,
        values,
        near_keys,
        near_values,
        table,
        context,
        context if first is None else first,
        rows,
        table.stride(0),
        BLOCK=keys.shape[1],
        KEY_BLOCK=keys[0].numel(),
        VALUE_BLOCK=values[0].numel(),
        ROWS=triton.next_power_of_2(rows),
        WINDOW=first is not None,
        CHUNK=_BYTES // keys.element_size(),
        num_warps=4,
    )
