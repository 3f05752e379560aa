"""Products of some rows. Importing this module needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

from graphmod.decode.early_launch import can_start_early, early_launch
from graphmod.decode.products.shared import place, prefetch, prefetched, stages

# What a program works on: columns and features of a weight at a time, and by how many warps. Of some 120 settings
# on an H200 the fastest, or within 0.1 us of it, for Qwen3-0.6B's weights and 32 rows: query, key and value 4.6 us
# (13.1 one after the other); gate and up 5.3 (10.3). The weight is the left factor because it has the 64 rows that
# newer tensor cores take there, which an input often has not.
_OUT, _DEPTH, _WARPS = 64, 128, 4


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
    """Each program makes OUT columns of one result, for all rows, of a part of the features. Gated, it makes half as
    many columns of the first two weights, and of these one."""
    program, part = tl.program_id(0), tl.program_id(1)
    each: tl.constexpr = FEATURES // PARTS
    weight, out, width, first_column = place(
        program, first_weight, second_weight, third_weight, first_out, second_out, third_out, FIRST, SECOND, THIRD, OUT
    )
    row, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    lane = tl.arange(0, OUT)
    if GATED:
        # Eight of the one weight and eight of the other in turn: so a thread that holds a number of the one also holds
        # that of the other (PTX ISA, "Register Fragments for wgmma").
        column = program * (OUT // 2) + lane // 16 * 8 + lane % 8
        begin = tl.where(lane // 8 % 2 == 0, first_weight, second_weight)[:, None] + column[:, None] * FEATURES
    else:
        column = first_column + lane
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
        PREFETCHED=prefetched(features, sum(widths), parts, _DEPTH),
        GATED=gated,
        num_warps=_WARPS,
        **early_launch(early),
    )
