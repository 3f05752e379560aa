"""What a model is told of the special tokens that its data has."""

from typing import Any

from transformers import PreTrainedModel

from graphmod.decode.text.special import SpecialTokens, special_ids


def _ids(found: int | list[int] | None) -> list[int]:
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def set_special_tokens(model: PreTrainedModel, tokenizer: Any) -> None:
    """Writes into the model's config and generation config which tokens begin and end a document, so that whoever
    loads its checkpoint stops there.

    End-of-sequence tokens that a saved model has already stay where they are special tokens of this tokenizer, such as
    those that end a turn of a chat; others are ids of some other tokenizer. Where the tokenizer has none, neither has
    the model.

    Args:
        model: changed in place.
        tokenizer: the transformers tokenizer of its data.
    """
    known = set(special_ids(tokenizer).values())
    end = _ids(SpecialTokens.of(tokenizer).end)
    for config in (model.config, model.generation_config):
        if config is None:
            continue
        ends = list(dict.fromkeys([*end, *(one for one in _ids(config.eos_token_id) if one in known)]))
        config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
        config.bos_token_id = tokenizer.bos_token_id
