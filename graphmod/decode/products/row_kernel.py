"""Products of one row. Importing this module needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

from graphmod.decode.early_launch import early_launch
from graphmod.decode.products.shared import place

# Columns of a program, and features of a column that it loads at once. What is loaded before the input is there is all
# that matters: of some 20 settings on an H200 this is the fastest for a layer of Qwen3-0.6B (22.7 us, 30.3 if it waits
# for its input first) and within 1 % of it for one of Qwen3-8B, when each let the next kernel start after its wait.
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
    THIRD: tl.constexpr,
    OUT: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
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
    # The kernel before may still run. It makes the input, but no weight: those come meanwhile.
    tl.extra.cuda.gdc_wait()
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
    """See `kernels.multiply`; of one row, for GPUs of compute capability 9.0 and newer."""
    features = x.shape[1]
    widths = [*widths[:1], 0, 0] if gated else widths
    _multiply_row[(sum(widths) // _OUT,)](
        x,
        *weights,
        *outs,
        features,
        *widths,
        OUT=_OUT,
        DEPTH=min(_DEPTH, triton.next_power_of_2(features)),
        GATED=gated,
        num_warps=8 if features >= _DEPTH else 4,
        **early_launch(True),
    )
