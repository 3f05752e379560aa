"""A training loop of one's own, in the style of nanoGPT: a whole iteration, optimizer included, is one graph."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from graphmod import CUDAGraphModule

device = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, WIDTH, HEADS, LENGTH, MICROBATCHES = 64, 32, 2, 32, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main(steps: int = 16, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = GPT().to(device)
    # A tensor on the device: the graph reads its value of now. A number would be captured anew each time it changes.
    rate = torch.tensor(3e-3, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def train_step(tokens):
        total = torch.zeros((), device=device)
        for part in tokens:
            with torch.autocast(device, torch.bfloat16):
                loss = model(part[:, :-1], part[:, 1:]) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    if graphs:
        train_step = CUDAGraphModule(train_step)

    losses = []
    for step in range(steps):
        batch = (torch.randint(VOCAB, (MICROBATCHES, 4, 1)) + torch.arange(LENGTH + 1)) % VOCAB
        losses.append(train_step(batch.to(device)).item())
        schedule.step()  # outside of the step: it counts in Python, which a replay would not do
        print(f"step {step}: loss {losses[-1]:.4f}")
    if graphs:
        print(train_step.stats)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    main(parser.parse_args().steps)
