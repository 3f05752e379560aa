"""Attention over the paged cache in decode steps: the SDPA reference, FlashInfer's XQA and kernels of this package; and
the choice between them, by a rule or by what each takes on this GPU.

They are registered with transformers' `AttentionInterface`, so that a model's own code and weights are used; none has
"flash" in its name, which transformers would take for its own. As there is no mask function of these names,
transformers builds no mask. All but the reference read on the device how long each row is and where its blocks lie, so
that one graph serves every context and the work ends where the context does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor, library
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphmod.attention import Rule
from graphmod.decode.cache import Attends, CacheView, Layer, PagedCache
from graphmod.decode.step import context_sizes
from graphmod.decode.types import AttentionName
from graphmod.errors import ConfigError
from graphmod.fuse.inductor import graph_milliseconds

log = logging.getLogger("graphmod")


class Implementation(NamedTuple):
    """An attention for decode steps.

    Attributes:
        name: under which transformers finds it; None leaves a model its own.
        function: as transformers calls it, with `cache_view` among the keywords; None with the model's own.
        stops_at_context: whether it does no work beyond the real context. If not, a graph is captured for each of a
            few numbers of visited tokens.
        unavailable: why it cannot be used with a cache, or None; asked of every implementation, so it must be quick.
        prepare: what takes long, for the one that is to be used: loads it, takes memory. Why that failed, or None.
    """

    name: str | None
    function: Callable[..., tuple[Tensor, None]] | None
    stops_at_context: bool
    unavailable: Callable[[PagedCache], str | None]
    prepare: Callable[[PagedCache], str | None] = lambda _: None

    def register(self) -> None:
        """Lets transformers find it."""
        if self.name is not None and self.function is not None:
            ALL_ATTENTION_FUNCTIONS.register(self.name, self.function)


def paged_sdpa(
    module: Attends,
    query: Tensor,
    *_: Any,
    cache_view: CacheView,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The reference, on any device: gathers the visited blocks and masks what lies beyond the context.

    Args:
        query: (B, heads, 1, head_dim).
        _: keys and values of the new token, which are in the cache already, and a mask, which there is none of.
        s_aux: (heads,), what transformers calls the logits of attention sinks.

    Returns:
        (B, 1, heads, value_dim).
    """
    view, layer = cache_view, cache_view.memory.layers[module.layer_idx]
    assert view.visited is not None
    rows, heads, width = query.shape[0], query.shape[1], query.shape[-1]
    keys, values = view.memory.read(module.layer_idx, view.block_table, view.visited)
    seen = view.shared.get(layer.rule)
    if seen is None:
        token = torch.arange(view.visited, device=query.device)
        seen = token < view.context.unsqueeze(1)
        first = layer.rule.first_seen(view.context)
        if first is not None:
            seen = seen & (token >= first.unsqueeze(1))
        seen = view.shared[layer.rule] = seen[:, None, None, :]
    # The query heads that share a KV head stand where SDPA has queries of different positions: nothing is repeated.
    grouped = query.reshape(rows, layer.kv_heads, -1, width)
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    if s_aux is not None:
        keys, values, seen = _with_sinks(s_aux, grouped, keys, values, seen)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scaling)
    return out.reshape(rows, 1, heads, layer.value_dim), None


def _with_sinks(sinks: Tensor, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, ...]:
    """Keys, values and an additive mask with one more token: its score is the sink of the head, its value nothing."""
    rows, kv_heads, group, _ = query.shape
    mask = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, float("-inf"))
    mask = mask.expand(rows, kv_heads, group, -1)
    more = sinks.to(query.dtype).reshape(1, kv_heads, group, 1).expand(rows, -1, -1, -1)
    return pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1)), torch.cat((mask, more), dim=-1)


def _sdpa_unavailable(memory: PagedCache) -> str | None:
    return "SDPA caps no scores" if any(layer.softcap for layer in memory.layers) else None


@functools.cache
def _processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has, which parts of all rows and KV heads are to keep busy."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# -- kernels of this package: any GPU that Triton knows, nothing to install and little to compile ----------------------

_WIDEST = 256


def triton_unavailable(memory: PagedCache) -> str | None:
    """Why it cannot be used with this cache, or None."""
    widths = sorted({width for layer in memory.layers for width in (layer.head_dim, layer.value_dim)})
    return misfit(memory.device, memory.block_size, widths)


def misfit(device: torch.device, block_size: int, widths: Iterable[int]) -> str | None:
    """Why its kernel does not take a cache of such blocks and heads, or None."""
    if device.type != "cuda":
        return f"it needs a GPU, and the cache is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    if block_size < 16 or block_size & (block_size - 1):
        return f"block_size={block_size} is no power of two of at least 16"
    for width in widths:
        if width & (width - 1) or not 16 <= width <= _WIDEST:
            return f"heads of {width} are no power of two from 16 to {_WIDEST}"
    return None


def prepare_triton(memory: PagedCache) -> None:
    """Registers the operation, and takes the memory in which the parts of a row are counted."""
    importlib.import_module("graphmod.decode.kernels")
    most = memory.rows * max(layer.kv_heads for layer in memory.layers)
    memory.scratch["triton"] = (torch.zeros(most, dtype=torch.int32, device=memory.device),)


def paged_triton(
    module: Attends,
    query: Tensor,
    *_: Any,
    cache_view: CacheView,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Queries (B, heads, 1, head_dim) against the cache: (B, 1, heads, value_dim). On the rest see `paged_sdpa`.

    Args:
        softcap: what scores are capped at; s_aux: (heads,) logits of attention sinks.
    """
    view, memory = cache_view, cache_view.memory
    rule = memory.layers[module.layer_idx].rule
    if rule not in view.shared:
        view.shared[rule] = rule.first_seen(view.context)
    out = torch.ops.graphmod.triton_decode(
        query.to(memory.dtype),
        *memory.near(module.layer_idx),
        view.block_table,
        view.context,
        view.shared[rule],
        s_aux,
        *memory.scratch["triton"],
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap,
    )
    return out.to(query.dtype), None


# -- FlashInfer's XQA kernel: bfloat16 or float16, with FlashInfer installed beside this package -----------------------

# Of FlashInfer's decode kernels it is the one that plans nothing on the host, so that one graph serves every context
# and the host may run ahead. FlashInfer is imported when the engine asks for this attention, and not before.
_TAKES = "q k_cache v_cache page_table seq_lens output workspace_buffer semaphores"
_SETTINGS = "num_kv_heads page_size q_scale sm_count enable_pdl"


_PACKAGE = "flashinfer-python"
# Before, every split of a row wrote the result, and not only the one that adds them up (flashinfer #4161).
_OLDEST = Version("0.6.17")
_PAGES = (16, 32, 64, 128)
_CAPABILITIES = (9, 10, 12)
_WIDEST_HEAD = 256
_QUERY_BYTES = 16 * 2**10  # of the query heads of one KV head, which the kernel keeps in shared memory


def xqa_unavailable(memory: PagedCache) -> str | None:
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
    if heads % kv_heads or _padded(heads // kv_heads, 16) * _padded_head(memory) * 2 > _QUERY_BYTES:
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


def _padded(number: int, to: int) -> int:
    return -(-number // to) * to


def _padded_head(memory: PagedCache) -> int:
    return max(64, 1 << (memory.layers[0].head_dim - 1).bit_length())


@functools.cache
def _kernel() -> Callable[..., None]:
    # Through the module's full name: the package has a function of the same name as the module.
    return importlib.import_module("flashinfer.xqa").xqa


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
            sm_count=_processors(query.device),
            enable_pdl=False,  # launched early, it reads lengths before it waits for what makes them
        )
    return out


@xqa_decode.register_fake
def _(query: Tensor, *others: Any) -> Tensor:
    return query.new_empty(query.shape)


def prepare_xqa(memory: PagedCache) -> str | None:
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
            memory.scratch["xqa"] = xqa_scratch(memory, _processors(memory.device))
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


def xqa_scratch(memory: PagedCache, parts: int) -> tuple[Tensor, Tensor]:
    """What the kernel writes beside its result, zeroed: workspace and semaphores, for at most `parts` parts."""
    heads, kv_heads = memory.layers[0][:2]
    group = _padded(heads // kv_heads, 16)
    # A part leaves maximum, sum and result of each query head of a KV head; twice that, for what other versions add.
    part = 2 * group * (2 * 4 + _padded_head(memory) * 2) + 512
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
    """Queries (B, heads, 1, head_dim) against the cache: (B, 1, heads, head_dim), in the dtype of `query`.

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


# -- the choice --------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = {
    AttentionName.flashinfer: Implementation("graphmod_xqa", paged_xqa, True, xqa_unavailable, prepare_xqa),
    AttentionName.triton: Implementation("graphmod_triton", paged_triton, True, triton_unavailable, prepare_triton),
    AttentionName.sdpa: Implementation("graphmod_sdpa", paged_sdpa, False, _sdpa_unavailable),
}
OWN = Implementation(None, None, False, lambda _: None)
"""The model's own attention, over keys and values that are gathered for it: what any model can use."""
# What `auto` tries, in this order: a rule and no measurement, so that one model decodes with the same last bits in
# every run.
AUTO = (AttentionName.triton, AttentionName.flashinfer, AttentionName.sdpa)


def choose(
    name: AttentionName, memory: PagedCache, max_seq_len: int, own_reason: str = ""
) -> tuple[Implementation, dict[str, float]]:
    """The implementation a setting stands for, prepared and registered with transformers; and microseconds a layer of
    each that `fastest` compared, by the name of the setting.

    Args:
        own_reason: why the model can only use its own attention; "" if it need not.
        max_seq_len: the most tokens of a sequence.

    Raises:
        ConfigError: it cannot be used here; the message says why.
    """
    measured: dict[str, float] = {}
    if own_reason and name not in (AttentionName.auto, AttentionName.fastest, AttentionName.own):
        raise ConfigError(f"attention={name} cannot be used with this model: {own_reason}; use auto, or own")
    if own_reason or name is AttentionName.own:
        if own_reason:
            log.info("decode attention: the model's own, because %s", own_reason)
        return OWN, measured
    if name is AttentionName.auto:
        found = next((IMPLEMENTATIONS[one] for one in AUTO if _reason(one, memory) is None), OWN)
    elif name is AttentionName.fastest:
        usable = {one.value: IMPLEMENTATIONS[one] for one in IMPLEMENTATIONS if _reason(one, memory) is None}
        measured = measure(usable, memory, max_seq_len) if len(usable) > 1 else {}
        fastest = min(measured, key=measured.__getitem__) if measured else AttentionName.sdpa.value
        found = usable.get(fastest, OWN)
    else:
        found, reason = IMPLEMENTATIONS[name], _reason(name, memory)
        if reason is not None:
            others = [one for one, way in IMPLEMENTATIONS.items() if way is not found and not way.unavailable(memory)]
            raise ConfigError(f"attention={name} cannot be used: {reason}; use auto, or: {', '.join([*others, 'own'])}")
    found.register()
    return found, measured


def reference(chosen: Implementation, memory: PagedCache) -> Implementation:
    """What computes the same as a chosen attention, on any device and without a compiler."""
    plain = IMPLEMENTATIONS[AttentionName.sdpa]
    if chosen.name is None or plain.unavailable(memory):
        return OWN
    plain.register()
    return plain


def _reason(name: AttentionName, memory: PagedCache) -> str | None:
    """Why an implementation cannot be used, or None: it is prepared."""
    found = IMPLEMENTATIONS[name]
    reason = found.unavailable(memory) or found.prepare(memory)
    if reason is not None:
        log.debug("decode attention: not %s, because %s", name, reason)
    return reason


_LAYERS = 8  # of the model, one after the other: no layer finds its keys in the GPU's cache because it ran before
_REPLAYS = 5
_WARMUP = 3
_WARM_SECONDS = 0.05  # of replays before any is timed: an idle GPU runs at low clocks


def measure(candidates: Mapping[str, Implementation], memory: PagedCache, max_seq_len: int) -> dict[str, float]:
    """Microseconds a layer of each candidate with a full batch, every row halfway to `max_seq_len`; in a CUDA graph.

    One that fails is left out, and the log says why. Must run outside of any capture.

    Args:
        candidates: by the name of the setting; prepared.
    """
    found = {}
    for name, one in candidates.items():
        try:
            with torch.cuda.device(memory.device):
                found[name] = time_graph(*layers_of(one, memory, memory.rows, max_seq_len // 2, max_seq_len))
        except torch.OutOfMemoryError:
            log.warning("decode attention: %s is skipped, because the GPU has no memory left to measure it", name)
        except Exception as error:  # of kernels, compilers and loaders: anything
            log.warning("decode attention: %s is skipped, because it failed: %.300s", name, error)
    said = ", ".join(f"{name} {us:.1f} us" for name, us in sorted(found.items(), key=lambda item: item[1]))
    log.info("decode attention: one layer with %d rows takes %s", memory.rows, said or "no measured time")
    return found


def layers_of(
    one: Implementation, memory: PagedCache, rows: int, context: int, max_seq_len: int
) -> tuple[Callable[[], Any], int]:
    """A function that calls an attention once for each of some layers, as a decode step does; and for how many.

    Args:
        rows: of the batch, each with `context` tokens, in blocks of its own where the cache has as many.
        max_seq_len: what block tables have room for.
    """
    size, context = memory.block_size, max(1, context)
    layers = [SimpleNamespace(layer_idx=number) for number in range(min(len(memory.layers), _LAYERS))]
    width = -(-max_seq_len // size)
    table = torch.arange(rows * width, device=memory.device) % (memory.blocks - memory.first_block)
    table = table.add(memory.first_block).view(rows, width)
    visited = next(n for n in context_sizes(size, width * size, one.stops_at_context) if n is None or n >= context)
    lengths = torch.full((rows,), context, device=memory.device)
    sizes = [
        (rows, memory.layers[layer.layer_idx].heads, 1, memory.layers[layer.layer_idx].head_dim) for layer in layers
    ]
    queries = [torch.ones(size, dtype=memory.dtype, device=memory.device) for size in sizes]
    slots = torch.zeros_like(lengths)

    def call() -> list[Tensor]:
        view = CacheView(memory, slots, table, lengths, visited)
        pairs = zip(layers, queries, strict=True)
        assert one.function is not None
        return [one.function(layer, query, cache_view=view)[0] for layer, query in pairs]

    return call, len(layers)


def time_graph(function: Callable[[], Any], parts: int) -> float:
    """Microseconds that `function` takes in a CUDA graph, divided by its `parts`: a median.

    Raises:
        RuntimeError: it failed, or could not be captured.
    """
    with torch.inference_mode():
        for _ in range(_WARMUP):  # compiles, and loads what a capture may not load
            function()
        return graph_milliseconds(lambda _: function(), _WARM_SECONDS, _REPLAYS) * 1e3 / parts
