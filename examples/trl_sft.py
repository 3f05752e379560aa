"""Supervised fine-tuning with TRL: SFTTrainer gets a model whose layers run from graphs."""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from graphmod import graph_layers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def main(steps: int = 12, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=258))
    layers = graph_layers(model) if graphs else []
    texts = [{"text": f"The square of {n} is {n * n}" + ", of course" * (n % 3)} for n in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            pad_to_multiple_of=64,  # else each batch has a length of its own, and needs graphs of its own
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        texts = Dataset.from_list(texts)
        trainer = SFTTrainer(model, arguments, train_dataset=texts, processing_class=byte_tokenizer())
        trainer.train()
    if graphs:
        print(sum(layer.stats for layer in layers))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    main(parser.parse_args().steps)
