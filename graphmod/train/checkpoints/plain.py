"""The weights of a model that is not of transformers, in one file of safetensors, as `safetensors.torch` has them."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from graphmod.errors import GraphmodError

_FORMAT = "format"


def save_plain(weights: Mapping[str, Tensor], file: Path) -> None:
    """Writes `weights`, of which those that are the same memory are written once; `safetensors.torch.load_model` reads
    them.

    Raises:
        GraphmodError: something in it is no tensor.
    """
    kept: dict[str, Tensor] = {}
    tied, known = {}, {}
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise GraphmodError(
                f"the model's state_dict holds a {type(value).__name__} as {name!r}, and a checkpoint holds tensors "
                "only; keep it in a buffer"
            )
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        if same in known:
            tied[name] = known[same]
            continue
        known[same], kept[name] = name, value.detach().to("cpu", copy=True).contiguous()
    save_file(kept, file, {_FORMAT: "pt", **tied})


def load_plain(file: Path) -> dict[str, Tensor]:
    """All that `save_plain` was given, on the CPU."""
    with safe_open(file, framework="pt") as found:
        weights = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
        tied = {name: kept for name, kept in (found.metadata() or {}).items() if name != _FORMAT}
    return weights | {name: weights[kept] for name, kept in tied.items()}
