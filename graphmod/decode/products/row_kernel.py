"""Products of one row. Importing this module needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

from graphmod.decode.early_launch import can_start_early, early_launch

# Columns of a program, and features of a column that it loads at once. What is loaded before the input is there is all
# that matters: of some 20 settings on an H200 this is the fastest for a layer of Qwen3-0.6B (22.7 us, 30.3 if it waits
# for its input first) and within 1 % of it for one of Qwen3-8B.
_OUT, _DEPTH = 4, 4096


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
    first_out,
    second_out,
    third_out,
    FEATURES: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
    GATED: tl.constexpr,
):
    """Each program makes OUT columns of one result; the programs of the results follow one another. Gated, it makes
    them of the first two weights."""
    program = tl.program_id(0)
    second: tl.constexpr = FIRST // OUT
    third: tl.constexpr = second + SECOND // OUT
    weight, out, before = first_weight, first_out, 0
    if not GATED:
        if program >= third:
            weight, out = third_weight, third_out
        elif program >= second:
            weight, out = second_weight, second_out
        before = tl.where(program >= third, third, tl.where(program >= second, second, 0))
    column = (program - before) * OUT + tl.arange(0, OUT)
    depth = tl.arange(0, DEPTH)
    begin = column[:, None].to(tl.int64) * FEATURES + depth[None, :]
    some = _tile(weight + begin, depth[None, :], 0, FEATURES, DEPTH)
    if GATED:
        others = _tile(second_weight + begin, depth[None, :], 0, FEATURES, DEPTH)
    if EARLY:
        # The kernel before may still run. It makes the input, but no weight: those come meanwhile.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    taken = _tile(x + depth, depth, 0, FEATURES, DEPTH).to(tl.float32)[None, :]
    total = tl.sum(some.to(tl.float32) * taken, 1)
    if GATED:
        given = tl.sum(others.to(tl.float32) * taken, 1)
    for start in tl.static_range(DEPTH, FEATURES, DEPTH):
        taken = _tile(x + depth, depth, start, FEATURES, DEPTH).to(tl.float32)[None, :]
        some = _tile(weight + begin, depth[None, :], start, FEATURES, DEPTH)
        total += tl.sum(some.to(tl.float32) * taken, 1)
        if GATED:
            others = _tile(second_weight + begin, depth[None, :], start, FEATURES, DEPTH)
            given += tl.sum(others.to(tl.float32) * taken, 1)
    if GATED:
        total = total / (1 + tl.exp(-total)) * given
    tl.store(out + column, total.to(out.dtype.element_ty))


def multiply(x: Tensor, weights: list[Tensor], widths: list[int], outs: list[Tensor], gated: bool) -> None:
    """See `kernels.multiply`; of one row."""
    features, early = x.shape[1], can_start_early(x.device)
    _multiply_row[(sum(widths[:1] if gated else widths) // _OUT,)](
        x,
        *weights,
        *outs,
        features,
        *widths[:2],
        OUT=_OUT,
        DEPTH=min(_DEPTH, triton.next_power_of_2(features)),
        EARLY=early,
        GATED=gated,
        num_warps=8 if features >= _DEPTH else 4,
        **early_launch(early),
    )
