"""One decode step, from the tokens of a batch to the next ones: what a graph holds.

Reads and writes static tensors only (`state`, `cache`, the model's weights).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graphmod.decode.cache.cache import CacheView, GatheredView, PagedCache, slot_mapping
from graphmod.decode.step.anatomy import positions, step_arguments
from graphmod.decode.step.sampling import sample
from graphmod.decode.step.state import (
    ACTIVE,
    BAD,
    FULL,
    LIMIT,
    NOTHING,
    POSITION,
    RUNNING,
    SEED,
    STOPPED,
    TEMPERATURE,
    TOKEN,
    TOP_K,
    TOP_P,
    Rows,
)


def next_logits(model: PreTrainedModel, memory: PagedCache, rows: Rows, visited: int | None, own: bool) -> Tensor:
    """(B, vocabulary): the model's logits after each row's token, whose keys and values are stored on the way.

    Args:
        own: whether the model attends by itself; else with the attention function that it is set to.
    """
    token, position, active = rows.integers[:, TOKEN], rows.integers[:, POSITION], rows.integers[:, ACTIVE] > 0
    slots = slot_mapping(position, rows.block_table, active, memory.block_size)
    slots = torch.where(slots < 0, memory.spare_slots[: len(slots)], slots)
    context = torch.where(active, position + 1, 0)
    position = position.unsqueeze(1)
    if own:
        # A padded row sees the token that it stores, for rows that see nothing make NaN in some models' attention.
        view = GatheredView(memory, slots, rows.block_table, context.clamp(min=1), visited, 1)
        given = {"input_ids": token.unsqueeze(1), "attention_mask": view.mask, **positions(model, position)}
        given |= {"past_key_values": view, "use_cache": True}
    else:
        view = CacheView(memory, slots, rows.block_table, context, visited)
        given = step_arguments(model, token.unsqueeze(1), position, view)
    return model(**given).logits[:, -1]


def take_token(logits: Tensor, rows: Rows, kind: int) -> None:
    """Samples, notes the result for the host, and makes the rows ready for their next step, or ends them."""
    integers = rows.integers
    position, active = integers[:, POSITION], integers[:, ACTIVE] > 0
    following = position + 1
    choice = sample(
        logits,
        rows.floats[:, TEMPERATURE],
        integers[:, TOP_K],
        rows.floats[:, TOP_P],
        integers[:, SEED],
        following,
        kind,
    )
    stopped = (choice.tokens.unsqueeze(1) == rows.stops).any(dim=1)
    status = torch.where(following + 1 >= integers[:, LIMIT], FULL, RUNNING)
    status = torch.where(stopped, STOPPED, status)
    status = torch.where(choice.bad, BAD, status)
    result = torch.stack((torch.where(active, choice.tokens, NOTHING), status))
    rows.results.index_copy_(0, rows.cursor, result.unsqueeze(0))
    rows.logprobs.index_copy_(0, rows.cursor, choice.logprobs.unsqueeze(0))
    if choice.top is not None:
        rows.top.tokens.index_copy_(0, rows.cursor, choice.top.tokens.unsqueeze(0))
        rows.top.logprobs.index_copy_(0, rows.cursor, choice.top.logprobs.unsqueeze(0))
    rows.cursor.copy_((rows.cursor + 1) % len(rows.results))
    going = active & (status == RUNNING)
    advanced = torch.stack((choice.tokens, following, going.to(torch.int64)), dim=1)
    held = torch.stack((integers[:, TOKEN], position, going.to(torch.int64)), dim=1)
    integers[:, TOKEN : ACTIVE + 1].copy_(torch.where(going.unsqueeze(1), advanced, held))


class DecodeStep(nn.Module):
    """The callable that `CUDAGraphModule` wraps.

    Args:
        model: a transformers causal LM; used as it is, with the attention it is set to at that moment.
        memory: the KV cache.
        own: whether the model attends by itself.
    """

    def __init__(self, model: PreTrainedModel, memory: PagedCache, own: bool) -> None:
        super().__init__()
        self.model, self.memory, self.own = model, memory, own

    def forward(self, rows: Rows, visited: int | None, kind: int) -> None:
        """One step for all rows.

        Args:
            rows: their state; what the step finds is left in it.
            visited: see `CacheView`.
            kind: see `sampling.sample`.
        """
        take_token(next_logits(self.model, self.memory, rows, visited, self.own), rows, kind)
