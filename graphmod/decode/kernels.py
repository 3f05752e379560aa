"""The Triton kernels of decode: attention over the cache, sums that do not depend on the batch, copies of far blocks,
and what gathers columns for prefill.
Importing this module needs Triton.

In attention each row's tokens are divided into parts that are worked on at the same time ("flash decoding": Dao,
Haziza, Massa, Sizov, 2023; the softmax of parts: Milakov, Gimelshein, arXiv:1805.02867). Whoever ends last adds them
up.
"""

from itertools import repeat
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library
from triton.tools.tensor_descriptor import TensorDescriptor

from graphmod.fuse.kernels import can_start_early, early_launch, stages

_MOST_PARTS = 64
_MOST_ROWS = 65535  # of a launch
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    query,
    keys,
    values,
    table,
    contexts,
    firsts,
    sinks,
    counters,
    out,
    results,
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
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    BULK: tl.constexpr,
    LATE: tl.constexpr,
):
    """A part of a row's tokens, for the query heads of one KV head. Exponentials are powers of two. With BULK, keys and
    values are descriptors of (slots, KV heads * width) in tiles of (TILE, width). With LATE, what comes next may start
    once they have been read: else they drive out of the cache what it brings there."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    member, width, column = tl.arange(0, GROUP_ROWS), tl.arange(0, HEAD), tl.arange(0, VALUE)
    there = member < GROUP
    heads = head * GROUP + member
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
    context = tl.load(contexts + row).to(tl.int32)
    first = tl.load(firsts + row).to(tl.int32) if WINDOW else context * 0
    last = (context + TILE - 1) // TILE
    each = tl.maximum((last - first // TILE + PARTS - 1) // PARTS, 1)
    parts = tl.maximum((last - first // TILE + each - 1) // each, 1)  # those that have anything to do
    if part >= parts:
        return
    begin = first // TILE + part * each
    end = tl.minimum(begin + each, last)
    asked = tl.load(
        query + row * query_row + heads[:, None] * query_head + width[None, :], mask=there[:, None], other=0.0
    )
    largest = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    result = tl.zeros([GROUP_ROWS, VALUE], tl.float32)
    if SINKS:  # one more token, whose value is nothing
        own = there & (part == 0)
        largest = tl.load(sinks + heads, mask=own, other=float("-inf")).to(tl.float32) * _LOG2E
        total = tl.where(own, 1.0, 0.0)
    step = tl.arange(0, TILE)
    for tile in tl.range(begin, end, num_stages=STAGES):
        block = tl.load(table + row * table_row + tile * TILE // BLOCK)
        if BULK:
            start = block.to(tl.int32) * BLOCK + (tile * TILE) % BLOCK
            key = tl.trans(keys.load([start, head * HEAD]))
        else:
            slot = block.to(tl.int64) * BLOCK + (tile * TILE) % BLOCK + step
            key = tl.load(keys + (slot[None, :] * KV_HEADS + head) * HEAD + width[:, None])
        score = tl.dot(asked, key, input_precision="ieee") * scale
        if CAPPED:
            score = cap * (2 / (1 + tl.exp(-2 * score / cap)) - 1)  # tanh
        token = tile * TILE + step
        seen = token < context
        if WINDOW:
            seen = seen & (token >= first)
        score = tl.where(seen[None, :], score * _LOG2E, float("-inf"))
        now = tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(now == float("-inf"), 0.0, now)
        before, weight = tl.exp2(largest - shift), tl.exp2(score - shift[:, None])
        if BULK:
            value = values.load([start, head * VALUE])
        else:
            value = tl.load(values + (slot[:, None] * KV_HEADS + head) * VALUE + column[None, :])
        # A slot behind the context may hold anything, and zero times NaN is NaN.
        value = tl.where(seen[:, None], value, 0.0)
        result = result * before[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        total = total * before + tl.sum(weight, 1)
        largest = now
    if EARLY and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    place = (row * KV_HEADS + head) * GROUP
    if parts == 1:
        result = result / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + (place + member)[:, None] * VALUE + column[None, :], result, mask=there[:, None])
        return
    own_place = (place + member) * PARTS + part
    tl.store(results + own_place[:, None] * VALUE + column[None, :], result, mask=there[:, None])
    tl.store(sums + own_place * 2, largest, mask=there)
    tl.store(sums + own_place * 2 + 1, total, mask=there)
    tl.debug_barrier()  # all of it is stored before one thread says so
    counter = counters + row * KV_HEADS + head
    if tl.atomic_add(counter, 1, sem="acq_rel") < parts - 1:
        return
    tl.store(counter, 0)  # as it was found
    every = tl.arange(0, PARTS)
    for one in tl.static_range(GROUP):
        at = (place + one) * PARTS + every
        # From the L2 cache, in which other multiprocessors have left it.
        largest_of = tl.load(sums + at * 2, mask=every < parts, other=float("-inf"), cache_modifier=".cg")
        total_of = tl.load(sums + at * 2 + 1, mask=every < parts, other=0.0, cache_modifier=".cg")
        most = tl.max(largest_of, 0)
        weight_of = tl.exp2(largest_of - tl.where(most == float("-inf"), 0.0, most))
        found = tl.load(
            results + at[:, None] * VALUE + column[None, :],
            mask=(every < parts)[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        whole = tl.sum(total_of * weight_of, 0)
        mixed = tl.sum(found * weight_of[:, None], 0) / tl.where(whole == 0, 1.0, whole)
        tl.store(out + (place + one) * VALUE + column, mixed)


def parts_of(rows: int, kv_heads: int, pieces: int, processors: int) -> int:
    """Into how many parts the tokens of a row are divided at most: a power of two, so that the GPU is full.

    Args:
        pieces: so large that no part is much smaller than what it takes to add parts up.
    """
    wanted = triton.next_power_of_2(max(1, 4 * processors // (rows * kv_heads)))
    return min(_MOST_PARTS, wanted, triton.next_power_of_2(max(1, pieces)))


def _comes_in_bulk(memory: Tensor) -> bool:
    """Whether the tensor memory accelerator, where there is one, takes tiles of it: up to 256 bytes of a head."""
    return memory.itemsize == 2 and 32 <= memory[0, 0, 0].nbytes <= 256


def _described(memory: Tensor, tile: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(memory.flatten(2).flatten(0, 1), [tile, memory.shape[3]])


# For an operation that does not take any strides, inductor makes copies of the table and the query for each layer.
@library.custom_op("graphmod::triton_decode", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    context: Tensor,
    first: Tensor | None,
    sinks: Tensor | None,
    counters: Tensor,
    scale: float,
    cap: float | None,
    one_part: int | None = None,
) -> Tensor:
    """One token of each row against its part of the cache; (B, 1, heads, value_dim) in the dtype of `query`.

    It is said to change nothing: the kernel leaves `counters` zero, as it found them.

    Args:
        query: (B, heads, 1, head_dim), its last dimension contiguous.
        keys, values: (blocks, block_size, kv_heads, head_dim or value_dim), contiguous, of the dtype of `query`.
        table: (B, blocks of a sequence) integers, its last dimension contiguous.
        context: (B,) int64: tokens of each row; a row without any gets zeros.
        first: (B,) int64: the first token that is seen; None sees all.
        sinks: (heads,) logits of attention sinks, or None.
        counters: (B * kv_heads or more) int32, zero.
        scale: of the products of queries and keys.
        cap: what scores are capped at by a tanh; None caps nothing.
        one_part: so many tokens are added up at a time, one after the other, whatever the batch; None divides rows as
            is fastest.
    """
    if len(query) > _MOST_ROWS:
        parts_of_rows = (one.split(_MOST_ROWS) for one in (query, table, context))
        begins = repeat(None) if first is None else first.split(_MOST_ROWS)
        found = [
            attend(asked, keys, values, blocks, length, begin, sinks, counters, scale, cap, one_part)
            for asked, blocks, length, begin in zip(*parts_of_rows, begins, strict=False)
        ]
        return torch.cat(found)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    rows, heads, _, head = query.shape
    block, kv_heads, value = keys.shape[1], keys.shape[2], values.shape[3]
    group = heads // kv_heads
    few = rows * kv_heads < processors
    tile = one_part or min(block, 32 if (few and rows > 1) or max(head, value) > 128 else 64)
    least = min(4 * tile, 128 if few else 256)  # tokens of a part
    parts = 1 if one_part else parts_of(rows, kv_heads, table.shape[1] * block // least, processors)
    early = can_start_early(query.device)  # and the accelerator is there
    bulk = early and not one_part and _comes_in_bulk(keys) and _comes_in_bulk(values)
    # The fastest of some 80 settings on an H200, for 32 and 128 rows of Qwen3-0.6B's shape; for one row, of 36 over 544
    # to 16,000 tokens, what is never far from the fastest.
    tiles = stages(2 if bulk or few else 3, tile * (head + value) * keys.itemsize, query.device)
    out = query.new_empty((rows, 1, heads, value))
    results = query.new_empty((rows, heads, parts, value) if parts > 1 else 1, dtype=torch.float32)
    sums = query.new_empty((rows, heads, parts, 2) if parts > 1 else 1, dtype=torch.float32)
    with torch.cuda.device_of(query):  # the device whose stream it is launched on
        _attend[(parts, kv_heads, rows)](
            query,
            _described(keys, tile) if bulk else keys,
            _described(values, tile) if bulk else values,
            table,
            context,
            context if first is None else first,
            sums if sinks is None else sinks,
            counters,
            out,
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
            STAGES=tiles,
            EARLY=early,
            BULK=bulk,
            LATE=not few,
            num_warps=2 if few or parts == 1 else 4,
            **early_launch(early),
        )
    return out


@attend.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *others: Any) -> Tensor:
    return query.new_empty((len(query), 1, query.shape[1], values.shape[3]))


# -- sums that are divided by their length alone, see `invariant` ------------------------------------------------------


@triton.jit
def _product(
    left,
    right,
    bias,
    out,
    rows,
    columns,
    length,
    left_row,
    left_column,
    right_row,
    right_column,
    BIAS: tl.constexpr,
    FAR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, length, INNER):
        inner = begin + tl.arange(0, INNER)
        there = inner < length
        if FAR:
            inner = inner.to(tl.int64)
        first = tl.load(
            left + row[:, None] * left_row + inner[None, :] * left_column,
            mask=(row < rows)[:, None] & there[None, :],
            other=0.0,
        )
        second = tl.load(
            right + inner[:, None] * right_row + column[None, :] * right_column,
            mask=there[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        total = tl.dot(first, second, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], total, mask=inside)


@library.custom_op("graphmod::invariant_product", mutates_args=())
def invariant_product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """(M, N) of (M, K) and (K, N) of any strides, and a bias (N,) or None; in the dtype of `left`."""
    (rows, length), columns = left.shape, right.shape[1]
    out = left.new_empty((rows, columns))
    few = rows <= 16
    # Never 64 rows: from there on Hopper has other instructions, which round otherwise.
    sizes = {"ROWS": 16, "COLUMNS": 32, "INNER": 128} if few else {"ROWS": 32, "COLUMNS": 128, "INNER": 64}
    if left.dtype == torch.float32:
        sizes["INNER"] //= 2
    with torch.cuda.device_of(left):
        if out.numel():
            _product[(triton.cdiv(rows, sizes["ROWS"]), triton.cdiv(columns, sizes["COLUMNS"]))](
                left,
                right,
                left if bias is None else bias,
                out,
                rows,
                columns,
                length,
                *left.stride(),
                *right.stride(),
                BIAS=bias is not None,
                # As in the gradient of a large vocabulary: 32 bits do not reach the last number.
                FAR=(length + sizes["INNER"]) * max(left.stride(1), right.stride(0)) >= 2**31,
                **sizes,
                num_warps=4,
                num_stages=3,
            )
    return out


@invariant_product.register_fake
def _(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]))


_CHUNK = 4096


@triton.jit
def _reduce(source, out, length, CHUNK: tl.constexpr, MEAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, CHUNK)
    shift = 0.0
    if not MEAN:
        largest = tl.full([CHUNK], float("-inf"), tl.float32)
        for begin in tl.range(0, length, CHUNK):
            at = begin + step
            found = tl.load(source + row * length + at, mask=at < length, other=float("-inf")).to(tl.float32)
            # NaN is kept, as log-sum-exp has it.
            largest = tl.maximum(largest, found, propagate_nan=tl.PropagateNan.ALL)
        most = tl.max(largest, 0)
        shift = tl.where((most == float("-inf")) | (most == float("inf")), 0.0, most)
    total = tl.zeros([CHUNK], tl.float32)
    for begin in tl.range(0, length, CHUNK):
        at = begin + step
        if MEAN:
            total += tl.load(source + row * length + at, mask=at < length, other=0.0).to(tl.float32)
        else:
            found = tl.load(source + row * length + at, mask=at < length, other=float("-inf")).to(tl.float32)
            total += tl.exp(found - shift)
    whole = tl.sum(total, 0)
    tl.store(out + row, whole / length if MEAN else shift + tl.log(whole))


def _reduced(source: Tensor, mean: bool) -> Tensor:
    length = source.shape[-1]
    rows = source.contiguous().view(-1, length)
    out = source.new_empty(source.shape[:-1])
    chunk = min(_CHUNK, triton.next_power_of_2(length))
    with torch.cuda.device_of(source):
        if len(rows):
            _reduce[(len(rows),)](rows, out, length, CHUNK=chunk, MEAN=mean, num_warps=4)
    return out


@library.custom_op("graphmod::invariant_mean", mutates_args=())
def invariant_mean(source: Tensor) -> Tensor:
    """The mean over the last dimension, without it, in the dtype of `source`."""
    return _reduced(source, True)


@library.custom_op("graphmod::invariant_logsumexp", mutates_args=())
def invariant_logsumexp(source: Tensor) -> Tensor:
    """Its log-sum-exp over the last dimension, without it, in the dtype of `source`."""
    return _reduced(source, False)


@invariant_mean.register_fake
@invariant_logsumexp.register_fake
def _(source: Tensor) -> Tensor:
    return source.new_empty(source.shape[:-1])


_FETCH_PROGRAMS = 32  # as many as fill the bus, and leave the multiprocessors to what computes
_FETCH_BYTES = 16384  # of a copy that is on its way, in each program


@triton.jit
def _fetch(
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


def fetch(
    keys: Tensor, values: Tensor, near_keys: Tensor, near_values: Tensor, listed: Tensor, beside_copy_nodes: bool
) -> None:
    """See `offload.fetch`, whose arguments these are.

    Args:
        beside_copy_nodes: whether it leaves out what these bring.
    """
    _fetch[(_FETCH_PROGRAMS,)](
        keys,
        values,
        near_keys,
        near_values,
        listed,
        KEY_BLOCK=keys[0].numel(),
        VALUE_BLOCK=values[0].numel(),
        ALL=not beside_copy_nodes,
        CHUNK=_FETCH_BYTES // keys.element_size(),
        num_warps=4,
    )


_GATHER_PROGRAMS = 256  # of each chunk of a row
_GATHER_ROWS = 8  # that a program has on their way
_GATHER_CHUNK = 1024  # numbers


@triton.jit
def _gather_rows(source, target, slot, at, there, chunk, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
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
            _gather_rows(keys, to_keys, slot, at, there, chunk, KEY, CHUNK)
        else:
            _gather_rows(values, to_values, slot, at, there, chunk - key_chunks, VALUE, CHUNK)


def gather(keys: Tensor, values: Tensor, slots: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """See `prefill.gather_columns`.

    Args:
        count: int32, whose first number is how many there are.
    """
    found = keys.new_empty((len(slots), *keys.shape[2:])), values.new_empty((len(slots), *values.shape[2:]))
    key, value = keys[0, 0].numel(), values[0, 0].numel()
    chunk = min(_GATHER_CHUNK, triton.next_power_of_2(max(key, value)))
    programs = min(_GATHER_PROGRAMS, triton.cdiv(len(slots), _GATHER_ROWS))
    _gather[(programs, triton.cdiv(key, chunk) + triton.cdiv(value, chunk))](
        *(keys, values, slots, count, *found), KEY=key, VALUE=value, ROWS=_GATHER_ROWS, CHUNK=chunk, num_warps=4
    )
    return found
