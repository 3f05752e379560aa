"""Parts that somebody brings along: models, data sets and losses, right ones and wrong ones."""

import os
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM


class Block(nn.Module):
    def __init__(self, width, p=0.0):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.p = p

    def forward(self, x):
        seen = self.mix(self.norm(x)).cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + dropout(self.out(torch.relu(seen)), self.p, self.training)


class Net(nn.Module):
    """Averages what came before; tied embeddings, dropout as a function, a buffer that each step changes."""

    def __init__(self, vocab_size: int, width: int = 16, layers: int = 2, p: float = 0.1):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Block(width, p) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(1))

    def hidden(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        if self.training:
            self.calls += 1
        return x

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


class Counting(nn.CrossEntropyLoss):
    """Keeps a number from one step to the next."""

    calls = 0

    def forward(self, logits, targets):
        self.calls += 1
        return super().forward(logits, targets) / self.calls


class FailingLater(Net):
    """Fails in the fifth training step."""

    def forward(self, tokens):
        if self.training and self.calls > 3:
            raise ValueError("no more tokens, please")
        return super().forward(tokens)


class NetWithOutput(Net):
    def forward(self, input_ids):
        return SimpleNamespace(logits=super().forward(input_ids))


class Classifier(nn.Module):
    def __init__(self, inputs=4, classes=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inputs, inputs) for _ in range(2))
        self.head = nn.Linear(inputs, classes)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def llama(vocab_size, layers=2):
    """A model of transformers that a function makes."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, pad_token_id=None, **sizes))


class Ahead(Net):
    def hidden(self, tokens):
        return super().hidden(tokens) + self.embed(tokens).mean(1, keepdim=True)


class OfIntegers(Net):
    def forward(self, tokens):
        return super().forward(tokens).argmax(-1)


class OfDict(Net):
    def forward(self, tokens):
        return {"logits": super().forward(tokens)}


class Failing(Net):
    def forward(self, tokens):
        raise RuntimeError("no such luck")


class Unmakeable(nn.Module):
    def __init__(self):
        super().__init__()
        raise OSError("weights.bin is not there")


class Frozen(nn.Module):
    pass


def number():
    return 3


constant = 5


class Tokens:
    """`size` items of seq_len + 1 tokens."""

    vocab_size = 50

    def __init__(self, seq_len: int, size: int = 40):
        self.tokens = torch.randint(0, self.vocab_size, (size, seq_len + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


class Labelled(Tokens):
    """The first third of each item is only read."""

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        labels[: len(labels) // (2 + index % 2)] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Pairs:
    def __init__(self, size: int = 30):
        draw = torch.Generator().manual_seed(2)
        self.x, self.y = torch.randn(size, 4, generator=draw), torch.randint(0, 3, (size,), generator=draw)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Drawn(Tokens):
    """Made from torch's random state, as many data sets are."""

    def __init__(self, seq_len: int):
        self.tokens = torch.randint(0, self.vocab_size, (40, seq_len + 1))


class Restless(Tokens):
    def __getitem__(self, index):
        return torch.randint(0, 50, (17,))


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(17, dtype=torch.int64)


class Empty(Tokens):
    def __len__(self):
        return 0


class Uneven(Tokens):
    def __getitem__(self, index):
        return self.tokens[index][: 17 - index % 2]


class Words(Tokens):
    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": [1, 2]}


class TooLarge(Tokens):
    vocab_size = 20

    def __init__(self, seq_len: int):
        self.tokens = torch.full((40, seq_len + 1), 19)
        self.tokens[7, 3] = 20


class Unmeasured(Tokens):
    def __len__(self):
        return "many"


class Broken(Tokens):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("five")
        return self.tokens[index]


def smoothed(model, tokens, smoothing=0.0):
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=smoothing)


def trained_on_few(model, tokens, smoothing=0.0):
    wanted = torch.where(tokens[:, 1:] < 25, tokens[:, 1:], -100).flatten()
    return cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), wanted, label_smoothing=smoothing)


trained_on_few.count_targets = lambda tokens: (tokens[:, 1:] < 25).sum()


def classified(model, batch):
    x, y = batch
    return cross_entropy(model(x), y)


class Weighted:
    """A loss with settings of its own, and its own count of targets."""

    def __init__(self, factor: float):
        self.factor = factor

    def count_targets(self, tokens):
        return (tokens[:, 1:] < 25).sum()

    def __call__(self, model, tokens):
        losses = cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        wanted = tokens[:, 1:].flatten() < 25
        return self.factor * (losses * wanted).sum() / wanted.sum()


def of_rows(model, tokens):
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


def detached(model, tokens):
    return smoothed(model, tokens).detach()


def on_the_host(model, tokens):
    return smoothed(model, tokens).item()


def misspelt(model, tokens):
    return smoothed(model, token)  # noqa: F821


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Unsplit(nn.Module):
    """Nothing in it is a list of like layers."""

    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def reads(model, tokens):
    """A graph cannot repeat it."""
    loss = smoothed(model, tokens)
    return loss * (1 if loss.item() > 0 else 2)


class Unused(Net):
    """A part of it takes no part in the loss."""

    def __init__(self, vocab_size):
        super().__init__(vocab_size, width=8)
        self.spare = nn.Linear(2, 2)


class OfThisProcess(Tokens):
    def __getitem__(self, index):
        return (self.tokens[index] + os.getpid()) % self.vocab_size


def rows_of(path: str, seq_len: int):
    """Rows of the datasets library."""
    from datasets import Dataset

    text = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
    pieces = text[: len(text) // (seq_len + 1) * (seq_len + 1)].view(-1, seq_len + 1).tolist()
    rows = Dataset.from_dict({"input_ids": pieces, "labels": pieces}).with_format("torch")
    return WithVocabulary(rows)


class WithVocabulary:
    vocab_size = 256

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def penalized(model, tokens):
    """Needs gradients itself."""
    logits = model(tokens[:, :-1])
    loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    (gradient,) = torch.autograd.grad(loss, model.embed.weight, create_graph=True)
    return loss + gradient.square().mean()


class Annealed:
    """Counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, tokens):
        self.calls += 1
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / self.calls
