"""How a decode step is compiled, and how compiled code of it runs. Imports torch and the core's `compiled`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphmod.compiled import shown

_MOST_COMPILED = 256  # batch sizes times kinds of sampling; dynamo's own limit is 8, and beyond it goes on uncompiled
# Bytes of a weight whose product takes longer than the launch of one more kernel (4 us on an H200).
_LARGE_WEIGHT = 16 * 2**20


def for_decode(function: Callable, tuned: bool) -> Callable:
    """`function` compiled for CUDA graphs of fixed shapes.

    Kernels are launched with programmatic dependent launch where PyTorch and GPU have it (compute capability 9.0): the
    next one is set up while the last one ends, and a step of many small kernels has no gaps. (CUDA Programming Guide,
    "Programmatic Dependent Launch and Synchronization".)

    Args:
        tuned: coordinate-descent tuning, with which inductor makes batch-1 products generated kernels.
    """
    options: dict[str, Any] = {}
    if hasattr(torch._inductor.config.triton, "enable_pdl"):
        options["triton.enable_pdl"] = True
    if not tuned:
        return torch.compile(function, dynamic=False, options=options)
    return torch.compile(function, dynamic=False, backend=_tuned_inductor(tuple(options.items())))


@functools.cache  # dynamo keeps what it compiled for each backend object
def _tuned_inductor(options: tuple[tuple[str, Any], ...]) -> Callable:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.inductor_prims import force_stride_order

    product = torch.ops.aten.mm.default
    decompose = select_decomp_table()[product]

    def decompose_product(left: Tensor, right: Tensor, *more: Any, **named: Any) -> Tensor:
        """What inductor does, but the vector that meets a large weight is computed first. Else it is computed again
        for each row of the weight, inside a kernel that then waits for arithmetic and not for memory."""
        if left.shape[0] == 1 and right.numel() * right.element_size() >= _LARGE_WEIGHT:
            left = force_stride_order(left, left.stride())
        return decompose(left, right, *more, **named)

    patches = {**dict(options), "coordinate_descent_tuning": True}

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # The cache of whole traced graphs does not know of the decomposition.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            decompositions = {**select_decomp_table(), product: decompose_product}
            return compile_fx(graph, inputs, config_patches=patches, decompositions=decompositions)

    return backend


@contextlib.contextmanager
def compiled_code(reads: Iterable[Tensor]) -> Iterator[None]:
    """Runs compiled code unseen by the recorder of a capture; `reads` are the tensors it reads by address.

    Raises:
        RuntimeError: in a capture, something would have to be compiled again.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    stance = torch.compiler.set_stance("fail_on_recompile") if capturing else contextlib.nullcontext()
    with shown(reads), stance, torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED):
        yield
