"""What an instruction reads: looks at the very values it is about to use, and notes where they live.

`plan_of` says once for each code which of its instructions read anything. `Reading` is told of these before they run;
the values lie on the frame's stack (`operand_stack`), so that nothing is guessed, whatever expression they come from.
What functions in C read of their arguments is in `_in_c`.
"""

from __future__ import annotations

import abc
import ctypes
import dis
import functools
import gc
import itertools
import operator
import os
import random
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from graphmod.guards.notes import DEEP, METHODS_IN_C, UNGUARDED, Notes
from graphmod.guards.values import (
    BUFFERS,
    CODE,
    COMMON,
    CONTAINERS,
    HELD_IN,
    INERT,
    LOCKS,
    MISSING,
    OTHER,
    UNKNOWN,
    Fields,
    content,
    find_in_classes,
    is_made_by_code,
    is_plain,
    sort_of,
)
from graphmod.reads.operand_stack import Nothing, depths, top
from graphmod.trace.lines import STDLIB, is_library
from graphmod.trace.operations import address, is_leaf
from graphmod.trace.untraced import identity

Step = tuple[Callable, int, Any, int, int]
"""What to do before an instruction: the method, how many values it takes off the stack, its argument, how far the stack
reaches, and its line."""
Plan = dict[int, Step]

_FRESH = (list, tuple, dict, set, frozenset)
_BUILT_IN = frozenset(map(identity, (*_FRESH, str, int, float)))
_OF_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType)
_READ_STATE = {"__reduce_ex__", "__reduce__", "__getstate__"}  # all that is in an object
_ADDS = {"append", "extend", "insert", "add", "update"}  # methods that tell nothing of what is there
_BY_KEY = {"get", "__getitem__", "__contains__"}
_PLAIN = frozenset(map(identity, (bool, int, float, str, type(None))))
# By identity: a class, or its class, may have a hash and a way to compare of its own.
_READERS = frozenset(map(identity, (operator.attrgetter, operator.methodcaller)))  # of attributes that only they know
_BUFFERS, _NOT_OF_CONTENT = (frozenset(map(identity, some)) for some in (BUFFERS, (len, type, isinstance)))
_READ_ANY = frozenset(map(identity, (operator.attrgetter, getattr, vars)))


def _goes_by_key(value: Any, method: str) -> bool:
    """Whether a method of a value looks at one key of a dict, and runs no code of the value's class."""
    kind = type(value)
    of = dict if issubclass(kind, dict) else types.MappingProxyType
    return issubclass(kind, of) and getattr(kind, method, None) is getattr(of, method)


def _tells_nothing(function: Any, kind: type) -> bool:
    """Whether a call of a function shows no more than what it is given and gives: a module or a class, of which all
    else is told as it runs, or a function in C that belongs to no object."""
    if kind is types.BuiltinFunctionType:
        return issubclass(type(function.__self__), (types.ModuleType, type, types.NoneType))
    if kind is types.MethodDescriptorType:
        return function.__objclass__ is not object and function.__objclass__ is not torch.Generator
    return issubclass(kind, (nn.Module, type)) and sort_of(kind) == INERT


def _code_of(function: Any) -> CodeType | None:
    """The code that a call runs, of which is told as it runs, whatever it does with its arguments; None where that is
    in C, or the call makes an object."""
    kind = type(function)
    if kind is functools.partial or kind is types.MethodType:
        return _code_of(function.func if kind is functools.partial else function.__func__)
    if kind is not types.FunctionType and not issubclass(kind, type):
        found = find_in_classes(kind.__mro__, "__call__")
        function = None if found is None else found.value
    return function.__code__ if type(function) is types.FunctionType else None


class Reading:
    """Notes what instructions read."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._draws = notes.chance.draws

    def step(self, frame: FrameType, code: CodeType, step: Step) -> None:
        """An instruction of a frame is about to run."""
        do, count, argument, reach, line = step
        notes, draws = self._notes, self._draws
        notes.where, notes.frame = (code, line), frame
        try:
            values = top(frame, count, reach) if count else []
            if draws is not None and draws.floats and code.co_filename != _RANDOM:
                draws.used(values, argument if do is Reading.compare else None, notes.ages.is_old)
            do(self, frame, argument, values)
        except Exception as error:  # what code uses may be of any kind; the user's call goes on
            notes.cannot_read(error)
        finally:
            notes.frame = None

    # -- values that are used as a whole -------------------------------------------------------------------------

    def use(self, value: Any) -> None:
        """Takes in that code reads what is in a value."""
        kind = type(value)
        sort = sort_of(kind)
        if sort == INERT or value is Nothing or (kind is tuple and _PLAIN.issuperset(map(identity, map(type, value)))):
            return
        if kind is types.MappingProxyType:
            value = self._behind(value)
        if sort == OTHER:
            self._notes.uses(value)
        self._notes.note_items(value)
        if kind is dict and "_parameters" in value:  # the attributes of a module, whole
            self._notes.held_by_module(value)

    def each(self, frame: FrameType, argument: Any, values: list) -> None:
        for value in values:
            if identity(type(value)) not in COMMON:
                self.use(value)

    def kept(self, frame: FrameType, argument: Any, values: list) -> None:
        """What is kept may be used where nobody looks: in a backward, or by code in C. `step` has asked whether it was
        drawn."""

    def enter(self, frame: FrameType, argument: Any, values: list) -> None:
        if issubclass(type(values[0]), LOCKS):
            self._notes.takes_lock(values[0])
        self.each(frame, argument, values)

    def leave_by_error(self, frame: FrameType, argument: Any, values: list) -> None:
        self.called(values[0], [])

    def compare(self, frame: FrameType, how: str, values: list) -> None:
        self.each(frame, how, values)

    def tell_apart(self, frame: FrameType | None, argument: Any, values: list) -> None:
        """Code asks which object a value is, and not only what is in it."""
        notes = self._notes
        notes.told_apart.update(address(value) for value in values if issubclass(type(value), Tensor))
        if len(values) == 2:
            tells = all(sort_of(type(value)) != INERT and notes.ages.is_old(value) for value in values)
        else:  # what copies and prints asks, too, and does the same for another
            filename = notes.where[0].co_filename
            tells = frame is None and ("-packages" in filename or not filename.startswith(STDLIB))
        if tells:
            others = (one for one in values if frame is None or not issubclass(type(one), Tensor))
            notes.identified.update((id(one), ("object", notes.here())) for one in others)

    # -- variables -----------------------------------------------------------------------------------------------

    def global_variable(self, frame: FrameType, name: str, values: Any) -> None:
        self._notes.global_variable(frame.f_globals, name, self._notes.where[0].co_filename)

    def name(self, frame: FrameType, name: str, values: Any) -> None:
        held = frame.f_locals
        if held is not frame.f_globals and name in held:
            if type(held) is dict:
                self._notes.item(held, name)
        else:
            self.global_variable(frame, name, values)

    def imported(self, frame: FrameType, name: str, values: list) -> None:
        if values[0] == 0 and not is_library(frame.f_code.co_filename):
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                self._notes.item(sys.modules, ".".join(parts[:count]))

    def changed_name(self, frame: FrameType, name: str, values: Any) -> None:
        if frame.f_locals is frame.f_globals:  # code that `exec` runs; else the body of a class
            self.global_variable(frame, name, values)

    # -- attributes and items ------------------------------------------------------------------------------------

    def attribute(self, frame: FrameType, name: str, values: list) -> None:
        self.attribute_of(values[-1], name)

    def store_attribute(self, frame: FrameType, name: str, values: list) -> None:
        self._notes.stored(self.attribute_of, values[-1], name)

    def attribute_of(self, owner: Any, name: Any) -> Any:
        if identity(type(owner)) in _BUILT_IN:  # whose methods nobody exchanges
            return UNKNOWN
        if type(owner) is types.FunctionType and name in Fields.NAMES:
            self._notes.function(owner)
        if name == "grad" and issubclass(type(owner), Tensor) and owner.requires_grad and is_leaf(owner):
            self._notes.gradient_at = self._notes.gradient_at or self._notes.here()
        return self._notes.attribute(owner, name)

    def attribute_of_super(self, frame: FrameType, name: str, values: list) -> None:
        function, kind, owner = values
        if function is super:
            self._notes.attribute(super(kind, owner), name)

    def match_class(self, frame: FrameType, positional: int, values: list) -> None:
        subject, kind, names = values
        self.use(subject)
        _kind_asked(self, isinstance, [subject, kind])
        if positional and isinstance(kind, type):
            self._notes.attribute(kind, "__match_args__")
            names = (*getattr(kind, "__match_args__", ())[:positional], *names)
        for name in names:
            self._notes.attribute(subject, name)

    def match_keys(self, frame: FrameType, argument: Any, values: list) -> None:
        for key in values[1]:
            self._item(values[0], key)

    def item(self, frame: FrameType, argument: Any, values: list) -> None:
        self._item(values[-2], values[-1])
        self.use(values[-1])

    def store_item(self, frame: FrameType, argument: Any, values: list) -> None:
        self._notes.stored(self._item, values[-2], values[-1])
        self.use(values[-1])
        if issubclass(type(values[-2]), Tensor) or type(values[-1]) is slice:
            self.use(values[0])

    def part(self, frame: FrameType, argument: Any, values: list) -> None:
        self.each(frame, argument, values[1:])
        self.item(frame, argument, [values[0], slice(*values[1:])])

    def store_part(self, frame: FrameType, argument: Any, values: list) -> None:
        self.each(frame, argument, values[2:])
        self.store_item(frame, argument, [*values[:2], slice(*values[2:])])

    def contains(self, frame: FrameType, argument: Any, values: list) -> None:
        key, container = values
        self.use(key)
        self.tell_apart(frame, argument, [key])
        if _goes_by_key(container, "__contains__"):
            self._item(container, key)
        else:
            self.use(container)

    def _item(self, container: Any, key: Any) -> Any:
        kind = type(container)
        if issubclass(kind, Tensor) or (is_plain(container) and not is_made_by_code(kind)):
            return UNKNOWN
        return self._notes.item(self._behind(container) if kind is types.MappingProxyType else container, key)

    def _behind(self, proxy: types.MappingProxyType) -> Any:
        """What a view of a dict shows, which may be made anew each time: the dict, or the attributes of a class."""
        held = gc.get_referents(proxy)[0]
        fresh = isinstance(held, dict) and not self._notes.ages.is_old(proxy)
        return self._notes.of_classes.get(identity(held), held if fresh else proxy)

    def group(self, names: tuple, keys: list[str], optimizer: torch.optim.Optimizer, group: dict) -> None:
        """Takes in that code goes through the parameters of an optimizer's group, their gradients and their state.

        Args:
            names: of attributes that it reads, among them those of the optimizer.
            keys: of items that it reads, among them those of the group.
        """
        notes = self._notes
        for name in names:
            if name in vars(optimizer):
                notes.attribute(optimizer, name)
        for key in keys:
            if key in group:
                notes.item(group, key)
        self.use(group["params"])
        for parameter in group["params"]:
            self.attribute_of(parameter, "grad")
            if parameter.grad is not None:
                self.attribute_of(parameter.grad, "is_sparse")
                notes.item(optimizer.state, parameter)
                self.use(dict.get(optimizer.state, parameter))

    def clears(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in that torch clears the gradients of an optimizer, which reads no other setting of its groups."""
        notes = self._notes
        defaults = notes.attribute(optimizer, "defaults")
        for key in ("foreach", "fused"):
            notes.item(defaults, key)
        groups = notes.attribute(optimizer, "param_groups")
        notes.note_items(groups, depth=0)
        for group in groups:
            notes.belongs(group, groups)
            notes.item(group, "params")
            self.use(group["params"])
            for parameter in group["params"]:
                self.attribute_of(parameter, "grad")

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, frame: FrameType, named: bool, values: list) -> None:
        one, other, *given = values
        if one is Nothing:
            function = other
        elif other is Nothing:
            function = one
        else:
            function = one
            given.insert(0, other)
        where = self._notes.where
        if not named and where[0].co_filename != _RANDOM:
            self._notes.chance.draw(function, given, where, self._notes.ages.is_old)
        self._calls(function, given)

    def call_with_names(self, frame: FrameType, argument: Any, values: list) -> None:
        del values[-1]
        self.call(frame, True, values)

    def call_all(self, frame: FrameType, argument: Any, values: list) -> None:
        """`function(*args, **kwargs)`."""
        function, args, *kwargs = (value for value in values if value is not Nothing)
        given = list(args) if isinstance(args, (tuple, list)) else []
        for one in kwargs:
            given += one.values() if type(one) is dict else ()
        self._calls(function, given, args, *kwargs)

    def _calls(self, function: Any, given: list, *whole: Any) -> None:
        """A function is about to be called by code, with arguments that may come in `whole` containers."""
        code = _code_of(function)
        if code is not None and code.co_name == UNGUARDED:
            return  # what that is given is made out of it at each replay
        told = self._notes.apart if code is not None else lambda note, *seen: note(*seen)
        for one in whole:
            told(self.use, one)
        told(self.called, function, given, bool(whole))

    def called(self, function: Any, given: list, used: bool = False) -> None:
        """A function is about to be called.

        Args:
            given: its arguments.
            used: whether these have been looked into.
        """
        kind, notes = type(function), self._notes
        if issubclass(kind, _OF_C) and function.__name__ in _ADDS:
            owner = getattr(function, "__self__", given[0] if given else None)
            if type(owner) in _FRESH and not notes.ages.is_old(owner):
                for value in given:
                    if value is not owner:
                        self.use(value)
                return
        if identity(function) in _NOT_OF_CONTENT and given and identity(type(given[0])) in _BUFFERS:
            used = True
        reads = _in_c.get(identity(function)) or _made_in_c.get(identity(kind))
        if reads is None and kind is types.BuiltinMethodType:  # of an object, where it is one's
            place = find_in_classes(type(function.__self__).__mro__, function.__name__)
            if place is not None and identity(place.value) in _in_c:
                self.called(place.value, [notes.belongs(function.__self__, function), *given], used)
                return
        if kind is types.FunctionType:
            notes.function(function)
        elif issubclass(kind, _OF_C) and function.__name__ in _BY_KEY:
            bound = hasattr(function, "__self__")
            owner = notes.belongs(function.__self__, function) if bound else given.pop(0) if given else None
            if given and _goes_by_key(owner, function.__name__):
                self._item(owner, given[0])
            else:
                self.use(owner)
        elif not _tells_nothing(function, kind):
            notes.uses(function)
            self._called_object(function, kind, given)
            held = issubclass(kind, METHODS_IN_C) and issubclass(type(function.__self__), HELD_IN)
            notes.note_items(notes.belongs(function.__self__, function) if held else function)
        self._arguments(given, used)
        if reads is not None and given:
            reads(self, function, given)

    def _arguments(self, given: list, used: bool) -> None:
        """Arguments are passed to a function."""
        any_attribute = False
        for value in given:
            if identity(type(value)) not in COMMON and sort_of(type(value)) != INERT:
                any_attribute = any_attribute or identity(type(value)) in _READERS or identity(value) in _READ_ANY
                if not used:
                    self.use(value)
        if any_attribute:
            self._any_attribute(given)

    def _called_object(self, function: Any, kind: type, given: list) -> None:
        """What is read of an object by being called."""
        if issubclass(kind, _OF_C):
            owner = getattr(function, "__self__", None)
            if function.__name__ in _READ_STATE:
                for value in (*given[:1], owner):
                    self._notes.all_attributes(value, DEEP)
            elif function.__name__ in _BY_NAME_OF_OBJECT:  # of a method that has its object
                _attribute(self, function, [owner, *given])
        elif issubclass(kind, functools.partial):
            self.called(function.func, [*function.args, *given, *function.keywords.values()], used=True)
        elif issubclass(kind, weakref.ref):
            self._notes.weakly.add(identity(function()))
        elif issubclass(kind, functools._lru_cache_wrapper):
            self._notes.cached(function)
        elif kind is types.MethodType:
            self.called(function.__func__, [function.__self__, *given], used=True)
        elif not issubclass(kind, (types.FunctionType, types.MethodType, nn.Module, type)) and is_made_by_code(kind):
            self._notes.attribute(kind, "__call__")

    def _any_attribute(self, values: list) -> None:
        """Code in C may read any attribute of values, and of what is in them or comes out of them."""
        for one in _handed_on(values, _DEPTH):
            if issubclass(type(one), nn.Module):
                for part in one.modules():
                    self._notes.all_attributes(part)
                    for held in vars(part).values():
                        self._notes.all_attributes(held, DEEP)
            elif not issubclass(type(one), (type, types.ModuleType, types.FunctionType)):
                self._notes.all_attributes(one, DEEP)


_RANDOM = random.__file__  # where one draw may be made of others
_DEPTH = 6  # of iterators over iterators over containers


def _handed_on(value: Any, depth: int) -> Iterator[Any]:
    """What code in C may find in a value: in a container, or in what an iterator or a view goes through."""
    kind = type(value)
    if issubclass(kind, CONTAINERS):
        inside = content(value) or ()
    elif hasattr(kind, "__next__") or hasattr(kind, "mapping"):
        inside = gc.get_referents(value)
    else:
        yield value
        return
    for one in inside if depth else ():
        yield from _handed_on(one, depth - 1)


# -- functions in C that read attributes and items of what they are given ----------------------------------------------
_BY_NAME_OF_OBJECT = {"__getattribute__", "__setattr__", "__delattr__"}


def _attribute(reading: Reading, function: Any, given: list) -> None:
    if len(given) > 1 and function.__name__ in ("setattr", "__setattr__"):
        reading._notes.stored(reading.attribute_of, given[0], given[1])
    elif len(given) > 1:
        reading.attribute_of(given[0], given[1])


def _attributes_named(reading: Reading, function: Any, given: list) -> None:
    for name in function.__reduce__()[1]:
        _go_along(reading, given[0], [(".", part) for part in name.split(".")])


def _go_along(reading: Reading, value: Any, path: list[tuple[str, str]]) -> None:
    """Takes in that code in C goes from a value by way of attributes (".") and items ("[") to another."""
    for sign, name in path:
        key = int(name) if sign == "[" and name.isdecimal() else name
        value = reading.attribute_of(value, name) if sign == "." else reading._item(value, key)
        if value is CODE or value is UNKNOWN or value is MISSING:
            break


def _formatted(reading: Reading, function: Any, given: list) -> None:
    """`"{0.scale}".format(config)`: which of its arguments a field names does not matter."""
    text, *values = given
    if function is str.format_map:
        values = [value for one in values if issubclass(type(one), dict) for value in dict.values(one)]
    for field in _FIELDS.findall(text):
        for value in values:
            _go_along(reading, value, _PARTS.findall(field))


def _items_named(reading: Reading, function: Any, given: list) -> None:
    for key in function.__reduce__()[1]:
        reading._item(given[0], key)


def _number(reading: Reading, function: Any, given: list) -> None:
    if reading._draws is not None and issubclass(type(given[0]), Tensor):
        reading._draws.expected = given[0]


def _kind_asked(reading: Reading, function: Any, given: list) -> None:
    """Classes may be registered with an abstract one."""
    if len(given) == 2 and any(issubclass(type(kind), abc.ABCMeta) for kind in _classes(given[1])):
        asked = given[0] if function is issubclass and isinstance(given[0], type) else type(given[0])
        reading._notes.asked_class(asked, given[1])


def _classes(kinds: Any) -> Iterator[Any]:
    """The classes in what `isinstance` is given: one, a union, or a tuple of such."""
    inside = kinds if isinstance(kinds, tuple) else kinds.__args__ if isinstance(kinds, types.UnionType) else ()
    yield from itertools.chain.from_iterable(map(_classes, inside)) if inside else (kinds,)


def _length(reading: Reading, function: Any, given: list) -> None:
    if identity(type(given[0])) in _BUFFERS:
        kind = type(given[0])
        reading._notes.asked(given[0], f"the length of one {kind.__name__}", kind.__len__)


def _takes_lock(reading: Reading, function: Any, given: list) -> None:
    """With arguments it may give up, and says so: then it asks."""
    if len(given) > 1:
        reading._notes.asks_lock(given[0])
    reading._notes.takes_lock(given[0])


def _by_address(reading: Reading, function: Any, given: list) -> None:
    raise ValueError("what lies at an address cannot be found again; read it outside, and pass it as a tensor")


def _warns(reading: Reading, function: Any, given: list) -> None:
    """A filter may make an error of it; `catch_warnings` exchanges their list."""
    if reading._notes.ages.is_old(warnings.filters):
        reading._notes.attribute(warnings, "filters")
    reading.use(warnings.filters)


def _mapped(reading: Reading, function: Any, given: list) -> None:
    """`map(function, *containers)` calls a function in C with each row; one in Python is told of as it runs."""
    called, *rows = given
    if rows and issubclass(type(called), _OF_C) and all(issubclass(type(one), CONTAINERS) for one in rows):
        for row in zip(*(content(one) or () for one in rows), strict=False):
            reading.called(called, list(row))


_LOCKED = ("locked", "locked_lock", "_is_owned", "_recursion_count", "_get_value", "_is_zero", "_is_mine", "_count")
_ACQUIRE, _RELEASE = ("acquire", "acquire_lock", "__enter__"), ("release", "release_lock", "__exit__")
_KINDS_OF_MEMORY: list[Any] = [
    *map(type, (ctypes.c_int, ctypes.Structure, ctypes.Union, ctypes.Array, ctypes.POINTER(ctypes.c_int)))
]
_FIELDS, _PARTS = re.compile(r"\{([^{}!:]+)"), re.compile(r"([.\[])([^.\[\]]+)")
_BY_NAME = (getattr, hasattr, setattr, delattr, object.__getattribute__, object.__setattr__, object.__delattr__)
_in_c: dict[int, Callable] = {  # by identity of the function
    **{identity(one): _attribute for one in (*_BY_NAME, type.__getattribute__)},
    identity(vars): lambda reading, _, given: reading.attribute_of(given[0], "__dict__"),
    identity(len): _length,
    identity(map): _mapped,
    identity(dir): lambda reading, _, given: reading._notes.all_attributes(given[0]),
    identity(id): lambda reading, _, given: reading.tell_apart(None, None, given),
    **{identity(one): _kind_asked for one in (isinstance, issubclass)},
    **{
        identity(vars(kind)[name]): reads
        for names, reads in (
            (_LOCKED, lambda reading, _, given: reading._notes.asks_lock(given[0])),
            (_ACQUIRE, _takes_lock),
            (_RELEASE, lambda reading, _, given: reading._notes.gives_lock_back(given[0])),
        )
        for kind in LOCKS
        for name in vars(kind).keys() & names
    },
    identity(warnings.warn): _warns,
    **{identity(one): _by_address for one in (ctypes.string_at, ctypes.wstring_at, ctypes.memmove)},
    **{identity(one.from_address): _by_address for one in _KINDS_OF_MEMORY},
    **{identity(one): _formatted for one in (str.format, str.format_map)},
    identity(float): _number,
    identity(torch.Tensor.item): _number,
    **{
        identity(getattr(os, name)): lambda reading, _, given: reading._notes.chance.ask_system(reading._notes.here())
        for name in ("urandom", "getrandom")
        if hasattr(os, name)
    },
}
_made_in_c: dict[int, Callable] = {  # by identity of the function's class
    identity(operator.attrgetter): _attributes_named,
    identity(operator.itemgetter): _items_named,
    identity(operator.methodcaller): lambda reading, function, given: reading._notes.attribute(
        given[0], function.__reduce__()[1][0]
    ),
}


# -- plans -------------------------------------------------------------------------------------------------------------
_IN_CALLS = 2  # beside the arguments: the function, and its object or nothing
_STEPS: dict[str, tuple[Callable, int]] = {
    **dict.fromkeys(("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"), (Reading.global_variable, 0)),
    **dict.fromkeys(("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"), (Reading.name, 0)),
    "STORE_NAME": (Reading.changed_name, 1),
    "DELETE_NAME": (Reading.changed_name, 0),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "DELETE_ATTR", "IMPORT_FROM"), (Reading.attribute, 1)),
    "STORE_ATTR": (Reading.store_attribute, 2),
    "SET_FUNCTION_ATTRIBUTE": (Reading.kept, 2),
    "IMPORT_NAME": (Reading.imported, 2),
    "LOAD_SUPER_ATTR": (Reading.attribute_of_super, 3),
    "MATCH_CLASS": (Reading.match_class, 3),
    "MATCH_KEYS": (Reading.match_keys, 2),
    "BINARY_SUBSCR": (Reading.item, 2),
    "DELETE_SUBSCR": (Reading.item, 2),
    "STORE_SUBSCR": (Reading.store_item, 3),
    "BINARY_SLICE": (Reading.part, 3),
    "STORE_SLICE": (Reading.store_part, 4),
    "CONTAINS_OP": (Reading.contains, 2),
    "BINARY_OP": (Reading.each, 2),
    "COMPARE_OP": (Reading.compare, 2),
    "IS_OP": (Reading.tell_apart, 2),
    **dict.fromkeys(
        (
            *("GET_ITER", "GET_YIELD_FROM_ITER", "UNPACK_SEQUENCE", "UNPACK_EX", "LIST_EXTEND", "SET_UPDATE"),
            *("DICT_UPDATE", "DICT_MERGE", "UNARY_NOT", "UNARY_NEGATIVE", "UNARY_INVERT", "UNARY_POSITIVE", "TO_BOOL"),
            *("FORMAT_SIMPLE", "CONVERT_VALUE", "GET_LEN", "MATCH_MAPPING", "MATCH_SEQUENCE"),
            *("POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_TRUE"),
            *("POP_JUMP_BACKWARD_IF_FALSE", "JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP", "CALL_INTRINSIC_1"),
            *("RETURN_VALUE", "YIELD_VALUE"),  # maybe to code in C
        ),
        (Reading.each, 1),
    ),
    "BEFORE_WITH": (Reading.enter, 1),
    "WITH_EXCEPT_START": (Reading.leave_by_error, 4),
    "FORMAT_WITH_SPEC": (Reading.each, 2),
}
if sys.version_info < (3, 13):
    _STEPS |= dict.fromkeys(("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE"), (Reading.each, 1))


def _step_of(step: dis.Instruction, named: bool) -> tuple[Callable, int, Any] | None:
    name, count = step.opname, step.arg or 0
    if name == "CALL":
        return Reading.call, count + _IN_CALLS, named
    if name == "CALL_KW":
        return Reading.call_with_names, count + _IN_CALLS + 1, None
    if name == "CALL_FUNCTION_EX":
        return Reading.call_all, _IN_CALLS + 1 + (count & 1), None
    if name == "MAKE_FUNCTION" and count:  # with defaults, up to Python 3.12
        return Reading.kept, count.bit_count() + 1, None
    if name == "FORMAT_VALUE":
        return Reading.each, 2 if count & 4 else 1, None
    if name not in _STEPS:
        return None
    do, taken = _STEPS[name]
    if name == "COMPARE_OP":
        return do, taken, step.argrepr.removeprefix("bool(").removesuffix(")")
    return do, taken, count if name == "MATCH_CLASS" else step.argval


_AT_ONCE = {"<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"}


def _of_functions(code: CodeType) -> Iterator[str]:
    """The variables that functions in a piece of code close over, but for those that go through something at once."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _of_functions(inner) if inner.co_name in _AT_ONCE else inner.co_freevars


def plan_of(code: CodeType) -> Plan:
    """What to do before which instruction of a piece of code, by offset."""
    steps = list(dis.get_instructions(code))
    reach = depths(code, steps)
    shared = {*code.co_freevars, *_of_functions(code)}
    plan: Plan = {}
    prefixes, line, named = [], code.co_firstlineno, False
    for step in steps:
        if step.positions is not None and step.positions.lineno:
            line = step.positions.lineno
        if step.opname == "EXTENDED_ARG":
            prefixes.append(step.offset)
            continue
        named = named or step.opname == "KW_NAMES"  # up to the next call
        wanted = _step_of(step, named) if step.offset in reach else None
        if step.opname == "STORE_DEREF" and step.argval in shared and step.offset in reach:
            wanted = Reading.kept, 1, None
        named = named and step.opname != "CALL"
        if wanted is not None:
            # Python 3.11 tells of an instruction with prefixes where the first of them lies.
            do, count, argument = wanted
            plan |= dict.fromkeys((step.offset, *prefixes), (do, count, argument, reach[step.offset], line))
        prefixes = []
    return plan
