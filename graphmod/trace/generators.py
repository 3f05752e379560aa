"""Random generators of torch, `random` and numpy: where they are, and whether a call reads or sets that, or seeds them.

A replay goes on drawing where the last one ended. Code that saves and restores the state, or seeds a generator, means
something else.
"""

import random
import sys
from typing import Any

import torch
from torch import Tensor

from graphmod.torch_private import TensorBase
from graphmod.trace.hazards import Reason
from graphmod.trace.lines import Lines

SEEDS = Reason(
    "seeds a random generator, which a replay would not: it goes on drawing",
    "seed outside the call, or draw the numbers once, outside, and pass them",
)
RESTORES = Reason(
    "saves and restores the random state around random operations (checkpoint with preserve_rng_state=True and dropout "
    "inside), which a replay cannot repeat",
    "take dropout out of the checkpointed part",
)
SETS_STATE = Reason(
    "sets the state of a random generator, which a replay would not: it goes on drawing",
    "set it outside the call, and not for each call anew",
)
_READS_SEED = Reason(
    "reads the seed of a random generator, which a replay would not: it has the number of now for good",
    "read it outside the call, and pass it as a tensor",
)
_MOVE = ("set_state", "graphsafe_set_state", "set_offset", "manual_seed", "seed")
METHODS = {**dict.fromkeys(_MOVE, SETS_STATE), "initial_seed": _READS_SEED}
"""Those methods of a generator that a replay would not call, with the reason."""
_SEEDED_INSIDE = Reason(
    "draws from a generator whose state was set inside the call, or right before it, which a replay would not do",
    "seed outside the call, and not for each call anew",
)


def kinds_followed() -> tuple[type, ...]:
    """The classes of generators in Python whose state can be read and set."""
    numpy = sys.modules.get("numpy.random")
    return random.Random, *(getattr(numpy, name) for name in ("RandomState", "Generator") if hasattr(numpy, name))


def same_generator(one: Any, other: Any) -> bool:
    """Whether two objects stand for one generator: operations are given another than the user holds."""
    of_torch = isinstance(one, torch.Generator) and isinstance(other, torch.Generator)
    return one is other or (of_torch and _stands_for(one) == _stands_for(other))


def _stands_for(generator: Any) -> int:
    """What an object of torch stands for, whose class is typed without it."""
    return generator._cdata


def state_of(generator: Any) -> Any:
    """Where a generator is."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    legacy = hasattr(generator, "get_state")
    return generator.get_state(legacy=False) if legacy else getattr(generator, "bit_generator", generator).state


def comparable(state: Any) -> Any:
    """A state that can be compared with another by `==`."""
    if isinstance(state, dict):
        return tuple((key, comparable(value)) for key, value in state.items())
    if isinstance(state, Tensor):
        state = TensorBase.numpy(state)
    return state.tobytes() if type(state).__module__ == "numpy" and hasattr(state, "tobytes") else state


def put_back(states: list[tuple[Any, Any]]) -> None:
    """Puts generators to where they were, as `state_of` told."""
    for generator, state in states:
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "set_state"):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def copy_of(generator: Any) -> Any:
    """Another generator of the same kind as one in Python, which is anywhere."""
    kind = type(generator)
    if kind is random.Random:
        return random.Random()
    bits = getattr(generator, "bit_generator", None) or generator._bit_generator
    return kind(type(bits)())


class Draws:
    """Notices when something else than drawing changed the state of a generator that a call draws from.

    Args:
        gpu: index of the GPU whose default generator the call may use.
        known: generators to be known from the beginning. Of others `know` tells; those of which it does not are taken
            to have been seeded inside if they were seeded and not used since.
    """

    def __init__(self, gpu: int | None, known: list[torch.Generator]) -> None:
        self._default = torch.default_generator if gpu is None else torch.cuda.default_generators[gpu]
        self._last: dict[int, tuple[torch.Generator, Any]] = {}  # by what they stand for, see `same_generator`
        for generator in (self._default, *known):
            self.after(generator)
        self._fresh: set[int] = set()  # those that were seeded, and not used, when they were met
        self._met: Lines | None = None

    def know(self, generator: torch.Generator, where: Lines) -> None:
        """Takes in that code is about to use a generator."""
        self._met = self._met or where
        if _stands_for(generator) not in self._last:
            self.after(generator)
            if _is_fresh(generator):
                self._fresh.add(_stands_for(generator))

    def moved(self) -> Lines | None:
        """Where code first met a generator, if one is not where the last operation that drew from it left it; of the
        default one, others tell."""
        if self._met is None or all(
            state == _fingerprint(one) for one, state in self._last.values() if not same_generator(one, self._default)
        ):
            return None
        return self._met

    def before(self, generator: torch.Generator | None) -> Reason | None:
        """Called before an operation draws; None stands for the default generator."""
        one = self._default if generator is None else generator
        _, last = self._last.get(_stands_for(one), (one, None))
        if (last is None or _stands_for(one) in self._fresh) and _is_fresh(one):
            return _SEEDED_INSIDE
        return None if last is None or last == _fingerprint(one) else _SEEDED_INSIDE

    def after(self, generator: torch.Generator | None) -> None:
        """Called when it has drawn."""
        one = self._default if generator is None else generator
        self._last[_stands_for(one)] = one, _fingerprint(one)

    def state(self) -> Any:
        """Where the default generator is."""
        return _fingerprint(self._default)

    def go_on(self) -> None:
        """Takes where the generators are for where the call left them: code ran unseen, which may have drawn."""
        for generator, _ in list(self._last.values()):
            self.after(generator)


def _fingerprint(generator: torch.Generator) -> Any:
    if generator.device.type == "cpu":
        return comparable(generator.get_state())
    return generator.initial_seed(), generator.get_offset()


def _is_fresh(generator: torch.Generator) -> bool:
    if generator.device.type == "cpu":
        fresh = torch.Generator().manual_seed(generator.initial_seed())
        return _fingerprint(fresh) == _fingerprint(generator)
    return generator.get_offset() == 0
