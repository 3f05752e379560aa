"""From what a user asks for to sequences the scheduler takes: every way a request can be wrong is found here, before
anything runs.

Requests that do not say how to choose tokens get that from the model's generation config, as transformers' `generate`
and vLLM have it. What is not supported of it is said when an engine is made. Some of that would change even the most
likely token: a greedy request is refused then.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from transformers import PreTrainedModel

from graphmod.decode.adapters import Adapters
from graphmod.decode.sampling import LONGEST_WORD, MOST_CHAINS, MOST_WORDS, Adjustment, is_adjusted
from graphmod.decode.scheduler import Sequence
from graphmod.decode.step import MOST_STOPS, Chain
from graphmod.decode.structured import Grammars
from graphmod.decode.types import Completion, GenerationConfigName, RequestError, Sampling, prompt_seed
from graphmod.errors import ConfigError, UnknownSetting
from graphmod.text import Codec, StopTexts

log = logging.getLogger("graphmod")

# Settings that are not supported -> the values of them that change nothing, besides None. Those of drawing change no
# greedy token, all others do.
_OF_DRAWING = {"typical_p": [1], "top_h": [1], "epsilon_cutoff": [0], "eta_cutoff": [0]}
_OF_CHOOSING = {
    "encoder_repetition_penalty": [1],
    "no_repeat_ngram_size": [0],
    "encoder_no_repeat_ngram_size": [0],
    "bad_words_ids": [[]],
    "suppress_tokens": [[]],
    "begin_suppress_tokens": [[]],
    "sequence_bias": [{}, []],
    "min_length": [0],
    "min_new_tokens": [0],
    "forced_bos_token_id": [],
    "forced_eos_token_id": [],
    "exponential_decay_length_penalty": [],
    "guidance_scale": [1],
    "watermarking_config": [],
    "stop_strings": [[]],
    "num_beams": [1],
    "penalty_alpha": [0],
    "dola_layers": [],
    "constraints": [[]],
    "force_words_ids": [[]],
    "token_healing": [False],
}
_WAY_OUT = "generation_config=none (serve.generation_config=none, decode.generation_config=none) decodes without it"


def _said(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.60}" for name, value in values.items())


@dataclass
class Defaults:
    """What a request gets where it says nothing.

    Attributes:
        temperature: that tokens are drawn with, where they are drawn.
        greedy: whether they are not, unless a request says so.
        top_k, top_p, min_p, repetition_penalty: see `Sampling`.
        unsupported: what would change the most likely token: name -> value.
    """

    temperature: float = 1.0
    greedy: bool = True
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    unsupported: dict[str, Any] = field(default_factory=dict)

    def fill(self, asked: Sampling) -> Sampling:
        """The settings of a request with these in the place of None.

        Raises:
            RequestError: it is greedy, and would get other tokens than from transformers' `generate`.
        """
        names = ("top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(asked, name) is None}
        if asked.temperature is None:
            given["temperature"] = 0.0 if self.greedy else self.temperature
        found = replace(asked, **given) if given else asked
        if self.unsupported and found.temperature == 0:
            raise RequestError(
                f"temperature 0 takes the most likely token, and the model's generation config changes which that is "
                f"({_said(self.unsupported)}), which is not supported: ask for a temperature above 0; {_WAY_OUT}"
            )
        return found


def defaults_of(model: PreTrainedModel, source: GenerationConfigName) -> Defaults:
    """The defaults of an engine; says what they are, where they are not this package's own.

    Raises:
        ConfigError: the generation config has a value that is out of range.
    """
    config = getattr(model, "generation_config", None)
    if source is GenerationConfigName.none or config is None:
        return Defaults()

    def changing(known: dict[str, list]) -> dict[str, Any]:
        found = {name: getattr(config, name, None) for name in known}
        return {name: one for name, one in found.items() if one is not None and one not in known[name]}

    nothing = {"temperature": None, "top_k": None, "top_p": None, "min_p": 0, "repetition_penalty": 1}
    found = {name: getattr(config, name, None) for name in nothing}
    drawn: dict[str, Any] = {name: one for name, one in found.items() if one not in (None, nothing[name])}
    if drawn.get("top_k", 0) < 0:
        drawn["top_k"] = 0
    try:
        Sampling(**drawn).check()
    except RequestError as error:
        raise ConfigError(f"the model's generation config cannot be used: {error}; {_WAY_OUT}") from None
    greedy, others = changing(_OF_CHOOSING), changing(_OF_DRAWING)
    made = Defaults(greedy=not config.do_sample, unsupported=greedy, **drawn)
    if drawn:
        log.warning("defaults of sampling, by the model's generation config: %s", _said(drawn))
    if greedy or others:
        log.warning(
            "not supported of the model's generation config, and left out: %s%s. %s",
            _said(greedy | others),
            f"; greedy requests are refused, since {', '.join(greedy)} would change their tokens" if greedy else "",
            _WAY_OUT,
        )
    return made


_CODEC = "make the engine with codec=TokenizerCodec(tokenizer), of graphmod.text"


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
    if any(one.seed is None and one.temperature for one in each):
        # Only where it is used: a greedy call leaves torch's generator, and so a training it is part of, as it was.
        drawn = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device="cpu"))
    return [
        one
        if one.seed is not None and not shared
        else replace(one, seed=prompt_seed(drawn if one.seed is None else one.seed, number))
        for number, one in enumerate(each)
    ]


class RequestReader:
    """Checks requests and takes them apart.

    Args:
        model: that decodes.
        max_seq_len: of the engine.
        codec: for prompts and stops that are text; None takes token ids only.
        source: of the defaults of requests that do not say how to choose tokens.
        processors: logits processors of all requests, before their own.
        chains: number -> logits processors; each different one that a request has is added.
        adapters: that requests may name.

    Attributes:
        vocabulary: number of tokens.
        eos: tokens that end a sequence unless it ignores them.
        defaults: of requests.
        grammars: of what completions must look like.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_seq_len: int,
        codec: Codec | None,
        source: GenerationConfigName,
        processors: list[Any],
        chains: dict[int, Chain],
        adapters: Adapters,
    ) -> None:
        Sampling(logits_processors=processors).check()
        self._processors, self._chains, self._adapters = processors, chains, adapters
        text = model.config.get_text_config()
        full = max_seq_len == getattr(text, "max_position_embeddings", None)
        self._way_out = ", since the model has no more positions" if full else ", or raise max_seq_len"
        self.vocabulary, self.max_seq_len, self.codec = text.vocab_size, max_seq_len, codec
        self.eos, self.defaults = eos_ids(model, codec), defaults_of(model, source)
        self.grammars = Grammars(codec, self.vocabulary, self.eos)

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
        kind = type(prompt).__name__
        if isinstance(prompt, Mapping):  # what a tokenizer returns, of which a list has the keys alone
            raise RequestError(f"prompt {number} must be token ids or a text, got {kind}; give its input_ids")
        try:
            found = list(prompt)
        except TypeError:
            alone = "; write [prompt]" if isinstance(prompt, Integral) else ""
            raise RequestError(f"prompt {number} must be token ids or a text, got {kind}{alone}") from None
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
        return isinstance(token, Integral) and not isinstance(token, bool) and 0 <= int(token) < self.vocabulary

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
                number = getattr(self._codec_for("stop", stop), "special", {}).get(stop, self.vocabulary)
                if number >= self.vocabulary:
                    texts.append(stop)
                    continue
                stop = number  # found on the device, as a text it would be looked for on the host
            parts = self._ids("stop", stop)
            if len(parts) == 1:
                ids += parts
            else:
                sequences.append(parts)
        ids = list(dict.fromkeys(ids))
        if len(ids) > MOST_STOPS:
            raise RequestError(
                f"{len(ids)} stop tokens (end-of-sequence included) are more than {MOST_STOPS}; use fewer, or "
                "ignore_eos=True"
            )
        return ids, sequences, texts

    def _codec_for(self, name: str, text: str) -> Codec:
        if self.codec is None:
            raise RequestError(f"{name} {text!r} is text and the engine has no codec; give token ids, or {_CODEC}")
        return self.codec

    def _ids(self, name: str, given: Any) -> list[int]:
        parts = [*given] if isinstance(given, SequenceOf) else [given]
        if not parts or not all(map(self._is_token, parts)):
            raise RequestError(
                f"unknown {name} {given!r}: expected a token id below {self.vocabulary}, a list of them, or a text"
            )
        return [*map(int, parts)]

    def adjustment(self, sampling: Sampling) -> Adjustment | None:
        """What changes the logits of a request; None if nothing does.

        Raises:
            RequestError: a token that the model does not have, or more than there is room for.
        """
        if not is_adjusted(sampling):
            return None
        allowed, bias = sampling.allowed_token_ids, sampling.logit_bias
        for name, ids in (("logit_bias", bias), ("allowed_token_ids", allowed or ())):
            wrong = next((token for token in ids if not self._is_token(token)), None)
            if wrong is not None:
                raise RequestError(f"{name} must have token ids below {self.vocabulary}, got {wrong!r}")
        bad = self._bad_words(sampling)
        biased = bias if allowed is None else {token: bias.get(token, 0.0) for token in allowed}
        out = {word[0]: float("-inf") for word in bad if len(word) == 1}
        words = [word for word in bad if len(word) > 1]
        if len(words) > MOST_WORDS or max(map(len, words), default=0) > LONGEST_WORD:
            raise RequestError(
                f"bad_words must be at most {MOST_WORDS} sequences of several tokens, each of up to {LONGEST_WORD}, "
                f"got {len(words)}, the longest of {max(map(len, words))}"
            )
        base = 0.0 if allowed is None else float("-inf")
        return Adjustment(base, {**biased, **out}, words, self._chain(sampling))

    def _bad_words(self, sampling: Sampling) -> list[list[int]]:
        """The sequences of ids that must not come; of a text, with and without a space before it."""
        found: list[list[int]] = []
        for word in sampling.bad_words:
            if isinstance(word, str) and word:
                codec = self._codec_for("bad_words", word)
                encode = getattr(codec, "encode_as_is", codec.encode)
                ids = [encode(before + (word.lstrip() or word)) for before in ("", " ")]
                if not all(ids):
                    raise RequestError(f"bad_words {word!r} has no tokens of its own; give token ids, or leave it out")
                found += ids
            else:
                found.append(self._ids("bad_words", word))
        return [*map(list, dict.fromkeys(map(tuple, found)))]

    def _chain(self, sampling: Sampling) -> int:
        chain, chains = tuple(sampling.logits_processors), self._chains
        if not chain:
            return 0
        number = next((number for number, known in [*chains.items()] if known == chain), len(chains) + 1)
        if number > len(chains):
            if number > MOST_CHAINS:
                raise RequestError(
                    f"logits_processors of {MOST_CHAINS} kinds were used with this engine, and each has graphs of its "
                    "own; make the functions once and use them again, or make another engine"
                )
            chains[number] = chain
        return number

    def read(self, prompts: Any, n: int, sampling: Any, settings: dict) -> list[Sequence]:
        """The n samples of each prompt; on the arguments see `DecodeEngine.generate`. Raises RequestError."""
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list of prompts, got one text; write [prompt]")
        if isinstance(prompts, torch.Tensor) and prompts.dim() == 1:
            raise RequestError("prompts must be a list of prompts, got one tensor of token ids; write [prompt]")
        if isinstance(prompts, Mapping):
            raise RequestError(
                f"prompts must be a list of prompts, got {type(prompts).__name__}; give its input_ids, without padding"
            )
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
            each = [replace(one, **settings) for one in each]
        except UnknownSetting as error:
            raise RequestError(str(error)) from None
        for one in each:
            one.check()
        each = [self.defaults.fill(one) for one in each]
        if self._processors:
            each = [replace(one, logits_processors=[*self._processors, *one.logits_processors]) for one in each]
        each = _seeded(each, shared=not isinstance(sampling, list) or "seed" in settings)
        asked = enumerate(zip(prompts, each, strict=True))
        return [one for number, (prompt, own) in asked for one in self._sequences(number, prompt, n, own)]

    def _sequences(self, number: int, prompt: Any, n: int, sampling: Sampling) -> list[Sequence]:
        if not isinstance(n, Integral) or isinstance(n, bool) or n < 1:
            raise RequestError(f"n must be an integer of at least 1, got {n!r}")
        tokens = self.tokens(prompt, number)
        ids, sequences, texts = self.stops(sampling)
        limit = min(len(tokens) + sampling.max_new_tokens, self.max_seq_len)
        adjustment, structure = self.adjustment(sampling), sampling.structured_outputs
        found = [
            Sequence(
                Completion(number, sample, tokens),
                sampling,
                limit,
                ids,
                sequences,
                StopTexts(self.codec, texts, tokens) if self.codec is not None and texts else None,
                adjustment,
                None if structure is None else self.grammars.matcher(structure),
            )
            for sample in range(n)
        ]
        self._adapters.take(sampling.adapter, found)
        return found
