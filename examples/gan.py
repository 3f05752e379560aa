"""A GAN: the step of the discriminator and the step of the generator are a graph each."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from graphmod import CUDAGraphModule

device = "cuda" if torch.cuda.is_available() else "cpu"
NOISE, BATCH = 8, 8


def main(steps: int = 16, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    generator = nn.Sequential(
        *(nn.ConvTranspose2d(NOISE, 16, 4), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1), nn.Tanh()),
    ).to(device)
    discriminator = nn.Sequential(
        *(nn.Conv2d(3, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
        nn.Conv2d(16, 1, 4),
    ).to(device)
    settings = {"lr": 2e-4, "betas": (0.5, 0.999), "fused": True, "capturable": True}
    generator_optimizer = torch.optim.Adam(generator.parameters(), **settings)
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), **settings)

    def discriminator_step(real):
        with torch.no_grad():
            fake = generator(torch.randn(BATCH, NOISE, 1, 1, device=device))
        loss = F.relu(1 - discriminator(real)).mean() + F.relu(1 + discriminator(fake)).mean()
        discriminator_optimizer.zero_grad()
        loss.backward()
        discriminator_optimizer.step()
        return loss.detach()

    def generator_step():
        loss = -discriminator(generator(torch.randn(BATCH, NOISE, 1, 1, device=device))).mean()
        generator_optimizer.zero_grad()
        loss.backward()
        generator_optimizer.step()
        return loss.detach()

    if graphs:
        discriminator_step, generator_step = CUDAGraphModule(discriminator_step), CUDAGraphModule(generator_step)

    losses = []
    for step in range(steps):
        real = torch.rand(BATCH, 3, 1, 1).expand(-1, -1, 8, 8).to(device)
        losses += [discriminator_step(real).item(), generator_step().item()]
        print(f"step {step}: discriminator {losses[-2]:.4f}, generator {losses[-1]:.4f}")
    if graphs:
        print(discriminator_step.stats)
        print(generator_step.stats)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    main(parser.parse_args().steps)
