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
    listed,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ALL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Some chunks of the listed blocks."""
    key_chunks: tl.constexpr = (KEY_BLOCK + CHUNK - 1) // CHUNK
    chunks: tl.constexpr = key_chunks + (VALUE_BLOCK + CHUNK - 1) // CHUNK
    step = tl.arange(0, CHUNK)
    begin = 0 if ALL else tl.load(listed).to(tl.int32)
    end = tl.load(listed + 1).to(tl.int32)
    for at in tl.range(begin * chunks + tl.program_id(0), end * chunks, tl.num_programs(0)):
        block = tl.load(listed + 2 + at // chunks)
        chunk = at % chunks
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
    keys: Tensor, values: Tensor, near_keys: Tensor, near_values: Tensor, listed: Tensor, beside_copy_nodes: bool
) -> None:
    """See `fetch`, whose arguments these are.

    Args:
        beside_copy_nodes: whether it leaves out what these bring.
    """
    _copy[(_PROGRAMS,)](
        keys,
        values,
        near_keys,
        near_values,
        listed,
        KEY_BLOCK=keys[0].numel(),
        VALUE_BLOCK=values[0].numel(),
        ALL=not beside_copy_nodes,
        CHUNK=_BYTES // keys.element_size(),
        num_warps=4,
    )
