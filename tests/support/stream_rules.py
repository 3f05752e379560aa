"""Tells on the CPU what a GPU would not forgive: a capture whose autograd graph ends at a gradient accumulator of the
caller's stream would fork to that stream, and one that is differentiated with respect to an accumulator it does not end
at would lose the gradient without a word. And graphs write over gradients that lie among their activations.

On a GPU an AccumulateGrad node belongs to the stream on which it was made. Here each is marked by who made it. And such
gradients are NaN as soon as a pass begins that may write over them.
"""

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from graphmod.layers.context import LayerContext
from graphmod.layers.graph import LayerGraph
from graphmod.signature.call import Flat
from graphmod.step.arena import Arena

CALLER, CAPTURE = "the caller's stream", "the capture stream"
MARK = "made on"


def ends(tensors: Iterable[Tensor]) -> Iterator[torch.autograd.graph.Node]:
    """The AccumulateGrad nodes that tensors lead to."""
    seen, queue = set(), [tensor.grad_fn for tensor in tensors]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node
        else:
            queue += [following for following, _ in node.next_functions]


def mark(tensors: Iterable[Tensor], stream: str) -> None:
    for node in ends(tensors):
        node.metadata.setdefault(MARK, stream)


def watch(monkeypatch) -> list[str]:
    """Watches all captures from now on; what breaks the rules is added to the list that it returns."""
    broken: list[str] = []
    made_by: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    track, results, find = LayerContext.eager_result, LayerContext.results, LayerGraph._find_parameters
    differentiate, begin = LayerGraph.differentiate, Arena.begin

    def tracked(context, entry, call, *recorded):
        mark(call.result.differentiable, CALLER)
        return track(context, entry, call, *recorded)

    def handed_out(*arguments):
        result = results(*arguments)
        mark(Flat(result).differentiable, CALLER)
        return result

    def found(graph, *arguments):
        mark(graph.results.retained, CAPTURE)
        return find(graph, *arguments)

    def differentiated(graph, outputs, inputs, grads, direct, edges, *several, **how):
        if several:  # no capture
            return differentiate(graph, outputs, inputs, grads, direct, edges, *several)
        reached: dict[int, set] = {}
        for node in ends(out for out, grad in zip(outputs, grads, strict=True) if grad is not None):
            reached.setdefault(id(node.variable), set()).add(node)
        for parameter in (*direct, *graph.hooked):
            edge = edges.get(id(parameter)) or torch.autograd.graph.get_gradient_edge(parameter)
            if id(parameter) not in reached or not hasattr(edge.node, "variable"):
                continue
            if edge.node not in reached[id(parameter)]:
                broken.append(f"{graph.context.name}: a gradient of shape {tuple(parameter.shape)} is lost")
            if edge.node.metadata.get(MARK) == CALLER:
                broken.append(f"{graph.context.name}: forks to the caller's stream for {tuple(parameter.shape)}")
        return differentiate(graph, outputs, inputs, grads, direct, edges, **how)

    def began(arena, tape):
        stuck = begin(arena, tape)
        for one in sorted(arena.tapes, key=lambda one: one.serial):
            backwards = [graph.backward for graph in one.owners if isinstance(graph, LayerGraph)]
            for buffer in (buffer for known in backwards if known is not None for buffer in known.written):
                if buffer.arena is arena:  # the first tape that has it has made it, and no later one uses its memory
                    made_by.setdefault(buffer, one.serial)
        for buffer, serial in made_by.items() if stuck is None else ():
            memory = buffer.memory
            if buffer.arena is arena and serial >= tape.serial and memory.is_floating_point() and not memory.is_cuda:
                memory.fill_(float("nan"))
        return stuck

    # What it looks at is nothing that a captured backward reads: code of the package's own, for the guards.
    differentiated.__code__ = differentiated.__code__.replace(co_filename=differentiate.__code__.co_filename)
    monkeypatch.setattr(LayerContext, "eager_result", tracked)
    monkeypatch.setattr(LayerContext, "results", handed_out)
    monkeypatch.setattr(LayerGraph, "_find_parameters", found)
    monkeypatch.setattr(LayerGraph, "differentiate", differentiated)
    monkeypatch.setattr(Arena, "begin", began)
    return broken
