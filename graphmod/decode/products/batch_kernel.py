"""Products of some rows. Importing this module needs Triton."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphmod.decode.early_launch import can_start_early, early_launch

_MOST_PREFETCHED = (
    16 * 2**20
)  # bytes of weights, of all programs: a part of the cache, so that they are there when wanted
_LINE: tl.constexpr = tl.constexpr(64)  # numbers of two bytes in a line of the cache


# What a program works on: rows and columns of a weight, tiles on their way at a time, and warps. Of some 120 settings
# on an H200 the fastest, or within 0.1 us of it, for Qwen3-0.6B's weights and 32 rows: query, key and value 4.6 us
# (13.1 one after the other); gate and up 5.3 (10.3). The weight is the left factor because it has the 64 rows that
# newer tensor cores take there, which an input often has not.
_OUT, _DEPTH, _STAGES, _WARPS = 64, 128, 4, 4


@triton.jit
def prefetch(begin, FEATURES: tl.constexpr, DEPTH: tl.constexpr):
    """Brings FEATURES numbers of the rows of a weight that begin there into the L2 cache; a multiple of DEPTH."""
    line = tl.arange(0, DEPTH // _LINE) * _LINE
    for start in tl.range(0, FEATURES, DEPTH):
        lines = begin + start + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], tl.int32, False, 1
        )


@triton.jit(do_not_specialize=["rows"])
def _multiply_batch(
    x,
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
    EARLY: tl.constexpr,
    PREFETCHED: tl.constexpr,
    GATED: tl.constexpr,
):
    """Each program makes OUT columns of one result, for all rows, of a part of the features; the programs of the
    results follow one another. Gated, it makes half as many columns of the first two weights, and of these one."""
    program, part = tl.program_id(0), tl.program_id(1)
    each: tl.constexpr = FEATURES // PARTS
    second: tl.constexpr = FIRST // OUT
    third: tl.constexpr = second + SECOND // OUT
    weight, out = first_weight, first_out
    if program >= third:
        weight, out = third_weight, third_out
    elif program >= second:
        weight, out = second_weight, second_out
    before = tl.where(program >= third, third, tl.where(program >= second, second, 0))
    width = tl.where(program >= third, THIRD, tl.where(program >= second, SECOND, FIRST))
    row, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    lane = tl.arange(0, OUT)
    if GATED:
        # Eight of the one weight and eight of the other in turn: so a thread that holds a number of the one also holds
        # that of the other (PTX ISA, "Register Fragments for wgmma").
        column = program * (OUT // 2) + lane // 16 * 8 + lane % 8
        begin = tl.where(lane // 8 % 2 == 0, first_weight, second_weight)[:, None] + column[:, None] * FEATURES
    else:
        column = (program - before) * OUT + lane
        begin = weight + column[:, None] * FEATURES
    begin += part * each
    there = row < rows
    if EARLY:
        # The kernel before may still run. It makes the input, but no weight: those come into the cache meanwhile.
        prefetch(begin, PREFETCHED, DEPTH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    weights = begin + depth[None, :]
    inputs = x + row[None, :] * FEATURES + part * each + depth[:, None]
    total = tl.zeros((OUT, ROWS), tl.float32)
    for start in tl.range(0, each, DEPTH, num_stages=STAGES):
        taken = tl.load(inputs + start, mask=there[None, :], other=0.0)
        total = tl.dot(tl.load(weights + start), taken, total)
    if GATED:
        pairs = tl.permute(tl.reshape(total, (OUT // 16, 2, 8, ROWS)), (0, 2, 3, 1))
        opened, given = tl.split(pairs)
        total = tl.reshape(opened / (1 + tl.exp(-opened)) * given, (OUT // 2, ROWS))
        column = program * (OUT // 2) + tl.arange(0, OUT // 2)
    result = total.to(out.dtype.element_ty)
    tl.store(out + (part * rows + row)[None, :] * width + column[:, None], result, mask=there[None, :])


@functools.cache
def stages(rows: int, depth: int, device: torch.device) -> int:
    """How many tiles of so many rows, of input and weight together, a multiprocessor has shared memory for."""
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
    return max(1, min(_STAGES, room // (2 * depth * rows)))


def prefetched(features: int, columns: int, parts: int) -> int:
    """How many features of a part are brought into the cache."""
    most = _MOST_PREFETCHED // (columns * parts * 2) // _DEPTH * _DEPTH
    return min(features // parts, most)


def multiply(x: Tensor, weights: list[Tensor], widths: list[int], outs: list[Tensor], parts: int, gated: bool) -> None:
    """See `kernels.multiply`; of up to 128 rows."""
    rows, features = max(16, triton.next_power_of_2(len(x))), x.shape[1]
    early = can_start_early(x.device)
    _multiply_batch[(sum(widths) // _OUT, parts)](
        x,
        *weights,
        *outs,
        len(x),
        features,
        *widths,
        PARTS=parts,
        ROWS=rows,
        OUT=_OUT,
        DEPTH=_DEPTH,
        STAGES=stages(rows + _OUT, _DEPTH, x.device),
        EARLY=early,
        PREFETCHED=prefetched(features, sum(widths), parts),
        GATED=gated,
        num_warps=_WARPS,
        **early_launch(early),
    )
