"""What requests get that do not say how to choose tokens: by the model's generation config, as transformers' `generate`
and vLLM have it.

What is not supported of it is said when an engine is made. Some of that would change even the most likely token: a
greedy request is refused then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from graphmod.decode.config import GenerationConfigName, Sampling
from graphmod.decode.errors import RequestError
from graphmod.errors import ConfigError

log = logging.getLogger("graphmod")

# Settings that are not supported -> the values of them that change nothing, besides None. Those of drawing change no
# greedy token, all others do.
_OF_DRAWING = {"min_p": [0], "typical_p": [1], "top_h": [1], "epsilon_cutoff": [0], "eta_cutoff": [0]}
_OF_CHOOSING = {
    "repetition_penalty": [1],
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
        top_k, top_p: see `Sampling`.
        unsupported: what would change the most likely token: name -> value.
    """

    temperature: float = 1.0
    greedy: bool = True
    top_k: int = 0
    top_p: float = 1.0
    unsupported: dict[str, Any] = field(default_factory=dict)

    def fill(self, asked: Sampling) -> Sampling:
        """The settings of a request with these in the place of None.

        Raises:
            RequestError: it is greedy, and would get other tokens than from transformers' `generate`.
        """
        given = {name: getattr(self, name) for name in ("top_k", "top_p") if getattr(asked, name) is None}
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

    names = ("temperature", "top_k", "top_p")
    drawn = {name: value for name in names if (value := getattr(config, name, None)) is not None}
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
