"""Random small modules for the random programs, as hypothesis strategies."""

import torch
from hypothesis import strategies as st
from torch import nn

WIDTH = 6


class Residual(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Branch(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x):
        return self.left(x) * torch.sigmoid(self.right(x))


class Sliced(nn.Module):
    """Views, concatenation and a reduction."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        first, second = self.body(x).chunk(2, dim=-1)
        return torch.cat([second, first - x[:, : WIDTH // 2].mean(-1, keepdim=True)], dim=-1)


PARTS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "relu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "tanh": nn.Tanh,
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.3),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "identity": nn.Identity,
}


leaf = st.sampled_from(sorted(PARTS)).map(lambda name: (name,))


part = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.tuples(st.just("residual"), inner),
        st.tuples(st.just("sliced"), inner),
        st.tuples(st.just("branch"), inner, inner),
        st.tuples(st.just("sequence"), inner, inner),
    ),
    max_leaves=3,
)


shapes = st.lists(part, min_size=1, max_size=3)


def build_part(spec):
    kind, *inner = spec
    if kind in PARTS:
        return PARTS[kind]()
    makers = {"residual": Residual, "sliced": Sliced, "branch": Branch, "sequence": nn.Sequential}
    return makers[kind](*map(build_part, inner))


class Stack(nn.Module):
    """Layers between two eager ones; `order` may name a layer more than once."""

    def __init__(self, specs, order):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(build_part(spec), nn.Linear(WIDTH, WIDTH)) for spec in specs)
        self.order = [index % len(specs) for index in order] or list(range(len(specs)))

    def forward(self, x):
        x = self.first(x)
        for index in self.order:
            x = self.layers[index](x)
        return x
