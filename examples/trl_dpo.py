"""Preference optimisation with TRL: DPOTrainer gets a policy and a reference model whose layers run from graphs."""

import argparse
import copy
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

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
    reference = copy.deepcopy(model)
    layers = graph_layers(model) + graph_layers(reference) if graphs else []
    pairs = [{"prompt": f"Twice {n} is ", "chosen": f"{2 * n}", "rejected": "unknown to me"} for n in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            gradient_checkpointing=False,  # is switched off and on in each step, with another hook each time
            pad_to_multiple_of=64,  # else each batch has a length of its own, and needs graphs of its own
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        pairs = Dataset.from_list(pairs)
        trainer = DPOTrainer(model, reference, arguments, train_dataset=pairs, processing_class=byte_tokenizer())
        trainer.train()
    if graphs:
        print(sum(layer.stats for layer in layers))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    main(parser.parse_args().steps)
