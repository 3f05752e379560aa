"""The kernels of `triton_decode`. Importing this module needs Triton.

Each row's tokens are divided into parts that are worked on at the same time, and added up by a second kernel
("flash decoding": Dao, Haziza, Massa, Sizov, 2023; the softmax of parts: Milakov, Gimelshein, arXiv:1805.02867).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 4  # for each multiprocessor: rows differ in length, and a program waits for memory most of the time
_MOST_PARTS = 64


@triton.jit
def _parts(
    query,
    keys,
    values,
    table,
    contexts,
    firsts,
    sinks,
    out,
    sums,
    scale,
    cap,
    query_row,
    query_head,
    table_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """A part of a row's tokens, for the query heads of one KV head: their weighted values, maximum and sum."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    member, width, column = tl.arange(0, GROUP_ROWS), tl.arange(0, HEAD), tl.arange(0, VALUE)
    there = member < GROUP
    heads = head * GROUP + member
    asked = tl.load(
        query + row * query_row + heads[:, None] * query_head + width[None, :], mask=there[:, None], other=0.0
    )
    context = tl.load(contexts + row)
    first = tl.load(firsts + row) if WINDOW else context * 0
    tiles = (context + TILE - 1) // TILE - first // TILE
    each = (tiles + PARTS - 1) // PARTS
    begin = first // TILE + part * each
    end = tl.minimum(begin + each, (context + TILE - 1) // TILE)
    largest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    result = tl.zeros([GROUP_ROWS, VALUE], tl.float32)
    if SINKS:  # one more token, whose value is nothing
        own = there & (part == 0)
        largest = tl.load(sinks + heads, mask=own, other=float("-inf")).to(tl.float32)
        total = tl.where(own, 1.0, 0.0)
    step = tl.arange(0, TILE)
    for tile in tl.range(begin, end):
        block = tl.load(table + row * table_row + tile * TILE // BLOCK).to(tl.int64)
        slot = block * BLOCK + (tile * TILE) % BLOCK + step
        key = tl.load(keys + (slot[None, :] * KV_HEADS + head) * HEAD + width[:, None])
        score = tl.dot(asked, key, input_precision="ieee") * scale
        if CAPPED:
            score = cap * (2 / (1 + tl.exp(-2 * score / cap)) - 1)  # tanh
        token = tile * TILE + step
        seen = token < context
        if WINDOW:
            seen = seen & (token >= first)
        score = tl.where(seen[None, :], score, float("-inf"))
        now = tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(now == float("-inf"), 0.0, now)
        before, weight = tl.exp(largest - shift), tl.exp(score - shift[:, None])
        value = tl.load(values + (slot[:, None] * KV_HEADS + head) * VALUE + column[None, :])
        # A slot behind the context may hold anything, and zero times NaN is NaN.
        value = tl.where(seen[:, None], value, 0.0)
        result = result * before[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * before + tl.sum(weight, 1)
        largest = now
    place = (row * KV_HEADS * GROUP + heads) * PARTS + part
    if PARTS == 1:
        result = result / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + place[:, None] * VALUE + column[None, :], result, mask=there[:, None])
    tl.store(sums + place * 2, largest, mask=there)
    tl.store(sums + place * 2 + 1, total, mask=there)


@triton.jit
def _whole(results, sums, out, VALUE: tl.constexpr, PARTS: tl.constexpr):
    """One head of one row, from its parts."""
    place = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, PARTS), tl.arange(0, VALUE)
    largest = tl.load(sums + (place * PARTS + part) * 2)
    total = tl.load(sums + (place * PARTS + part) * 2 + 1)
    most = tl.max(largest, 0)
    scale = tl.exp(largest - tl.where(most == float("-inf"), 0.0, most))
    found = tl.load(results + (place * PARTS + part[:, None]) * VALUE + column[None, :])
    whole = tl.sum(total * scale, 0)
    result = tl.sum(found * scale[:, None], 0) / tl.where(whole == 0, 1.0, whole)
    tl.store(out + place * VALUE + column, result)


@functools.cache
def _programs(device: torch.device) -> int:
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def parts_of(rows: int, kv_heads: int, tiles: int, programs: int) -> int:
    """Into how many parts the tokens of each row are divided: a power of two, so that the GPU is full."""
    wanted = triton.next_power_of_2(max(1, programs // (rows * kv_heads)))
    return min(_MOST_PARTS, wanted, triton.next_power_of_2(tiles))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    context: Tensor,
    first: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    cap: float | None,
) -> Tensor:
    """See `triton_decode`, whose arguments these are."""
    rows, heads, _, head = query.shape
    block, kv_heads, value = keys.shape[1], keys.shape[2], values.shape[3]
    tile = min(block, 64 if head <= 128 else 32)
    group = heads // kv_heads
    parts = parts_of(rows, kv_heads, table.shape[1] * block // tile, _programs(query.device))
    out = query.new_empty((rows, 1, heads, value))
    results = out if parts == 1 else query.new_empty((rows, heads, parts, value), dtype=torch.float32)
    sums = query.new_empty((rows, heads, parts, 2), dtype=torch.float32)
    _parts[(rows, kv_heads, parts)](
        query,
        keys,
        values,
        table,
        context,
        context if first is None else first,
        sums if sinks is None else sinks,
        results,
        sums,
        scale,
        0.0 if cap is None else cap,
        query.stride(0),
        query.stride(1),
        table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD=head,
        VALUE=value,
        BLOCK=block,
        TILE=tile,
        PARTS=parts,
        WINDOW=first is not None,
        CAPPED=cap is not None,
        SINKS=sinks is not None,
        GROUP_ROWS=max(16, triton.next_power_of_2(group)),
        num_warps=4,
        num_stages=3,
    )
    if parts > 1:
        _whole[(rows * heads,)](results, sums, out, VALUE=value, PARTS=parts, num_warps=4)
    return out
