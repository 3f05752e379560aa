"""A step around a model that is compiled already: torch.compile fuses the kernels, and one graph launches them all."""

import argparse

import torch
from torch import nn

from graphmod import CUDAGraphModule

device = "cuda" if torch.cuda.is_available() else "cpu"


def main(steps: int = 12, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    compiled = torch.compile(model)  # its default mode: "reduce-overhead" would make graphs of its own
    rate = torch.tensor(1e-2, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=6)

    def train_step(x, y):
        loss = nn.functional.mse_loss(compiled(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if graphs:
        train_step = CUDAGraphModule(train_step)

    losses = []
    for step in range(steps):
        x = torch.randn(32, 16).to(device)
        losses.append(train_step(x, x.sum(1, keepdim=True).sin()).item())
        schedule.step()
        print(f"step {step}: loss {losses[-1]:.4f}")
    if graphs:
        print(train_step.stats)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    main(parser.parse_args().steps)
