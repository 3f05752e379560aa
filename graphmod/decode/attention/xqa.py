"""Decode attention with FlashInfer's XQA kernel: bf16 or fp16, on a GPU, with FlashInfer installed beside this package.

Of FlashInfer's decode kernels it is the one that plans nothing on the host: how long each row is and where its blocks
lie is read on the device, so that one graph serves every context and the host may run ahead. FlashInfer is imported
when the engine asks for this attention, and not before.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor, library

from graphmod.attention import Rule
from graphmod.decode.cache.cache import Attends, CacheView, Layer, PagedCache

__all__ = ["paged_xqa", "prepare", "scratch", "unavailable", "xqa_decode"]

log = logging.getLogger("graphmod")

_TAKES = "q k_cache v_cache page_table seq_lens output workspace_buffer semaphores"
_SETTINGS = "num_kv_heads page_size q_scale sm_count enable_pdl"


_PACKAGE = "flashinfer-python"
# Before, every split of a row wrote the result, and not only the one that adds them up (flashinfer #4161).
_OLDEST = Version("0.6.17")
_PAGES = (16, 32, 64, 128)
_CAPABILITIES = (9, 10, 12)
_WIDEST_HEAD = 256
_QUERY_BYTES = 16 * 2**10  # of the query heads of one KV head, which the kernel keeps in shared memory


def unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None. Imports nothing of FlashInfer."""
    if (reason := _not_plain(memory.layers)) is not None:
        return reason
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


def _not_plain(layers: tuple[Layer, ...]) -> str | None:
    """What keeps an attention that takes one size of heads and looks at everything from these layers, or None."""
    if len({one[:4] for one in layers}) > 1:
        return "its layers have heads of different sizes"
    if any(one.head_dim != one.value_dim for one in layers):
        return "its keys and values are of different sizes"
    found = {
        "layers that see a window or chunk": any(one.rule != Rule() for one in layers),
        "capped scores": any(one.softcap for one in layers),
        "attention sinks": any(one.sinks for one in layers),
    }
    return next((f"the model has {name}" for name, there in found.items() if there), None)


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


@functools.cache
def _kernel() -> Callable[..., None]:
    # Through the module's full name: the package has a function of the same name as the module.
    return importlib.import_module("flashinfer.xqa").xqa


def _parts(device: torch.device) -> int:
    """The most parts that contexts are divided into, all rows and KV heads together; beyond that, one for each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# It takes query, table and lengths of any strides: for an operation that does not, inductor makes copies of the table
# and the lengths of its own for each layer.
@library.custom_op("graphmod::xqa_decode", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def xqa_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    workspace: Tensor,
    semaphores: Tensor,
    scale: float,
) -> Tensor:
    """One token of each row against its part of the cache; as large as `query`, (B, 1, heads, head_dim), in its dtype.

    It is said to change nothing: `workspace` holds nothing that anyone else reads, and the kernel leaves `semaphores`
    zero, as it found them.

    Args:
        keys, values: (blocks, block_size, kv_heads, head_dim), contiguous, of the dtype of `query`.
        table: (B, blocks of a sequence) int32.
        lengths: (B, 1) int32, all of them at least 1: the kernel does not say what it does without a token.
        workspace: uint8; semaphores: (B * kv_heads or more) int32, zero.
        scale: of the products of queries and keys, beyond 1 / sqrt(head_dim).
    """
    out = query.new_empty(query.shape)
    with torch.cuda.device_of(query):  # the device whose stream it is launched on
        _kernel()(
            q=query.contiguous(),
            k_cache=keys,
            v_cache=values,
            page_table=table.contiguous(),
            seq_lens=lengths.contiguous().view(torch.uint32),
            output=out,
            workspace_buffer=workspace,
            semaphores=semaphores.view(torch.uint32),
            num_kv_heads=keys.shape[2],
            page_size=keys.shape[1],
            q_scale=scale,
            sm_count=_parts(query.device),
            enable_pdl=False,  # launched early, it reads lengths before it waits for what makes them
        )
    return out


@xqa_decode.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return query.new_empty(query.shape)


def prepare(memory: PagedCache) -> str | None:
    """Loads the kernel, which FlashInfer compiles where it has not done so before, and takes its memory.

    Outside of any capture: it compiles, allocates and runs once, on a row of one zero token.

    Returns:
        Why it failed, or None.
    """
    log.info("decode attention: loading FlashInfer's kernel; compiling it, the first time, takes up to a minute")
    try:
        with torch.cuda.device(memory.device):
            missing = {*_TAKES.split(), *_SETTINGS.split()} - set(inspect.signature(_kernel()).parameters)
            if missing:
                return f"the kernel of this FlashInfer does not take {', '.join(sorted(missing))}"
            memory.scratch["xqa"] = scratch(memory, _parts(memory.device))
            settings = {"device": memory.device, "dtype": torch.int32}
            query = torch.zeros(
                (1, 1, memory.layers[0].heads, memory.layers[0].head_dim), dtype=memory.dtype, device=memory.device
            )
            table, lengths = torch.zeros((1, 1), **settings), torch.ones((1, 1), **settings)
            with torch.inference_mode():
                xqa_decode(query, *memory.near(0), table, lengths, *memory.scratch["xqa"], 1.0)
            torch.cuda.synchronize()
    except Exception as error:  # of imports, compilers and loaders: anything
        log.debug("FlashInfer failed", exc_info=True)
        return f"FlashInfer does not run here: {_gist(error)}"
    return None


def _gist(error: Exception) -> str:
    """The line that says what went wrong; an error of compilation is thousands of lines long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {next((line for line in lines if 'error:' in line), lines[0]):.300}"


def scratch(memory: PagedCache, parts: int) -> tuple[Tensor, Tensor]:
    """What the kernel writes beside its result, zeroed: workspace and semaphores, for at most `parts` parts."""
    heads, kv_heads = memory.layers[0][:2]
    group = padded(heads // kv_heads, 16)
    # A part leaves maximum, sum and result of each query head of a KV head; twice that, for what other versions add.
    part = 2 * group * (2 * 4 + padded_head(memory) * 2) + 512
    workspace = torch.zeros(parts * part, dtype=torch.uint8, device=memory.device)
    return workspace, torch.zeros(memory.rows * kv_heads, dtype=torch.int32, device=memory.device)


def paged_xqa(
    module: Attends,
    query: Tensor,
    *_: Any,
    cache_view: CacheView,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `attention.paged_sdpa`: (B, heads, 1, head_dim) to (B, 1, heads, head_dim), the result in `query`'s dtype.

    A padded row has no context and looks at one token of its first block instead, which is finite.
    """
    view, memory = cache_view, cache_view.memory
    if not view.shared:
        lengths = view.context.clamp(min=1).to(torch.int32).unsqueeze(1)
        view.shared[None] = view.block_table.to(torch.int32), lengths
    out = xqa_decode(
        query.transpose(1, 2).to(memory.dtype),
        *memory.near(module.layer_idx),
        *view.shared[None],
        *memory.scratch["xqa"],
        1.0 if scaling is None else scaling * math.sqrt(query.shape[-1]),
    )
    return out.to(query.dtype), None
