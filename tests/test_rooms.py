"""The rooms of the house: who may import whom."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

import graphmod

HOUSE = Path(graphmod.__file__).parent
ROOMS = (
    *("errors", "words", "config", "torch_private", "cuda_driver", "trace", "ranks", "guards", "reads", "signature"),
    *("backend", "step", "layers", "wrap", "check", "interrupts", "text", "attention", "fuse", "decode", "train"),
    *("serve", "cli", "__main__"),
)
WITHIN = {
    "decode": (
        *("types", "blocks", "streams", "kernels", "memory", "offload", "cache", "model", "sampling", "structured"),
        *("weights", "adapters", "step", "attention", "prefill", "invariant", "verification", "scheduler", "requests"),
        *("batch", "traffic", "engine", "rollouts"),
    ),
    "train": (
        *("folders", "targets", "settings", "attention", "loss", "model", "experts", "parallel", "draws"),
        *("activations", "fused_loss", "float8", "compile", "optim", "step", "device", "ranks", "data", "batches"),
        *("result", "checkpoint", "metrics", "display", "profile", "compare", "resume", "fitting", "auto", "run"),
    ),
    "cli": (
        *("start", "errors", "app", "settings", "prompts", "decode", "generate", "serve", "launch", "job", "rank"),
        *("train", "main"),
    ),
}


@functools.cache
def modules():
    """Each module -> those that it imports, wherever in it, also for annotations alone."""
    found = {}
    for path in HOUSE.rglob("*.py"):
        parts = path.relative_to(HOUSE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {one.name.partition(".")[2] for one in node.names if one.name.startswith("graphmod.")}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "graphmod":
                place = node.module.partition(".")[2]
                for one in node.names:
                    inside = HOUSE.joinpath(*place.split("."), one.name) if place else HOUSE / one.name
                    is_module = inside.is_dir() or inside.with_suffix(".py").exists()
                    found[name].add(f"{place}.{one.name}".lstrip(".") if is_module else place)
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} imports relatively"
    return found


def test_each_room_is_known():
    assert {name.partition(".")[0] for name in modules()} - {""} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_rooms_before_it(room):
    before = {*ROOMS[: ROOMS.index(room) + 1]}
    for name, imported in modules().items():
        if name.partition(".")[0] == room:
            rooms = {one.partition(".")[0] for one in imported}
            assert rooms <= before, f"{name} imports from {rooms - before}"


def test_a_graph_without_a_backward_outside_needs_nothing_of_layers():
    for name, imported in modules().items():
        if name.partition(".")[0] == "step":
            assert not {one for one in imported if one.partition(".")[0] == "layers"}, f"{name} imports from layers"


OWNERS = {"step/graph.py": "StepGraph", "layers/graph.py": "LayerGraph", "step/entry.py": "Entry"}
NO_OWNERS = (
    "ctx",
    "counters",
)  # an autograd node's context, and counters: other objects with attributes of these names


def written(tree):
    """Each attribute that code assigns, with the name of what it is an attribute of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr


def test_graphs_and_entries_own_their_state():
    own = set()
    for path, name in OWNERS.items():
        owner = next(one for one in ast.parse((HOUSE / path).read_text()).body if getattr(one, "name", "") == name)
        own |= {attribute for holder, attribute in written(owner) if holder == "self"}
        own |= {field.target.id for field in owner.body if isinstance(field, ast.AnnAssign)}
    assert {"recording", "ticket", "needs_grad"} <= own
    for room in ("step", "layers", "wrap"):
        for path in sorted(HOUSE.joinpath(room).glob("*.py")):
            if path.relative_to(HOUSE).as_posix() in OWNERS:
                continue
            others = {(holder, name) for holder, name in written(ast.parse(path.read_text())) if name in own}
            others = {(holder, name) for holder, name in others if holder not in ("self", *NO_OWNERS)}
            assert not others, f"{path.name} assigns {others}"


@pytest.mark.parametrize(("house", "room"), [(house, room) for house in WITHIN for room in WITHIN[house]])
def test_so_do_the_rooms_within(house, room):
    before = {*WITHIN[house][: WITHIN[house].index(room) + 1]}
    for name, imported in modules().items():
        if name.split(".")[:2] == [house, room]:
            rooms = {one.split(".")[1] for one in imported if one.startswith(f"{house}.")}
            assert rooms <= before, f"{name} imports from {rooms - before}"


ON_TOP = ("fuse", "decode")
DOORS = {"errors", "config", "torch_private", "cuda_driver", "interrupts", "text", "attention"}
DOORS |= {"wrap.extension", "wrap.module", "wrap.layers"}


@pytest.mark.parametrize("room", ON_TOP)
def test_what_stands_on_the_core_imports_its_doors_alone(room):
    for name, imported in modules().items():
        if name.partition(".")[0] == room:
            within = {one for one in imported if one.partition(".")[0] in ON_TOP}
            assert imported - within <= DOORS, f"{name} imports {imported - within - DOORS}"


def test_each_room_within_is_known():
    for house, rooms in WITHIN.items():
        assert {name.split(".")[1] for name in modules() if name.startswith(f"{house}.")} == {*rooms}


def test_no_modules_import_in_a_circle():
    graphlib.TopologicalSorter(modules()).prepare()  # raises CycleError, and says which
