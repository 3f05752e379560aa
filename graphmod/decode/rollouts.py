"""Completions for trainers of TRL from a `DecodeEngine` over the very weights that they train."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from transformers import ProcessorMixin

from graphmod.config import choice
from graphmod.decode.engine import DecodeEngine
from graphmod.decode.types import DecodeError, EngineConfig, GenerationConfigName, Keep
from graphmod.errors import ConfigError


def use_decode_engine(trainer: Any, *, keep: Keep | str = Keep.graphs, **settings: Any) -> Rollouts:
    """Has a `GRPOTrainer` or `RLOOTrainer` of TRL sample from a `DecodeEngine`, with the settings of its own config:
    temperature, top_p, `generation_kwargs` and the others. There is one copy of the weights, the one that is trained.

    Args:
        trainer: its model is on one device, or a copy of it on each (DDP).
        keep: what stays between rollouts, see `DecodeEngine.suspend`; the memory of keys and values is given back.
        settings: of the engine, fields of `EngineConfig`. Unless it is given, `max_batch_size` is all prompts of a
            rollout. Give `max_seq_len`, of prompt and completion, or there is memory for all the model's positions.

    Returns:
        What the trainer calls from now on; its `engine` is made in the first rollout.

    Raises:
        ConfigError: another trainer, or one whose settings want another sampler, several devices or pictures.
    """
    generate, model = getattr(trainer, "_generate_single_turn", None), getattr(trainer, "model", None)
    if generate is None or model is None:
        kind = type(trainer).__name__
        raise ConfigError(f"trainer must be a GRPOTrainer or RLOOTrainer of trl 1.16 or newer, got {kind}")
    adapters = getattr(model, "peft_config", {}).values()
    refused = {
        "use_vllm=True, which samples": trainer.args.use_vllm,
        "use_transformers_continuous_batching=True, which samples": trainer.args.use_transformers_continuous_batching,
        "a rollout_func, which samples": getattr(trainer, "rollout_func", None),
        "FSDP, which splits the weights": trainer.is_fsdp_enabled,
        "DeepSpeed, which may split the weights": trainer.is_deepspeed_enabled,
        "a processor, for prompts with pictures or sounds": isinstance(trainer.processing_class, ProcessorMixin),
        "a learned prompt of peft": any(one.is_prompt_learning for one in adapters),
    }
    for what in (what for what, found in refused.items() if found):
        raise ConfigError(f"the trainer has {what}; leave that out, or do not use a DecodeEngine")
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    config = EngineConfig(generation_config=GenerationConfigName.auto, **{"max_batch_size": rows, **settings})
    told = "num_generations" in inspect.signature(generate).parameters  # of GRPO, which takes log-probabilities
    trainer._generate_single_turn = made = Rollouts(trainer, choice(Keep, keep, "keep"), config, told)
    return made


class Rollouts:
    """Generates in the place of a trainer's own `_generate_single_turn`.

    The log-probabilities are those that the trainer computes: of the logits, divided by its temperature, before top_k
    and the like, under its autocast.

    Attributes:
        engine: None before the first rollout.
    """

    def __init__(self, trainer: Any, keep: Keep, config: EngineConfig, told: bool) -> None:
        self.engine: DecodeEngine | None = None
        self._trainer, self._keep, self._config, self._told = trainer, keep, config, told
        self._model = model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
        forward, temperature = model.forward, trainer.temperature

        @functools.wraps(forward)
        def scored(*args: Any, **kwargs: Any) -> Any:
            found = forward(*args, **kwargs)
            found.logits = found.logits.float() / temperature
            return found

        self._forward = scored

    def __call__(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        """The completion of each prompt; for GRPO, with the log-probabilities of its tokens."""
        model = self._model
        hooks = model.get_input_embeddings()._forward_hooks
        own = {name: value for name, value in vars(model).items() if name == "forward"}
        before = dict(hooks)
        try:
            # Gradient checkpointing is switched on anew for each batch, and transformers adds a hook each time.
            for number, hook in before.items():
                if "enable_input_require_grads" in getattr(hook, "__qualname__", ""):
                    del hooks[number]
            model.forward = self._forward
            with self._trainer.accelerator.autocast():
                return self._sample(prompt_ids)
        finally:
            del model.forward
            vars(model).update(own)
            hooks.clear()
            hooks.update(before)

    def _sample(self, prompt_ids: list[list[int]]) -> Any:
        config, model = self._trainer.generation_config, self._model
        if self.engine is None:
            own = model.generation_config
            try:
                model.generation_config = config
                self.engine = DecodeEngine(model, self._config)
            finally:
                model.generation_config = own
        self.engine.resume()
        try:
            temperature = config.temperature / self._trainer.temperature if config.do_sample else 0.0
            found = self.engine.generate(prompt_ids, temperature=temperature, max_new_tokens=config.max_new_tokens)
        finally:
            self.engine.suspend(self._keep)
        for one in found:
            if one.error is not None:
                raise DecodeError(f"prompt {one.request} of a rollout: {one.error}")
        tokens = [one.tokens for one in found]
        return (tokens, [one.logprobs for one in found]) if self._told else tokens
