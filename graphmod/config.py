"""The settings of graph capture."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, TypeVar

from graphmod.errors import ConfigError, UnknownSetting
from graphmod.words import nearest

Member = TypeVar("Member", bound=StrEnum)


class BackendName(StrEnum):
    """Which backend captures: `auto` takes `cuda` for modules on a GPU and `emulated` for modules on the CPU."""

    auto = "auto"
    cuda = "cuda"
    emulated = "emulated"


class Verify(StrEnum):
    """Which calls run eagerly instead of being replayed, and are compared with what was captured."""

    off = "off"
    sampled = "sampled"
    always = "always"


class CompileMode(StrEnum):
    """What torch.compile does inside graphs, in training as in decode: nothing, what it does by default (`default`), or
    also measure variants of its kernels, which takes minutes (`max`).

    Which variants pay is another matter in either: training tries matrix kernels, too; the products of decode have few
    rows, and kernels that need no tuning.
    """

    none = "none"
    default = "default"
    max = "max"


def choice(kind: type[Member], value: object, setting: str) -> Member:
    """The member of `kind` that a value names.

    Raises:
        ConfigError: it names none; `setting` is what the message calls it.
    """
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(kind)
        raise ConfigError(f"{setting}={value!r} is not known; choose one of: {allowed}") from None


def integer(value: object, least: int, setting: str) -> None:
    """Checks a whole number.

    Raises:
        ConfigError: it is none, or less than `least`.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{setting} must be an integer of at least {least}, got {value!r}")


def refuse_unknown(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Checks the names of settings.

    Raises:
        UnknownSetting: one of `given` is not among `allowed`; `where` is what has these.
    """
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            best = nearest(name, allowed)
            meant = f"; did you mean {best!r}? It has" if best else "; it has"
            raise UnknownSetting(f"{where} has no setting {name!r}{meant} {', '.join(allowed)}")


def names_settings(kind: type) -> type:
    """Class decorator of a dataclass of settings: a name that it does not have is refused with the one most like it."""
    made = kind.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        refuse_unknown(given, [field.name for field in fields(kind)], kind.__name__)
        made(self, *args, **given)

    kind.__init__ = __init__
    return kind


def settings(given: object, single: dict[str, Any] | None = None) -> "CUDAGraphConfig":
    """What was given as `config`, or the defaults for None, with single settings in the place of its own.

    Raises:
        TypeError: it is something else.
        UnknownSetting: there is no such setting.
    """
    if given is None:
        given = CUDAGraphConfig()
    if isinstance(given, CUDAGraphConfig):
        return replace(given, **single) if single else given
    raise TypeError(f"config must be a CUDAGraphConfig, such as CUDAGraphConfig(max_graphs=4), got {given!r:.80}")


@names_settings
@dataclass
class CUDAGraphConfig:
    """Settings of `CUDAGraphModule` and `graph_layers`; `graphmod.train.settings` has those of `TrainStep`.

    Attributes:
        warmup_steps: ordinary eager calls of a new signature before it is captured; at least 1. The last of them is
            recorded: what its code reads is guarded from then on.
        backend: `auto`, `cuda` or `emulated`.
        layers: name patterns (`layers.*.mlp`; matched against the end of a name, `*` within one part) of the modules
            that `graph_layers` wraps; None finds the decoder layers.
        body: `graph_layers` also wraps the module that runs the layers, where it is not the model itself and `layers`
            is None. Its one graph serves then, and costs the host a fraction of theirs; where it cannot be captured,
            they serve.
        clone_outputs: return copies instead of tensors that alias graph memory. Not needed for correctness: an output
            that is still held when its graph replays again is moved to memory of its own first.
        max_graphs: distinct signatures of one module that may have graphs at a time; the least recently used goes
            first. At least 1.
        max_failures: failures in a row after which a module stays eager, but for a try at the 64th of those calls, the
            128th and so on; `force_enable()` tries at once. At least 1.
        verify: what guards may miss (files, clocks, code in C) is looked for by calls that run eagerly and are compared
            with what was captured, operation by operation. `sampled` spends a thousandth of the time on them; a
            difference is logged, and the call stays eager. `always` replays nothing after the capture, and a difference
            raises `VerificationFailed`: for tests. `off` never looks.
        eager_parts: where nothing but some functions (an optimizer's `step`, a callback) that it calls keeps a callable
            eager, these are called between its graphs, as if they were marked with `eager`. False: it stays eager.
    """

    warmup_steps: int = 3
    backend: BackendName = BackendName.auto
    layers: list[str] | None = None
    body: bool = True
    clone_outputs: bool = False
    max_graphs: int = 8
    max_failures: int = 3
    verify: Verify = Verify.sampled
    eager_parts: bool = True

    def __post_init__(self) -> None:
        self.backend = choice(BackendName, self.backend, "backend")
        self.verify = choice(Verify, self.verify, "verify")
        for setting in ("body", "eager_parts"):
            if not isinstance(getattr(self, setting), bool):
                raise ConfigError(f"{setting} must be true or false, got {getattr(self, setting)!r}")
        if isinstance(self.layers, str):
            self.layers = [self.layers]
        for setting, least in (("warmup_steps", 1), ("max_graphs", 1), ("max_failures", 1)):
            integer(getattr(self, setting), least, setting)
