"""What inductor is asked for when a decode step is compiled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from graphmod.decode.early_launch import can_start_early
from graphmod.decode.products.joining import join_products, multiplies_row
from graphmod.decode.step.reductions import divide_reductions
from graphmod.decode.step.state import MOST_STOPS
from graphmod.torch_private import fx_beside_others, settle_assembler

_MOST_COMPILED = 256  # batch sizes times rules of layers; dynamo's own limit is 8, and beyond it goes on uncompiled
_one_at_a_time = threading.RLock()  # what is patched belongs to the process
_WAIT, _LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


def for_decode(function: Callable) -> Callable:
    """`function` compiled by dynamo and inductor for CUDA graphs of fixed shapes."""
    return torch.compile(function, dynamic=False, fullgraph=True, backend=partial(by_inductor, tuned=False))


def compile_graph(graph: GraphModule, inputs: list[Tensor], tuned: bool) -> Callable[..., tuple]:
    """A graph of aten operations compiled for CUDA graphs of fixed shapes. Any thread may call it.

    Args:
        inputs: without memory (fake tensors).
        tuned: see `by_inductor`.
    """
    with torch.no_grad(), torch._C._DisableAutocast(), fx_beside_others():
        FakeTensorProp(graph, detect_fake_mode(inputs)).propagate_dont_convert_inputs(*inputs)
        join_products(graph)
        divide_reductions(graph)
        return by_inductor(graph, inputs, tuned)


def by_inductor(graph: GraphModule, inputs: list[Any], tuned: bool) -> Callable[..., tuple]:
    """What inductor makes of a graph.

    Generated kernels use programmatic dependent launch where PyTorch and GPU have it (compute capability 9.0): the next
    one is set up while the last one ends, and a step of many small kernels has no gaps. (CUDA Programming Guide,
    "Programmatic Dependent Launch and Synchronization".)

    Args:
        tuned: coordinate-descent tuning.
    """
    from torch._inductor.compile_fx import compile_fx

    # A row's stops are looked at one by one: a loop over them would be a kernel of its own.
    patches: dict[str, Any] = {"unroll_reductions_threshold": MOST_STOPS + 1}
    if tuned:
        patches["coordinate_descent_tuning"] = True
    waiting: contextlib.AbstractContextManager = contextlib.nullcontext()
    if torch.cuda.is_available():
        settle_assembler()
        # Kernels that do not need each other are one: query and key are rotated by the same launch.
        patches["combo_kernels"] = True
    if torch.cuda.is_available() and _can_launch_early():
        patches["triton.enable_pdl"] = True
        waiting = every_kernel_waits_first(late=multiplies_row(graph))
        # No function of this name is called: it tells apart what is kept on disk.
        marked = torch._inductor.config.unsafe_marked_cacheable_functions
        patches["unsafe_marked_cacheable_functions"] = {**marked, "graphmod.every_kernel_waits_first": "2"}
    # What was traced and compiled of it is kept between processes.
    with _one_at_a_time, torch._functorch.config.patch(enable_autograd_cache=True), waiting:
        return compile_fx(graph, inputs, config_patches=patches)


def _can_launch_early() -> bool:
    from torch._inductor.codegen.triton import TritonKernel

    known = hasattr(torch._inductor.config.triton, "enable_pdl") and hasattr(TritonKernel, "_filter_pdl")
    return known and can_start_early(torch.device("cuda", torch.cuda.current_device()))


@contextlib.contextmanager
def every_kernel_waits_first(late: bool = False) -> Iterator[None]:
    """Lets each kernel that inductor generates for early launch begin with a wait.

    Inductor lets a kernel read before it waits what the kernel before it did not write, and leaves the wait out where
    it finds no need; see `early_launch` why neither will do. Of several kernels in one, each has its own lines.

    Args:
        late: the next kernel may start when one has loaded all that it reads, which is inductor's own place for it.
            Else it may at once, before the wait.
    """
    from torch._inductor.codegen.triton import TritonKernel

    before = TritonKernel._filter_pdl

    def filtered(kernel: Any, code: Any) -> None:
        if not kernel._enable_pdl_codegen():  # of another thread
            return before(kernel, code)
        if late:
            before(kernel, code)
            code._lines[:] = [_WAIT, *_without(code._lines, _WAIT)]
        else:
            code._lines[:] = [_LAUNCH, _WAIT, *_without(code._lines, _LAUNCH, _WAIT)]

    TritonKernel._filter_pdl = filtered
    try:
        yield
    finally:
        TritonKernel._filter_pdl = before


def _without(lines: list[Any], *calls: str) -> list[Any]:
    return [line for line in lines if not isinstance(line, str) or line.strip() not in calls]


def compiled_code() -> contextlib.AbstractContextManager:
    """For code that dynamo compiles to run in: for as many batch sizes as there are."""
    return torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED)
