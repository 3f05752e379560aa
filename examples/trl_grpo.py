"""Reinforcement learning with TRL: GRPOTrainer trains layers that run from graphs, and samples from a DecodeEngine over
the same weights."""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from graphmod import graph_layers
from graphmod.decode import use_decode_engine

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def even(completion_ids: list[list[int]], **_) -> list[float]:
    """What is wanted: even tokens. A rule, so that no other model is needed."""
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def main(steps: int = 24, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=258))
    layers = graph_layers(model) if graphs else []
    prompts = Dataset.from_list([{"prompt": f"The square of {n} is "} for n in range(64)])
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            num_generations=4,
            num_iterations=2,
            max_completion_length=8,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,  # is switched off and on for each rollout, with another hook each time
            pad_to_multiple_of=32,  # else each batch has a length of its own, and needs graphs of its own
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = GRPOTrainer(model, even, arguments, train_dataset=prompts, processing_class=byte_tokenizer())
        rollouts = use_decode_engine(trainer, max_seq_len=64, buckets=[8], graphs=graphs)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    if graphs:
        print(sum(layer.stats for layer in layers))
        print(rollouts.engine.stats)
    rewards = [entry["reward"] for entry in logs if "reward" in entry]  # each rollout is used in two steps
    print(f"reward {rewards[0]:.3f} to {rewards[-1]:.3f}")
    return [entry["loss"] for entry in logs]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    main(parser.parse_args().steps)
