"""The Triton kernels of compiled steps: products of few rows, and parts of long reductions. Importing this module needs
Triton.

Kernels use programmatic dependent launch where there is such (CUDA Programming Guide, "Programmatic Dependent Launch
and Synchronization"): a kernel may be launched before the one before it has ended, and waits for it itself. Before it
waits, a kernel may not touch what any kernel of the step writes: not only the one before it may still run, as that may
let the next one start before it has waited itself. Each kernel waits, so that one that has ended says the same of all
before it. What comes before a step has ended when the step begins, since a graph waits for it.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

# -- early launch ------------------------------------------------------------------------------------------------------


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Whether Triton kernels of this package can be launched early on a device."""
    known = torch.version.hip is None and hasattr(tl.extra.cuda, "gdc_wait")
    return known and torch.cuda.get_device_capability(device) >= (9, 0)


def early_launch(early: bool) -> dict[str, bool]:
    """For the launch of a Triton kernel."""
    return {"launch_pdl": True} if early else {}


# -- what the products have in common ----------------------------------------------------------------------------------

_MOST_PREFETCHED = 16 * 2**20  # bytes of weights: a part of the cache, so that they are there when wanted
_MOST_STAGES = 4
_LINE: tl.constexpr = tl.constexpr(128)  # bytes of a line of the cache


@triton.jit
def place(
    program,
    first_weight,
    second_weight,
    third_weight,
    first_out,
    second_out,
    third_out,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    OUT: tl.constexpr,
):
    """The weight and the result that a program works on, the columns of these, and the first that it makes: each makes
    OUT, and the programs of the results follow one another."""
    second: tl.constexpr = FIRST // OUT
    third: tl.constexpr = second + SECOND // OUT
    weight, out = first_weight, first_out
    if program >= third:
        weight, out = third_weight, third_out
    elif program >= second:
        weight, out = second_weight, second_out
    before = tl.where(program >= third, third, tl.where(program >= second, second, 0))
    width = tl.where(program >= third, THIRD, tl.where(program >= second, SECOND, FIRST))
    return weight, out, width, (program - before) * OUT


@triton.jit
def prefetch(begin, FEATURES: tl.constexpr, DEPTH: tl.constexpr):
    """Brings FEATURES numbers of the rows of a weight that begin there into the L2 cache; a multiple of DEPTH."""
    each: tl.constexpr = _LINE * 8 // begin.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, DEPTH // each) * each
    for start in tl.range(0, FEATURES, DEPTH):
        lines = begin + start + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], tl.int32, False, 1
        )


@triton.jit
def _widened(weight, dtype: tl.constexpr):
    """Numbers of a weight in float32 or half precision, which hold those of 8 bits exactly."""
    if weight.dtype == tl.int8 and dtype == tl.float32:
        # Each becomes the last byte of a float from 2**23 on, from which that is taken: a GPU converts a quarter as
        # many integers as it adds floats.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 word, a, b, c, d;
            xor.b32 word, $4, 0x80808080;
            prmt.b32 a, word, 0x4B000000, 0x7540;
            prmt.b32 b, word, 0x4B000000, 0x7541;
            prmt.b32 c, word, 0x4B000000, 0x7542;
            prmt.b32 d, word, 0x4B000000, 0x7543;
            add.f32 $0, a, 0fCB000080;
            add.f32 $1, b, 0fCB000080;
            add.f32 $2, c, 0fCB000080;
            add.f32 $3, d, 0fCB000080;
            }""",
            "=f,=f,=f,=f,r",
            [weight],
            tl.float32,
            True,
            4,
        )
    elif weight.dtype == tl.float8e4nv:  # by way of what GPUs have an instruction for
        return weight.to(tl.float16).to(dtype)
    else:
        return weight.to(dtype)


def prefetched(features: int, columns: int, parts: int, depth: int, itemsize: int = 2) -> int:
    """How many features of a part are brought into the cache."""
    most = _MOST_PREFETCHED // (columns * parts * itemsize) // depth * depth
    return min(features // parts, most)


@functools.cache
def stages(most: int, tile: int, device: torch.device) -> int:
    """How many tiles of so many bytes a multiprocessor has shared memory for, at most `most`."""
    properties = torch.cuda.get_device_properties(device)
    return max(1, min(most, getattr(properties, "shared_memory_per_block_optin", 48 * 1024) // tile))


# -- products of one row -----------------------------------------------------------------------------------------------

# Columns of a program, and features of a column that it loads at once. What is loaded before the input is there is all
# that matters: of some 20 settings on an H200 this is the fastest for a layer of Qwen3-0.6B (22.7 us, 30.3 if it waits
# for its input first) and within 1 % of it for one of Qwen3-8B, when each let the next kernel start after its wait.
_ROW_OUT, _ROW_DEPTH = 4, 4096
_ROW_OUT_8 = 2  # of weights of 8 bits, whose numbers have to be converted


@triton.jit
def _tile(at, column, start: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr):
    """Numbers of a row or weight, behind which there is nothing."""
    if start + DEPTH > FEATURES:
        return tl.load(at + start, mask=column < FEATURES - start, other=0.0)
    return tl.load(at + start)


@triton.jit
def _multiply_row(
    x,
    first_weight,
    second_weight,
    third_weight,
    first_scale,
    second_scale,
    third_scale,
    first_out,
    second_out,
    third_out,
    FEATURES: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Each program makes OUT columns of one result; gated, of the first two weights together."""
    # At once: most products have a small kernel or attention behind them, and the next product waits for that.
    tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    weight, out, _, column = place(
        program, first_weight, second_weight, third_weight, first_out, second_out, third_out, FIRST, SECOND, THIRD, OUT
    )
    column += tl.arange(0, OUT)
    depth = tl.arange(0, DEPTH)
    begin = column[:, None].to(tl.int64) * FEATURES + depth[None, :]
    some = _tile(weight + begin, depth[None, :], 0, FEATURES, DEPTH)
    if GATED:
        others = _tile(second_weight + begin, depth[None, :], 0, FEATURES, DEPTH)
    if SCALED:
        scale, _, _, _ = place(
            program, first_scale, second_scale, third_scale, first_out, second_out, third_out, FIRST, SECOND, THIRD, OUT
        )
        factor = tl.load(scale + column)
        if GATED:
            other_factor = tl.load(second_scale + column)
    # The kernel before may still run. It makes the input, but no weight: those come meanwhile.
    tl.extra.cuda.gdc_wait()
    taken = _tile(x + depth, depth, 0, FEATURES, DEPTH).to(tl.float32)[None, :]
    total = tl.sum(_widened(some, tl.float32) * taken, 1)
    if GATED:
        given = tl.sum(_widened(others, tl.float32) * taken, 1)
    for start in tl.static_range(DEPTH, FEATURES, DEPTH):
        taken = _tile(x + depth, depth, start, FEATURES, DEPTH).to(tl.float32)[None, :]
        some = _tile(weight + begin, depth[None, :], start, FEATURES, DEPTH)
        total += tl.sum(_widened(some, tl.float32) * taken, 1)
        if GATED:
            others = _tile(second_weight + begin, depth[None, :], start, FEATURES, DEPTH)
            given += tl.sum(_widened(others, tl.float32) * taken, 1)
    if SCALED:
        total *= factor
        if GATED:
            given *= other_factor
    if GATED:
        total = total / (1 + tl.exp(-total)) * given
    tl.store(out + column, total.to(out.dtype.element_ty))


def multiply_row(
    x: Tensor, weights: list[Tensor], scales: list[Tensor], widths: list[int], outs: list[Tensor], gated: bool
) -> None:
    """See `operations.multiply`; of one row, for GPUs of compute capability 9.0 and newer."""
    features = x.shape[1]
    widths = [*widths[:1], 0, 0] if gated else widths
    columns = _ROW_OUT_8 if scales else _ROW_OUT
    _multiply_row[(sum(widths) // columns,)](
        x,
        *weights,
        *(scales or weights),
        *outs,
        features,
        *widths,
        OUT=columns,
        DEPTH=min(_ROW_DEPTH, triton.next_power_of_2(features)),
        GATED=gated,
        SCALED=bool(scales),
        num_warps=8 if features >= _ROW_DEPTH and not scales else 4,
        **early_launch(True),
    )


# -- products of some rows ---------------------------------------------------------------------------------------------

# What a program works on: columns and features of a weight at a time, and by how many warps. Of some 120 settings
# on an H200 the fastest, or within 0.1 us of it, for Qwen3-0.6B's weights and 32 rows: query, key and value 4.6 us
# (13.1 one after the other); gate and up 5.3 (10.3). The weight is the left factor because it has the 64 rows that
# newer tensor cores take there, which an input often has not.
_OUT, _DEPTH, _WARPS = 64, 128, 4
# With weights of 8 bits the input is the left factor up to so many rows. Products of a layer of Qwen3-8B, each timed by
# itself on an H200: 60 us with 4 rows and 90 with 32 that way, 83 and 94 the other way, in bfloat16 102 and 107. With
# 128 rows the other way takes 134, in bfloat16 142; all of a layer one after the other took 195 this way.
_MOST_LEFT = 32


@triton.jit(do_not_specialize=["rows"])
def _multiply_batch(
    x,
    first_weight,
    second_weight,
    third_weight,
    first_scale,
    second_scale,
    third_scale,
    first_out,
    second_out,
    third_out,
    rows,
    FEATURES: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCHED: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    LEFT: tl.constexpr,
):
    """Each program makes OUT columns of one result, for all rows, of a part of the features. Gated, it makes half as
    many columns of the first two weights, and of these one.

    LEFT: whether the input is the left factor. Tensor cores then take weights from registers, where they are converted.
    """
    program, part = tl.program_id(0), tl.program_id(1)
    each: tl.constexpr = FEATURES // PARTS
    row, depth, lane = tl.arange(0, ROWS), tl.arange(0, DEPTH), tl.arange(0, OUT)
    if GATED:
        # Columns of the one weight and of the other in turn, so that a thread that holds a number of the one also holds
        # that of the other: eight of each where the weight is the left factor (PTX ISA, "Register Fragments for
        # wgmma").
        run: tl.constexpr = 1 if LEFT else 8
        first = lane // run % 2 == 0
        out, width = first_out, FIRST
        column = program * (OUT // 2) + lane // (2 * run) * run + lane % run
        weight = tl.where(first, first_weight, second_weight)[:, None]
    else:
        weight, out, width, column = place(
            program,
            first_weight,
            second_weight,
            third_weight,
            first_out,
            second_out,
            third_out,
            FIRST,
            SECOND,
            THIRD,
            OUT,
        )
        column += lane
    begin = weight + column[:, None].to(tl.int64) * FEATURES + part * each
    if SCALED:
        if GATED:
            scale = tl.where(first, first_scale, second_scale)
        else:
            scale, _, _, _ = place(
                program,
                first_scale,
                second_scale,
                third_scale,
                first_out,
                second_out,
                third_out,
                FIRST,
                SECOND,
                THIRD,
                OUT,
            )
        factor = tl.load(scale + column)
    there = row < rows
    if EARLY:
        # The kernel before may still run. It makes the input, but no weight: those come into the cache meanwhile.
        prefetch(begin, PREFETCHED, DEPTH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    weights = begin + depth[None, :]
    if LEFT:
        inputs = x + row[:, None] * FEATURES + part * each + depth[None, :]
        total = tl.zeros((ROWS, OUT), tl.float32)
        for start in tl.range(0, each, DEPTH, num_stages=STAGES):
            taken = tl.load(inputs + start, mask=there[:, None], other=0.0)
            total = tl.dot(taken, tl.trans(_widened(tl.load(weights + start), taken.dtype)), total)
        if SCALED:
            total *= factor[None, :]
        if GATED:
            opened, given = tl.split(tl.reshape(total, (ROWS, OUT // 2, 2)))
            total = opened / (1 + tl.exp(-opened)) * given
            column = program * (OUT // 2) + tl.arange(0, OUT // 2)
        at, kept = (part * rows + row)[:, None] * width + column[None, :], there[:, None]
    else:
        inputs = x + row[None, :] * FEATURES + part * each + depth[:, None]
        total = tl.zeros((OUT, ROWS), tl.float32)
        for start in tl.range(0, each, DEPTH, num_stages=STAGES):
            taken = tl.load(inputs + start, mask=there[None, :], other=0.0)
            total = tl.dot(_widened(tl.load(weights + start), taken.dtype), taken, total)
        if SCALED:
            total *= factor[:, None]
        if GATED:
            pairs = tl.permute(tl.reshape(total, (OUT // 16, 2, 8, ROWS)), (0, 2, 3, 1))
            opened, given = tl.split(pairs)
            total = tl.reshape(opened / (1 + tl.exp(-opened)) * given, (OUT // 2, ROWS))
            column = program * (OUT // 2) + tl.arange(0, OUT // 2)
        at, kept = (part * rows + row)[None, :] * width + column[:, None], there[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=kept)


def multiply_batch(
    x: Tensor,
    weights: list[Tensor],
    scales: list[Tensor],
    widths: list[int],
    outs: list[Tensor],
    parts: int,
    gated: bool,
) -> None:
    """See `operations.multiply`; of up to 128 rows."""
    rows, features, itemsize = max(16, triton.next_power_of_2(len(x))), x.shape[1], weights[0].itemsize
    early = can_start_early(x.device)
    _multiply_batch[(sum(widths) // _OUT, parts)](
        x,
        *weights,
        *(scales or weights),
        *outs,
        len(x),
        features,
        *widths,
        PARTS=parts,
        ROWS=rows,
        OUT=_OUT,
        DEPTH=_DEPTH,
        STAGES=stages(_MOST_STAGES, _DEPTH * (2 * rows + itemsize * _OUT), x.device),
        EARLY=early,
        PREFETCHED=prefetched(features, sum(widths), parts, _DEPTH, itemsize),
        GATED=gated,
        SCALED=bool(scales),
        LEFT=bool(scales) and rows <= _MOST_LEFT,
        num_warps=_WARPS,
        **early_launch(early),
    )


# -- products of many rows, whose tiles the tensor memory accelerator brings -------------------------------------------

# With 128 rows on an H200 a layer of Qwen3-0.6B, whose gate and up `multiply_batch` makes, takes 120.7 us; 125 where
# that makes all.
_BULK_ROWS, _BULK_OUT = 128, 32


@triton.jit(do_not_specialize=["rows"])
def _multiply_bulk(
    inputs,
    first_tiles,
    second_tiles,
    third_tiles,
    first_weight,
    second_weight,
    third_weight,
    first_out,
    second_out,
    third_out,
    rows,
    FEATURES: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    """Each program makes OUT columns of one result, for all rows, of a part of the features. `inputs` and the tiles of
    weights are descriptors."""
    program, part = tl.program_id(0), tl.program_id(1)
    each: tl.constexpr = FEATURES // PARTS
    begin = part * each
    weight, out, width, column = place(
        program, first_weight, second_weight, third_weight, first_out, second_out, third_out, FIRST, SECOND, THIRD, OUT
    )
    tiles = first_tiles
    if program >= (FIRST + SECOND) // OUT:
        tiles = third_tiles
    elif program >= FIRST // OUT:
        tiles = second_tiles
    prefetch(weight + (column + tl.arange(0, OUT))[:, None] * FEATURES + begin, PREFETCHED, DEPTH)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((ROWS, OUT), tl.float32)
    for start in tl.range(0, each, DEPTH, num_stages=STAGES):
        taken = inputs.load([0, begin + start])
        total = tl.dot(taken, tl.trans(tiles.load([column, begin + start])), total)
    row = tl.arange(0, ROWS)[:, None]
    at = (part * rows + row) * width + column + tl.arange(0, OUT)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=row < rows)


def _described(tensor: Tensor, length: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [length, _DEPTH])


def multiply_bulk(x: Tensor, weights: list[Tensor], widths: list[int], outs: list[Tensor], parts: int) -> None:
    """See `operations.multiply`; of up to 128 rows, for GPUs of compute capability 9.0 and newer."""
    features = x.shape[1]
    _multiply_bulk[(sum(widths) // _BULK_OUT, parts)](
        _described(x, _BULK_ROWS),
        *(_described(weight, _BULK_OUT) for weight in weights),
        *weights,
        *outs,
        len(x),
        features,
        *widths,
        PARTS=parts,
        ROWS=_BULK_ROWS,
        OUT=_BULK_OUT,
        DEPTH=_DEPTH,
        STAGES=stages(_MOST_STAGES, 2 * _DEPTH * (_BULK_ROWS + _BULK_OUT), x.device),
        PREFETCHED=prefetched(features, sum(widths), parts, _DEPTH),
        num_warps=_WARPS,
        **early_launch(True),
    )


# -- reductions --------------------------------------------------------------------------------------------------------

_GROUP = 8  # numbers: 16 bytes of two each


@triton.jit
def _reduce_parts(
    x,
    largest,
    place,
    total,
    row_stride,
    count,
    LENGTH: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    group, within = tl.arange(0, LENGTH // GROUP), tl.arange(0, GROUP)
    at = part * LENGTH + group[:, None] * GROUP + within[None, :]
    x += row * row_stride
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + at, mask=at < count, other=float("-inf")).to(tl.float32)
    of_groups = tl.max(value, 1)  # of numbers; a NaN is found in the sum
    most = tl.max(of_groups, 0)
    shift = tl.where(tl.abs(most) == float("inf"), 0.0, most)
    whole = tl.sum(tl.sum(libdevice.fast_expf(value - shift), 1), 0)
    if whole != whole:
        most = whole
        first = tl.min(tl.min(tl.where(value != value, at, count), 1), 0)
    else:
        # Where a number is costs more than the number: the first group is looked at once more.
        begin = part * LENGTH + tl.min(tl.where(of_groups == most, group, LENGTH), 0) * GROUP
        again = tl.load(x + begin + within, mask=begin + within < count, other=float("-inf")).to(tl.float32)
        first = begin + tl.min(tl.where(again == most, within, GROUP), 0)
    out = row * parts + part
    tl.store(largest + out, most)
    tl.store(place + out, first)
    tl.store(total + out, whole)


def reduce_parts(x: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `operations.reduce_parts`; parts of any power of two from 8 on."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    shape, early = (*x.shape[:-1], triton.cdiv(x.shape[-1], length)), can_start_early(x.device)
    largest, total = (x.new_empty(shape, dtype=torch.float32) for _ in range(2))
    place = x.new_empty(shape, dtype=torch.int64)
    _reduce_parts[(len(rows), shape[-1])](
        rows,
        largest,
        place,
        total,
        rows.stride(0),
        rows.shape[1],
        LENGTH=length,
        GROUP=_GROUP,
        EARLY=early,
        num_warps=max(1, length // 1024),
        **early_launch(early),
    )
    return largest, place, total
