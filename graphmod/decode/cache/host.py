"""Memory of the host that a GPU reads and writes at its address."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from graphmod.errors import ConfigError

_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class _Bytes:
    """Pinned bytes as the CUDA array interface describes them. They are unpinned when nothing refers to them any more.

    (The interface: numba's documentation, "CUDA Array Interface", version 3.)
    """

    def __init__(self, memory: Tensor) -> None:
        pointer = memory.data_ptr()
        code = int(torch.cuda.cudart().cudaHostRegister(pointer, memory.nbytes, _PORTABLE_AND_MAPPED))
        if code:
            raise torch.cuda.CudaError(code)
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }
        weakref.finalize(self, _unpin, memory).atexit = False  # what ends gives everything back


def _unpin(memory: Tensor) -> None:
    torch.cuda.synchronize()  # what was launched may still work on it
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def host_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in memory of the host, as a tensor of `device`.

    For a GPU the memory is pinned, and kernels reach it over the bus (unified virtual addressing: CUDA Programming
    Guide, "Page-Locked Host Memory"). For a CPU it is an ordinary tensor.

    Raises:
        ConfigError: the system does not let so much be pinned.
    """
    if device.type != "cuda":
        return torch.zeros(size, dtype=dtype, device=device)
    with torch.cuda.device(device):
        memory = torch.zeros(size, dtype=dtype)
        try:
            held = _Bytes(memory)
        except RuntimeError as error:
            raise ConfigError(
                f"{memory.nbytes / 2**30:.2f} GiB more of the host's memory cannot be pinned for the KV cache "
                f"({error}); lower cache_tokens, raise decode.offload_resident, or use offload=none"
            ) from error
        return torch.as_tensor(held, device=device).view(dtype).view(size)
