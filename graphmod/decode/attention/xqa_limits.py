"""Which caches FlashInfer's XQA kernel takes, and whether FlashInfer is there."""

import importlib.metadata
import importlib.util

import torch
from packaging.version import InvalidVersion, Version

from graphmod.decode.cache.cache import PagedCache
from graphmod.decode.cache.layers import not_plain

_PACKAGE = "flashinfer-python"
# Before, every split of a row wrote the result, and not only the one that adds them up (flashinfer #4161).
_OLDEST = Version("0.6.17")
_PAGES = (16, 32, 64, 128)
_CAPABILITIES = (9, 10, 12)
_WIDEST_HEAD = 256
_QUERY_BYTES = 16 * 2**10  # of the query heads of one KV head, which the kernel keeps in shared memory


def unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None. Imports nothing of FlashInfer."""
    if not_plain(memory.layers):
        return not_plain(memory.layers)
    if memory.device.type != "cuda":
        return f"it needs a GPU, and the cache is on {memory.device}"
    if torch.cuda.get_device_capability(memory.device)[0] not in _CAPABILITIES:
        return f"it needs a GPU of compute capability {', '.join(f'{major}.x' for major in _CAPABILITIES)}"
    if memory.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, and the model has {memory.dtype}"
    if memory.block_size not in _PAGES:
        return f"block_size={memory.block_size} is not one of {', '.join(map(str, _PAGES))}"
    heads, kv_heads, width = memory.layers[0][:3]
    if width % 16 or width > _WIDEST_HEAD:
        return f"heads of {width} are no multiple of 16 up to {_WIDEST_HEAD}"
    if heads % kv_heads or padded(heads // kv_heads, 16) * padded_head(memory) * 2 > _QUERY_BYTES:
        return f"{heads} query heads of {width} do not fit its {kv_heads} KV heads"
    return _not_installed()


def _not_installed() -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return f'FlashInfer is not installed (pip install "{_PACKAGE}>={_OLDEST}")'
    try:
        found = importlib.metadata.version(_PACKAGE)
        if Version(found) < _OLDEST:
            return f"FlashInfer {found} is older than {_OLDEST}, whose splits do not overwrite each other's results"
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        pass  # installed some other way: what it can do is seen when it is imported
    return None


def padded(number: int, to: int) -> int:
    return -(-number // to) * to


def padded_head(memory: PagedCache) -> int:
    return max(64, 1 << (memory.layers[0].head_dim - 1).bit_length())
