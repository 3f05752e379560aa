"""A vision transformer, timm's where it is installed, else that of transformers: its blocks run from graphs."""

import argparse

import torch
from torch.nn import functional as F

from graphmod import graph_layers

try:
    import timm
except ImportError:
    from transformers import ViTConfig, ViTForImageClassification

    timm = None

device = "cuda" if torch.cuda.is_available() else "cpu"


def vision_transformer() -> torch.nn.Module:
    if timm is not None:
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 10}
        return timm.create_model("vit_tiny_patch16_224", **sizes, drop_path_rate=0.1)
    sizes = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**sizes, intermediate_size=128, num_labels=10))


def main(steps: int = 16, graphs: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = vision_transformer().to(device)
    layers = graph_layers(model) if graphs else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    losses = []
    for step in range(steps):
        labels = torch.randint(10, (8,)).to(device)
        images = torch.randn(8, 3, 32, 32).to(device) + labels.view(-1, 1, 1, 1)
        with torch.autocast(device, torch.bfloat16):
            scores = model(images)
            loss = F.cross_entropy(scores if timm else scores.logits, labels, label_smoothing=0.1)
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
