"""Python reads the same number in many ways: whichever it is, a change is noticed, and looking changes nothing."""

import abc
import array
import collections
import contextlib
import copy
import ctypes
import enum
import functools
import mmap
import multiprocessing
import numbers
import operator
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from graphmod import CUDAGraphModule
from graphmod.trace.untraced import traced, untraced
from tests.support.harness import config

WAYS = {}


def way(make):
    """Registers what makes a function of x, and what changes a number that it reads."""
    WAYS[make.__name__] = make
    return make


@way
def nearer_class():
    Base = type("Base", (), {"scale": 0.5})
    Derived = type("Derived", (Base,), {})
    one = Derived()
    return lambda x: x * one.scale, lambda: setattr(Derived, "scale", 3.0)


@way
def class_read_itself():
    Base = type("Base", (), {"scale": 0.5})
    Derived = type("Derived", (Base,), {})
    return lambda x: x * Derived.scale, lambda: setattr(Derived, "scale", 3.0)


@way
def default_of_getattr():
    Kind = type("Kind", (), {})
    one = Kind()
    return lambda x: x * getattr(one, "scale", 0.5), lambda: setattr(Kind, "scale", 3.0)


@way
def property_in_front_of_an_attribute():
    Kind = type("Kind", (), {})
    one = Kind()
    one.scale = 0.5
    return lambda x: x * one.scale, lambda: setattr(Kind, "scale", property(lambda _: 3.0))


@way
def getattr_of_a_class_that_had_none():
    Kind = type("Kind", (), {})
    one = Kind()
    return lambda x: x * getattr(one, "scale", 0.5), lambda: setattr(Kind, "__getattr__", lambda _, name: 3.0)


@way
def method_of_a_base_hidden_later():
    Base = type("Base", (), {"act": lambda self, x: x * 0.5})
    Derived = type("Derived", (Base,), {})
    one = Derived()
    return lambda x: one.act(x), lambda: setattr(Derived, "act", lambda self, x: x * 3.0)


@way
def called_object():
    Base = type("Base", (), {"__call__": lambda self, x: x * 0.5})
    Derived = type("Derived", (Base,), {})
    one = Derived()
    return lambda x: one(x), lambda: setattr(Derived, "__call__", lambda self, x: x * 3.0)


@way
def member_of_an_enum_of_strings():
    Mode = enum.Enum("Mode", {"fast": "fast"}, type=str)
    Mode.fast.weight = 0.5
    return lambda x: x * Mode.fast.weight, lambda: setattr(Mode.fast, "weight", 3.0)


@way
def computed_name_of_a_class_attribute():
    Kind = type("Kind", (), {"scale_1": 0.5})
    one = Kind()
    return lambda x: x * getattr(one, f"scale_{len(x.shape)}"), lambda: setattr(Kind, "scale_1", 3.0)


@way
def computed_name_of_a_slot():
    Kind = type("Kind", (), {"__slots__": ("scale_1",)})
    one = Kind()
    one.scale_1 = 0.5
    return lambda x: x * getattr(one, f"scale_{len(x.shape)}"), lambda: setattr(one, "scale_1", 3.0)


@way
def path_of_names():
    one = types.SimpleNamespace(inner=types.SimpleNamespace(scale=0.5))
    names = ["inner", "scale"]
    return lambda x: x * functools.reduce(getattr, names, one), lambda: setattr(one.inner, "scale", 3.0)


@way
def sum_of_nested_attributes():
    Kind = type("Kind", (), {})
    one = Kind()
    one.inner = Kind()
    one.inner.scale = 0.5
    of = [one]
    return lambda x: x * sum(map(operator.attrgetter("inner.scale"), of)), lambda: setattr(one.inner, "scale", 3.0)


@way
def property_in_c():
    Kind = type("Kind", (), {"scale": property(operator.attrgetter("_scale"))})
    one = Kind()
    one._scale = 0.5
    return lambda x: x * one.scale, lambda: setattr(one, "_scale", 3.0)


@way
def copy_of_a_config():
    Kind = type("Kind", (), {})
    one = Kind()
    one.scale = 0.5
    return lambda x: x * copy.copy(one).scale, lambda: setattr(one, "scale", 3.0)


@way
def deep_dict():
    inner = {"scale": 0.5}
    deep = {"a": {"b": {"c": {"d": {"e": inner}}}}}
    names = ["a", "b", "c", "d", "e", "scale"]
    return lambda x: x * functools.reduce(operator.getitem, names, deep), lambda: inner.update(scale=3.0)


@way
def event():
    one = threading.Event()
    return lambda x: x * (3.0 if one.is_set() else 0.5), one.set


@way
def weak_set():
    Kind = type("Kind", (), {})
    one, other = Kind(), Kind()
    one.scale, other.scale = 0.5, 2.5
    of = weakref.WeakSet([one])
    return lambda x, _=(one, other): x * sum(each.scale for each in of), lambda: of.add(other)


@way
def global_that_comes_later():
    def function(x):
        try:
            return x * comes_later
        except NameError:
            return x

    return function, lambda: globals().update(comes_later=3.0)


@way
def function_of_python_hidden_by_a_global():
    return lambda x: x * max(0.5, 0.25), lambda: globals().update(max=lambda *_: 3.0)


@way
def function_of_torch_exchanged():
    return lambda x: nn.functional.relu(x), lambda: setattr(nn.functional, "relu", nn.functional.gelu)


@way
def array_of_numpy():
    array = np.ones(3, dtype=np.float32)
    return lambda x: x * torch.from_numpy(array).to(x.device), lambda: array.fill(3.0)


@way
def array_of_numpy_copied():
    array = np.ones(3, dtype=np.float32)
    return lambda x: x * torch.tensor(array, device=x.device), lambda: array.fill(3.0)


@way
def field_of_a_format():
    one = types.SimpleNamespace(inner=types.SimpleNamespace(scale=0.5))
    return lambda x: x * float(f"{one.inner.scale}"), lambda: setattr(one.inner, "scale", 3.0)


@way
def named_field_of_a_format():
    one = type("Kind", (), {})()
    one.scale = 0.5
    text = "{one.scale}"  # which is no literal
    return lambda x: x * float(text.format(one=one)), lambda: setattr(one, "scale", 3.0)


@way
def field_of_a_format_of_a_map():
    one = type("Kind", (), {})()
    one.items = [0.5]
    return lambda x: x * float("{one.items[0]}".format_map({"one": one})), lambda: one.items.__setitem__(0, 3.0)


@way
def byte_of_a_view_of_memory():
    held = bytearray([1])
    view = memoryview(held)
    return lambda x: x * view[0], lambda: held.__setitem__(0, 3)


@way
def view_of_memory_taken_apart():
    held = array.array("d", [0.5])
    view = memoryview(held)
    return lambda x: x * view.tolist()[0], lambda: held.__setitem__(0, 3.0)


@way
def method_of_an_array_by_way_of_a_variable():
    held = array.array("d", [0.5])
    read = held.tolist
    return lambda x: x * read()[0], lambda: held.__setitem__(0, 3.0)


@way
def special_method_in_c_by_way_of_a_variable():
    held = [1.0]
    count = held.__len__
    return lambda x: x * count(), lambda: held.append(1.0)


@way
def view_of_an_array_of_numpy():
    held = np.array([[0.5]])
    return lambda x: x * float(held.T[0, 0]), lambda: held.__setitem__((0, 0), 3.0)


@way
def mapped_memory():
    held = mmap.mmap(-1, 8)
    held[0] = 1
    return lambda x: x * held[0], lambda: held.__setitem__(0, 3)


@way
def number_of_ctypes():
    number = ctypes.c_double(0.5)
    return lambda x: x * number.value, lambda: setattr(number, "value", 3.0)


@way
def field_of_ctypes():
    kind = type("Fields", (ctypes.Structure,), {"_fields_": [("scale", ctypes.c_double)]})
    fields = kind(0.5)
    return lambda x: x * fields.scale, lambda: setattr(fields, "scale", 3.0)


@way
def number_of_several_processes():
    number = multiprocessing.Value("d", 0.5)
    return lambda x: x * number.value, lambda: setattr(number, "value", 3.0)


@way
def numbers_of_several_processes():
    numbers = multiprocessing.Array("d", [0.5])
    return lambda x: x * numbers[0], lambda: numbers.__setitem__(0, 3.0)


@way
def class_registered_with_an_abstract_one():
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def act(self):
            pass

    class Below(Abstract):
        pass

    Kind = type("Kind", (), {})
    one = Kind()
    return lambda x: x * (3.0 if isinstance(one, Abstract) else 0.5), lambda: Below.register(Kind)


@way
def lock():
    one = threading.Lock()
    return lambda x: x * (3.0 if one.locked() else 0.5), lambda: one.acquire(blocking=False)


@way
def class_registered_with_one_in_a_union():
    Kind, Meta = type("Kind", (), {}), type("Meta", (abc.ABCMeta,), {})
    Abstract, one = Meta("Abstract", (), {}), Kind()
    return lambda x: x * (3.0 if isinstance(one, int | Abstract) else 0.5), lambda: Abstract.register(Kind)


@way
def class_registered_with_one_of_a_library():
    one = type("Kind", (), {})()
    return lambda x: x * (3.0 if isinstance(one, (str, (numbers.Number,))) else 0.5), lambda: numbers.Real.register(
        type(one)
    )


@way
def class_registered_with_one_in_a_pattern():
    Abstract, one = abc.ABCMeta("Abstract", (), {}), type("Kind", (), {})()

    def function(x):
        match one:
            case Abstract():
                return x * 3.0
        return x * 0.5

    return function, lambda: Abstract.register(type(one))


@way
def lock_by_way_of_a_variable():
    one = threading.Lock()
    ask = one.locked
    return lambda x: x * (3.0 if ask() else 0.5), lambda: one.acquire(blocking=False)


@way
def lock_that_is_tried():
    one = threading.Lock()

    def function(x):
        if one.acquire(blocking=False):
            one.release()
            return x * 0.5
        return x * 3.0

    return function, lambda: one.acquire(blocking=False)


@way
def lock_of_one_thread_that_is_tried():
    one = threading.RLock()

    def function(x):
        if one.acquire(blocking=False):
            one.release()
            return x * 0.5
        return x * 3.0

    return function, lambda: ThreadPoolExecutor(1).submit(one.acquire, False).result()


@way
def event_of_several_processes():
    one = multiprocessing.Event()
    return lambda x: x * (3.0 if one.is_set() else 0.5), one.set


@way
def semaphore_of_several_processes():
    one = multiprocessing.Semaphore(2)
    return lambda x: x * (3.0 if one.get_value() == 1 else 0.5), one.acquire


@way
def lock_of_several_processes_that_is_tried():
    one = multiprocessing.RLock()

    def function(x):
        if one.acquire(False):
            one.release()
            return x * 0.5
        return x * 3.0

    return function, lambda: ThreadPoolExecutor(1).submit(one.acquire, False).result()


@way
def field_of_a_format_with_keywords_in_a_dict():
    given = {"one": types.SimpleNamespace(scale=0.5)}
    return lambda x: x * float("{one.scale}".format(**given)), lambda: setattr(given["one"], "scale", 3.0)


@way
def field_of_a_format_by_way_of_a_variable():
    one = type("Kind", (), {})()
    one.scale, read = 0.5, "{0.scale}".format
    return lambda x: x * float(read(one)), lambda: setattr(one, "scale", 3.0)


@way
def number_that_a_pointer_of_ctypes_leads_to():
    number = ctypes.c_double(0.5)
    pointer = ctypes.pointer(number)
    return lambda x: x * pointer[0], lambda: setattr(number, "value", 3.0)


@way
def what_a_pointer_of_ctypes_leads_to():
    number = ctypes.c_double(0.5)
    pointer = ctypes.pointer(number)
    return lambda x: x * pointer.contents.value, lambda: setattr(number, "value", 3.0)


@way
def what_a_pointer_of_ctypes_leads_to_by_now():
    pointer = ctypes.pointer(ctypes.c_double(0.5))
    return lambda x: x * pointer.contents.value, lambda: setattr(pointer, "contents", ctypes.c_double(3.0))


@way
def field_that_a_pointer_of_ctypes_leads_to():
    kind = type("Fields", (ctypes.Structure,), {"_fields_": [("other", ctypes.c_int), ("scale", ctypes.c_double)]})
    fields = kind(1, 0.5)
    pointer = ctypes.pointer(fields)
    return lambda x: x * pointer.contents.scale, lambda: setattr(fields, "scale", 3.0)


@way
def field_in_a_field_of_ctypes():
    inner = type("Inner", (ctypes.Structure,), {"_fields_": [("scale", ctypes.c_double)]})
    outer = type("Outer", (ctypes.Structure,), {"_fields_": [("inner", inner)]})
    fields = outer(inner(0.5))
    return lambda x: x * fields.inner.scale, lambda: setattr(fields.inner, "scale", 3.0)


@way
def field_of_an_item_that_a_pointer_of_ctypes_leads_to():
    kind = type("Fields", (ctypes.Structure,), {"_fields_": [("scale", ctypes.c_double)]})
    fields = (kind * 2)(kind(1), kind(0.5))
    pointer = ctypes.cast(fields, ctypes.POINTER(kind))
    return lambda x: x * pointer[0].scale * pointer[1].scale, lambda: setattr(fields[1], "scale", 3.0)


@way
def view_by_numpy_of_mapped_memory():
    held = mmap.mmap(-1, 8)
    array = np.frombuffer(held, np.uint8)
    return lambda x: x * int(array[0]), lambda: held.__setitem__(0, 3)


@way
def view_by_numpy_of_memory_of_several_processes():
    numbers = multiprocessing.Array("d", [0.5])
    array = np.frombuffer(numbers.get_obj())
    return lambda x: x * float(array[0]), lambda: numbers.__setitem__(0, 3.0)


@way
def part_of_the_numbers_of_several_processes():
    numbers = multiprocessing.Array("d", [0.5, 1.0])
    return lambda x: x * sum(numbers[:]), lambda: numbers.__setitem__(1, 3.0)


@way
def part_of_a_view_of_memory():
    held = bytearray([1, 2, 3, 4])
    view = memoryview(held)[::2]
    return lambda x: x * sum(view), lambda: held.__setitem__(2, 5)


@way
def length_of_bytes():
    held = bytearray(1)
    return lambda x: x * len(held), lambda: held.append(1)


@way
def memory_that_is_released():
    held = [memoryview(bytearray(b"abc"))]

    def function(x):
        try:
            return x * held[0][0]
        except ValueError:
            return x * 7

    return function, lambda: held[0].release()


@way
def memory_that_is_released_as_a_whole():
    held = [memoryview(bytearray(b"abc"))]

    def function(x):
        try:
            return x * held[0].tolist()[0]
        except ValueError:
            return x * 7

    return function, lambda: held[0].release()


@way
def mapped_memory_that_is_closed():
    held = mmap.mmap(-1, 8)

    def function(x):
        try:
            return x * (held[0] + 1)
        except ValueError:
            return x * 7

    return function, held.close


@way
def equal_list_beside_another_change():
    one = types.SimpleNamespace(values=[1.0, 2.0], flag=1.0)
    first = one.values

    def change():
        if one.values is first:
            one.values, one.flag = [1.0, 2.0], 5.0
        else:
            one.values, one.flag = first, 1.0
            first[1] = 3.0

    return lambda x: x * one.values[1] * one.flag, change


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(nn.functional, "relu", nn.functional.relu)
    yield
    globals().pop("comes_later", None)
    globals().pop("max", None)


@way
def key_that_is_there():
    held = {}
    return lambda x: x * (3.0 if "scale" in held else 0.5), lambda: held.update(scale=1)


@way
def key_that_is_not_there():
    held = {"scale": 1}
    return lambda x: x * (3.0 if "scale" not in held else 0.5), lambda: held.pop("scale", None)


@way
def one_of_several_keys():
    held = {"a": 0.5}
    return lambda x: x * sum(held[key] for key in "abc" if key in held), lambda: held.update(b=2.5)


@way
def key_of_a_class():
    Kind = type("Kind", (), {})
    return lambda x: x * (3.0 if "scale" in vars(Kind) else 0.5), lambda: setattr(Kind, "scale", 1)


@way
def key_that_is_made_as_the_code_runs():
    held = {}
    return lambda x: x * (3.0 if "sc" + str(x.dim()) in held else 0.5), lambda: held.update(sc1=1)


@way
def key_asked_of_a_dict_with_a_way_of_its_own():
    class Folded(dict):
        def __contains__(self, key):
            return any(one.lower() == key for one in self.keys())

        def get(self, key, default):
            return next((value for one, value in self.items() if one.lower() == key), default)

    held = Folded()
    return lambda x: x * (held.get("scale", 1.0) if "scale" in held else 0.5), lambda: held.update(SCALE=3.0)


@way
def get_of_a_dict():
    held = collections.OrderedDict()
    return lambda x: x * held.get("scale", 0.5), lambda: held.update(scale=3.0)


@way
def get_with_its_arguments_in_a_tuple():
    held, given = {}, ("scale", 0.5)
    return lambda x: x * held.get(*given), lambda: held.update(scale=3.0)


@way
def get_of_another_kind_of_object():
    class Settings:
        def __init__(self):
            self.scale = 0.5

        def get(self, name):
            return getattr(self, name)

    settings = Settings()
    return lambda x: x * settings.get("scale"), lambda: setattr(settings, "scale", 3.0)


@way
def member_of_a_set():
    held = set()
    return lambda x: x * (3.0 if "scale" in held else 0.5), lambda: held.add("scale")


@way
def member_of_a_list():
    held = [0, 1]
    return lambda x: x * (3.0 if 1 in held else 0.5), held.clear


@way
def arguments_of_a_partial():
    plain = {"scale": 0.5}
    return functools.partial(lambda d, x: x * d["scale"], plain), lambda: plain.update(scale=3.0)


@way
def keywords_of_a_partial_in_a_partial():
    plain = {"scale": 0.5}
    inner = functools.partial(lambda x, d: x * d["scale"], d=plain)
    return functools.partial(lambda f, x: f(x), inner), lambda: plain.update(scale=3.0)


@way
def method_of_a_plain_dict():
    plain = {"scale": 0.5}
    return (lambda get: lambda x: x * get("scale"))(plain.get), lambda: plain.update(scale=3.0)


@way
def view_of_a_plain_dict():
    plain = {"scale": 0.5}
    return (lambda view: lambda x: x * sum(view))(plain.values()), lambda: plain.update(scale=3.0)


@way
def method_of_a_plain_dict_in_a_partial():
    plain = {"scale": 0.5}
    return (lambda get: lambda x: x * get())(functools.partial(plain.get, "scale")), lambda: plain.update(scale=3.0)


@way
def method_of_a_plain_dict_in_a_class():
    plain = {"scale": 0.5}
    Kind = type("Kind", (), {"get": staticmethod(plain.get)})
    return lambda x: x * Kind.get("scale"), lambda: plain.update(scale=3.0)


@way
def dict_in_a_cache_by_way_of_a_variable():
    plain = {"scale": 0.5}
    cached = functools.cache(lambda: plain)

    def function(x):
        found = cached()
        return x * found["scale"]

    return function, lambda: plain.update(scale=3.0)


@way
def dict_in_a_cache():
    plain = {"scale": 0.5}
    cached = functools.lru_cache(lambda: plain)
    return lambda x: x * cached()["scale"], lambda: plain.update(scale=3.0)


@pytest.mark.parametrize("exchanged", [False, True], ids=["in place", "exchanged"])
def test_a_warning_that_has_become_an_error_is_noticed(exchanged, device):
    def function(x):
        try:
            warnings.warn("half", stacklevel=1)
        except UserWarning:
            return x * 3.0
        return x * 0.5

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call, x = CUDAGraphModule(function, config()), torch.ones(2, device=device)
        for _ in range(6):
            assert torch.equal(call(x), x * 0.5)
        assert call.stats.replays
        with warnings.catch_warnings() if exchanged else contextlib.nullcontext():
            warnings.simplefilter("error")
            assert torch.equal(call(x), x * 3.0)
        if exchanged:
            assert torch.equal(call(x), x * 0.5)


def test_of_a_mapped_file_that_is_cut_off_nothing_is_read_but_what_the_code_reads(device, tmp_path):
    path, page = tmp_path / "mapped", mmap.PAGESIZE
    path.write_bytes(b"\1" * 16 * page)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        call, x = CUDAGraphModule(lambda x: x * mapped[0], config()), torch.ones(2, device=device)
        for _ in range(5):
            assert torch.equal(call(x), x)
        os.ftruncate(file.fileno(), page)
        assert torch.equal(call(x), x) and call.stats.captures == 1
        mapped[0] = 3
        assert torch.equal(call(x), x * 3)


CUT_OFF = """
import ctypes, mmap, os, tempfile
import numpy as np
import torch
from graphmod import CUDAGraphModule

page = mmap.PAGESIZE
for view in (np.frombuffer, lambda held, kind: (ctypes.c_uint8 * len(held)).from_buffer(held)):
    for offset in (0, 8 * page):
        with tempfile.TemporaryFile() as file:
            file.write(bytes([1]) * 16 * page)
            file.flush()
            shown = view(mmap.mmap(file.fileno(), 8 * page, offset=offset), np.uint8)
            call, x, reads = CUDAGraphModule(lambda x: x * sum(shown[:2]) if any(reads) else x), torch.ones(2), [True]
            for step in range(12):
                if step == 6:
                    shown[1] = 4
                if step == 9:
                    os.ftruncate(file.fileno(), offset)
                    reads[0] = False
                assert call(x).tolist() == [2.0 if step < 6 else 5.0 if step < 9 else 1.0] * 2, step
            assert call.stats.replays, call.last_failure
"""


def test_views_of_a_mapped_file_that_is_cut_off_are_not_looked_at():
    done = subprocess.run([sys.executable, "-c", CUT_OFF], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_mapped_memory_that_is_read_as_a_whole_is_refused(device):
    with mmap.mmap(-1, 8) as mapped:
        call, x = CUDAGraphModule(lambda x: x * mapped[:2][0] + 1, config()), torch.ones(2, device=device)
        for scale in range(6):
            mapped[0] = scale
            assert torch.equal(call(x), x * scale + 1)
        assert "only single items" in str(call.last_failure)


BESIDE = []
READS_ONLY = {
    "length": lambda held, view, x: x * len(held),
    "closed": lambda held, view, x: x * (not held.closed),
    "item": lambda held, view, x: x * (1 + held[0]),
    "form": lambda held, view, x: x * (view.readonly + view.contiguous + view.nbytes + (view.obj is held)),
    "beside": lambda held, view, x: x * sum(one for one in BESIDE if type(one) is int),
}


@pytest.mark.parametrize("name", READS_ONLY)
def test_large_memory_of_which_little_is_read_keeps_nothing_eager(name, monkeypatch, device):
    with mmap.mmap(-1, 2**27) as held, memoryview(held) as view:
        monkeypatch.setitem(globals(), "BESIDE", [held, view, 1])
        call = CUDAGraphModule(functools.partial(READS_ONLY[name], held, view), config())
        for _ in range(5):
            call(torch.ones(2, device=device))
        assert call.stats.replays, call.last_failure


def test_memory_that_is_compared_may_grow_in_another_thread(device):
    held = bytearray(2**21)
    call, x, over = CUDAGraphModule(lambda x: x * (1 + held[:1][0]), config()), torch.ones(2, device=device), []

    def grow():
        while not over:
            held.append(0)
            held.pop()
        return len(held)

    with ThreadPoolExecutor(1) as pool:
        grown = pool.submit(grow)
        for _ in range(20):
            assert torch.equal(call(x), x)
        over.append(True)
        assert grown.result() == 2**21


def test_methods_of_containers_that_code_comes_across_do_not_count(device):
    one, held = queue.SimpleQueue(), bytearray(1)
    settings = {"put": one.put, "append": held.append, "scale": 2}
    call = CUDAGraphModule(lambda x: x * sum(v for v in settings.values() if type(v) is int), config())
    for index in range(6):
        one.put(index)
        held.append(1)
        call(torch.ones(2, device=device))
    assert (call.stats.captures, call.stats.replays) == (1, 4)


@pytest.mark.parametrize("elements", [1, 3])
def test_a_method_that_is_held_asks_nothing_of_its_tensor(elements, device):
    def run(x):
        add = x.add
        return add(x)

    wrapper, x = CUDAGraphModule(run), torch.ones(elements, device=device)
    for _ in range(6):
        assert torch.equal(wrapper(x), x + x)
    assert wrapper.stats.replays


def test_a_lock_that_the_code_itself_holds_is_no_change(device):
    lock = threading.Lock()

    def function(x):
        with lock:
            assert lock.locked()
            return x * 2

    call = CUDAGraphModule(function, config())
    for _ in range(6):
        call(torch.ones(2, device=device))
    assert call.stats.replays, call.last_failure


def test_a_lock_that_another_thread_took_since_the_call_gave_it_back_counts(device):
    """Pipes tell the other thread, since an event would be a change."""
    one, hold = threading.Lock(), [True]
    (asked, ask), (done, answer) = os.pipe(), os.pipe()

    def take():
        while os.read(asked, 1) == b"?":
            if hold[0]:
                one.acquire(blocking=False)
            os.write(answer, b"!")

    def function(x):
        with contextlib.suppress(ValueError), one:
            raise ValueError
        os.write(ask, b"?")
        os.read(done, 1)
        return x * (3.0 if one.locked() else 0.5)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    call, x = CUDAGraphModule(function, config()), torch.ones(2, device=device)
    for step in range(10):
        if step == 6:
            hold[0] = False
        for run in (function, call):
            assert torch.equal(run(x), x * (3.0 if hold[0] else 0.5)), step
            if one.locked():
                one.release()
    os.write(ask, b".")
    thread.join()


KINDS = (threading.Lock, threading.RLock, multiprocessing.Lock, multiprocessing.RLock, multiprocessing.Semaphore)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["takes", "gives back"])
def test_a_lock_that_a_call_takes_for_others_is_refused(way, kind, device):
    one = kind()

    def function(x):
        one.acquire() if way == "takes" else one.release()
        return x * 2

    call, x = CUDAGraphModule(function, config()), torch.ones(2, device=device)
    for _ in range(6):
        if way == "gives back":
            assert one.acquire(timeout=5)
        assert torch.equal(call(x), x * 2)
        if way == "takes":
            one.release()
    assert "changes the state of a lock from" in call.last_failure and "take it and release it" in call.last_failure


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_a_call_takes_and_gives_back_is_no_change(kind, device):
    one = kind()

    def function(x):
        with one:
            x = x * 2
        one.acquire()
        one.release()
        with contextlib.suppress(ValueError), one:
            raise ValueError
        return x

    call, x = CUDAGraphModule(function, config()), torch.ones(2, device=device)
    for _ in range(6):
        assert torch.equal(call(x), x * 2)
    assert call.stats.replays, call.last_failure


REMEDIES = {
    "register classes before the call": lambda held: held["abstract"].register(type(held["one"])),
    "do that after the call": lambda held: held["bytes"].append(len(held["bytes"])),
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedy_fits_what_the_call_changes(remedy, device):
    Abstract = abc.ABCMeta("Abstract", (), {})
    held = {"abstract": Abstract, "bytes": bytearray(1)}

    def function(x):
        x = x * (1 + isinstance(held["one"], Abstract))
        REMEDIES[remedy](held)
        return x

    call = CUDAGraphModule(function, config(eager_parts=False))
    for _ in range(6):
        held["one"] = type("Kind", (), {})()
        call(torch.ones(2, device=device))
    assert remedy in str(call.last_failure)


def test_classes_registered_elsewhere_do_not_count(device):
    Abstract = abc.ABCMeta("Abstract", (), {})
    call = CUDAGraphModule(lambda x: x * (1 + isinstance(x, Abstract)), config())
    for _ in range(8):
        Abstract.register(type("Kind", (), {}))
        call(torch.ones(2, device=device))
    assert (call.stats.captures, call.stats.replays) == (1, 6)


def test_a_class_asked_with_too_few_arguments_raises_as_in_eager(device):
    def function(x):
        try:
            return x * isinstance(3)
        except TypeError:
            return x * 2

    call, x = CUDAGraphModule(function, config()), torch.ones(2, device=device)
    for _ in range(6):
        assert torch.equal(call(x), x * 2)
    assert call.stats.replays, call.last_failure


@pytest.mark.parametrize("name", WAYS)
def test_a_change_is_noticed_whichever_way_it_is_read(name, device):
    function, change = WAYS[name]()
    graphed = CUDAGraphModule(function, config())
    for step in range(18):
        if step in (8, 13):
            change()
        x = torch.linspace(-1, 2, 3, device=device) + step
        assert torch.equal(graphed(x), function(x)), step
    assert graphed.stats.replays or device.type == "cuda"  # which takes no array of numpy


REFUSED = []


def refused(make):
    """Registers what makes a function of x that reads what cannot be compared, and what changes that."""
    REFUSED.append(make)
    return make


@refused
def what_a_pointer_to_a_pointer_of_ctypes_leads_to():
    number = ctypes.c_double(0.5)
    pointer = ctypes.pointer(ctypes.pointer(number))
    return lambda x: x * pointer.contents.contents.value, lambda: setattr(number, "value", 3.0)


@refused
def item_of_a_pointer_in_a_field_of_ctypes():
    kind = type("Fields", (ctypes.Structure,), {"_fields_": [("at", ctypes.POINTER(ctypes.c_double))]})
    number = ctypes.c_double(0.5)
    fields = kind(ctypes.pointer(number))
    return lambda x: x * fields.at[0], lambda: setattr(number, "value", 3.0)


@refused
def part_of_what_a_pointer_of_ctypes_leads_to():
    numbers = (ctypes.c_double * 2)(0.5, 1.0)
    pointer = ctypes.cast(numbers, ctypes.POINTER(ctypes.c_double))
    return lambda x: x * sum(pointer[:2]), lambda: numbers.__setitem__(1, 3.0)


@refused
def string_at_an_address():
    held = ctypes.create_string_buffer(b"a")
    return lambda x: x * len(ctypes.string_at(ctypes.addressof(held))), lambda: setattr(held, "value", b"")


@refused
def number_at_an_address():
    number = ctypes.c_double(0.5)
    address = ctypes.addressof(number)
    return lambda x: x * ctypes.c_double.from_address(address).value, lambda: setattr(number, "value", 3.0)


@pytest.mark.parametrize("make", REFUSED)
def test_what_cannot_be_found_again_is_refused(make, device):
    function, change = make()
    graphed, x = CUDAGraphModule(function, config()), torch.ones(2, device=device)
    for step in range(8):
        if step == 5:
            change()
        assert torch.equal(graphed(x), function(x)), step
    assert "cannot be looked into without harm" in str(graphed.last_failure)


HELD = {"a": 1.0}


@pytest.mark.parametrize(
    "function",
    [lambda x: x * ("scale" in HELD), lambda x: x * HELD.get("scale", 0.5), lambda x: x * HELD["a"]],
    ids=["in", "get", "item"],
)
def test_other_keys_of_a_dict_do_not_count(function, monkeypatch, device):
    """As those of `sys.modules`, which each import fills."""
    wrapper = CUDAGraphModule(function, config())
    for index in range(8):
        monkeypatch.setitem(HELD, f"other {index}", index)
        wrapper(torch.ones(2, device=device))
    assert (wrapper.stats.captures, wrapper.stats.replays) == (1, 6)


def test_looking_puts_nothing_into_a_dict_and_runs_no_code_of_containers(device):
    ran = []

    class Counting(list):
        def __iter__(self):
            ran.append("iter")
            return super().__iter__()

    class Telling(dict):
        def keys(self):
            ran.append("keys")
            return super().keys()

        def values(self):
            ran.append("values")
            return super().values()

    found, counted = collections.defaultdict(dict), collections.Counter("aab")
    several, named = Counting([0.5]), Telling(scale=2.0)

    def function(x):
        return x * found.get("scale", 1.0) * several[0] * named["scale"] * (counted["a"] + counted["z"])

    graphed = CUDAGraphModule(function, config())
    x = torch.ones(3, device=device)
    for _ in range(8):
        assert torch.equal(graphed(x), torch.full_like(x, 2.0))
    assert not found and not ran and dict(counted) == {"a": 2, "b": 1}
    assert graphed.stats.replays > 2


def test_an_interrupt_leaves_tracing_as_it_was():
    told = []

    def interrupt(*_):
        raise KeyboardInterrupt

    def follow(*_):
        told.append(1)

    def tells():
        told.clear()
        sys.settrace(follow)
        (lambda: None)()
        sys.settrace(None)
        return bool(told)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        end, count = time.monotonic() + 1.0, 0
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + count % 23))
                for _ in range(1_000):
                    untraced(lambda: traced(int, (), {}))
                time.sleep(0)  # Python 3.11 may overlook a signal until it takes its lock again
            except KeyboardInterrupt:
                count += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert count and tells()


def test_a_call_that_nobody_can_watch_is_refused(device):
    kept = types.SimpleNamespace(scale=2.0)
    graphed = CUDAGraphModule(lambda x: x * kept.scale, config())
    x = torch.ones(3, device=device)
    for scale in (2.0, 5.0):
        kept.scale = scale
        assert [untraced(graphed, x)[0].item() for _ in range(6)] == [scale] * 6
    assert graphed.stats.replays == 0 and "trace functions are suspended" in graphed.last_failure
