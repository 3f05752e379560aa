"""The parts of an engine, made for a model and settings."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from graphmod.decode.attention.choice import choose
from graphmod.decode.attention.implementation import Implementation
from graphmod.decode.batching.batch import ContinuousBatch
from graphmod.decode.batching.requests import RequestReader, eos_ids
from graphmod.decode.batching.scheduler import Scheduler
from graphmod.decode.batching.traffic import Traffic
from graphmod.decode.cache.blocks import BlockAllocator
from graphmod.decode.cache.cache import Offload, PagedCache
from graphmod.decode.cache.offload import unavailable as unavailable_fetch
from graphmod.decode.config import EngineConfig, OffloadName
from graphmod.decode.generation_config import defaults_of
from graphmod.decode.model_state import decoding
from graphmod.decode.prefill.attention import unavailable
from graphmod.decode.prefill.packed import PackedPrefill
from graphmod.decode.prefill.padded import PaddedPrefill
from graphmod.decode.prefill.piece import Limits
from graphmod.decode.results import BucketStats, DecodeStats
from graphmod.decode.step.anatomy import look_at
from graphmod.decode.step.graphs import BucketGraphs, context_sizes
from graphmod.decode.step.state import BatchState
from graphmod.decode.step.step import DecodeStep
from graphmod.decode.text.codec import Codec
from graphmod.decode.verification import FirstTokens, compare_made_up
from graphmod.errors import ConfigError

_MOST_PIECES = 32  # of prompts that are prefilled at once: logits are made for the end of each
_MOST_LOGITS = 2**26  # numbers, where they are made for each token: 256 MiB in float32
_LEAST_SCORED = 128  # tokens, however large the vocabulary


@dataclass
class Parts:
    """What an engine consists of.

    Attributes:
        prefill: in graphs; None where the model attends by itself.
        attention_us, resume_seconds: see `DecodeStats`.
    """

    max_seq_len: int
    memory: PagedCache
    attention: Implementation
    attention_us: dict[str, float]
    state: BatchState
    scheduler: Scheduler
    graphs: BucketGraphs
    prefill: PackedPrefill | None
    requests: RequestReader
    batch: ContinuousBatch
    traffic: Traffic
    resume_seconds: float = 0.0

    def stats(self) -> DecodeStats:
        """The counters of all parts."""
        buckets, seconds, pool = self.graphs.stats()
        prefill, prefill_seconds = self.prefill.stats() if self.prefill else (BucketStats(), 0.0)
        states = {bucket.state for bucket in buckets.values()}
        ran = {b.state for b in buckets.values() if b.launches or b.eager_steps}
        state = next((s for s in ("capturing", "valid") if s in states), None)
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        return DecodeStats(
            state=state or ("disabled" if ran == {"disabled"} else "invalid"),
            buckets=buckets,
            prefill=prefill,
            prompt_tokens=self.batch.prompt_tokens,
            prefix_tokens=scheduler.prefix_tokens,
            tokens=self.batch.tokens,
            waiting=len(scheduler.waiting) + len(scheduler.filling),
            running=len(scheduler.running),
            blocks_used=allocator.count - allocator.free_blocks,
            blocks_total=allocator.count,
            capture_seconds=seconds + prefill_seconds,
            waited_seconds=self.batch.waited_seconds,
            graph_bytes=pool,
            cache_bytes=self.memory.nbytes,
            host_cache_bytes=self.memory.host_nbytes,
            resume_seconds=self.resume_seconds,
            attention_us=dict(self.attention_us),
        )


def _length(config: EngineConfig, positions: int | None) -> int:
    found = config.max_seq_len or positions
    if found is None:
        raise ConfigError("the number of positions of this model is unknown; give max_seq_len")
    if positions is not None and found > positions:
        raise ConfigError(f"max_seq_len={found} is more than the {positions} positions of the model")
    return found


def _offload(config: EngineConfig, model: PreTrainedModel) -> Offload | None:
    if config.offload is OffloadName.none:
        return None
    reason = unavailable_fetch(model.device)
    if reason is not None:
        raise ConfigError(f"offload=layers cannot be used: {reason}; use offload=none")
    return Offload(config.offload_buffers, config.offload_resident)


def build(model: PreTrainedModel, config: EngineConfig, codec: Codec | None) -> Parts:
    """Makes the parts, and compares what they compute with the model's own forward.

    Raises:
        ConfigError, DecodeError: see `DecodeEngine`.
    """
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    max_seq_len = _length(config, positions)
    modules = list(model.modules())
    anatomy = decoding(modules, look_at, model, max_seq_len)
    size, rows = config.block_size, config.max_batch_size
    table = -(-max_seq_len // size)
    blocks = rows * table if config.cache_tokens is None else config.cache_tokens // size
    memory = PagedCache(anatomy.layers, blocks, size, rows, model.dtype, model.device, _offload(config, model))
    attention, attention_us = choose(config.attention, memory, max_seq_len, anatomy.own_reason)
    # A launch that waits its turn reads memory of the host over and over, and takes 5 % of the bus from copies.
    steps = config.steps_per_sync if memory.ring is None else 1
    # Results of two chunks of steps wait to be read at most, and first tokens.
    state = BatchState(rows, table, 2 * steps + 1, model.device, text.vocab_size)
    scheduler = Scheduler(BlockAllocator(blocks, size, memory.first_block), rows)
    step = DecodeStep(model, memory, own=attention.name is None)
    contexts = context_sizes(size, table * size, attention.stops_at_context)
    graphs = BucketGraphs(step, state, config, contexts, attention.compiled)
    tokens = config.prefill_tokens
    scored = min(tokens, max(_LEAST_SCORED, _MOST_LOGITS // text.vocab_size))
    limits = Limits(tokens, _MOST_PIECES, max(min(table, blocks) * size, 4 * tokens), scored)
    packed = None
    if attention.name is not None and unavailable(memory) is None:
        packed = PackedPrefill(model, memory, limits, graphs.settings if config.graphs else None, graphs.group)
    padded = PaddedPrefill(model, memory, tokens, state.to_device)
    batch = ContinuousBatch(model, memory, state, scheduler, graphs, packed or padded, limits, attention.name, steps)
    computed = packed.uncounted if packed else padded
    decoding(modules, compare_made_up, model, memory, state, computed, tokens, attention)
    defaults = defaults_of(model, config.generation_config)
    requests = RequestReader(text.vocab_size, max_seq_len, eos_ids(model, codec), codec, positions, defaults)
    first = FirstTokens(model, tokens, f"decode steps with {attention.name or 'own attention'}")
    if graphs.compiler is not None:
        graphs.compiler.taken_over = first.await_again
    traffic = Traffic(model, batch, memory, first, requests, config.keep_prefixes, config.frozen)
    return Parts(
        max_seq_len, memory, attention, attention_us, state, scheduler, graphs, packed, requests, batch, traffic
    )
