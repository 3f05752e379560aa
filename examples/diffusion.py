"""Diffusion in the manner of DDPM: noise and timesteps are drawn, a small U-Net learns, and an average of its weights
is kept, all in one graph."""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional as F

from graphmod import CUDAGraphModule

device = "cuda" if torch.cuda.is_available() else "cpu"
TIMES, WIDTH, BATCH = 100, 16, 8


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(TIMES, WIDTH)
        self.into, self.down = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, padding=1)
        self.middle = nn.Sequential(
            nn.GroupNorm(4, 2 * WIDTH), nn.SiLU(), nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1)
        )
        self.up, self.out = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2), nn.Conv2d(2 * WIDTH, 3, 3, padding=1)

    def forward(self, x, times):
        x = self.into(x) + self.time(times)[:, :, None, None]
        deep = self.middle(self.down(F.silu(x)))
        return self.out(torch.cat([x, self.up(F.silu(deep))], 1))


def main(steps: int = 16, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = UNet().to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    signal = torch.linspace(0.999, 0.9, TIMES).cumprod(0).to(device)
    rate = torch.tensor(2e-3, device=device)  # a tensor, so that a new value needs no new graph
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)

    def train_step(images):
        noise = torch.randn_like(images)
        times = torch.randint(TIMES, (BATCH,), device=device)
        kept = signal[times].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(kept.sqrt() * images + (1 - kept).sqrt() * noise, times), noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.01)
        return loss.detach()

    if graphs:
        train_step = CUDAGraphModule(train_step)

    losses = []
    for step in range(steps):
        images = torch.rand(BATCH, 3, 1, 1).expand(-1, -1, 8, 8).to(device)
        losses.append(train_step(images).item())
        schedule.step()
        print(f"step {step}: loss {losses[-1]:.4f}")
    if graphs:
        print(train_step.stats)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    main(parser.parse_args().steps)
