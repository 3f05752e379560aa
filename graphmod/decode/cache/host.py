"""Memory of the host that a GPU reads and writes at its address."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor

from graphmod.backend.lifetime import between_captures
from graphmod.decode.cache.foreign import bytes_at, shaped
from graphmod.errors import ConfigError

_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class _Pinned:
    """Keeps memory pinned. Once nothing refers to it any more, it is unpinned, as soon as no capture is under way."""

    def __init__(self, memory: Tensor) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE_AND_MAPPED))
        if code:
            raise torch.cuda.CudaError(code)
        # What ends gives everything back.
        weakref.finalize(self, between_captures, partial(_unpin, memory)).atexit = False


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
            pinned = _Pinned(memory)
        except RuntimeError as error:
            raise ConfigError(
                f"{memory.nbytes / 2**30:.2f} GiB more of the host's memory cannot be pinned for the KV cache "
                f"({error}); lower cache_tokens, max_batch_size or max_seq_len, raise offload_resident, or use "
                "offload=none"
            ) from error
        return shaped(bytes_at(memory.data_ptr(), memory.nbytes, pinned, device), size, dtype)
