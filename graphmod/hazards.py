"""What a graph cannot repeat: tells, before an operation runs, why a capture must refuse it.

Imports `trace` and `errors`.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from graphmod.errors import CaptureRefused
from graphmod.trace import Facts, Step, address

_HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::item"}
_UNREPEATABLE = {
    # Keeps its workspace and weights in a packed form outside the recorded tensors.
    "aten::mkldnn_rnn_layer": "an LSTM or GRU on the CPU; keep it outside the captured module",
    "aten::_cudnn_rnn": "an LSTM or GRU of cuDNN; keep it outside the captured module",
    "aten::miopen_rnn": "an LSTM or GRU of MIOpen; keep it outside the captured module",
}
_FROM_LIST = (
    "uses a tensor made of Python values or on the host, which a graph would copy from an address that changes "
    "(torch.tensor(values), x[[0, 1]]); create it once, outside"
)


def _inside(path: str) -> bool:
    """Whether code of a file with `path` in its name is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if path in frame.f_code.co_filename.replace("\\", "/"):
            return True
        frame = frame.f_back
    return False


class Hazards:
    """The check of one capture. It follows where tensors come from.

    Args:
        gpu: index of the GPU on which CUDA captures: then "device" tensors are those there. None under emulation: then
            they are the inputs, the tensors from outside and everything computed from them; what is made inside from
            nothing is host data.

    Attributes:
        made: the storage addresses of what was made inside.
    """

    def __init__(self, gpu: int | None) -> None:
        self.on_gpu = gpu is not None
        self._index = -1 if gpu is None else gpu  # as of `Tensor.get_device`
        self.made: set[int] = set()
        self._host: set[int] = set()
        self._listed: set[int] = set()  # made from Python values, or from nothing else

    def on_device(self, tensor: Tensor) -> bool:
        return tensor.is_cuda if self.on_gpu else address(tensor) not in self._host

    def note(
        self, about: Facts, given: list[Tensor], given_at: list[int], results_at: list[int], fresh_at: list[int]
    ) -> None:
        """Takes in an operation that has run: what it was given, and the addresses of that, of its results, and of
        those results that share no memory with what it was given."""
        listed = bool(given and self._listed) and self._listed.issuperset(given_at)
        if listed or about.name == "aten::lift_fresh":
            self._listed.update(results_at)
        elif self._listed:
            self._listed.difference_update(fresh_at)
        self.made.update(fresh_at)
        if self.on_gpu or not fresh_at:
            return
        if any(map(self.on_device, given)):
            self._host.difference_update(fresh_at)
        else:
            self._host.update(fresh_at)

    def note_write(self, where: int) -> None:
        """Takes in that memory was written: what a host tensor received from the device is not host data any more."""
        if not self.on_gpu:
            self._host.discard(where)

    def check(self, op: Any, about: Facts, args: tuple, kwargs: dict, given: list, code: Any, line: int) -> None:
        """Called before each operation; `code` and `line` are where the user called it.

        Raises:
            CaptureRefused: naming the operation, the line and the way out.
        """
        reason = self._reason(about, args, kwargs, given)
        if reason is not None:
            step = Step(op, (), code, line)
            if about.name in _HOST_READS and _inside("/torch/optim/"):
                reason = (
                    "the optimizer reads its step count or learning rate on the host; build it with fused=True (and "
                    "capturable=True on a GPU), and with a tensor as lr"
                )
            raise CaptureRefused(f"{about.name.removeprefix('aten::')} at {step.place}: {reason}")

    def _reason(self, about: Facts, args: tuple, kwargs: dict, given: list) -> str | None:
        name = about.name
        if name in _HOST_READS and any(map(self.on_device, given)):
            return (
                "reads a value on the host (.item(), float(), bool(), if, max(a, b), a tensor as a slice bound), and a "
                "replay reads nothing; use torch.where or clamp, or move it out of the captured module"
            )
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                return "indexes with a boolean mask, whose result has no fixed size; use torch.where or masked_fill"
        elif about.dynamic and kwargs.get("output_size") is None and any(map(self.on_device, given)):
            return "has a result whose size depends on the data; pad it, or use nonzero_static or output_size="
        if name in _UNREPEATABLE:
            return f"cannot be repeated from a recording: {_UNREPEATABLE[name]}"
        if kwargs and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device.type == "cuda" and device.index not in ((None, self._index) if self.on_gpu else ()):
                return self._elsewhere(device)
        host = False
        for tensor in given:
            if tensor.layout is not torch.strided:
                return "works on a sparse tensor"
            index = tensor.get_device()
            if index != self._index and index >= 0:
                return self._elsewhere(tensor.device)
            host = host or index < 0
        if self.on_gpu:
            return self._gpu_reason(about, args, kwargs, given) if host or name == "aten::_to_copy" else None
        if self._listed:
            listed = [tensor for tensor in given if tensor.dim() and tensor.numel() and address(tensor) in self._listed]
            if listed and len(listed) < len(given):
                return _FROM_LIST
        return None

    def _elsewhere(self, device: torch.device) -> str:
        if self.on_gpu:
            return (
                f"works on {device} in a graph of cuda:{self._index}, which would leave that out; wrap the parts of "
                "the model on each GPU apart, as graph_layers(model) does"
            )
        return (
            f"works on {device}, but the callable's arguments and attributes showed tensors of the CPU only; pass it a "
            "tensor of the GPU, or keep one in an attribute"
        )

    def _gpu_reason(self, about: Facts, args: tuple, kwargs: dict, given: list) -> str | None:
        cuda = [tensor for tensor in given if tensor.is_cuda]
        host = [tensor for tensor in given if not tensor.is_cuda]
        if about.name == "aten::_to_copy":
            target = kwargs.get("device")
            kind = torch.device(target).type if target is not None else given[0].device.type
            if cuda and kind == "cpu":
                return "copies a GPU tensor to the host; read it after the replay"
            if host and kind == "cuda":
                return _FROM_LIST
        if about.name == "aten::copy_" and cuda and host:
            return "copies between host and GPU; do it outside the captured module"
        if host and not cuda and about.writes:
            outside = [t for t in host if address(t) not in self.made]
            if outside:
                return (
                    "changes a host tensor, which a replay would not; keep it on the GPU (fused=True, capturable=True)"
                )
        if cuda and any(tensor.dim() for tensor in host):
            return "mixes a host tensor into a GPU operation; move it to the GPU once, outside"
        if cuda and any(address(tensor) not in self.made for tensor in host):
            return "uses the value of a host tensor, which a graph would freeze; keep it on the GPU"
        return None
