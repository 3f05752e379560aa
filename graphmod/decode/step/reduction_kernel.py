"""The kernel of `reduce_parts`. Importing this module needs Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from graphmod.decode.early_launch import can_start_early, early_launch

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
    """See `reductions.reduce_parts`; parts of any power of two from 8 on."""
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
