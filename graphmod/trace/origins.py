"""Where the values of tensors come from.

A value made from constants alone inside a call is the same in every such call. One that depends on an argument, on
anything from outside or on chance is not.
"""

from collections.abc import Iterable

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
UNWRITTEN, CONSTANTS, CHANCE, DATA, NOT_MADE = range(5)
"""What a value depends on at most; the greater one wins. NOT_MADE is memory that was there before the call."""


class Origins:
    """The origins of what one call makes, by the addresses of storages. What it did not make is data.

    Attributes:
        here: address -> origin, of memory on the device of the call, which operations need no care with.
        elsewhere: address -> origin, of memory that the call has made and that may lie elsewhere.
    """

    def __init__(self) -> None:
        self.here: dict[int, int] = {}
        self.elsewhere: dict[int, int] = {}
        self._of_kernels: set[int] = set()

    def __contains__(self, where: int) -> bool:
        """Whether the call made what lies at an address."""
        return self.here.get(where, NOT_MADE) != NOT_MADE or where in self.elsewhere

    def of(self, where: int, tensor: Tensor) -> int:
        if where not in self:  # what has no memory has no values that depend on anything
            nothing = not tensor.numel() or (not where and tensor._is_zerotensor())
            return CONSTANTS if nothing else DATA
        return self.here[where] if where in self.here else self.elsewhere[where]

    def constant(self, places: Iterable[int], tensors: Iterable[Tensor]) -> bool:
        """Whether nothing but constants went into any of these."""
        return all(self.of(where, tensor) == CONSTANTS for where, tensor in zip(places, tensors, strict=True))

    def result(self, about: Facts, given: list[Tensor], given_at: list[int]) -> int:
        """The origin of what an operation makes of these, chance apart."""
        fixed = fixed_origin(about)
        return max(CONSTANTS, self.greatest(given_at, given)) if fixed is None else fixed

    def greatest(self, places: Iterable[int], tensors: Iterable[Tensor]) -> int:
        """The origin of what any of these goes into."""
        return max(map(self.of, places, tensors), default=UNWRITTEN)

    def note_made(self, where: int, origin: int, ordinary: bool = False) -> None:
        """Takes in that what lies at an address is made, or known, from here on: new memory, a tensor made of values
        in Python, or one that is kept from an earlier call.

        Args:
            ordinary: whether it is known to lie on the device of the call.
        """
        if where:
            self._of_kernels.discard(where)
            self.here.pop(where, None)
            (self.here if ordinary else self.elsewhere)[where] = origin

    def note_of_kernels(self, places: Iterable[int]) -> None:
        """Takes in host tensors that an operation on a GPU returned: attention does, for the seed and offset of its
        dropout. They hold nothing computed there, because to know that would have been to wait for it; and in a
        capture, where they count, they lie on the GPU."""
        self._of_kernels.update(places)

    def of_kernels(self, where: int) -> bool:
        """Whether `note_of_kernels` was told of an address."""
        return where in self._of_kernels

    def note_write(self, where: int, origin: int) -> None:
        """Takes in that an operation changed what lies at an address, with values of this origin."""
        if where in self:
            held = self.here if where in self.here else self.elsewhere
            held[where] = max(held[where], origin)


def fixed_origin(about: Facts) -> int | None:
    """The origin of an operation's results, whatever it is given; None where that matters."""
    if about.collective:
        return DATA
    name = about.short
    return UNWRITTEN if name in _NO_VALUES else CONSTANTS if name in _ONLY_SHAPES else None
