"""Mappings that a layer is given to fill: the keys and values that layers of Gemma 3n and Gemma 4 share.

A replay fills nothing. So a wrapped layer is given the items, fills a mapping of its own, and what it changed there is
among its results, to be put into the caller's mapping after the call. Plain dicts are left alone: they are arguments
whose change is refused.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

ARGUMENT = "graphmod_fills"  # in which a wrapped layer is told the names of its mappings
Changes = tuple[dict, tuple]


def mappings_in(kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The names of the arguments that may be filled."""
    return tuple([name for name, value in kwargs.items() if value.__class__ is UserDict])


def changes(now: Mapping, before: Mapping) -> Changes:
    """The items that are new or others, and the keys that are gone."""
    other = {key: value for key, value in now.items() if key not in before or before[key] is not value}
    return other, tuple(key for key in before if key not in now)


def change(mapping: UserDict, changed: Changes) -> None:
    """Changes the caller's mapping likewise."""
    other, gone = changed
    for key in gone:
        del mapping[key]
    mapping.update(other)
