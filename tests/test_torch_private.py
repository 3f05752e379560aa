"""Private names of torch: `graphmod/torch_private.py` holds all of them, and nobody else reaches for one.

A name is private if it begins with one underscore, or lies in a module that does. A place counts that

- imports one from torch, or has the path of a private module of torch as a string;
- takes one from a module of torch, however it is reached (`torch._C`, `torch.ops.aten._to_copy`);
- asks an object for one (`tensor._version`, `getattr(tensor, "_version")`), unless `torch_private` lists the name in
  `ATTRIBUTES` or `OPTIONAL`, or it is this package's own, or another library's.
"""

import ast
import functools
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import graphmod
from graphmod import torch_private

HOUSE = Path(graphmod.__file__).parent
FILES = sorted(path for path in HOUSE.rglob("*.py") if path != HOUSE / "torch_private.py")
LISTED = {name for names in torch_private.ATTRIBUTES.values() for name in names} | {*torch_private.OPTIONAL}
OF_OTHER_LIBRARIES = {
    *("_replace", "_getframe", "_exit", "_is_owned", "_parse_exception_table", "_slotnames", "_lru_cache_wrapper"),
    *("_inst", "_actions", "_option_string_actions"),  # random, argparse
    *("_get_value", "_is_mine", "_b_base_", "_objects"),  # multiprocessing, ctypes
    *("_rand", "_bit_generator", "_return_value"),  # numpy, hydra
    *("_attn_implementation", "_global_mapping", "_decode", "_active_collector", "_hf_peft_config_loaded"),
    "_apply_gate",  # transformers, of experts
    "_generate_single_turn",  # trl, whose RLOOTrainer has no other place for a sampler
}
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def own_names():
    """The private names that the package itself gives: of functions, and what its classes hold."""
    found = set()
    for path in HOUSE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            elif isinstance(node, ast.ClassDef):
                for one in ast.walk(node):
                    if isinstance(getattr(one, "ctx", None), ast.Store):
                        found.add(getattr(one, "attr", None) or getattr(one, "id", ""))
    return found


@functools.cache
def names_of_torch():
    """The private names of what most code reaches."""
    known = {*dir(torch._C), *dir(torch.Tensor), *dir(nn.Module()), *dir(torch.utils._python_dispatch)}
    optimizers = sys.modules[torch.optim.Optimizer.__module__]
    known.update(*map(dir, (torch.autograd, torch.autograd.graph, optimizers, torch.amp.GradScaler("cpu"))))
    return {*filter(is_private, known)} - {*dir(torch.types)}  # `_size` and the like, which its modules import


def is_known(name):
    return name in LISTED or name in OF_OTHER_LIBRARIES or name.startswith("_graphmod")


def chain(node):
    """The names of `a.b.c`; nothing for what is more than that."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def variables(tree):
    """Those of a file that hold something of torch, by name: imported, or assigned at its top."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({one.asname or "torch": torch for one in node.names if one.name.partition(".")[0] == "torch"})
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            for one in node.names:
                if home.partition(".")[0] == "torch" or home == torch_private.__name__:
                    found[one.asname or one.name] = vars(importlib.import_module(home)).get(one.name)
                elif f"{home}.{one.name}" == torch_private.__name__:
                    found[one.asname or one.name] = torch_private
    for node in tree.body:
        if isinstance(node, ast.Assign) and chain(node.value)[:1] and chain(node.value)[0] in found:
            value = found[chain(node.value)[0]]
            for name in chain(node.value)[1:]:
                value = getattr(value, name, None)
            found.update({one.id: value for one in node.targets if isinstance(one, ast.Name)})
    return found


def of_modules(value, names):
    """Those private names that are looked up in a module on the way from a value along names, and not in an object."""
    for name in names:
        if is_private(name) and isinstance(value, types.ModuleType) and value is not torch_private.forward_ad:
            yield name
        value = getattr(value, name, None)


def places(path):
    """Each place of a file that counts: its line, and what it has."""
    held, inner = variables(tree_of(path)), set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (home + one.name for one in node.names):
                if name.partition(".")[0] == "torch" and any(map(is_private, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and node not in inner:
            names, value = chain(node), node.value
            while isinstance(value, ast.Attribute):
                inner.add(value)
                value = value.value
            asked = [*filter(is_private, names[1:] or [node.attr])]
            if names and names[0] in held:
                unknown = [*of_modules(held[names[0]], names[1:]), *(name for name in asked if not is_known(name))]
            else:
                unknown = [name for name in asked if not is_known(name) and name not in own_names()]
            if unknown:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_module = re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", node.value)
            if is_module or (node.value in names_of_torch() and not is_known(node.value)):
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Call) and chain(node.func)[-1:] and chain(node.func)[-1] in _BY_NAME:
            for name in (one.value for one in node.args if isinstance(one, ast.Constant)):
                if is_private(str(name)) and not is_known(name) and name not in own_names():
                    yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_only_one_file_has_private_names_of_torch(path):
    found = [f"{path.relative_to(HOUSE.parent)}:{line}: {what}" for line, what in sorted(set(places(path)))]
    assert not found, "\n".join(["graphmod/torch_private.py holds or lists private names of torch, and lacks:", *found])


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch._dynamo", True),
        ("from torch._ops import OpOverload", True),
        ("from torch.optim.optimizer import _use_grad_for_differentiable", True),
        ("import torch\ntorch._C", True),
        ("from torch import distributed\ndistributed._nothing()", True),
        ("import torch\n_aten = torch.ops\n_aten._c10d_functional.wait_tensor", True),
        ("'torch._inductor.output_code'", True),
        ("'_is_any_autocast_enabled'", True),
        ("tensor._nobody_has_this", True),
        ("getattr(tensor, '_nobody_has_this', None)", True),
        ("import graphmod.torch_private as private\nprivate.any_autocast()", False),
        ("from graphmod import torch_private\ntorch_private._C", True),
        ("tensor._version", False),
        ("self._context, frame.__class__, one._replace(x=1)", False),
        ("import torch\ntorch.Tensor._make_subclass", False),
        ("'torch._foreach_add_ is what a message may say'", False),
    ],
)
def test_a_place_counts(code, found, tmp_path):
    file = tmp_path / "some.py"
    file.write_text(code)
    assert bool([*places(file)]) == found


OBJECTS = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard as shard
from torch.distributed.tensor import distribute_tensor
from graphmod import torch_private
from graphmod.torch_private import COMPOSABLE, FSDP_STATE, REPLICATE
from graphmod.ranks import data_parallel, fully_shard as sharded
import importlib

distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
mesh = torch.distributed.init_device_mesh("cpu", (1,))
averaged = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
divided = shard(nn.Linear(2, 2), mesh=mesh)
divided(torch.ones(1, 2)).sum().backward()
leaf = torch.ones(1, requires_grad=True)
objects = {
    "Tensor": leaf, "storage": leaf.untyped_storage(), "Generator": torch.Generator(), "node": (leaf * 2).grad_fn,
    "operator": torch.ops.aten.add.Tensor, "ScriptObject": torch.ScriptObject, "Module": nn.Linear(2, 2),
    "ScriptModule": torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), "forward_ad": torch_private.forward_ad,
    "DistributedDataParallel": averaged, "Reducer": averaged.reducer, "ProcessGroup": distributed.group.WORLD,
    "DTensor": distribute_tensor(torch.ones(1), mesh), "DeviceMesh": mesh,
    COMPOSABLE: importlib.import_module(COMPOSABLE), REPLICATE: importlib.import_module(REPLICATE),
    "FSDPState": next(sharded._states()), "FSDPParamGroup": next(sharded.param_groups()),
    "FSDPParam": next(sharded._parameters()),
}
assert objects.keys() == torch_private.ATTRIBUTES.keys(), objects.keys() ^ torch_private.ATTRIBUTES.keys()
lacks = [why for kind, one in objects.items() if (why := torch_private.lacking(kind, one))]
for name in torch_private._LATER:
    assert getattr(torch_private, name) is not None
for name, place in vars(torch_private).items():
    if name.isupper() and isinstance(place, str) and place.startswith("torch."):
        importlib.import_module(place)
kind, method = torch_private.INFERS_SHAPES
assert hasattr(getattr(importlib.import_module(torch_private.SHARDING), kind), method)
frames = importlib.import_module(torch_private.EVAL_FRAME)
assert hasattr(frames, torch_private.BEGINS) and hasattr(frames, torch_private.ENDS)
assert hasattr(torch_private.TorchDispatchMode, "ignore_compile_internals")
assert not any(map(sharded.shared_otherwise, (divided, averaged))) and data_parallel.refused(averaged) is None
torch_private.ATTRIBUTES |= {"FSDPParamGroup": ("_no_release_has_this",), "Reducer": ("_nor_this",)}
print(lacks, sharded.shared_otherwise(divided), data_parallel.refused(averaged), sep="\\n")
"""


def test_this_torch_has_what_is_listed_and_stays_eager_where_another_has_not():
    done = subprocess.run([sys.executable, "-c", OBJECTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lacks, of_sharded, of_averaged = done.stdout.splitlines()[-3:]
    assert lacks == "[]"
    assert of_sharded.endswith(f"FSDPParamGroup of torch {torch.__version__} has no _no_release_has_this")
    assert of_averaged.endswith(f"Reducer of torch {torch.__version__} has no _nor_this")


def test_what_is_imported_later_and_is_not_there_is_named_with_the_version(monkeypatch):
    monkeypatch.setitem(torch_private._LATER, "compile_fx", "torch._inductor.moved.compile_fx")
    with pytest.raises(
        ImportError, match=f"torch._inductor.moved.compile_fx, which torch {re.escape(torch.__version__)}"
    ):
        from graphmod.torch_private import compile_fx  # noqa: F401


def test_what_is_needed_and_is_not_there_is_named_with_the_version():
    remove = "import torch; del torch._C._len_torch_function_stack; import graphmod.torch_private"
    done = subprocess.run([sys.executable, "-c", remove], capture_output=True, text=True, timeout=300)
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("ImportError: graphmod does not know torch") and "_len_torch_function_stack" in said
    assert torch.__version__ in said


def test_an_object_without_what_is_needed_is_told_of():
    assert torch_private.lacking("FSDPParam", object()) == f"FSDPParam of torch {torch.__version__} has no _module_info"
    assert torch_private.lacking("Tensor", torch.ones(1)) is None


def test_a_value_of_a_thread_keeps_its_references():
    value = object()
    before = sys.getrefcount(value)
    for _ in range(3):
        torch_private.put_in_thread("test", value)
        assert torch_private.in_thread("test") is value
    torch_private.put_in_thread("test", None)
    assert sys.getrefcount(value) == before


@pytest.fixture
def allocator():
    """What the settings of the caching allocator are, and what sets them; they are afterwards as before."""
    settings = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if settings is None:
        pytest.skip("before torch 2.12 nobody tells what they are")
    before, change = settings(), torch._C._accelerator_setAllocatorSettings
    yield settings, change
    change("expandable_segments:False")
    change(before)


@pytest.mark.parametrize("before", ["", "max_split_size_mb:64"])
def test_segments_grow_inside_alone(allocator, before):
    settings, change = allocator
    change(before)
    with torch_private.growing_segments():
        assert before in settings() and "expandable_segments:True" in settings()
        with torch_private.growing_segments():
            pass
        assert "expandable_segments:True" in settings()
    assert settings() == before


@pytest.mark.parametrize("before", ["expandable_segments:False", "max_split_size_mb:64,expandable_segments:True"])
def test_segments_are_as_the_user_says(allocator, before):
    settings, change = allocator
    change(before)
    with torch_private.growing_segments():
        assert settings() == before


@pytest.mark.parametrize("before", ["backend:cudaMallocAsync", "max_split_size_mb:64, backend: cudaMallocAsync"])
def test_an_allocator_without_segments_is_left_alone(monkeypatch, before):
    monkeypatch.setattr(torch_private, "_allocator_settings", lambda: before)
    monkeypatch.setattr(torch_private, "_set_allocator_settings", lambda _: pytest.fail("it was changed"))
    with torch_private.growing_segments():
        pass


@pytest.mark.parametrize(("variable", "grows"), [("PYTORCH_ALLOC_CONF", False), ("SOMETHING_ELSE", True)])
def test_where_pytorch_does_not_tell_its_settings_the_environment_does(monkeypatch, variable, grows):
    told = []
    monkeypatch.setattr(torch_private, "_allocator_settings", None)
    monkeypatch.setattr(torch_private, "_set_allocator_settings", told.append)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv(variable, "expandable_segments:False")
    with torch_private.growing_segments():
        assert told == ["expandable_segments:True"] * grows
    assert told == ["expandable_segments:True", "expandable_segments:False", ""][: 3 * grows]
