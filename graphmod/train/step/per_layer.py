"""A training iteration from graphs of its own for each layer, for the loss and for the update."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphmod.train.settings import TrainGraphConfig
from graphmod.train.step.iteration import Iteration
from graphmod.train.step.losses import criterion_of
from graphmod.wrap.body import body_of
from graphmod.wrap.layers import edge_modules, match_layers, wrap
from graphmod.wrap.module import CUDAGraphModule


class LayerGraphs:
    """The graphs of an iteration in scope `per_layer`.

    Args:
        iteration: whose loss function gets its criterion from a graph, where there is one.
        config: with `optimizer`, what lies beside the layers is captured too, and so is the update.
        layers: names of the model's layers.

    Attributes:
        graphs: all of them; those of the model come first.
    """

    def __init__(self, iteration: Iteration, config: TrainGraphConfig, layers: list[str]) -> None:
        self._iteration, self._update = iteration, None
        self._settled: dict[int, Tensor] = {}
        model, body = iteration.model, None
        if config.body and config.layers is None:
            body = body_of(model, layers)
        if config.optimizer:
            # The optimizer's graph reads every gradient by address, so every parameter's gradient must stay in place.
            layers = [*layers, *edge_modules(model, layers)]
        self.graphs: list[CUDAGraphModule] = wrap(model, config, match_layers(model, layers), body)
        self._groups = list({id(graph._context.group): graph._context.group for graph in self.graphs}.values())
        if config.optimizer:
            self._graph_criterion(config)
            self._update = CUDAGraphModule(iteration.update, config, name="optimizer step")
            self.graphs = [*self.graphs, self._update]

    def _graph_criterion(self, config: TrainGraphConfig) -> None:
        """Puts the loss of the logits beside the head, whose results it then reads where they are."""
        criterion = criterion_of(self._iteration.loss_fn)
        if criterion is None:
            return
        # The caller keeps losses, and a copy of one number costs less than to look for those that are still held.
        config = replace(config, clone_outputs=True)
        graphed = CUDAGraphModule(criterion, config, name="loss", group=self.graphs[-1]._context.group)
        self._iteration.loss_fn = functools.partial(self._iteration.loss_fn, criterion=graphed)
        self.graphs = [*self.graphs, graphed]

    def run(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """As `Iteration.run`."""
        if self._update is None:
            return self._iteration.run(batch)
        loss = self._iteration.differentiate(batch)
        self._settle_gradients()
        norm = self._update(loss) if self._iteration.guarded else self._update()
        self._iteration.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _settle_gradients(self) -> None:
        """Moves gradients that autograd put at a new address (of tied weights) to where the optimizer's graph reads."""
        for key, parameter in itertools.chain.from_iterable(group.shared.items() for group in self._groups):
            if parameter.grad is not None:
                settled = self._settled.get(key)
                if settled is None:
                    settled = self._settled[key] = torch.empty_like(parameter, requires_grad=False)
                settled.copy_(parameter.grad)
                parameter.grad = settled
