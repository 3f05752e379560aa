"""Which data a run has, which batches it sees, and which loss they need: windows, buckets, packed documents, items."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphmod.train.data.buckets import BucketSampler, padded_next_token_loss
from graphmod.train.data.corpus import Corpus, load_corpus
from graphmod.train.data.items import Items, ItemSampler, evaluation_batches
from graphmod.train.data.packing import (
    PackedSampler,
    choose_attention,
    document_numbers,
    most_documents,
    packed_next_token_loss,
)
from graphmod.train.data.windows import ALL, Place, WindowSampler, evaluation_starts, split, windows_at
from graphmod.train.loss import has_masks, next_token_loss
from graphmod.train.settings import PackingAttention, RunConfig, Source

_EVALUATION_SEED = 1

Data = Corpus | Items


def load_data(config: RunConfig) -> Data:
    """The data of a run, on the host; enough for one sequence to train on, and one to evaluate on.

    Raises:
        ConfigError: it cannot be read, or is too short.
    """
    if config.data.source is Source.custom:
        return Items(config.data, config.train.seed)
    corpus = load_corpus(config.data, config.model, config.train.seed)
    split(corpus, config.data)
    return corpus


@dataclass
class Batches:
    """Where batches come from.

    Attributes:
        sampler: from a step, counted from 0, to its batch; it knows how many steps an epoch has.
        evaluation: batches of the evaluation, on the host; the same at every one.
        loss_fn: the loss that goes with their form; None where none does.
    """

    sampler: WindowSampler | BucketSampler | ItemSampler
    evaluation: list[Any]
    loss_fn: Callable | None

    def report(self, captures: dict[int, int]) -> dict[str, dict[str, Any]]:
        """Padding of each bucket, and its graphs from `captures` by length; empty without buckets."""
        if not isinstance(self.sampler, BucketSampler):
            return {}
        found: dict[str, dict[str, Any]] = self.sampler.waste()
        for length in self.sampler.buckets:
            found[str(length)]["graphs"] = captures.get(length, 0)
        return found


def _packed_loss(config: RunConfig, starts: list[Tensor], device: torch.device, dims: Any) -> Callable:
    chosen = choose_attention(config.data.packing_attention, device, config.train.precision, dims)
    if chosen is PackingAttention.mask:
        return packed_next_token_loss
    most = max(most_documents(begins, config.data.seq_len) for begins in starts)
    return partial(packed_next_token_loss, most=most)


def make_batches(config: RunConfig, corpus: Data, device: torch.device, dims: Any, place: Place = ALL) -> Batches:
    """The batches of a run; evaluation has batches only with `train.eval_every`.

    Args:
        config: checked settings.
        corpus: the data.
        device: of the run.
        dims: the transformers config of the model.
        place: of this rank; the evaluation has the batches of all.

    Raises:
        ConfigError: the data is too short, or `data.packing_attention` cannot be used.
    """
    data, train = config.data, config.train
    count = train.eval_batches if train.eval_every else 0
    if isinstance(corpus, Items):
        sampler = ItemSampler(corpus, (train.grad_accumulation, data.batch_size), train.seed, place)
        evaluation = evaluation_batches(corpus, data.batch_size, count) if count else []
        return Batches(sampler, evaluation, corpus.loss_fn if train.loss else corpus.require_loss())
    training, held_out = split(corpus, data)
    starts = corpus.starts[corpus.starts < len(training)]
    later = corpus.starts[corpus.starts > len(training)] - len(training)
    held_starts = torch.cat([torch.zeros(1, dtype=torch.int64), later])
    if data.buckets is not None:
        shape = (train.grad_accumulation, data.batch_size)
        sampler = BucketSampler(training, starts, data.buckets, shape, train.seed, place)
        evaluation = []
        if count:
            held = BucketSampler(held_out, held_starts, data.buckets, (1, data.batch_size), _EVALUATION_SEED)
            evaluation = [held(index) for index in range(count)]
        return Batches(sampler, evaluation, padded_next_token_loss)
    shape = (train.grad_accumulation, data.batch_size, data.seq_len)
    parts, sampler = [held_out], WindowSampler(training, shape, train.seed, place)
    loss_fn = padded_next_token_loss if has_masks(corpus.tokens) else next_token_loss
    if data.packing:
        sampler = PackedSampler(training, document_numbers(starts, len(training)), shape, train.seed, place)
        parts.append(document_numbers(held_starts, len(held_out)))
        loss_fn = _packed_loss(config, [starts, held_starts], device, dims)
    evaluation = []
    if count:
        places = evaluation_starts(held_out, data.batch_size, data.seq_len, count)
        found = [windows_at(part, places, (count, data.batch_size, data.seq_len)) for part in parts]
        evaluation = list(torch.cat(found, dim=1).unsqueeze(1))
    return Batches(sampler, evaluation, loss_fn)
