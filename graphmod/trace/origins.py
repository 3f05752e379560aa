"""Where the values of tensors come from.

A value made from constants alone inside a call is the same in every such call. One that depends on an argument, on
anything from outside or on chance is not.
"""

from collections.abc import Iterable
from enum import IntEnum

from torch import Tensor

from graphmod.trace.operations import Facts

# Their results have the shape of what they are given, and nothing of its values.
_ONLY_SHAPES = {
    *("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like"),
    *("randint_like", "_shape_as_tensor"),
}
_NO_VALUES = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "empty_quantized",
}  # fmt: skip


class Origin(IntEnum):
    """What a value depends on at most; the greater one wins."""

    unwritten = 0
    constants = 1
    chance = 2
    data = 3


class Origins:
    """The origins of what one call makes, by the addresses of storages. What it did not make is data."""

    def __init__(self) -> None:
        self._of: dict[int, Origin] = {}
        self._of_kernels: set[int] = set()

    def __contains__(self, where: int) -> bool:
        """Whether the call made what lies at an address."""
        return where in self._of

    def of(self, where: int, tensor: Tensor) -> Origin:
        found = self._of.get(where)
        if found is None or not where:  # what has no memory has no values that depend on anything
            nothing = not tensor.numel() or (not where and tensor._is_zerotensor())
            return Origin.constants if nothing else Origin.data
        return found

    def constant(self, places: Iterable[int], tensors: Iterable[Tensor]) -> bool:
        """Whether nothing but constants went into any of these."""
        return all(self.of(where, tensor) is Origin.constants for where, tensor in zip(places, tensors, strict=True))

    def note_made(
        self, about: Facts, random: bool, given: list[Tensor], given_at: list[int], fresh_at: list[int]
    ) -> None:
        """Takes in what an operation has made at the addresses `fresh_at`."""
        if fresh_at:
            self._of_kernels.difference_update(fresh_at)
            drawn = Origin.chance if random else Origin.unwritten
            self._of.update(dict.fromkeys(fresh_at, max(drawn, self.result(about, given, given_at))))

    def result(self, about: Facts, given: list[Tensor], given_at: list[int]) -> Origin:
        """The origin of what an operation makes of these, chance apart."""
        if about.collective:
            return Origin.data
        name = about.name.removeprefix("aten::")
        if name in _NO_VALUES:
            return Origin.unwritten
        if name in _ONLY_SHAPES:
            return Origin.constants
        return max(Origin.constants, self.greatest(given_at, given))

    def greatest(self, places: Iterable[int], tensors: Iterable[Tensor]) -> Origin:
        """The origin of what any of these goes into."""
        return max(map(self.of, places, tensors), default=Origin.unwritten)

    def note_of_kernels(self, places: Iterable[int]) -> None:
        """Takes in host tensors that an operation on a GPU returned: attention does, for the seed and offset of its
        dropout. They hold nothing computed there, because to know that would have been to wait for it; and in a
        capture, where they count, they lie on the GPU."""
        self._of_kernels.update(places)

    def of_kernels(self, where: int) -> bool:
        """Whether `note_of_kernels` was told of an address."""
        return where in self._of_kernels

    def note_write(self, where: int, of: Origin) -> None:
        """Takes in that an operation changed what lies at an address.

        Args:
            of: what it is given.
        """
        before = self._of.get(where)
        if before is not None:
            self._of[where] = max(before, of)

    def note_allocated(self, where: int) -> None:
        """Takes in memory that nobody has written yet."""
        self._of[where] = Origin.unwritten

    def note_constant(self, where: int) -> None:
        """Takes in a tensor made of values in Python, or kept from an earlier call."""
        self._of[where] = Origin.constants
