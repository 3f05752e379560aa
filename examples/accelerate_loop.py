"""An Accelerate loop with `accumulate()`, mixed precision and a prepared schedule: the layers of the model run from
graphs."""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from graphmod import graph_layers
from graphmod.train.attention import use_static_causal_attention

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}


def main(steps: int = 16, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    layers = []
    if graphs:
        use_static_causal_attention(model)  # rows are of one length; leave it out for batches with padding
        # Layers, not the step: `accumulate()` counts in Python, which a replay would not do.
        layers = graph_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, steps)
    rows = (torch.randint(64, (2 * steps, 1)) + torch.arange(16)) % 64
    loader = DataLoader(TensorDataset(rows), batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    losses = []
    for step, (tokens,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}")
    if graphs:
        print(sum(layer.stats for layer in layers))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    main(parser.parse_args().steps)
