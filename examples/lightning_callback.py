"""Lightning: a callback lets the layers of the model run from graphs, in training and validation, and gives them back
when `fit` ends."""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from graphmod import graph_layers, ungraph
from graphmod.train.attention import use_static_causal_attention

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}


class GraphLayers(L.Callback):
    def on_fit_start(self, trainer, module):
        use_static_causal_attention(module.model)  # rows are of one length; leave it out for batches with padding
        self.layers = graph_layers(module.model)

    def on_fit_end(self, trainer, module):
        print(sum(layer.stats for layer in self.layers))
        ungraph(module.model)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**SIZES))
        self.losses = []

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.model(input_ids=batch[0], labels=batch[0]).loss)

    def on_train_batch_end(self, outputs, batch, index):
        self.losses.append(outputs["loss"].item())
        print(f"batch {index}: loss {self.losses[-1]:.4f}")

    def on_validation_epoch_end(self):
        self.losses.append(self.trainer.callback_metrics["val_loss"].item())
        print(f"val_loss {self.losses[-1]:.4f}")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(steps: int = 8, graphs: bool = True) -> list[float]:
    L.seed_everything(0)
    model = Model()
    data = TensorDataset((torch.randint(64, (4 * steps, 1)) + torch.arange(16)) % 64)
    trainer = L.Trainer(
        max_steps=steps,
        callbacks=[GraphLayers()] if graphs else [],
        devices=1,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=2), DataLoader(data, batch_size=8))
    return model.losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    main(parser.parse_args().steps)
