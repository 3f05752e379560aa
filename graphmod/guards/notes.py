"""Notes, while a call runs, what its code reads and where that lives."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.guards.chance import Chance
from graphmod.guards.compiled import CompiledFrame, is_arithmetic
from graphmod.guards.contents import CONTAINERS, Cached, Whole, content, is_plain
from graphmod.guards.library import is_library, is_library_module, is_of_core, means_nothing, package_of
from graphmod.guards.lookup import (
    CODE,
    HELD_BY_MODULE,
    MISSING,
    UNKNOWN,
    Place,
    bound_to,
    dict_of,
    find,
    find_item,
    is_made_by_code,
    of_c,
)
from graphmod.guards.note import Note
from graphmod.guards.values import Values
from graphmod.trace.untraced import identity

_FIXED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_DESCRIPTORS = (types.FunctionType, property, classmethod, staticmethod, types.GetSetDescriptorType)
_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"),
)
_MOST_CACHED = 256
DEEP = 6  # how far attributes of attributes are followed, where code in C may read any of them


class Notes(Values):
    """Collects notes on what code reads, and on where that lives; on values see `Values`.

    Attributes:
        modules: the modules that were called, each once.
        of_dynamo: the runs of code that dynamo has written.
        chance: the random generators of the host.
        holders: the objects, by identity of what is theirs, with which that is as old or as new.
        roots: identities of what was there before, whatever the collector says.
        unreadable: an error from looking at what code reads, and where.
        elsewhere: where code was sent to another thread.
        watched: whether anybody could look on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[int, nn.Module] = {}
        self.of_dynamo: list[CompiledFrame] = []
        self.chance = Chance()
        self.unreadable: tuple[str, tuple] | None = None
        self.elsewhere: tuple | None = None
        self.watched = True
        self.roots: set[int] = set()
        self.holders: dict[int, Any] = {}
        self._walked: dict[int, nn.Module] = {}
        self._in_classes: dict[tuple[int, str], Place | None] = {}
        self._supers: dict[tuple, tuple[Any, Any]] = {}  # identities of classes, name -> the classes, and what is there
        self._kinds: dict[int, type] = {}  # kept, so that their identities stay theirs
        self._of_classes: dict[int, types.MappingProxyType] = {}
        self._wholes: dict[int, Whole | Cached] = {}
        self._deep: dict[int, Any] = {}

    # -- what there is to begin with -----------------------------------------------------------------------------

    def root(self, value: Any) -> None:
        """Takes in an object that was there before, whatever the collector says: the callable, an argument."""
        self.roots.add(identity(value))
        if isinstance(value, types.MethodType):
            self.root(value.__self__)
            value = value.__func__
        if isinstance(value, types.FunctionType):
            self.roots.add(identity(value))
            self.function(value)
        elif isinstance(value, CONTAINERS):
            for item in content(value) or ():
                if isinstance(item, CONTAINERS):
                    self.root(item)

    def called(self, module: nn.Module) -> None:
        """Takes in that a module is called."""
        if not self.modules:
            for hooks in _GLOBAL_HOOKS:
                self.look_inside(getattr(nn.modules.module, hooks, {}))
        if self.modules.setdefault(identity(module), module) is not module:
            return
        if isinstance(module, torch.jit.ScriptModule):
            self.whole(module)
        else:
            self.attribute(module, "forward")
            if "forward" in vars(module):  # which may lead to that of the class, as a wrapper's does
                self.attribute(type(module), "forward")

    def compiled(self, frame: types.FrameType) -> None:
        """Takes in that code which dynamo has written runs, under guards of its own."""
        if not is_arithmetic(frame):
            self.of_dynamo.append(CompiledFrame(frame))

    def walked(self, module: nn.Module) -> None:
        """Takes in that code goes through a module and all that is in it."""
        if isinstance(module, nn.Module) and identity(module) not in self._walked:
            self._walked[identity(module)] = module
            self.held_by_module(module.__dict__)
            for part in module.__dict__.get("_modules", {}).values():
                if part is not None and identity(part) not in self._walked:
                    self.walked(part)

    def held_by_module(self, attributes: dict) -> None:
        """Takes in that code reads all parameters, buffers and modules that a module holds."""
        for name in HELD_BY_MODULE:
            self.look_inside(attributes.get(name))

    def whole(self, module: nn.Module) -> None:
        """Takes in that all of a module may be read."""
        if identity(module) not in self._wholes:
            whole = self._wholes[identity(module)] = Whole(module)
            self.roots.add(identity(whole))
            self.look_inside(whole)

    def cached(self, function: Any) -> tuple:
        """What an `lru_cache` may return without calling its function, noted; nothing where that is too much."""
        if identity(function) not in self._wholes:
            self._wholes[identity(function)] = Cached(function)
            self.roots.add(identity(self._wholes[identity(function)]))
        items = self._wholes[identity(function)].content()
        if len(items) > _MOST_CACHED:
            return ()
        self.look_inside(self._wholes[identity(function)])
        return items

    # -- places --------------------------------------------------------------------------------------------------

    def global_variable(self, held: dict, name: str, file: str) -> Any:
        """The value of a global variable, noted."""
        value = held[name]
        if not (isinstance(value, _FIXED) and is_library(file)):
            self._note(held, Place(held, name, value))
        return value

    def no_global_variable(self, held: dict, name: str, file: str) -> None:
        """Takes in that there is no such global variable, where one would come before what Python has itself."""
        if not is_library(file):
            self._note(held, Place(held, name, MISSING))

    def attribute(self, owner: Any, name: Any) -> Any:
        """The value of an attribute, noted; MISSING, UNKNOWN or CODE where there is none to be had."""
        if not isinstance(name, str):
            return UNKNOWN
        kind, known = type(owner), self.notes.get((identity(owner), name))
        if known is not None and known.owner is owner and known.kind is kind:
            value = self._again(known, kind)
            if value is not UNKNOWN:
                return value
        if is_plain(owner) and not is_made_by_code(kind):
            return UNKNOWN
        if issubclass(kind, Tensor):
            return self._of_tensor(owner, name)
        if kind is super:
            return self._of_super(owner, name)
        if kind in (weakref.ProxyType, weakref.CallableProxyType):
            return self.attribute(owner.__init__.__self__, name)
        self._kind_if_it_matters(owner)
        if name == "__dict__":
            held = self._class_dict(owner) if isinstance(owner, type) else dict_of(owner)
            if held is None:
                return UNKNOWN
            self.holders[identity(held)] = owner  # Python may have made this dict only now
            return held
        if name == "__class__":
            return kind
        if identity(kind) not in self._kinds:
            self._kinds[identity(kind)] = kind
            for special in ("__getattribute__", "__getattr__"):
                self._hidden_by(kind.__mro__, special, None)
        first_look = (identity(kind), name) not in self._in_classes
        place = find(owner, name, self._in_classes)
        if isinstance(owner, type):
            self._hidden_by(owner.__mro__, name, None if place is None else place.shared)
        elif first_look and kind is not super and not isinstance(owner, types.ModuleType):
            self._hidden_by(kind.__mro__, name, None if place is None else place.shared)
        if isinstance(owner, torch._C._FunctionBase):  # what a forward keeps for its own backward
            return UNKNOWN if place is None or place.shared is not None else place.value
        if means_nothing(owner):
            return UNKNOWN
        if place is None:
            shared = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
            if isinstance(shared, property) and not isinstance(shared.fget, types.FunctionType):
                self.all_attributes(owner, DEEP)  # whatever it is that reads
            return of_c(owner, name)
        if place.shared is not None:
            return self._of_class(owner, name, place)
        value = place.value
        if isinstance(owner, types.ModuleType):
            of_torch = owner is torch.nn.functional and not is_of_core(value)  # what others exchange now and then
            if of_torch or not (isinstance(value, _FIXED) and is_library_module(owner)):
                self.holders[identity(place.container)] = owner
                self._note(place.container, place)
            return value
        own = dict_of(owner)
        if isinstance(owner, nn.Module) and place.container is not own and own is not None:
            self._note(
                owner, next(Place(own, held, own[held]) for held in HELD_BY_MODULE if own[held] is place.container)
            )
        self._note(owner, place)
        if value is MISSING:
            if hasattr(kind, "_reach_through"):
                return self.attribute(dict_of(owner)[kind._reach_through[0]], name)
            return CODE if hasattr(kind, "__getattr__") else MISSING
        return value

    def _of_super(self, owner: super, name: str) -> Any:
        kinds = owner.__self_class__, owner.__thisclass__
        where = (*map(identity, kinds), name)
        if where not in self._supers:
            place = find(owner, name)
            if place is None:
                return of_c(owner, name)
            self._supers[where] = kinds, self._of_class(owner, name, place)
        return self._supers[where][1]

    def _again(self, known: Note, kind: type) -> Any:
        """The value of an attribute of an ordinary object that was noted before, and is where it was; else UNKNOWN."""
        name, held = known.key, known.own()
        if held is None:
            return UNKNOWN
        value = dict.get(held, name, MISSING)
        if value is not known.before():
            return UNKNOWN
        if value is not MISSING:
            return value
        shared = self._in_classes.get((identity(kind), name))
        return UNKNOWN if shared is None or shared.shared is None else bound_to(shared.value)

    def _hidden_by(self, mro: tuple[type, ...], name: str, until: type | None) -> None:
        """Notes that classes have no such attribute, which would come before the one that was found."""
        for base in mro:
            if base is until or not is_made_by_code(base):
                break
            held = self._class_dict(base)
            if name in held:
                break
            self._note(base, Place(held, name, MISSING))

    def _of_class(self, owner: Any, name: str, place: Place) -> Any:
        value = place.value
        own = None if isinstance(owner, (type, super)) else dict_of(owner)
        if own is not None:
            self._note(owner, Place(own, name, MISSING))
        if not (isinstance(value, _DESCRIPTORS) and is_library_module(sys.modules.get(package_of(place.shared)))):
            self._note(place.shared, place)
        return bound_to(value)

    def all_attributes(self, owner: Any, depth: int = 1) -> None:
        """Takes in that any attribute of an object may be read, and, with more depth, of the objects found there."""
        if isinstance(owner, (Tensor, nn.Module, types.FunctionType, types.ModuleType)) and depth > 1:
            return
        if is_plain(owner) and not is_made_by_code(type(owner)):
            return
        if isinstance(owner, types.ModuleType) and is_library_module(owner):
            if identity(owner) not in self._deep:  # in which most never changes, and what watches a call is put
                self._deep[identity(owner)] = owner
                for name in list(vars(owner)):
                    self.attribute(owner, name)
            return
        found = [self.attribute(owner, "__dict__")]
        self.look_inside(found[0])
        for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
            if not is_made_by_code(base) or is_library_module(sys.modules.get(package_of(base))):
                break
            self.look_inside(self._class_dict(base), depth=0)
            slots = [name for name, value in vars(base).items() if isinstance(value, types.MemberDescriptorType)]
            found.append({name: self.attribute(owner, name) for name in slots})
        if depth > 1 and identity(owner) not in self._deep:
            self._deep[identity(owner)] = owner
            for held in found:
                for value in list(dict.values(held)) if isinstance(held, dict) else ():
                    self.all_attributes(value, depth - 1)

    def _class_dict(self, kind: type) -> types.MappingProxyType:
        held = self._of_classes.setdefault(identity(kind), vars(kind))
        self.holders[identity(held)] = kind
        return held

    def _of_tensor(self, owner: Tensor, name: str) -> Any:
        self._leaf(owner)
        held = getattr(owner, "__dict__", None)
        if held is not None and name in held:
            self._note(owner, Place(held, name, held[name]))
            return held[name]
        if held is not None and not hasattr(type(owner), name):
            self._note(owner, Place(held, name, MISSING))
        return UNKNOWN

    def item(self, owner: Any, key: Any) -> Any:
        """The value of an item, noted; MISSING, UNKNOWN or CODE where there is none to be had."""
        place = find_item(owner, key)
        if place is None:
            self.look_inside(owner)
            return CODE
        if not isinstance(owner, tuple):
            self._note(owner, place)
        return place.value
