"""What the kernels of products have in common. Importing this module needs Triton."""

import functools

import torch
import triton
import triton.language as tl

_MOST_PREFETCHED = (
    16 * 2**20
)  # bytes of weights, of all programs: a part of the cache, so that they are there when wanted
_MOST_STAGES = 4
_LINE: tl.constexpr = tl.constexpr(64)  # numbers of two bytes in a line of the cache


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
    line = tl.arange(0, DEPTH // _LINE) * _LINE
    for start in tl.range(0, FEATURES, DEPTH):
        lines = begin + start + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], tl.int32, False, 1
        )


def prefetched(features: int, columns: int, parts: int, depth: int) -> int:
    """How many features of a part are brought into the cache."""
    most = _MOST_PREFETCHED // (columns * parts * 2) // depth * depth
    return min(features // parts, most)


@functools.cache
def stages(rows: int, depth: int, device: torch.device) -> int:
    """How many tiles of so many rows, of input and weight together, a multiprocessor has shared memory for."""
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", 48 * 1024)
    return max(1, min(_MOST_STAGES, room // (2 * depth * rows)))
