"""Capture streams, what belongs to a stream (gradient accumulators), and captures on one that nothing runs on."""

import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graphmod.torch_private import TensorBase, TorchDispatchMode, is_traceable_wrapper_subclass


def renew_gradient_accumulators(parameters: list[Tensor]) -> None:
    """Makes autograd create the parameters' AccumulateGrad nodes anew, on the stream that is current when it does.

    Such a node keeps the stream it was made on, and lives as long as any loss that leads to it. A loop that always
    holds the last loss hands the node from step to step, so that without this a capture would for ever fork to the
    stream of the first eager step. Autograd drops its reference when a parameter's data changes dtype. It does so there
    and back within one call of C code, because an interrupt between the two would leave a weight empty.
    """
    targets, contents = [], []
    for parameter in parameters:
        if parameter.is_leaf and parameter.requires_grad:
            data = parameter.data
            other = torch.float32 if data.dtype is not torch.float32 else torch.float64
            targets += [parameter, parameter]
            contents += [_empty_of_kind(data, other), data]
    deque(map(_set_data, targets, contents), maxlen=0)


def _empty_of_kind(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    empty = torch.empty([0] * tensor.dim() or 0, device=tensor.device, dtype=dtype)
    if not is_traceable_wrapper_subclass(tensor):
        return empty
    if not hasattr(tensor, "device_mesh"):
        return torch.empty_like(tensor, dtype=dtype)
    split: Any = tensor  # a DTensor, whose module may not be imported for others
    return type(split).from_local(empty, split.device_mesh, split.placements, run_check=False)


_set_data = vars(TensorBase)["data"].__set__


# A stream keeps its cuBLAS workspace (32 MiB) for as long as the process lives. So a stream whose backend is gone
# serves the next one, always the oldest, so that runs of the same kind use the same ones.
_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def stream_for(owner: Any, device: torch.device) -> torch.cuda.Stream:
    """A capture stream, which is idle again when `owner` is gone."""
    idle = _idle_streams[device]
    if idle:
        found = min(idle, key=lambda stream: stream.stream_id)
        idle.remove(found)
    else:
        found = torch.cuda.Stream(device)
    weakref.finalize(owner, idle.append, found)
    return found


class _RunOn(TorchDispatchMode):
    """Runs operations on `stream`, whichever is the current one."""

    hides_nothing = True  # what it runs is no part of what is recorded

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._stream = stream

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to import torch._dynamo takes a second, and here it would be in the middle of a capture

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch.cuda.stream(self._stream):
            return func(*args, **(kwargs or {}))


def begin_capture(
    graph: torch.cuda.CUDAGraph, generators: Iterable[torch.Generator], caller: torch.cuda.Stream, **settings: Any
) -> None:
    """Begins a capture on the current stream; what that runs, it runs on the caller's.

    Args:
        generators: all of them, also the default one, which a capture would register by itself: where an interrupt
            comes in the middle of that, in the Python of `_RunOn`, PyTorch ends the process when the graph goes.
        settings: of `capture_begin`.
    """
    for generator in generators:
        if generator.device.type == "cuda":
            graph.register_generator_state(generator)
    with _RunOn(caller):  # seed and offset of the generators are written
        graph.capture_begin(capture_error_mode="thread_local", **settings)


def is_capturing() -> bool:
    """Whether what the current stream is given becomes part of a graph. Code in other rooms that asks PyTorch for it,
    while a call is captured, is told what it was told in the eager call."""
    return torch.cuda.is_current_stream_capturing()
