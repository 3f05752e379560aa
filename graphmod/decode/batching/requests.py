"""From what a user asks for to sequences the scheduler takes: every way a request can be wrong is found here, before
anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from numbers import Integral
from typing import Any

import torch
from transformers import PreTrainedModel

from graphmod.decode.batching.seeds import prompt_seed
from graphmod.decode.batching.sequence import Sequence
from graphmod.decode.config import Sampling
from graphmod.decode.errors import RequestError
from graphmod.decode.generation_config import Defaults
from graphmod.decode.results import Completion
from graphmod.decode.step.state import MOST_STOPS
from graphmod.decode.text.codec import Codec
from graphmod.decode.text.stream import StopTexts
from graphmod.errors import UnknownSetting

_CODEC = "make the engine with codec=TokenizerCodec(tokenizer), of graphmod.decode.text.codec"


def eos_ids(model: PreTrainedModel, codec: Codec | None = None) -> list[int]:
    """The end-of-sequence tokens of the model or, if it names none, of its codec; [] if neither has one."""
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    if found is None:
        found = getattr(getattr(codec, "around", None), "end", None)
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def _seeded(each: list[Sampling], shared: bool) -> list[Sampling]:
    """The settings with a seed for every prompt: its own as it is, one that is `shared` by all mixed with the number
    of the prompt, and where there is none the same of a seed drawn for this call."""
    drawn = 0
    if any(one.seed is None and one.temperature > 0 for one in each):
        # Only where it is used: a greedy call leaves torch's generator, and so a training it is part of, as it was.
        drawn = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu"))
    return [
        one
        if one.seed is not None and not shared
        else dataclasses.replace(one, seed=prompt_seed(drawn if one.seed is None else one.seed, number))
        for number, one in enumerate(each)
    ]


class RequestReader:
    """Checks requests and takes them apart.

    Args:
        vocabulary: number of tokens.
        max_seq_len: of the engine.
        eos: tokens that end a sequence unless it ignores them.
        codec: for prompts and stops that are text; None takes token ids only.
        positions: of the model; None where it tells no number.
        defaults: of requests that do not say how to choose tokens.
    """

    def __init__(
        self,
        vocabulary: int,
        max_seq_len: int,
        eos: list[int],
        codec: Codec | None,
        positions: int | None,
        defaults: Defaults,
    ) -> None:
        full = positions is not None and max_seq_len >= positions
        self._way_out = ", since the model has no more positions" if full else ", or raise max_seq_len"
        self.vocabulary, self.max_seq_len, self.eos, self.codec = vocabulary, max_seq_len, eos, codec
        self.defaults = defaults

    def tokens(self, prompt: Any, number: int) -> list[int]:
        """The token ids of a prompt.

        Raises:
            RequestError: it is empty, too long, or holds ids the model does not have.
        """
        if isinstance(prompt, str):
            if self.codec is None:
                raise RequestError(f"prompt {number} is text and the engine has no codec; give token ids, or {_CODEC}")
            prompt = self.codec.encode(prompt)
        elif isinstance(prompt, torch.Tensor):
            if prompt.dim() > 1 and len(prompt) != 1:
                raise RequestError(
                    f"prompt {number} is a tensor of shape {tuple(prompt.shape)}; give each row as a prompt of its own"
                )
            prompt = prompt.flatten().tolist()
        try:
            found = list(prompt)
        except TypeError:
            kind = type(prompt).__name__
            raise RequestError(f"prompt {number} must be token ids or a text, got {kind}") from None
        if not found:
            raise RequestError(f"prompt {number} is empty; write some text, or give a token such as that of the start")
        if len(found) >= self.max_seq_len:
            raise RequestError(
                f"prompt {number} has {len(found)} tokens and max_seq_len={self.max_seq_len} has no room for "
                f"another; shorten it{self._way_out}"
            )
        if set(map(type, found)) == {int} and min(found) >= 0 and max(found) < self.vocabulary:
            return found
        wrong = next((t for t in found if not self._is_token(t)), None)
        if wrong is not None:
            raise RequestError(f"prompt {number} holds {wrong!r}, which is not a token id below {self.vocabulary}")
        return list(map(int, found))

    def _is_token(self, token: Any) -> bool:
        return isinstance(token, Integral) and not isinstance(token, bool) and 0 <= token < self.vocabulary

    def stops(self, sampling: Sampling) -> tuple[list[int], list[list[int]], list[str]]:
        """What ends a request: token ids, sequences of several ids, texts.

        Raises:
            RequestError: a stop is of an unknown kind, or there are too many.
        """
        ids = [] if sampling.ignore_eos else list(self.eos)
        sequences: list[list[int]] = []
        texts: list[str] = []
        for stop in sampling.stop:
            if isinstance(stop, str) and stop:
                if self.codec is None:
                    raise RequestError(
                        f"stop {stop!r} is text and the engine has no codec; give token ids, or {_CODEC}"
                    )
                number = getattr(self.codec, "special", {}).get(stop, self.vocabulary)
                if number >= self.vocabulary:
                    texts.append(stop)
                    continue
                stop = number  # found on the device, as a text it would be looked for on the host
            parts = [stop] if isinstance(stop, int) else list(stop) if isinstance(stop, SequenceOf) else []
            if not parts or any(not isinstance(t, int) or not 0 <= t < self.vocabulary for t in parts):
                raise RequestError(
                    f"unknown stop {stop!r}: expected a token id below {self.vocabulary}, a list of them, or a text"
                )
            if len(parts) == 1:
                ids.append(parts[0])
            else:
                sequences.append(parts)
        ids = list(dict.fromkeys(ids))
        if len(ids) > MOST_STOPS:
            raise RequestError(
                f"{len(ids)} stop tokens (end-of-sequence included) are more than {MOST_STOPS}; use fewer, or "
                "ignore_eos=True"
            )
        return ids, sequences, texts

    def read(self, prompts: Any, n: int, sampling: Any, settings: dict) -> list[Sequence]:
        """The n samples of each prompt; on the arguments see `DecodeEngine.generate`. Raises RequestError."""
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list of prompts, got one text; write [prompt]")
        if isinstance(prompts, torch.Tensor) and prompts.dim() == 1:
            raise RequestError("prompts must be a list of prompts, got one tensor of token ids; write [prompt]")
        if not hasattr(prompts, "__len__"):
            raise RequestError(f"prompts must be a list of prompts, got {type(prompts).__name__}")
        each = sampling if isinstance(sampling, list) else [sampling or Sampling()] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"{len(each)} sampling settings were given for {len(prompts)} prompts")
        for one in each:
            if not isinstance(one, Sampling):
                raise RequestError(
                    f"sampling must be a Sampling, or a list with one for each prompt, got {type(one).__name__}; "
                    "single settings are keyword arguments"
                )
        try:
            each = [dataclasses.replace(one, **settings) for one in each]
        except UnknownSetting as error:
            raise RequestError(str(error)) from None
        for one in each:
            one.check()
        each = [self.defaults.fill(one) for one in each]
        each = _seeded(each, shared=not isinstance(sampling, list) or "seed" in settings)
        asked = enumerate(zip(prompts, each, strict=True))
        return [one for number, (prompt, own) in asked for one in self.sequences(number, prompt, n, own)]

    def sequences(self, number: int, prompt: Any, n: int, sampling: Sampling) -> list[Sequence]:
        """The n samples of one request. Raises RequestError."""
        if not isinstance(n, Integral) or isinstance(n, bool) or n < 1:
            raise RequestError(f"n must be an integer of at least 1, got {n!r}")
        sampling.check()
        sampling = self.defaults.fill(sampling)
        tokens = self.tokens(prompt, number)
        ids, sequences, texts = self.stops(sampling)
        limit = min(len(tokens) + sampling.max_new_tokens, self.max_seq_len)
        return [
            Sequence(
                Completion(number, sample, tokens),
                sampling,
                limit,
                ids,
                sequences,
                StopTexts(self.codec, texts, tokens) if texts else None,
            )
            for sample in range(n)
        ]
