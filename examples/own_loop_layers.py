"""A loop one does not want to restructure: it reads losses on the host, skips steps, and sets the rate as a number. The
layers of its model run from graphs, the loop stays as it is."""

import argparse
import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod import graph_layers
from graphmod.train.attention import use_static_causal_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
MICROBATCHES = 2


def main(steps: int = 16, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device)
    layers = []
    if graphs:
        use_static_causal_attention(model)  # rows are of one length; leave it out for batches with padding
        layers = graph_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 + math.cos(math.pi * step / steps)) / 2
        total = 0.0
        for _ in range(MICROBATCHES):
            tokens = ((torch.randint(64, (4, 1)) + torch.arange(32)) % 64).to(device)
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / MICROBATCHES
            if not loss.isfinite():
                continue
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm < 100:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        print(f"step {step}: loss {total:.4f}, norm {norm:.3f}")
    if graphs:
        print(sum(layer.stats for layer in layers))
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    main(parser.parse_args().steps)
