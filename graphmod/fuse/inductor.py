"""What inductor is asked for when a step is compiled, and how its kernels are timed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from graphmod.fuse.operations import divide_reductions, join_products, multiplies_row
from graphmod.torch_private import NoAutocast, detect_fake_mode, fx_beside_others, settle_assembler
from graphmod.wrap.extension import capture_launches, capturing

log = logging.getLogger("graphmod")

MOST_UNROLLED = 8  # numbers of a reduction, such as the stops of a row: a loop over them would be a kernel of its own
_one_at_a_time = threading.RLock()  # what is patched belongs to the process


def compile_graph(graph: GraphModule, inputs: list[Tensor], tuned: bool) -> Callable[..., tuple]:
    """A graph of aten operations compiled for CUDA graphs of fixed shapes. Any thread may call it.

    Args:
        inputs: without memory (fake tensors).
        tuned: see `by_inductor`.
    """
    with torch.no_grad(), NoAutocast(), fx_beside_others():
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
    from graphmod.torch_private import compile_fx, functorch_config, inductor_config

    patches: dict[str, Any] = {"unroll_reductions_threshold": MOST_UNROLLED + 1}
    if tuned:
        patches["coordinate_descent_tuning"] = True
    waiting: contextlib.AbstractContextManager = contextlib.nullcontext()
    if torch.cuda.is_available():
        settle_assembler()
        # Kernels that do not need each other are one: query and key are rotated by the same launch.
        patches["combo_kernels"] = True
    if torch.cuda.is_available() and generated_can():
        patches["triton.enable_pdl"] = True
        waiting = every_kernel_waits_first(late=multiplies_row(graph))
        # No function of this name is called: it tells apart what is kept on disk.
        marked = inductor_config.unsafe_marked_cacheable_functions
        patches["unsafe_marked_cacheable_functions"] = {**marked, "graphmod.every_kernel_waits_first": "2"}
    # What was traced and compiled of it is kept between processes.
    with _one_at_a_time, functorch_config.patch(enable_autograd_cache=True), waiting:
        found: Any = compile_fx(graph, inputs, config_patches=patches)
        return found


# -- early launch ------------------------------------------------------------------------------------------------------

_WAIT, _LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"


def generated_can() -> bool:
    """Whether kernels that inductor generates can on the current device."""
    from graphmod.torch_private import TritonKernel, inductor_config

    if not hasattr(inductor_config.triton, "enable_pdl") or not hasattr(TritonKernel, "_filter_pdl"):
        return False
    from graphmod.fuse.kernels import can_start_early

    return can_start_early(torch.device("cuda", torch.cuda.current_device()))


@contextlib.contextmanager
def every_kernel_waits_first(late: bool) -> Iterator[None]:
    """Lets each kernel that inductor generates for early launch begin with a wait.

    Inductor lets a kernel read before it waits what the kernel before it did not write, and leaves the wait out where
    it finds no need; see `kernels` why neither will do. Of several kernels in one, each has its own lines.

    Args:
        late: the next kernel may start when one has loaded all that it reads, which is inductor's own place for it.
            Else it may at once, before the wait.
    """
    from graphmod.torch_private import TritonKernel

    kernels: Any = TritonKernel
    before = kernels._filter_pdl

    def filtered(kernel: Any, code: Any) -> None:
        if not kernel._enable_pdl_codegen():  # of another thread
            return before(kernel, code)
        if late:
            before(kernel, code)
            code._lines[:] = [_WAIT, *_without(code._lines, _WAIT)]
        else:
            code._lines[:] = [_LAUNCH, _WAIT, *_without(code._lines, _LAUNCH, _WAIT)]

    kernels._filter_pdl = filtered
    try:
        yield
    finally:
        kernels._filter_pdl = before


def _without(lines: list[Any], *calls: str) -> list[Any]:
    return [line for line in lines if not isinstance(line, str) or line.strip() not in calls]


# -- tuning ------------------------------------------------------------------------------------------------------------

_LAUNCHES = 32  # in a graph
_LARGE = 2**20  # bytes of a tensor that is a weight, and no input of a few rows
_MOST = 2**28  # bytes of copies of weights: several times the cache
_ROUNDS = 15
_WARM = 5  # rounds before: a GPU that has waited for a compiler runs at low clocks


@contextlib.contextmanager
def timed_in_graphs() -> Iterator[None]:
    """For kernels to be tuned in, by this thread. Candidates are timed as a step meets them: in a CUDA graph, one
    launch after the other, and with weights that are not in the GPU's cache.

    Inductor times single launches. Of a kernel that takes 4 us, what a launch costs is then as large a part as what
    candidates differ by: the same step of 28 layers took from 0.83 to 1.00 ms, as noise had chosen (H200).
    """
    from graphmod.torch_private import CachingAutotuner

    single, tuning = CachingAutotuner.bench, threading.get_ident()
    latest: list[Any] = [None, []]  # a kernel, and arguments for it

    def bench(kernel: Any, launcher: Callable, *args: Any, with_profiler: bool = False, **named: Any) -> float:
        if threading.get_ident() == tuning and any(isinstance(one, Tensor) and one.is_cuda for one in args):
            try:
                if latest[0] is not kernel:
                    latest[:] = kernel, []  # what was before is let go first
                    latest[1] = _sets(args, [name not in kernel.mutated_arg_names for name in kernel.fn.arg_names])
                return _milliseconds(launcher, latest[1], named)
            except Exception as error:  # of launches: a candidate may ask for more than there is
                log.debug("%s is timed by itself", launcher, exc_info=error)
                with capturing():  # it waits for all of the GPU
                    return single(kernel, launcher, *args, with_profiler=with_profiler, **named)
        return single(kernel, launcher, *args, with_profiler=with_profiler, **named)

    CachingAutotuner.bench = bench
    try:
        yield
    finally:
        CachingAutotuner.bench = single


def _sets(args: tuple, read_only: list[bool]) -> list[list[Any]]:
    """The arguments, and as many more with other memory for what is large and only read as the cache cannot hold."""
    large = [
        keeps and isinstance(one, Tensor) and one.nbytes >= _LARGE
        for one, keeps in zip(args, itertools.chain(read_only, itertools.repeat(False)), strict=False)
    ]
    nbytes = sum(one.nbytes for one, other in zip(args, large, strict=True) if other)
    count = min(_LAUNCHES, _MOST // nbytes) if nbytes else 1
    if count < 2:  # one alone is larger than the cache
        return [list(args)]
    return [
        [torch.zeros_like(one) if other else one for one, other in zip(args, large, strict=True)] for _ in range(count)
    ]


def _milliseconds(launcher: Callable, sets: list[list[Any]], named: dict[str, Any]) -> float:
    """Of one launch."""
    launcher(*sets[0], **named, stream=torch.cuda.current_stream().cuda_stream)  # loads it
    torch.cuda.current_stream().synchronize()

    def launch(stream: int) -> None:
        for given in itertools.islice(itertools.cycle(sets), _LAUNCHES):
            launcher(*given, **named, stream=stream)

    return graph_milliseconds(launch) / _LAUNCHES


def graph_milliseconds(launch: Callable[[int], Any]) -> float:
    """Of one replay of a CUDA graph: a median.

    Args:
        launch: what it holds, without anything that a capture may not load; is given the stream to launch on.
    """
    held = capture_launches(launch)

    def timed() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        held.graphs[0].replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    return statistics.median([timed() for _ in range(_WARM + _ROUNDS)][_WARM:])
