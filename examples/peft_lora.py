"""LoRA with PEFT: the layers of the adapted model run from graphs, with a frozen base and dropout in the adapters."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod import graph_layers
from graphmod.train.attention import use_static_causal_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def main(steps: int = 16, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**SIZES))
    model = get_peft_model(base, LoraConfig(**LORA)).to(device)
    layers = []
    if graphs:
        use_static_causal_attention(base)  # rows are of one length; leave it out for batches with padding
        layers = graph_layers(model)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    losses = []
    for step in range(steps):
        tokens = ((torch.randint(64, (4, 1)) + torch.arange(16)) % 64).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
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
