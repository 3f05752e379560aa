"""Memory that is not PyTorch's own as a tensor of a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphmod.decode.errors import DecodeError


class _Bytes:
    """Bytes that a GPU can reach, as libraries tell each other of them. The tensor over them holds this, and this their
    owner. (numba's documentation, "CUDA Array Interface", version 2.)"""

    def __init__(self, address: int, size: int, owner: Any) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def bytes_at(address: int, size: int, owner: Any, device: torch.device) -> Tensor:
    """(size,) uint8 on a GPU, over memory at an address that it can reach.

    Args:
        owner: of the memory; lives as long as the tensor.

    Raises:
        DecodeError: this PyTorch copies it.
    """
    found = torch.as_tensor(_Bytes(address, size, owner), device=device)
    if found.data_ptr() != address:
        raise DecodeError("this PyTorch copies memory that is not its own")
    return found


def shaped(raw: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes as a tensor that is no view of another, for a view shares the version of its base."""
    return torch.empty(0, dtype=dtype, device=raw.device).set_(raw.untyped_storage(), 0, shape)
