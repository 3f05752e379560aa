"""What a recorded call itself changed of what it read, so that a replay, in which no Python runs, would go wrong.

Imports `notes`, `contents` and `lookup`.
"""

from typing import Any

from torch import Tensor

from graphmod.guards.contents import content, describe, same_content
from graphmod.guards.lookup import Cell
from graphmod.guards.note import Note
from graphmod.guards.notes import Notes

NOT_REPLAYED = "which a replay would not do; keep it in a tensor that is changed in place, or pass it as an argument"


def line_of(where: tuple) -> str:
    """File, line and function of the code that read something."""
    code, line = where
    return f"{code.co_filename}:{line} in {code.co_name}" if code else "the call"


def name_of(note: Note) -> str:
    """What a place is called in a message."""
    if isinstance(note.container, Cell):
        return "a variable it closes over"
    if isinstance(note.owner, list):
        return f"item {note.key}"
    if isinstance(note.key, Tensor):
        return f"the item of one {type(note.key).__name__}"
    return repr(note.key)


def what_changed(notes: Notes) -> str | None:
    """The first of what a call changed, in words; None if that is nothing."""
    if notes.unreadable is not None:
        error, where = notes.unreadable
        return f"reads an object at {line_of(where)} that nobody can look into without harm ({error})"
    if notes.elsewhere is not None:
        return f"{line_of(notes.elsewhere)} runs code in another thread, where nobody can watch it; run it in this one"
    for _, kind, where in notes.iterators:
        return f"{line_of(where)} takes items from a {kind}, {NOT_REPLAYED}"
    drawn = notes.chance.drawn()
    if drawn is not None:
        library, where = drawn
        return (
            f"{line_of(where) if where else 'code inside'} draws random numbers on the host ({library}), which a "
            "replay would not; draw them outside and pass them as an argument, or draw on the device with torch"
        )
    replaced = replacements(notes)
    for note in notes.notes.values():
        if id(note.owner) not in replaced and note.changed():
            was, now = note.before(), note.now()
            if isinstance(now, Tensor) and was is now:
                return f"moves or reshapes {name_of(note)} as it runs ({line_of(note.where)}), {NOT_REPLAYED}"
            return (
                f"changes {name_of(note)} from {describe(was)} to {describe(now)} as it runs ({line_of(note.where)}), "
                f"{NOT_REPLAYED}"
            )
    for value, items, where in notes.contents.values():
        if id(value) not in replaced and not same_content(items, content(value)):
            return f"changes the items of a {type(value).__name__} as it runs ({line_of(where)}), {NOT_REPLAYED}"
    return None


def replacements(notes: Notes) -> dict[int, Any]:
    """Containers (by identity) in whose place the call put another with the same content -> that other."""
    found = {}
    for note in notes.notes.values():
        if note.items is not None:
            before, now = note.before(), note.now()
            if before is not now and type(before) is type(now) and not note.changed():
                found[id(before)] = now
    return found
