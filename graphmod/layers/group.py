"""What layers that are captured together share for the backwards outside of their graphs: gradient buffers, and what is
known of the gradients that the next backward will meet.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from graphmod.config import BackendName
from graphmod.step.entry import Entry
from graphmod.step.gradients import GradientBuffer, kind_of, unheld
from graphmod.step.group import Group
from graphmod.torch_private import current_backward, storage_uses

_tensor, _where, _data_ptr = operator.attrgetter("tensor"), operator.attrgetter("where"), Tensor.data_ptr


class LayerGroup(Group):
    """The layers that are captured together.

    Whether a backward will find gradients to be None or present is learned (`expects_fresh_grads`): for what is known
    when a pass begins (whether the gradient of one parameter is None, whether an optimizer has changed it, what the
    last pass found), what the first backward then found is expected again. So `zero_grad` between forward and backward
    is foreseen, too.

    Attributes:
        anchor: a leaf on the device that every replayed forward with a backward has among its inputs; anchor_node:
            where its gradient would be accumulated. One for all: autograd visits that node once in a backward, not once
            for each module.
        gradients: the buffer by parameter, which it holds; buffers are held by the graphs that write them.
        passing: where the gradients lie that are taken as soon as a backward is over.
        stash: gradients (by parameter) that wait for their other uses in the backward that runs.
        producers: which operations make gradients, by the shape of a capture.
        facts: what is known of the gradients that the coming backward meets, until one comes.
        found_fresh: whether the last pass found gradients to be None.
        keeps_gradients: whether gradients were ever there when a pass began, or a backward was to be captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.anchor: Tensor | None = None
        self.anchor_node: Any = None
        self.gradients: weakref.WeakValueDictionary[int, GradientBuffer] = weakref.WeakValueDictionary()
        self.passing = Passing()
        self.stash: dict[int, Tensor] = {}
        self.producers: dict[tuple, list] = {}
        self.facts: tuple | None = None
        self.found_fresh: bool | None = None
        self.keeps_gradients = False
        self._learned: dict[tuple, bool] = {}
        self._version = -1
        self._in_backward: tuple = ()  # the modes
        self._of_backward = -1  # in which they were read

    def settle(self, name: BackendName, device: torch.device | None, misguessed: bool = False) -> bool:
        changes, device = super().settle(name, device, misguessed), self.backend.device
        if self.anchor is None or self.anchor.device != device:
            with torch.inference_mode(False):
                self.anchor = torch.empty(0, device=device, requires_grad=True)
                self.anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        return changes

    def forget(self, parameters: list[Tensor]) -> None:
        super().forget(parameters)
        self.facts = None if parameters else self.facts

    def release(self) -> None:
        super().release()
        self.passing.clear()
        for known in (self.gradients, self.producers, self.stash, self._learned):
            known.clear()

    def begin_pass(self) -> None:
        """Notes, before the first forward of a pass, what is known about the gradients its backward will meet: are
        they None now, has the optimizer stepped since the last pass began, and were they None in that?"""
        super().begin_pass()
        probe = self._probe()
        if probe is None:
            self.facts = None
            return
        self.stash.clear()
        version = probe._version
        # Fused optimizers leave the version alone; then what the last pass met tells one kind of pass from another.
        self.facts = (probe.grad is None, version != self._version, self.found_fresh)
        self.keeps_gradients = self.keeps_gradients or probe.grad is not None
        self._version = version

    def expects_fresh_grads(self) -> bool | None:
        return None if self.facts is None else self._learned.get(self.facts, self.facts[0])

    def first_backward(self) -> None:
        """Called as each backward begins; the first of a pass tells what the gradients really were."""
        probe = self._probe()
        if self.facts is not None and probe is not None:
            self._learned[self.facts] = self.found_fresh = probe.grad is None
            self.facts = None

    def _probe(self) -> Tensor | None:
        return next((p for p in self.parameters if p.requires_grad), None)

    def modes_in_backward(self) -> tuple:
        """The modes of the backward that runs now, the same object while they are the same."""
        task = current_backward()
        if task != self._of_backward or task < 0:
            self._of_backward = task  # no code of the user's runs between the nodes of one backward, hooks apart
            now = self.modes()
            if now != self._in_backward:
                self._in_backward = now
        return self._in_backward


class Loans:
    """The gradients that one graph writes, looked at together: hundreds of them, before each backward.

    Those that lie in a pool are among the results of their tape.

    Attributes:
        owners: what each of them is taken with, where they are passing.
        entry: the signature of the graph.
    """

    __slots__ = ("_buffers", "_memory", "entry", "owners")

    def __init__(self, buffers: list[GradientBuffer], entry: Entry) -> None:
        self._buffers, self.entry = buffers, entry
        self.owners = frozenset(buffer.passing for buffer in buffers)
        self._memory = [buffer.memory.data_ptr() for buffer in buffers]

    def free(self) -> list[Tensor] | None:
        """What is to be `.grad`, where nothing is now; None where somebody holds one of the gradients before, or has
        given it other memory."""
        alone = unheld()
        tensors = list(map(_tensor, self._buffers))
        most = len(tensors)
        if list(map(getrefcount, tensors)).count(alone.references) != most:
            return None
        if list(map(_data_ptr, tensors)) != self._memory:
            return None
        return tensors if list(map(storage_uses, map(_where, self._buffers))).count(alone.uses) == most else None

    def evacuate(self) -> bool:
        """Moves all that is held, so that the memory may be other parameters' gradients; see `GradientBuffer`."""
        return self.free() is not None or all(buffer.evacuate(for_another=True) for buffer in self._buffers)

    def held(self) -> bool:
        """Whether somebody has one of them where the graph writes it."""
        there = (one for one in self._buffers if one.tensor.data_ptr() == one.memory.data_ptr())
        return any(one.held() or one.parameter.grad is one.tensor for one in there)

    def let_go(self) -> None:
        """Nothing to forget: who holds them is counted."""


class Passing:
    """Memory in which the gradients of all layers lie one after the other, where somebody takes those of each as soon
    as its backward is over (`fully_shard` does): as much as for one layer, in the place of as much as for all.

    Who is late finds his gradients nevertheless: before those of others are written there, what is left is moved.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple, list[Tensor]] = {}
        self._owners: frozenset = frozenset()
        self._lent: list[Loans] = []

    def memory_for(self, parameter: Tensor, taken: Collection[int]) -> Tensor:
        """Memory for a parameter's gradient, beside the addresses of gradients that are taken together with it."""
        known = self._memory.setdefault(kind_of(parameter), [])
        free = next((memory for memory in known if memory.data_ptr() not in taken), None)
        if free is None:
            free = torch.empty_like(parameter, requires_grad=False)
            known.append(free)
        return free

    def claim(self, loans: Loans) -> bool:
        """Gives the memory to the gradients of a graph that is about to write there, beside those that are taken
        together with them; False if it is not free."""
        if self._owners != loans.owners:
            if not all(lent.evacuate() for lent in self._lent):
                return False
            self._owners, self._lent = loans.owners, []
        if not any(lent is loans for lent in self._lent):
            self._lent.append(loans)
        return True

    def clear(self) -> None:
        """Lets go of the memory; those that graphs have stay theirs."""
        self._memory.clear()
        self._owners, self._lent = frozenset(), []
