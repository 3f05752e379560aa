"""Runs one program on an eager twin and on a graphed twin, step by step, and demands the same bits from both.

`twins(build, step, replays=...)` is all most tests need. The program sees a `Side`; what it notes there, what it
returns, and every parameter, gradient, buffer, optimizer state and random state are compared after each step. At the
end the counters must show that the last steps really came from graphs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphmod import CUDAGraphModule, graph_layers
from graphmod.train.settings import TrainGraphConfig

WARMUP = 2
STEPS = 12
SETTLED = 5


def config(**settings: Any) -> TrainGraphConfig:
    """Settings of the tests: a short warm-up, and layers that serve in each call, also where one graph could."""
    return TrainGraphConfig(**{"warmup_steps": WARMUP, "body": False, **settings})


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nested value with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{path} {key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_of(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def snapshot(value: Any) -> dict[str, Any]:
    """The leaves of a value by path, tensors copied, so that it is the value of now."""
    leaves = tensors_of(value)
    return {p: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for p, v in leaves}


def difference(eager: Any, graphed: Any) -> str | None:
    """In what two leaves differ, in words; None where they are the same bits."""
    if isinstance(eager, Tensor) and isinstance(graphed, Tensor):
        for name in ("shape", "dtype", "requires_grad"):
            if getattr(eager, name) != getattr(graphed, name):
                return f"{name} {getattr(eager, name)} became {getattr(graphed, name)}"
        if not torch.equal(eager, graphed):
            off = (eager.detach().double() - graphed.detach().double()).abs().max().item()
            return f"values differ by up to {off:.3g}"
        return None
    if type(eager) is not type(graphed) or eager != graphed:
        return f"{short(eager)} became {short(graphed)}"
    return None


def short(value: Any) -> str:
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def assert_same(eager: Any, graphed: Any, where: str) -> None:
    """Fails, naming the first leaf that differs."""
    left, right = list(tensors_of(eager)), list(tensors_of(graphed))
    paths = {p for p, _ in left} ^ {p for p, _ in right}
    assert not paths, f"{where}: only one of the two has {sorted(paths)[:4]}"
    for (path, a), (_, b) in zip(left, right, strict=True):
        found = difference(a, b)
        assert found is None, f"{where}{path}: {found}"


class Side:
    """One of the two twins: what `build` made, plus the place where a program notes what must be equal.

    Attributes:
        call: how a program calls the model: the model itself, or its graphed form.
        graphs: the wrappers whose counters tell whether graphs ran; empty on the eager side.
    """

    def __init__(self, parts: dict[str, Any], device: torch.device, graphed: bool) -> None:
        self.__dict__.update(parts)
        self.device, self.graphed = device, graphed
        self.graphs: list[CUDAGraphModule] = []
        self.notes: list[tuple[str, Any]] = []
        if "call" not in parts:
            self.call = self.model

    def batch(self, step: int, *shape: int, key: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers that depend on the step alone, so that both twins get the same."""
        generator = torch.Generator().manual_seed(7919 * step + key)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.device, dtype)

    def tokens(self, step: int, *shape: int, vocabulary: int = 32, key: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(7919 * step + key)
        return torch.randint(0, vocabulary, shape, generator=generator).to(self.device)

    def note(self, **values: Any) -> None:
        """Keeps copies of values to be compared with the other twin's."""
        self.notes += [(name, snapshot(value)) for name, value in values.items()]

    def note_gradients(self) -> None:
        self.note(gradient={name: parameter.grad for name, parameter in self.model.named_parameters()})

    def state(self) -> dict[str, Any]:
        """Everything that outlives a step."""
        found: dict[str, Any] = {
            "parameter": dict(self.model.named_parameters()),
            "gradient": {name: p.grad for name, p in self.model.named_parameters()},
            "buffer": dict(self.model.named_buffers()),
            "random state": self.random_state(),
        }
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None:
            found["optimizer"] = optimizer.state_dict()
        return found

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def counters(self) -> tuple[int, int, int, int]:
        """`(replays, eager calls, captures, failures)` of all graphs."""
        found = [graph.stats for graph in self.graphs]
        names = ("replays", "eager_calls", "captures", "failures")
        return tuple(sum(getattr(stats, name) for stats in found) for name in names)


def wrapped(**settings: Any) -> Callable[[Side], None]:
    """Graphs the model as a whole: `side.call` becomes a `CUDAGraphModule` around it."""

    def graph(side: Side) -> None:
        side.call = CUDAGraphModule(side.model, config(**settings))
        side.graphs = [side.call]

    return graph


def layered(layers: Any = None, **settings: Any) -> Callable[[Side], None]:
    """Graphs the model's layers in place."""

    def graph(side: Side) -> None:
        side.graphs = graph_layers(side.model, config(**settings), layers=layers)

    return graph


def make_sides(
    build: Callable[[torch.device], Any], device: torch.device, graph: Callable[[Side], Any], seed: int = 0
) -> tuple[Side, Side]:
    """An eager side and a graphed side with equal contents. `build` returns a module or a dict with a `model`."""
    sides = []
    for graphed in (False, True):
        torch.manual_seed(seed)
        parts = build(device)
        side = Side(parts if isinstance(parts, dict) else {"model": parts}, device, graphed)
        if "optimizer" not in side.__dict__ and any(True for _ in side.model.parameters()):
            side.optimizer = torch.optim.SGD(side.model.parameters(), lr=0.05, momentum=0.9)
        sides.append(side)
    graph(sides[1])
    return sides[0], sides[1]


class Pair:
    """The two twins, and their random states between steps."""

    def __init__(self, eager: Side, graphed: Side) -> None:
        self.eager, self.graphed = eager, graphed
        torch.manual_seed(1)
        self._states = [side.random_state() for side in (eager, graphed)]

    def run(self, program: Callable[[Side, int], Any], step: int) -> None:
        """Runs one step on both twins and compares everything."""
        results = []
        for index, side in enumerate((self.eager, self.graphed)):
            side.set_random_state(self._states[index])
            results.append(program(side, step))
            self._states[index] = side.random_state()
        notes = self.eager.notes, self.graphed.notes
        names = [[name for name, _ in side] for side in notes]
        assert names[0] == names[1], f"step {step}: eager noted {names[0]}, graphed {names[1]}"
        for (name, a), (_, b) in zip(*notes, strict=True):
            assert_same(a, b, f"step {step}, {name}")
        assert_same(results[0], results[1], f"step {step}, result")
        eager, graphed = self.eager.state(), self.graphed.state()
        eager["random state"], graphed["random state"] = self._states
        assert_same(eager, graphed, f"after step {step}: ")
        self.eager.notes.clear()
        self.graphed.notes.clear()


def play(
    build: Callable[[torch.device], Any],
    step: Callable[[Side, int], Any],
    device: torch.device,
    *,
    graph: Callable[[Side], Any] | None = None,
    steps: int = STEPS,
) -> tuple[Side, list[tuple[int, int, int, int]]]:
    """Runs `step(side, i)` on both twins and compares after each step; returns the graphed side and its counters,
    `(replays, eager calls, captures, failures)`, after each step."""
    eager, graphed = make_sides(build, device, graph or wrapped())
    pair = Pair(eager, graphed)
    history = []
    for index in range(steps):
        pair.run(step, index)
        history.append(graphed.counters())
    return graphed, history


def twins(
    build: Callable[[torch.device], Any],
    step: Callable[[Side, int], Any],
    device: torch.device,
    *,
    replays: int | None,
    graph: Callable[[Side], Any] | None = None,
    steps: int = STEPS,
    settled: int = SETTLED,
    eager_calls: int = 0,
    failures: int = 0,
) -> Side:
    """Like `play`, and demands of the last steps that they came from graphs.

    Args:
        replays: by how much `stats.replays` must grow in each of the last `settled` steps.
        eager_calls: likewise for `stats.eager_calls`.
        failures: how many captures or replays may have failed in all.

    Returns:
        The graphed side.
    """
    graphed, history = play(build, step, device, graph=graph, steps=steps)
    last = history[-settled - 1 :]
    growth = [tuple(b - a for a, b in zip(*two, strict=True)) for two in itertools.pairwise(last)]
    reasons = "; ".join(filter(None, (getattr(g, "last_failure", "") for g in graphed.graphs)))
    assert history[-1][3] == failures, f"{history[-1][3]} failures: {reasons}"
    expected = (replays, eager_calls, 0, 0)
    assert growth == [expected] * settled, f"(replays, eager, captures, failures) per step: {growth}; {reasons}"
    return graphed


def train(side: Side, step: int, *shape: int) -> Tensor:
    """The plainest training step: forward, backward, optimizer, zeroing."""
    output = side.call(side.batch(step, *(shape or (4, 8))))
    loss = loss_of(output)
    side.note(output=output, loss=loss)
    loss.backward()
    side.note_gradients()
    side.optimizer.step()
    side.optimizer.zero_grad()
    return loss.detach()


def iteration_of(side: Side) -> Callable[[Tensor], Tensor]:
    """A whole training iteration of the side's model, as one callable."""

    def iteration(x: Tensor) -> Tensor:
        loss = loss_of(side.model(x))
        loss.backward()
        side.optimizer.step()
        side.optimizer.zero_grad()
        return loss.detach()

    return iteration


def loss_of(output: Any) -> Tensor:
    """A loss whose gradient is different in every element."""
    tensors = [v for _, v in tensors_of(output) if isinstance(v, Tensor) and v.requires_grad]
    total = None
    for tensor in tensors:
        weights = torch.linspace(0.1, 1.0, max(tensor.numel(), 1), device=tensor.device)[: tensor.numel()]
        part = (tensor.float() * weights.view(tensor.shape)).pow(2).mean()
        total = part if total is None else total + part
    return total


def mlp(device: torch.device, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)).to(device)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([mlp("cpu"), nn.Sequential(nn.Linear(8, 8), nn.Tanh())])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def two(device):
    return Two().to(device)


GRAPHS = {"whole": (wrapped, 2), "layers": (layered, 4)}
graphs = pytest.mark.parametrize("graph", GRAPHS)
