"""transformers' Trainer, with accumulation, bf16, clipping, a schedule and evaluation: it gets a model whose layers run
from graphs."""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from graphmod import graph_layers
from graphmod.train.attention import use_static_causal_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}


def main(steps: int = 12, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    layers = []
    if graphs:
        use_static_causal_attention(model)  # rows are of one length; leave it out for batches with padding
        layers = graph_layers(model)

    rows = (torch.randint(64, (128, 1)) + torch.arange(16)) % 64
    rows = [{"input_ids": row, "labels": row} for row in rows.tolist()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            bf16=True,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            eval_strategy="steps",
            eval_steps=6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:32])
        trainer.train()
    if graphs:
        print(sum(layer.stats for layer in layers))
    logged = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
    return [loss for loss in logged if loss is not None]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    main(parser.parse_args().steps)
