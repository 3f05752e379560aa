"""What a captured call returns: structure and constants as captured, around the tensors of each replay.

May import `signature`, `buffers`, `recorder` and `errors`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphmod.buffers import StaticOutput
from graphmod.errors import CaptureRefused
from graphmod.lifecycle import Entry
from graphmod.recorder import Recorder
from graphmod.signature import Leaf, flatten, opaque_parts, rebuild
from graphmod.trace import address


class Results:
    """The results of one captured call.

    Args:
        result: what the captured code returned.
        given: the static tensors it was given.
        entry: the signature it belongs to.
        stood_in: view (by identity) -> the parameter it stood for in the capture.
        owned: the storage addresses of buffers into which arguments are copied; a result there is copied in turn.
        clone: hand out copies.

    Attributes:
        with_grad: those that require grad, in the order in which autograd sees them.
        handed_out: all that lie in memory of the graph.
        passed_on: tensors from outside that the code returns as they are.
        retained: the captured ones of `with_grad` with their autograd graph, until the backward is captured from it.

    Raises:
        CaptureRefused: something among them cannot be made again around other tensors.
    """

    def __init__(
        self,
        result: Any,
        given: list[Tensor],
        recorder: Recorder,
        entry: Entry,
        stood_in: dict[int, Tensor],
        owned: set[int],
        clone: bool,
    ) -> None:
        leaves: list[Tensor] = []
        self._structure = flatten(result, leaves, {})
        for part in opaque_parts(self._structure):
            raise CaptureRefused(
                f"returns a {type(part).__name__}, which cannot be taken apart into tensors; return tensors, numbers, "
                "strings or containers of them (for a transformers model in training: use_cache=False)"
            )
        self.with_grad: list[StaticOutput] = []
        self.passed_on: list[Tensor] = []
        self.retained: list[Tensor] = []
        self._parts: list[Any] = []  # an index of an argument, None for the next of `with_grad`, or what it is
        places = {id(static): index for index, static in enumerate(given)}
        for leaf in leaves:
            tensor = stood_in.get(id(leaf), leaf)
            if tensor.layout is not torch.strided:
                raise CaptureRefused("returns a sparse tensor")
            if id(tensor) in places:
                self._parts.append(places[id(tensor)])
            elif (tensor.is_leaf and address(tensor) in recorder.outside) or recorder.is_host(tensor):
                self._parts.append(tensor)
                self.passed_on.append(tensor)
            elif tensor.requires_grad:
                self._parts.append(None)
                self.with_grad.append(StaticOutput(tensor.detach(), entry, counted=True))
                self.retained.append(tensor)
            else:
                self._parts.append(StaticOutput(tensor.detach(), entry))
        plain = [part for part in self._parts if isinstance(part, StaticOutput)]
        self.handed_out = self.with_grad + plain
        for output in self.with_grad:
            output.copied = False  # as a rule they are held for a moment only
        for output in self.handed_out:
            output.copied = output.copied or address(output.tensor) in owned
        self._clone = clone or entry.copies_out
        # The usual case of a layer: one tensor, handed out as it is.
        self._sole = self._structure.__class__ is Leaf and len(self.handed_out) == 1 and not self._clone
        self._sole = self._sole and not self.handed_out[0].copied

    def make(self, leaves: list[Tensor], differentiable: tuple[Tensor, ...]) -> Any:
        """The result of the replay that was just launched.

        Args:
            leaves: the call's tensor arguments.
            differentiable: `with_grad` as they came out of the autograd node.
        """
        if self._sole:
            return differentiable[0] if differentiable else self._parts[0].hand_out()
        grads = iter(zip(differentiable, self.with_grad, strict=True))
        made = []
        for part in self._parts:
            if part is None:
                tensor, output = next(grads)
                made.append(tensor.clone() if self._clone or output.copied else tensor)
            elif part.__class__ is StaticOutput:
                made.append(part.tensor.clone() if self._clone or part.copied else part.hand_out())
            else:
                made.append(leaves[part] if isinstance(part, int) else part)
        return rebuild(self._structure, made)


def resolved(result: Any) -> Any:
    """The result with lazy conjugates, negations and zeros carried out, for which no plain memory stands."""
    leaves: list[Tensor] = []
    structure = flatten(result, leaves, {})
    if not any(t.is_conj() or t.is_neg() or t._is_zerotensor() for t in leaves if t.layout is torch.strided):
        return result
    return rebuild(structure, [_in_memory(tensor) for tensor in leaves])


def _in_memory(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.clone() if tensor._is_zerotensor() else tensor
