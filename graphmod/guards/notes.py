"""Notes, while a call runs, what its code reads and where that lives; tells afterwards what the call itself changed.

Objects that the call makes itself need no notes. Those that were there before it are told apart by the garbage
collector: what exists when the call begins is frozen (`gc.freeze`), so that all it lists afterwards is new. Imports
`reads`, `lookup`, `contents` and `frames`.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.guards.chance import Chance
from graphmod.guards.contents import CONTAINERS, Whole, content, is_iterator, is_plain, same, same_content
from graphmod.guards.frames import Frames, is_library, is_users
from graphmod.guards.lookup import MISSING, Cell, Place, dict_of, find, find_item, get
from graphmod.guards.reads import RESULT, Expression, Read

_UNKNOWN: Any = object()
_FIXED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_DESCRIPTORS = (types.FunctionType, property, classmethod, staticmethod, types.GetSetDescriptorType)
# What changes in many calls and decides nothing: loggers, and what torch.compile keeps about code.
_OF_NO_MEANING = ("logging", "torch._dynamo", "torch._inductor", "torch.fx", "torch.utils._pytree", "warnings")
_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"),
)


def geometry(tensor: Tensor) -> tuple:
    """All that a graph freezes about a tensor it reads by address."""
    if tensor.layout is not torch.strided:
        return (id(tensor), tensor.layout)
    try:
        where = tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        where = 0
    return (where, tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad)


def _held(value: Any) -> tuple[Any, bool]:
    """The value, or a weak reference to it and True: a note keeps nothing alive that the call made."""
    if not is_plain(value) and not isinstance(value, (*CONTAINERS, type, nn.Module, nn.Parameter, types.ModuleType)):
        with contextlib.suppress(TypeError):
            return weakref.ref(value), True
    return value, False


class Note:
    """What was at one place when the call first looked there.

    Attributes:
        key: attribute name, key or index.
        geometry: of a tensor.
        items: of a container.
        where: code and line that looked; if a library's, also `(code, line)` of the user's that had called it.
    """

    __slots__ = ("_container", "_owner", "_value", "_weak_owner", "_weak_value", "geometry", "items", "key", "where")

    def __init__(self, owner: Any, place: Place, where: tuple) -> None:
        self.key, self.where = place.key, where
        self._owner, self._weak_owner = _held(owner)
        # The attributes of an object would keep it alive.
        self._container = None if self._weak_owner and place.container is dict_of(owner) else place.container
        self._value, self._weak_value = _held(place.value)
        self.geometry = geometry(place.value) if isinstance(place.value, Tensor) else None
        self.items = content(place.value) if isinstance(place.value, CONTAINERS) else None

    @property
    def owner(self) -> Any:
        """The object whose place it is; None when that is gone."""
        return self._owner() if self._weak_owner else self._owner

    @property
    def container(self) -> Any:
        return self._container if self._container is not None else dict_of(self.owner)

    def before(self) -> Any:
        """What was there; None when that is gone."""
        return self._value() if self._weak_value else self._value

    def now(self) -> Any:
        return get(self.container, self.key)

    def changed(self) -> bool:
        """Whether the place holds another value than at first. A container in the place of an equal one is none."""
        before, now = self.before(), self.now()
        if before is now:
            return self.geometry is not None and geometry(now) != self.geometry
        if self.items is not None and type(before) is type(now):
            return not same_content(self.items, content(now) or ())
        return not same(before, now)


class Notes:
    """Collects notes while it is active.

    Attributes:
        modules: the modules that were called, each once.
        notes: by identity of the object and key.
        iterators: what code used that is used up by it.
        gradients: the leaf tensors met -> whether they had no gradient then.
        chance: the random generators of the host.
        unreadable: an error from looking at what code reads, and where.
    """

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.notes: dict[tuple[int, Any], Note] = {}
        self.contents: dict[int, tuple[Any, tuple, tuple]] = {}  # containers met in variables
        self.iterators: list[tuple[Any, str, tuple]] = []
        self.gradients: dict[int, tuple[Tensor, bool]] = {}
        self.chance = Chance()
        self.unreadable: tuple[str, tuple] | None = None
        self.roots: set[int] = set()
        self._holders: dict[int, Any] = {}
        self._wholes: dict[int, Whole] = {}
        self._where: tuple = ("", 0)
        self._frame: types.FrameType | None = None  # that runs now; held for no longer than it is looked at

    # -- while the call runs -------------------------------------------------------------------------------------

    def root(self, value: Any) -> None:
        """Takes in an object that was there before, whatever the collector says: the callable, an argument."""
        self.roots.add(id(value))
        if isinstance(value, types.MethodType):
            self.root(value.__self__)
            value = value.__func__
        if isinstance(value, types.FunctionType):
            self.roots.add(id(value))
            self._closure(value)
        elif isinstance(value, CONTAINERS):
            for item in content(value) or ():
                if isinstance(item, CONTAINERS):
                    self.root(item)

    def see(self, frame: types.FrameType, reads: Iterable[Read], results: Iterable[Any]) -> None:
        """Takes in that code is about to read something."""
        self._where, self._frame = (frame.f_code, frame.f_lineno), frame
        try:
            self._see(frame, reads, results)
        except Exception as error:  # what is looked at may be of any kind; the user's call goes on
            self.unreadable = self.unreadable or (f"{type(error).__name__}: {error}", self._here())
        finally:
            self._frame = None

    def _here(self) -> tuple:
        """The code and line that reads now; if they are a library's, also those of the user's that had called it."""
        frame = self._frame
        if frame is None or not is_library(frame.f_code.co_filename):
            return self._where
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return self._where if frame is None else (*self._where, (frame.f_code, frame.f_lineno))

    def _see(self, frame: types.FrameType, reads: Iterable[Read], results: Iterable[Any]) -> None:
        variables = frame.f_locals
        for read in reads:
            for result in results or (_UNKNOWN,):
                if results and not _follows(read.of):
                    continue
                value = self._value(read.of, frame, variables, result)
                self.chance.meet(value, self._where)
                if read.content and value is not _UNKNOWN and value is not MISSING:
                    self._look_inside(value)
                    if isinstance(value, dict) and "_parameters" in value and read.of[0] == "attr":
                        for held in ("_parameters", "_buffers", "_modules"):  # the attributes of a module, whole
                            self._look_inside(value.get(held))

    def called(self, module: nn.Module) -> None:
        """Takes in that a module is called."""
        if not self.modules:
            for hooks in _GLOBAL_HOOKS:
                self._look_inside(getattr(nn.modules.module, hooks, {}))
        self.modules.setdefault(id(module), module)
        if isinstance(module, torch.jit.ScriptModule) or module.__dict__.get("_compiled_call_impl") is not None:
            self.whole(module)
        elif isinstance(module, _compiled_kind()):
            self.whole(module._orig_mod)
        else:
            self._attribute(module, "forward")

    def whole(self, module: nn.Module) -> None:
        """Takes in that all of a module may be read."""
        if id(module) not in self._wholes:
            whole = self._wholes[id(module)] = Whole(module)
            self.roots.add(id(whole))
            self._look_inside(whole)

    def _value(self, of: Expression, frame: types.FrameType, variables: dict, result: Any) -> Any:
        kind = of[0]
        if kind == "local":
            return variables.get(of[1], _UNKNOWN)
        if kind == "const":
            return of[1]
        if kind == "global":
            held = frame.f_globals
            if of[1] in held:
                value = held[of[1]]
                if not (isinstance(value, _FIXED) and is_library(frame.f_code.co_filename)):
                    self._note(held, Place(held, of[1], value))
                return value
            return builtins.__dict__.get(of[1], _UNKNOWN)
        if of is RESULT or kind == "result":
            return result
        if kind == "module":
            return sys.modules.get(of[1], _UNKNOWN)
        base = self._value(of[1], frame, variables, result)
        key = self._value(of[2], frame, variables, result)
        if base is _UNKNOWN or base is MISSING or key is _UNKNOWN or key is MISSING or is_plain(base):
            return _UNKNOWN
        return self._attribute(base, key) if kind == "attr" else self._item(base, key)

    def _attribute(self, owner: Any, name: Any) -> Any:
        if isinstance(owner, Tensor):
            self._leaf(owner)
            held = getattr(owner, "__dict__", None) or {}
            if name in held:
                self._note(owner, Place(held, name, held[name]))
                return held[name]
            return _UNKNOWN
        if name == "__dict__":
            held = dict_of(owner)
            if held is None:
                return _UNKNOWN
            self._holders[id(held)] = owner  # Python may have made this dict only now
            return held
        if name == "__class__":
            return type(owner)
        place = find(owner, name)
        if isinstance(owner, torch._C._FunctionBase):  # what a forward keeps for its own backward
            return _UNKNOWN if place is None or place.shared is not None else place.value
        if place is None or _means_nothing(owner):
            return _UNKNOWN
        value = place.value
        if place.shared is not None:
            own = None if isinstance(owner, type) else dict_of(owner)
            if own is not None:
                self._note(owner, Place(own, name, MISSING))
            if not (isinstance(value, _DESCRIPTORS) and _is_library_module(sys.modules.get(_package(place.shared)))):
                self._note(place.shared, place)
            if isinstance(value, staticmethod):
                return value.__func__
            return _UNKNOWN if isinstance(value, (property, classmethod)) else value
        if isinstance(owner, types.ModuleType) and isinstance(value, _FIXED) and _is_library_module(owner):
            return value
        self._note(owner if not isinstance(owner, types.ModuleType) else place.container, place)
        if value is MISSING and hasattr(type(owner), "_reach_through"):
            return self._attribute(dict_of(owner)[type(owner)._reach_through[0]], name)
        return value

    def _item(self, owner: Any, key: Any) -> Any:
        place = find_item(owner, key)
        if place is None:
            self._look_inside(owner)
            return _UNKNOWN
        if not isinstance(owner, tuple):
            self._note(owner, place)
        return place.value

    def _note(self, owner: Any, place: Place) -> None:
        try:
            name = (id(owner), place.key)
            known = self.notes.get(name)
        except TypeError:  # a key that cannot be hashed
            return
        if known is None or known.owner is not owner:
            self.notes[name] = Note(owner, place, self._here())
            value = place.value
            if isinstance(value, Tensor):
                self._leaf(value)
            elif isinstance(value, types.FunctionType):
                self._closure(value)

    def _leaf(self, tensor: Tensor) -> None:
        if (
            tensor.is_leaf
            and id(tensor) not in self.gradients
            and (tensor.requires_grad or isinstance(tensor, nn.Parameter))
        ):
            self.gradients[id(tensor)] = tensor, tensor.grad is None

    def _closure(self, function: types.FunctionType) -> None:
        if function.__closure__ is None:
            return
        for cell in function.__closure__:
            place = Place(Cell(cell), None, get(Cell(cell), None))
            if (id(cell), None) not in self.notes:
                self._note_cell(cell, place)

    def _note_cell(self, cell: types.CellType, place: Place) -> None:
        self.notes[id(cell), None] = Note(cell, place, self._here())
        if isinstance(place.value, types.FunctionType):
            self._closure(place.value)

    def _look_inside(self, value: Any) -> None:
        """Notes the items of a container that code goes through, or passes to code that may."""
        if isinstance(value, (Tensor, nn.Module, str, type)) or is_plain(value):
            return
        if is_iterator(value):
            self.iterators.append((value, type(value).__name__, self._here()))
            return
        known = self.contents.get(id(value))
        if known is not None and known[0] is value:
            return
        items = content(value)
        if items is not None and not (isinstance(value, tuple) and all(is_plain(item) for item in items)):
            self.contents[id(value)] = (value, items, self._here())
            for item in items:
                if isinstance(item, Tensor):
                    self._leaf(item)


def _compiled_kind() -> Any:
    """The class of compiled modules; nothing where torch.compile was never used."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(compiler, "OptimizedModule", ())


def _follows(of: Expression) -> bool:
    while of[0] in ("attr", "item"):
        of = of[1]
    return of[0] == "result"


def _package(kind: type) -> str:
    name = getattr(kind, "__module__", "")
    return name if isinstance(name, str) else ""


def _means_nothing(owner: Any) -> bool:
    return _package(owner if isinstance(owner, type) else type(owner)).startswith(_OF_NO_MEANING)


def _is_library_module(module: types.ModuleType | None) -> bool:
    return module is not None and is_library(getattr(module, "__file__", None) or "<frozen")


# -- what was there before ---------------------------------------------------------------------------------------

_lock = threading.Lock()  # the collector belongs to the process
_recordings = 0
_frozen_before = 0


@contextlib.contextmanager
def _telling_new_objects() -> Iterator[None]:
    global _recordings, _frozen_before
    with _lock:
        _recordings += 1
        if _recordings == 1:
            _frozen_before = gc.get_freeze_count()
            gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _recordings -= 1
            if not _recordings:
                gc.unfreeze()
                if _frozen_before:
                    gc.freeze()


@contextlib.contextmanager
def noting(*roots: Any) -> Iterator[Notes]:
    """Notes what the body reads. Afterwards the notes hold what was there before it, and nothing that it made.

    Args:
        roots: objects that were there before.
    """
    notes = Notes()
    for root in roots:
        notes.root(root)
    with _telling_new_objects():
        token = _current.set(notes)
        try:
            with Frames(notes.see, notes.called):
                yield notes
        finally:
            _current.reset(token)
        _forget_new(notes)


_current: ContextVar[Notes | None] = ContextVar("notes", default=None)


def note_whole(modules: Iterable[nn.Module]) -> None:
    """Takes in that code reads modules which nobody can watch reading: compiled code. Does nothing elsewhere."""
    notes = _current.get()
    for module in modules if notes is not None else ():
        notes.whole(module)


def _forget_new(notes: Notes) -> None:
    new = set(map(id, gc.get_objects())) - notes.roots
    old: set[int] = set()  # the collector does not track all containers: others are old if an old place leads to them

    def was_there(value: Any) -> bool:
        return value is not None and id(value) not in new and (gc.is_tracked(value) or id(value) in old | notes.roots)

    waiting, found = notes.notes, {}
    while waiting:
        kept = {key: note for key, note in waiting.items() if was_there(note.owner)}
        if not kept:
            break
        found.update(kept)
        old.update(id(note.before()) for note in kept.values())
        waiting = {key: note for key, note in waiting.items() if key not in kept}
    notes.notes = found
    notes.contents = {
        key: one for key, one in notes.contents.items() if was_there(notes._holders.get(id(one[0]), one[0]))
    }
    notes.iterators = [one for one in notes.iterators if was_there(one[0])]
    notes.gradients = {key: one for key, one in notes.gradients.items() if was_there(one[0])}
    notes.modules = {key: module for key, module in notes.modules.items() if was_there(module)}
