"""Times candidates for a generated kernel as a decode step meets them: in a CUDA graph, one launch after the other, and
with weights that are not in the GPU's cache.

Inductor times single launches. Of a kernel that takes 4 us, what a launch costs is then as large a part as what
candidates differ by: the same step of 28 layers took from 0.83 to 1.00 ms, as noise had chosen (H200).
"""

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

from graphmod.wrap.extension import capture_launches, capturing

log = logging.getLogger("graphmod")

_LAUNCHES = 32  # in a graph
_LARGE = 2**20  # bytes of a tensor that is a weight, and no input of a few rows
_MOST = 2**28  # bytes of copies of weights: several times the cache
_ROUNDS = 15
_WARM = 5  # rounds before: a GPU that has waited for a compiler runs at low clocks


@contextlib.contextmanager
def timed_in_graphs() -> Iterator[None]:
    """For kernels to be tuned in, by this thread."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

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

    held, times = capture_launches(launch), []
    for _ in range(_WARM + _ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        held.graphs[0].replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[_WARM:]) / _LAUNCHES
