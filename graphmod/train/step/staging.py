"""Batches of any form: brought to fixed addresses on the device, and cut into microbatches."""

from typing import Any

import torch
from torch import Tensor

from graphmod.signature.flattening import flatten, rebuild
from graphmod.step.buffers import mark_static


def _leaves(batch: Any) -> tuple[Any, list[Tensor]]:
    leaves: list[Tensor] = []
    return flatten(batch, leaves, {}), leaves


def microbatches(batch: Any) -> list[Any]:
    """The microbatches of a batch: of its form, with what each tensor has at one place of its first dimension."""
    if isinstance(batch, Tensor):
        return list(batch.unbind(0))
    structure, leaves = _leaves(batch)
    return [rebuild(structure, list(parts)) for parts in zip(*[leaf.unbind(0) for leaf in leaves], strict=True)]


def on_device(batch: Any, device: torch.device) -> Any:
    """The same batch with its tensors on `device`."""
    structure, leaves = _leaves(batch)
    return rebuild(structure, [leaf.to(device) for leaf in leaves])


def pinned(batch: Any) -> Any:
    """The same batch with its tensors in pinned memory."""
    structure, leaves = _leaves(batch)
    return rebuild(structure, [leaf.pin_memory() for leaf in leaves])


def shapes(batch: Any) -> tuple[Any, ...]:
    """The form of a batch and the shapes of its tensors, to be compared."""
    structure, leaves = _leaves(batch)
    return structure, *(leaf.shape for leaf in leaves)


def _check(batch: Any, leaves: list[Tensor]) -> None:
    if not leaves:
        raise TypeError(
            f"a batch must be a tensor, or a dict, list, tuple or dataclass of tensors, got {type(batch).__name__} "
            "without tensors; of a transformers BatchEncoding pass dict(batch)"
        )
    for leaf in leaves:
        if leaf.is_nested or leaf.layout is not torch.strided:
            raise ValueError(f"a batch must hold dense tensors, got one of layout {leaf.layout}; pad it to one shape")
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if len({shape[:1] for shape in shapes}) > 1 or not all(shape and shape[0] for shape in shapes):
        raise ValueError(
            "the first dimension of every tensor in a batch must be the number of microbatches, at least one, got the "
            f"shapes {', '.join(map(str, shapes))}; for a single microbatch add it with unsqueeze(0)"
        )


class Staging:
    """A fixed place on the device for the batches of each form and shape.

    Args:
        device: where batches are brought.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[Any, list[Tensor]] = {}

    def __call__(self, batch: Any) -> Any:
        """A batch of the same form at its place, without waiting for the step that still runs; what it holds beside
        tensors stays as it is.

        Raises:
            TypeError: it holds no tensors.
            ValueError: its tensors disagree about the number of microbatches, or are not dense.
        """
        if type(batch) is Tensor:  # most batches, of which to find the form would take longer than the copy
            places = self._places.get((batch.shape, batch.dtype))
            return self._load(batch, places[0] if places else self._made(batch, [batch], (batch.shape, batch.dtype))[0])
        structure, leaves = _leaves(batch)
        key = structure, *[(leaf.shape, leaf.dtype) for leaf in leaves]
        places = self._places.get(key) or self._made(batch, leaves, key)
        return rebuild(structure, [self._load(leaf, place) for leaf, place in zip(leaves, places, strict=True)])

    def _made(self, batch: Any, leaves: list[Tensor], key: Any) -> list[Tensor]:
        _check(batch, leaves)
        places = [mark_static(torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)) for leaf in leaves]
        self._places[key] = places
        return places

    @staticmethod
    def _load(leaf: Tensor, place: Tensor) -> Tensor:
        if place.is_cuda and not leaf.is_cuda and not leaf.is_pinned():
            leaf = leaf.pin_memory()
        place.copy_(leaf.detach() if leaf.requires_grad else leaf, non_blocking=True)
        return place

    def clear(self) -> None:
        """Forgets all places; graphs that read them must be gone."""
        self._places.clear()
