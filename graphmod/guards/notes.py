"""Notes, while a call runs, what its code reads and where that lives."""

from __future__ import annotations

import gc
import logging
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.autograd.function import AUTOGRAD_FUNCTION_COUNTER

from graphmod.guards.compiled import CompiledFrame, is_arithmetic
from graphmod.guards.values import (
    BUFFERS,
    CODE,
    COMMON,
    CONTAINERS,
    HELD_BY_MODULE,
    HOLDERS,
    INERT,
    MISSING,
    OBJECT,
    OTHER,
    POINTER,
    STATE_OF_LOCK,
    UNKNOWN,
    Answer,
    Cached,
    Cell,
    Data,
    Fields,
    InC,
    Kind,
    OpaqueModule,
    Place,
    Slots,
    Subclasses,
    View,
    behind,
    bound_to,
    content,
    content_now,
    dict_of,
    find,
    find_in_classes,
    find_item,
    get,
    is_iterator,
    is_library_module,
    is_made_by_code,
    is_of_core,
    is_of_library,
    is_plain,
    is_random,
    is_small_memory,
    means_nothing,
    of_c,
    same,
    same_content,
    sort_of,
    state_of_lock,
)
from graphmod.ranks.fully_shard import held_between_calls, whole_in_calls
from graphmod.torch_private import FunctionBase, weak_reference
from graphmod.trace import dispatch
from graphmod.trace.garbage import Ages
from graphmod.trace.generators import METHODS, comparable, kinds_followed, state_of
from graphmod.trace.host_draws import HostDraws
from graphmod.trace.lines import is_library, users
from graphmod.trace.operations import address, is_leaf
from graphmod.trace.undo import let_through
from graphmod.trace.untraced import identity

_FIXED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
_DESCRIPTORS = (types.FunctionType, property, classmethod, staticmethod, types.GetSetDescriptorType)
_GLOBAL_HOOKS = [f"_global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre")]
_OF_METHODS = ("__self__", "__func__", "__class__", "__call__")  # all other attributes are the function's
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType)
_version = operator.attrgetter("_version")
_LOGGING = (logging.Filterer, logging.Manager)
_DECIDE = ("level", "disabled", "disable")  # of these
_BOUND = frozenset(map(identity, (types.BuiltinMethodType, types.MethodType)))
_ITEM = object()  # tells notes on items from those on attributes
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
# Of arrays, and of what shows memory: no content.
_OF_FORM = {"device", "dtype", "flags", "itemsize", "nbytes", "ndim", "obj", "shape", "size", "strides", "suboffsets"}
_MOST_CACHED = 256
DEEP = 6  # how far attributes of attributes are followed, where code in C may read any of them


METHODS_IN_C = (types.BuiltinMethodType, types.MethodWrapperType)
UNGUARDED = "graphmod_calls_eager_part"
"""The name of the code of functions that are called anew at each replay, so that what belongs to them is no guard."""
_FOLLOWED = (*CONTAINERS, partial, types.SimpleNamespace, *METHODS_IN_C)
_DEPTH, _MOST_INSIDE = 32, 4096  # how far, and into how many items, containers in containers are followed


def geometry(tensor: Tensor) -> tuple:
    """All that a graph freezes about a tensor it reads by address."""
    if tensor.layout is not torch.strided:
        return (id(tensor), tensor.layout)
    try:
        where = tensor.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        where = 0
    return (where, tensor.size(), tensor.stride(), tensor.dtype, tensor.requires_grad)


_HELD = (nn.Module, type, *HOLDERS, nn.Parameter, types.ModuleType)


def form(value: Any) -> tuple | None:
    """All that a graph freezes about a tensor whose values it copies; None of what it is to read where it is."""
    if type(value) is not Tensor or value.requires_grad or value.layout is not torch.strided or value.is_nested:
        return None
    if value.is_conj() or value.is_neg() or value.__dict__:
        return None
    return value.size(), value.stride(), value.dtype, value.device


def _held(value: Any) -> tuple[Any, bool]:
    """The value, or a weak reference to it and True: a note keeps nothing alive that the call made."""
    if issubclass(type(value), _HELD) or is_plain(value):
        return value, False
    try:
        return weak_reference(value), True
    except TypeError:
        return value, False


class Chance:
    """Compares the states of the host's random generators before and after a call.

    Those of `random` and `numpy.random`, and each generator that the call's code was seen to use.

    Attributes:
        draws: is told what code draws from them, and what that does with the numbers; see `host_draws`.
    """

    def __init__(self, draws: HostDraws | None = None) -> None:
        self.draws = draws
        self._kinds = frozenset(map(identity, kinds_followed()))
        self._states: dict[int, tuple[Any, Any, tuple | None]] = {}  # by identity of the generator, which it holds
        self._of_system: tuple | None = None
        self._still: dict[int, bool] = {}
        self.meet(random._inst, None)
        mtrand = sys.modules.get("numpy.random.mtrand")
        if hasattr(mtrand, "_rand"):  # another thread may be importing it
            self.meet(mtrand._rand, None)

    def meet(self, value: Any, where: tuple | None) -> int:
        """Takes in a value that code at `where` uses: a generator, or a function that draws from one. Returns the
        identity of that generator; 0 where there is none."""
        if sort_of(type(value)) != OTHER:
            return 0
        method = _method_of_generator(value)
        if method in METHODS and (recorder := dispatch.current()) is not None:
            recorder.refuse(method, METHODS[method])
        if issubclass(type(value), (types.BuiltinMethodType, types.MethodType)):
            value = value.__self__
        of_torch = _is_generator(value)
        if not (of_torch or is_random(value)):
            return 0
        recorder = dispatch.current() if of_torch else None
        if recorder is not None and (self.draws is not None or not recorder.watching):
            recorder.note_generator(value)
            return identity(value)
        known = self._states.get(identity(value))
        if known is None:
            self._states[identity(value)] = (value, _state(value), where)
            if self.draws is not None and identity(type(value)) in self._kinds:
                self.draws.begin(value)
        elif known[2] is None:
            self._states[identity(value)] = (*known[:2], where)
        return identity(value)

    def ask_system(self, where: tuple) -> None:
        """Takes in that code at `where` is about to ask the system for random bytes, which has no state to compare."""
        self._of_system = self._of_system or where

    def look_away(self) -> None:
        """Code comes whose draws are nobody's business."""
        self._still = {name: _state(one) == before for name, (one, before, _) in self._states.items()}

    def look_again(self) -> None:
        """It has run; what it drew is not to be told."""
        for name, still in self._still.items():
            one, _, where = self._states[name]
            if still:
                self._states[name] = one, _state(one), where

    def drawn(self) -> Iterator[tuple[str, tuple | None, int]]:
        """What was drawn on the host, or by a backward from a generator that is not every capture's own, in words; the
        code and line that used the generator first; and its identity."""
        drawn_at, followed = ({}, False) if self.draws is None else (self.draws.drawn_at, self.draws.followed)
        default = (torch.default_generator, *torch.cuda.default_generators)
        for value, before, where in self._states.values():
            known = id(value) in drawn_at
            if any(value is one for one in default) or (followed if known else _state(value) == before):
                continue
            library = type(value).__module__.partition(".")[0]
            on_host = f"draws random numbers on the host ({library})"
            told = "draws from a torch.Generator in its backward" if _is_generator(value) else on_host
            yield told, drawn_at.get(id(value), where), identity(value)
        if self._of_system is not None:
            yield "draws random numbers on the host (os)", self._of_system, 0

    def draw(self, function: Any, given: list, where: tuple, is_old: Callable[[Any], bool]) -> None:
        """Takes in that code at `where` is about to call a function, which may be a method of a generator."""
        bound = identity(type(function)) in _BOUND
        owner = function.__self__ if bound else given[0] if given else None
        if self.draws is None or identity(type(owner)) not in self._kinds:
            return
        if not bound:
            name = getattr(function, "__name__", "")
            if getattr(type(owner), name, None) is not function:
                return
            function, given = getattr(owner, name), given[1:]
        self.meet(owner, where)
        if not is_old(owner):  # another one is made in each call
            self.draws.escaped()
        self.draws.draw(function, given, where)


def _state(generator: Any) -> Any:
    """Where a generator is; of one that cannot tell, another value each time, so that it counts as drawn from. The
    system's has no state: of its draws `Chance.ask_system` is told."""
    try:
        return None if isinstance(generator, random.SystemRandom) else comparable(state_of(generator))
    except Exception as error:
        let_through(error)
        return object()


def _is_generator(value: Any) -> bool:
    return issubclass(type(value), torch.Generator)  # `isinstance` runs Python code of torch's, at each value met


def _method_of_generator(value: Any) -> str:
    """The name of a method of one of torch's generators; "" of anything else."""
    of_object = type(value) is types.BuiltinMethodType and _is_generator(value.__self__)
    of_class = type(value) is types.MethodDescriptorType and value.__objclass__ is torch.Generator
    return value.__name__ if of_object or of_class else ""


class MetTensor:
    """A tensor as it was when code first came upon it.

    Attributes:
        geometry: see the function of that name.
        is_leaf: whether it may collect a gradient.
        without_gradient: whether it had none then; None where an eager part may have changed that before.
        asked_for_gradient: whether code looked at its gradient.
        tuples: the `id` of each in which code found it, on which there are no notes.
        gets_data: whether code gave it other memory (`tensor.data = ...`).
        where_it_lay: the address of its memory.
        where: code and line that came upon it.
    """

    __slots__ = (
        *("_tensor", "_weakly", "asked_for_gradient", "geometry", "gets_data", "is_leaf", "tuples", "where"),
        *("where_it_lay", "without_gradient"),
    )

    def __init__(self, tensor: Tensor, where: tuple) -> None:
        self.geometry, self.where = geometry(tensor), where
        self.is_leaf = (tensor.requires_grad or isinstance(tensor, nn.Parameter)) and is_leaf(tensor)
        self.without_gradient: bool | None = self.is_leaf and tensor.grad is None
        self.asked_for_gradient = self.gets_data = False
        self.tuples: set[int] = set()
        self.where_it_lay = address(tensor)
        self._tensor: Tensor | None = tensor if self.is_leaf else None
        self._weakly: weakref.ref[Tensor] | None = None if self.is_leaf else weak_reference(tensor)

    @property
    def tensor(self) -> Tensor | None:
        """None when it is gone."""
        return self._tensor if self._weakly is None else self._weakly()

    def hold(self) -> None:
        """Holds it no longer weakly."""
        self._tensor, self._weakly = self.tensor, None

    def changed(self) -> bool:
        """Whether it is elsewhere, or otherwise laid out, than it was."""
        tensor = self.tensor
        return tensor is not None and geometry(tensor) != self.geometry

    def data(self) -> Note | None:
        """The place of its memory, if code gave it other memory of the same form, and its class runs no code."""
        tensor = self.tensor
        if tensor is None or not self.gets_data or type(tensor) not in (Tensor, nn.Parameter) or not self.changed():
            return None
        found = Note(tensor, Place(Data(tensor), "data", tensor.data), self.where)
        found.where_it_lay = self.where_it_lay
        return found if geometry(tensor)[1:] == self.geometry[1:] and found.form is not None else None


class Note:
    """What was at one place when the call first looked there.

    Attributes:
        key: attribute name, key or index.
        items: of a container.
        where: code and line that looked.
        read: whether code looked at what was there before it put something else there.
        form: of a tensor that was there, see the function of that name.
        where_it_lay: its address; 0 of anything else.
    """

    __slots__ = (
        *("_container", "_owner", "_value", "_view", "_weak_owner", "_weak_value"),
        *("form", "items", "key", "read", "where", "where_it_lay"),
    )

    def __init__(self, owner: Any, place: Place, where: tuple) -> None:
        container, self.key, there, _ = place
        self.where, kind = where, type(there)
        self._owner, self._weak_owner = _held(owner)
        self._container = container
        self._view = None  # what makes the container of the object, which would keep that alive
        if self._weak_owner and container is dict_of(owner):
            self._container, self._view = None, dict_of
        elif self._weak_owner and type(container) in (Data, InC, Kind, Slots):
            self._container, self._view = None, type(container)
        self._value, self._weak_value = _held(there)
        self.items = content(there) if issubclass(kind, HOLDERS) else None
        self.read, self.form = True, form(there)
        self.where_it_lay = address(there) if issubclass(kind, Tensor) else 0

    @property
    def owner(self) -> Any:
        """The object whose place it is; None when that is gone."""
        return self._owner() if self._weak_owner else self._owner

    @property
    def container(self) -> Any:
        return self._container if self._view is None else self._view(self.owner)

    def hold(self) -> None:
        """Holds what was there no longer weakly."""
        self._value, self._weak_value = self.before(), False

    @property
    def place(self) -> tuple:
        """Which place it is, by whatever way code came to it."""
        return _place(self.owner, self.container, self.key)

    def let_go(self) -> None:
        """Forgets what was there."""
        self._value, self._weak_value, self.items = None, False, None

    def before(self) -> Any:
        """What was there; None when that is gone."""
        return self._value() if self._weak_value else self._value

    @property
    def gone(self) -> bool:
        """Whether what was there is no more."""
        return self._weak_value and self._value() is None

    def now(self) -> Any:
        return get(self.container, self.key)

    def changed(self) -> bool:
        """Whether the place holds another value than at first. A container in the place of an equal one is none."""
        if self._weak_owner and self.owner is None:  # nobody has it any more
            return False
        before, now = self.before(), self.now()
        if before is now:
            return False
        if self.items is not None and type(before) is type(now):
            return not same_content(self.items, content_now(now))
        return not same(before, now)


def _place(owner: Any, container: Any, key: Any) -> tuple:
    if issubclass(type(container), (View, types.MappingProxyType)):  # another one each time
        return identity(owner), type(container), key
    return identity(container), key


class TakenLock:
    """A lock that the call itself has taken, which is no change as long as it gives it back.

    Attributes:
        answer: tells its state.
        before: what that was before the call first took it, at `where`.
        times: how often the call has taken it and not given it back.
    """

    __slots__ = ("answer", "before", "times", "where")

    def __init__(self, answer: Answer, where: tuple) -> None:
        self.answer, self.where, self.times = answer, where, 0
        (self.before,) = answer.content()


class Notes:
    """Collects notes on what code reads of what was there before it, and on where that lives.

    Args:
        ages: tells what was there; what the call itself makes needs no notes.

    Attributes:
        notes: by identity of the object and key.
        contents: containers whose items were read, by identity: the container, its items, and where that was.
        iterators: what code used that is used up by it.
        tensors: those that were met, by identity.
        between_calls: identity of a dict of parameters -> what is in it before and after the call, though not in it.
        weakly: the identities of objects that code had from a weak reference, which are not to be kept alive.
        where: the code and line that reads now.
        frame: that runs now; held for no longer than it is looked at.
        modules: the modules that were called, each once.
        of_dynamo: the runs of code that dynamo has written.
        chance: the random generators of the host.
        unreadable: an error from looking at what code reads, and where.
        elsewhere: where code was sent to another thread.
        unseen: why nobody could look on; "" where somebody could.
        gradient_at: where code first looked at, or set, the gradient of a leaf tensor.
        callers: by identity of frames that run, the user's code and line that led there.
        of_classes: identity of the attributes of a class -> the view of them that notes are on.
        taken: those locks, by identity, that code has taken.
        told_apart: the addresses of tensors of which code asked whether they are others.
        identified: by `id`, as parts of a call are known, of what code asked which object it is, or which version of a
            tensor: that, in words, and where.
        after_part: whether code has run unseen, which may have changed what is first looked at from here on.
        around: tells of a frame the functions that it runs in, if somebody asks where code comes upon things.
        arounds: by identity of the frames that run, what it has told, and what `touched` has of that.
        touched: the functions in which code runs, see `around` -> the places and, by identity, objects that it comes
            upon there, and whatever else it does, in words.
    """

    def __init__(self, ages: Ages, host_draws: HostDraws | None = None) -> None:
        self.ages = ages
        self.notes: dict[tuple, Note] = {}
        self.contents: dict[int, tuple[Any, tuple, tuple]] = {}
        self.iterators: list[tuple[Any, str, tuple]] = []
        self.tensors: dict[int, MetTensor] = {}
        self.between_calls = held_between_calls()
        self._whole = whole_in_calls()
        self.weakly: set[int] = set()
        self.where: tuple = ("", 0)
        self.frame: types.FrameType | None = None
        self.modules: dict[int, nn.Module] = {}
        self.of_dynamo: list[CompiledFrame] = []
        self.around: Callable[[types.FrameType], tuple | None] | None = None
        self.arounds: dict[int, tuple[tuple | None, set[Any]]] = {}
        self.touched: dict[tuple | None, set[Any]] = {}
        self.chance = Chance(host_draws)
        self.unreadable: tuple[str, tuple] | None = None
        self.elsewhere: tuple | None = None
        self.unseen = ""
        self.gradient_at: tuple | None = None
        self.of_classes: dict[int, types.MappingProxyType] = {}
        self.taken: dict[int, TakenLock] = {}
        self.told_apart: set[int] = set()
        self.identified: dict[int, tuple[str, tuple]] = {}
        self.after_part = False
        self._walked: dict[int, nn.Module] = {}
        self._in_classes: dict[tuple[int, str], Place | None] = {}
        self._kinds: dict[int, type] = {}  # kept, so that their identities stay theirs
        self._dicts: dict[int, tuple[type, types.MappingProxyType]] = {}  # by identity of the class, which is kept
        self._in_c: dict[tuple[int, str], OpaqueModule | Cached | Answer] = {}
        self._subclasses = Subclasses()
        self.callers: dict[int, tuple] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._first: dict[tuple[int, Any], Note] = {}  # notes by identity of the container, and key
        self._deep: dict[int, Any] = {}
        self._stored: Any = MISSING  # the name or key at which something is about to be put

    def try_to(self, note: Callable, *seen: Any) -> None:
        """Notes something that was seen. It may be of any kind, so that this may fail; the user's call goes on."""
        try:
            note(*seen)
        except Exception as error:
            self.cannot_read(error)

    def uses(self, value: Any) -> None:
        """Takes in that code uses a value that may be a random generator, or draw from one."""
        generator = self.chance.meet(value, self.where)
        if generator:
            self._touch(generator)

    def _touch(self, what: Any) -> None:
        if self.around is not None and self.frame is not None:
            known = self.arounds.get(identity(self.frame))
            if known is None:
                around = self.around(self.frame)
                known = self.arounds[identity(self.frame)] = around, self.touched.setdefault(around, set())
            known[1].add(what)

    def apart(self, note: Callable, *seen: Any) -> None:
        """Notes something as `note` does, though code does not come upon it here, but where it runs."""
        around, self.around = self.around, None
        try:
            note(*seen)
        finally:
            self.around = around

    def cannot_read(self, error: Exception) -> None:
        """Takes in an error from looking at what code reads."""
        let_through(error)
        self.unreadable = self.unreadable or (f"{type(error).__name__}: {error}", self.here())

    # -- what there is to begin with -----------------------------------------------------------------------------

    def root(self, value: Any) -> None:
        """Takes in an object that was there before, whatever the collector says: the callable, an argument."""
        self.ages.there(value)
        if isinstance(value, types.MethodType):
            self.root(value.__self__)
            self.root(value.__func__)
        elif isinstance(value, types.BuiltinMethodType):
            self.root(value.__self__)
        elif isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, torch.jit.ScriptModule):
            self.opaque_module(value)
        elif isinstance(value, (*CONTAINERS, partial)):
            for item in content(value) or ():
                if issubclass(type(item), (*_FOLLOWED, *BUFFERS)):
                    self.root(item)

    def called(self, module: nn.Module) -> None:
        """Takes in that a module is called."""
        if not self.modules:
            for hooks in _GLOBAL_HOOKS:
                self.note_items(getattr(nn.modules.module, hooks, {}))
        if identity(module) in self.modules or not self.ages.is_old(module):
            return
        self.modules[identity(module)] = module
        if isinstance(module, torch.jit.ScriptModule):
            self.opaque_module(module)
        else:
            self.attribute(module, "forward")
            if "forward" in vars(module):  # which may lead to that of the class, as a wrapper's does
                self.attribute(type(module), "forward")

    def compiled(self, frame: types.FrameType) -> None:
        """Takes in that code which dynamo has written runs, under guards of its own."""
        if not is_arithmetic(frame):
            self.of_dynamo.append(CompiledFrame(frame, self._with_other_gradients()))

    def _with_other_gradients(self) -> list[Tensor]:
        """The tensors whose gradient has come or gone since code came upon them."""
        met = [(one.tensor, one.without_gradient) for one in self.tensors.values() if one.is_leaf]
        return [leaf for leaf, without in met if leaf is not None and without is not (leaf.grad is None)]

    def walked(self, module: nn.Module) -> None:
        """Takes in that code goes through a module and all that is in it."""
        if isinstance(module, nn.Module) and identity(module) not in self._walked:
            self._walked[identity(module)] = module
            self.held_by_module(self.belongs(module.__dict__, module))
            for part in module.__dict__.get("_modules", {}).values():
                if part is not None and identity(part) not in self._walked:
                    self.walked(part)

    def held_by_module(self, attributes: dict) -> None:
        """Takes in that code reads all parameters, buffers and modules that a module holds."""
        for name in HELD_BY_MODULE:
            held = attributes.get(name)
            if held is not None:
                self.note_items(self.belongs(held, attributes))

    def special(self, owner: Any, function: types.FunctionType) -> None:
        """Takes in that a function runs as a special method of an object, such as `__len__`."""
        name = function.__name__
        for base in type(owner).__mro__:
            if vars(base).get(name) is function:
                self._hidden_by(type(owner).__mro__, name, base)
                self._note(base, Place(self._class_dict(base), name, function, shared=base))
                break

    def exchanged(self, *tensors: Tensor) -> None:
        """Takes in that tensors are about to be exchanged, which torch does not do while they are held weakly."""
        for one in self.notes.values():
            if any(one.before() is tensor for tensor in tensors):
                one.hold()
        for tensor in tensors:
            if identity(tensor) in self.tensors:
                self.tensors[identity(tensor)].hold()

    def opaque_module(self, module: nn.Module) -> None:
        """Takes in that all of a module may be read."""
        self.note_items(self._held_by(module, "", OpaqueModule))

    def cached(self, function: Any) -> None:
        """Notes what an `lru_cache` may return without calling its function, unless that is too much."""
        cached = self._held_by(function, "", Cached)
        if len(cached.content()) <= _MOST_CACHED:
            self.note_items(cached)

    def asked(self, owner: Any, of: str, ask: Callable[[Any], Any]) -> None:
        """Takes in that code asks something of an object, which only a function in C can tell."""
        self.note_items(self._answer(owner, of, ask))

    def _answer(self, owner: Any, of: str, ask: Callable[[Any], Any]) -> Any:
        return self._held_by(owner, of, lambda _: Answer(of, partial(ask, owner)))

    def asks_lock(self, lock: Any) -> None:
        """Takes in that code asks whether a lock is free; not of one that it has itself, which the next has as well."""
        if identity(lock) not in self.taken or not self.taken[identity(lock)].times:
            self.asked(lock, STATE_OF_LOCK, state_of_lock)

    def takes_lock(self, lock: Any) -> None:
        """Takes in that code waits for a lock, as nobody does before a replay."""
        if identity(lock) not in self.taken:
            answer = self._answer(lock, STATE_OF_LOCK, state_of_lock)
            self.taken[identity(lock)] = TakenLock(answer, self.here())
        self.taken[identity(lock)].times += 1

    def gives_lock_back(self, lock: Any) -> None:
        """Takes in that code gives back a lock, which somebody else may have taken."""
        self.asks_lock(lock)
        if identity(lock) in self.taken:
            self.taken[identity(lock)].times = max(0, self.taken[identity(lock)].times - 1)

    def asked_class(self, kind: type, of: Any) -> None:
        """Takes in that code asks whether a class is a subclass of others, with which some may be registered."""
        if self.ages.is_old(kind) or not is_made_by_code(kind):
            self.ages.there(self._subclasses)
            self._subclasses.ask(kind, of)
            self.note_items(self._subclasses)

    def _held_by(self, value: Any, what: str, view: Callable[[Any], Any]) -> Any:
        """A view of what an object holds in C, always the same one."""
        name = identity(value), what
        if name not in self._in_c:
            self._in_c[name] = self.belongs(view(value), value)
        return self._in_c[name]

    # -- places --------------------------------------------------------------------------------------------------

    def global_variable(self, held: dict, name: str, file: str) -> None:
        """Notes a global variable, or that there is none, where one would come before what Python has itself."""
        value = dict.get(held, name, MISSING)
        if not (is_library(file) and (value is MISSING or issubclass(type(value), _FIXED))):
            self._note(held, Place(held, name, value))

    def stored(self, look: Callable, owner: Any, key: Any) -> None:
        """Takes in, by a look at it, a place where code is about to put something, without reading what is there."""
        self._stored = key
        try:
            look(owner, key)
        finally:
            self._stored = MISSING

    def attribute(self, owner: Any, name: Any) -> Any:
        """The value of an attribute, noted; MISSING, UNKNOWN or CODE where there is none to be had."""
        if not issubclass(type(name), str):
            return UNKNOWN
        kind = type(owner)
        if identity(kind) not in self._kinds:  # of those it is ordinary lookup that finds attributes
            if issubclass(kind, Tensor):
                return self._of_tensor(owner, name)
            if kind is types.ModuleType and name not in ("__dict__", "__class__"):
                return self._of_module(owner, name)
            if kind is super:
                return self._of_super(owner, name)
            if is_plain(owner) and not is_made_by_code(kind):
                return UNKNOWN
            if issubclass(kind, _PROXIES):
                return self.attribute(self._behind(owner), name)
        if kind is types.MethodType and name not in _OF_METHODS:
            return self.attribute(owner.__func__, name)
        if name == "contents" and issubclass(kind, POINTER):
            self._old_pointer(owner)
            self.asked(owner, "what a pointer leads to", behind)
            return UNKNOWN
        self._kind(owner)
        if name == "__dict__":
            held = self._class_dict(owner) if issubclass(kind, type) else dict_of(owner)
            if held is None:
                return UNKNOWN
            return self.belongs(held, owner)  # Python may have made this dict only now
        if name == "__class__":
            return kind
        if identity(kind) not in self._kinds:
            self._kinds[identity(kind)] = kind
            for special in ("__getattribute__", "__getattr__"):
                self._hidden_by(kind.__mro__, special, None)
        first_look = (identity(kind), name) not in self._in_classes
        place = find(owner, name, self._in_classes)
        is_class = issubclass(kind, type)
        if is_class:
            self._hidden_by(owner.__mro__, name, None if place is None else place.shared)
        elif first_look and not issubclass(kind, types.ModuleType):
            self._hidden_by(kind.__mro__, name, None if place is None else place.shared)
        if issubclass(kind, FunctionBase):  # what a forward keeps for its own backward
            return UNKNOWN if place is None or place.shared is not None else place.value
        if means_nothing(owner if is_class else kind) and not (name in _DECIDE and issubclass(kind, _LOGGING)):
            return UNKNOWN
        if issubclass(kind, torch.autocast) and name.startswith("prev"):  # it notes when entered, for its own end alone
            return UNKNOWN
        if place is None:
            found = find_in_classes(kind.__mro__, name)
            base, shared = (None, None) if found is None else (found.shared, found.value)
            if base is not None and not is_of_library(base):
                self._note(base, Place(self._class_dict(base), name, shared, shared=base))
            if isinstance(shared, property) and not isinstance(shared.fget, types.FunctionType):
                self.all_attributes(owner, DEEP)  # whatever it is that reads
            value = of_c(owner, name)
            if issubclass(kind, tuple):  # of whose fields each is an item
                self._in_tuple(owner, value)
            elif issubclass(kind, BUFFERS) and is_plain(value):
                self._note(owner, Place(InC(owner), name, value))
            elif issubclass(kind, (numpy.ndarray, *BUFFERS)) and name not in _OF_FORM:
                self.note_items(owner)
            return value
        if place.shared is not None:
            return self._of_class(owner, name, place)
        if issubclass(kind, types.ModuleType):
            return self._of_module(owner, name)
        value, own = place.value, dict_of(owner)
        if issubclass(kind, nn.Module) and place.container is not own and own is not None:
            for held in HELD_BY_MODULE:
                if own.get(held) is place.container:
                    self._note(owner, Place(own, held, place.container))
        self._note(owner, place)
        if value is MISSING:
            if issubclass(kind, nn.Module) and own is not None:
                for held in map(own.get, HELD_BY_MODULE):
                    if held is not None:
                        self._note(self.belongs(held, owner), Place(held, name, MISSING))
            if own is not None and hasattr(kind, "_reach_through"):
                return self.attribute(own[kind._reach_through[0]], name)
            special = getattr(kind, "__getattr__", MISSING)
            if isinstance(special, _OF_C) and issubclass(kind, dict):  # as in classes that read items as attributes
                return self.item(owner, name)
            return MISSING if special is MISSING else CODE
        return value

    def _of_module(self, owner: types.ModuleType, name: str) -> Any:
        held, kind = owner.__dict__, type(owner)
        value = held.get(name, MISSING)
        of_torch = owner is torch.nn.functional and not is_of_core(value)  # what others exchange now and then
        fixed = value is MISSING or issubclass(type(value), _FIXED)
        of_library = is_library_module(owner) or (kind is not types.ModuleType and is_of_library(kind))
        if of_torch or not (fixed and of_library):
            self._note(self.belongs(held, owner), Place(held, name, value))
        return CODE if value is MISSING and "__getattr__" in held else value

    def _behind(self, proxy: Any) -> Any:
        """What a weak proxy stands for."""
        owner = proxy.__init__.__self__
        self.weakly.add(identity(owner))
        return owner

    def _of_super(self, owner: Any, name: str) -> Any:
        place = find(owner, name, self._in_classes)
        if place is None:
            return of_c(owner, name)
        mro = owner.__self_class__.__mro__
        self._hidden_by(mro[mro.index(owner.__thisclass__) + 1 :], name, place.shared)
        return self._of_class(owner, name, place)

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
        own = None if issubclass(type(owner), (type, super)) else dict_of(owner)
        if own is not None:
            self._note(owner, Place(own, name, MISSING))
        fixed = issubclass(type(value), _DESCRIPTORS) and is_of_library(place.shared)
        if not (fixed or is_of_core(value)):
            self._note(place.shared, place)
        return bound_to(value)

    def all_attributes(self, owner: Any, depth: int = 1) -> None:
        """Takes in that any attribute of an object may be read, and, with more depth, of the objects found there."""
        kind = type(owner)
        if issubclass(kind, (Tensor, nn.Module, types.FunctionType, types.ModuleType)) and depth > 1:
            return
        if is_plain(owner) and not is_made_by_code(kind):
            return
        if issubclass(kind, types.ModuleType) and is_library_module(owner):
            if identity(owner) not in self._deep:  # in which most never changes, and what watches a call is put
                self._deep[identity(owner)] = owner
                for name in list(vars(owner)):
                    self.attribute(owner, name)
            return
        found = [self.attribute(owner, "__dict__")]
        self.note_items(found[0])
        for base in (owner if issubclass(kind, type) else kind).__mro__:
            if not is_made_by_code(base) or is_of_library(base):
                break
            self.note_items(self._class_dict(base), depth=0)
            slots = [name for name, value in vars(base).items() if isinstance(value, types.MemberDescriptorType)]
            found.append({name: self.attribute(owner, name) for name in slots})
        if depth > 1 and identity(owner) not in self._deep:
            self._deep[identity(owner)] = owner
            for held in found:
                for value in list(dict.values(held)) if issubclass(type(held), dict) else ():
                    self.all_attributes(value, depth - 1)

    def _class_dict(self, kind: type) -> types.MappingProxyType:
        known = self._dicts.get(identity(kind))
        if known is None:
            view = vars(kind)  # another one each time
            view = self.of_classes.setdefault(identity(gc.get_referents(view)[0]), self.belongs(view, kind))
            known = self._dicts[identity(kind)] = kind, view
        return known[1]

    def _of_tensor(self, owner: Tensor, name: str) -> Any:
        self._tensor(owner)
        met = self.tensors.get(identity(owner))
        if met is not None:
            met.asked_for_gradient = met.asked_for_gradient or name == "grad"
            met.gets_data = met.gets_data or name == self._stored == "data"
        if name == "_version" and self.ages.is_old(owner) and not owner.is_inference():
            self.identified.setdefault(id(owner), ("version of a tensor", self.here()))
            self.asked(owner, "the version of a tensor", _version)
        held = getattr(owner, "__dict__", None)
        if held is not None and name in held:
            self._note(owner, Place(held, name, held[name]))
            return held[name]
        if held is not None and not hasattr(type(owner), name):
            self._note(owner, Place(held, name, MISSING))
        return UNKNOWN

    def item(self, owner: Any, key: Any) -> Any:
        """The value of an item, noted; MISSING, UNKNOWN or CODE where there is none to be had."""
        kind = type(owner)
        if issubclass(kind, POINTER):
            self._old_pointer(owner, whole=type(key) is not int)
        place = find_item(owner, key)
        if place is None and issubclass(kind, POINTER):  # a structure
            self.asked(owner, f"item {key} that a pointer leads to", partial(behind, index=key))
            return CODE
        if place is None:
            self.note_items(owner)
            return CODE
        if place.value is MISSING and issubclass(type(key), Tensor):
            self.note_items(owner)  # another one may be there
        if issubclass(kind, tuple):
            self._in_tuple(owner, place.value)
        else:
            self._note(owner, place)
        return place.value

    def _old_pointer(self, pointer: Any, whole: bool = False) -> None:
        """Raises an error unless what a pointer leads to can be found again."""
        if whole or not self.ages.is_old(pointer):
            raise ValueError(
                "of what pointers of ctypes lead to, only `pointer.contents` and single items (`pointer[0]`) of one "
                "that was made outside can be compared; pass the rest as a tensor"
            )

    def _in_tuple(self, owner: tuple, value: Any) -> None:
        """Takes in an item of a tuple, which stays there for as long as the tuple does."""
        old = self.ages.is_old(owner)
        if old:
            self._lead_to(value)
        self._meet(value)
        if old and issubclass(type(value), Tensor) and identity(value) in self.tensors:
            self.tensors[identity(value)].tuples.add(id(owner))

    # -- values --------------------------------------------------------------------------------------------------

    def here(self) -> tuple:
        """The code and line that reads now; if they are a library's, also those of the user's that had called it."""
        frame, where = self.frame, self.where
        if frame is None or not is_library(where[0].co_filename):
            return where
        name = identity(frame)
        if name not in self.callers:
            outer = users(frame)
            self.callers[name] = () if outer is None else ((outer.f_code, outer.f_lineno),)
        return where + self.callers[name]

    def _note(self, owner: Any, place: Place) -> None:
        container, key, value, _ = place
        try:
            name = (identity(owner), key) if container is not owner else (identity(owner), _ITEM, key)
            known = self.notes.get(name)
        except TypeError:  # a key that cannot be hashed
            return
        if self.around is not None:
            self._touch(_place(owner, container, key))
        read = key is not self._stored
        if known is not None and known.owner is owner:
            known.read = known.read or (read and value is known.before())
        elif self.ages.is_old(owner):
            if issubclass(type(owner), _HELD):
                self.ages.there(owner)
            found = (identity(container), key)
            lasting = self.between_calls[found[0]].get(key) if found[0] in self.between_calls else None
            earlier = self._first.get(found)  # by another way, before the call put something else there
            if earlier is not None and earlier.container is container:
                lasting = earlier.before() if lasting is None else lasting
                read = read and value is earlier.before()
            value = value if lasting is None else lasting
            known = self.notes[name] = self._first[found] = Note(owner, Place(container, key, value), self.here())
            known.read = read
            self._lead_to(value)
            self._meet(value)
        elif container is not owner:  # which an object that the call made may share: `self.__dict__ = cls.state`
            self._note(container, place)

    def belongs(self, value: Any, owner: Any) -> Any:
        """The value, which is as old as its owner."""
        if self.ages.is_old(owner):
            self.ages.there(value)
        return value

    def _lead_to(self, value: Any) -> None:
        """Takes in that what was there leads to a value, which the collector may not track."""
        if not gc.is_tracked(value) and identity(type(value)) not in COMMON and sort_of(type(value)) == OTHER:
            self.ages.there(value)

    def _kind(self, owner: Any) -> None:
        """Notes the class of an object, if it is one of a program's own."""
        kind = type(owner)
        if is_made_by_code(kind) and not issubclass(kind, (type, types.ModuleType)):
            name = (identity(owner), Kind)
            known = self.notes.get(name)
            if (known is None or known.owner is not owner) and self.ages.is_old(owner):
                self.notes[name] = Note(owner, Place(Kind(owner), "__class__", kind), self.here())

    def _meet(self, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, Tensor):
            self._tensor(value)
        elif kind is types.FunctionType:
            self.function(value)
        elif issubclass(kind, (staticmethod, classmethod)):
            self._meet(value.__func__)
        elif issubclass(kind, property):
            for function in (value.fget, value.fset, value.fdel):
                self._meet(function)
        elif kind is types.MethodType:
            self._meet(value.__func__)
            self._kind(value.__self__)

    def _tensor(self, tensor: Tensor) -> None:
        self._touch(identity(tensor))
        if identity(tensor) in self._whole:
            return
        known = self.tensors.get(identity(tensor))
        if (known is None or known.tensor is not tensor) and self.ages.is_old(tensor):
            met = self.tensors[identity(tensor)] = MetTensor(tensor, self.here())
            if self.after_part:
                met.without_gradient = None

    def function(self, function: types.FunctionType) -> None:
        """Notes what belongs to a function: the variables it closes over, and, of one of the user's, its defaults."""
        if self._functions.get(identity(function)) is function or not self.ages.is_old(function):
            return
        if function.__code__.co_name != UNGUARDED:
            self._functions[identity(function)] = function
            self.apart(self._function, function)

    def runs(self, function: types.FunctionType) -> None:
        """Takes in that a function begins to run, which may use the variables that it closes over."""
        self.function(function)
        for cell in function.__closure__ or ():
            self._touch(_place(cell, Cell(cell), None))

    def _function(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":  # that is for `super()`, and stays
                self._note(self.belongs(cell, function), Place(Cell(cell), None, get(Cell(cell), None)))
        if not is_library(function.__code__.co_filename):
            for name in Fields.NAMES:
                self._note(function, Place(Fields(function), name, getattr(function, name)))
            self.note_items(function.__defaults__)
            self.note_items(function.__kwdefaults__)

    def note_items(self, value: Any, depth: int = _DEPTH) -> None:
        """Notes the items of a container that code goes through, or passes to code that may."""
        if issubclass(type(value), _PROXIES):
            value = self._behind(value)
        kind = type(value)
        sort = sort_of(kind)
        if sort == INERT:
            return
        if sort == OBJECT:
            self._kind(value)
            return
        if issubclass(kind, METHODS_IN_C) and issubclass(type(value.__self__), CONTAINERS):
            value = self.belongs(value.__self__, value)
        elif hasattr(kind, "mapping") and issubclass(kind, (KeysView, ValuesView, ItemsView)):
            # The dict itself, which `mapping` would wrap anew each time.
            value = self.belongs(gc.get_referents(value)[0], value)
        self._touch(identity(value))
        known = self.contents.get(identity(value))
        if known is not None and known[0] is value:
            return
        self._meet(value)
        if type(value) is types.FunctionType:
            return
        old = self.ages.is_old(value)
        if is_iterator(type(value)):
            if old and value is not AUTOGRAD_FUNCTION_COUNTER:  # which only numbers classes
                self.iterators.append((value, type(value).__name__, self.here()))
            return
        items = content(self.between_calls.get(identity(value), value))
        if items is None:
            self._kind(value)
            return
        few = len(items) <= _MOST_INSIDE
        if not old:  # what the call made itself, and may hold tensors, is not kept; what is in it may have been there
            for item in items if few and depth and not COMMON.issuperset(map(identity, map(type, items))) else ():
                self.note_items(item, depth - 1)
        elif not (issubclass(type(value), tuple) and all(is_plain(item) for item in items)):
            self.contents[identity(value)] = (value, items, self.here())
            for item in items:
                self._lead_to(item)
                if issubclass(type(item), Tensor):
                    self._tensor(item)
                elif depth and few and (issubclass(type(item), _FOLLOWED) or is_small_memory(item)):
                    self.note_items(item, depth - 1)
