"""Writes the special tokens of the data into the configs of the model."""

from typing import Any

from transformers import PreTrainedModel

from graphmod.decode.text.codec import SpecialTokens, special_ids


def _ids(found: int | list[int] | None) -> list[int]:
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def set_special_tokens(model: PreTrainedModel, tokenizer: Any) -> None:
    """Sets `bos_token_id` and `eos_token_id` in the model's config and generation config, so that generation with its
    checkpoints stops where a document ends.

    End tokens that a saved model already has, such as the end of a turn in a chat, are kept if they are special tokens
    of this tokenizer; other ids belong to some other tokenizer and are dropped.

    Args:
        model: changed in place.
        tokenizer: the transformers tokenizer of the training data.
    """
    known = set(special_ids(tokenizer).values())
    end = _ids(SpecialTokens.of(tokenizer).end)
    configs: list[Any] = [model.config, model.generation_config]
    for config in configs:
        if config is None:
            continue
        ends = list(dict.fromkeys([*end, *(one for one in _ids(config.eos_token_id) if one in known)]))
        config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
        config.bos_token_id = tokenizer.bos_token_id
