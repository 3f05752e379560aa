"""Which layer and phase each GPU kernel of a whole-iteration graph belongs to, as ranges in a Chrome trace. Pure
Python on the trace's events; imports nothing.

No Python of the layers runs in a replay, so that nothing in it can be named while it is recorded. But a replay launches
what an eager step launches, in the same order. An eager step in the same trace tells the layer of each of its kernels;
where the two sequences of kernel names are the same, the replay's kernels get the names of the eager ones.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest
from typing import Any, NamedTuple

Event = dict[str, Any]

DIFFERENTIATE, UPDATE = "forward and backward", "optimizer"
FORWARD, BACKWARD = "forward", "backward"
_ENGINE = "autograd::engine::evaluate_function: "
_DEVICE_WORK = {"kernel": None, "gpu_memcpy": "Memcpy", "gpu_memset": "Memset"}
# The kernels that stand in a graph for what copies and sets memory outside (backend/nodes.py).
_STAND_INS = {"BitwiseOrFunctor": "Memcpy", "FillFunctor": "Memset"}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_SHOWN = 60  # characters of a kernel's name, which may have thousands


class Label(NamedTuple):
    """Where a kernel belongs: `forward`, `backward` or `optimizer`, and the layer, or None beside all layers."""

    phase: str
    layer: str | None


class Named(NamedTuple):
    """What `name_replays` found.

    Attributes:
        events: to be added to the trace; empty where the kernels could not be told apart.
        phase_us: microseconds of kernel time in a replay, by phase; empty likewise.
        note: how many kernels got a name, or why none did.
    """

    events: list[Event]
    phase_us: dict[str, float]
    note: str


class _Ranges:
    """Ranges of host time on one thread that lie beside or inside each other."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda e: (e["ts"], -e["dur"]))
        self._starts = [e["ts"] for e in self.events]
        self._outer: list[int | None] = []
        open_: list[int] = []
        for index, event in enumerate(self.events):
            while open_ and _end(self.events[open_[-1]]) <= event["ts"]:
                open_.pop()
            self._outer.append(open_[-1] if open_ else None)
            open_.append(index)

    def around(self, time: float) -> list[Event]:
        """The ranges that hold a point in time, the innermost first."""
        index: int | None = bisect_right(self._starts, time) - 1
        found = []
        while index is not None and index >= 0:
            if time < _end(self.events[index]):
                found.append(self.events[index])
            index = self._outer[index]
        return found


def _end(event: Event) -> float:
    return event["ts"] + event["dur"]


def _within(event: Event, outer: Event) -> bool:
    return outer["ts"] <= event["ts"] < _end(outer)


def _kind(event: Event) -> str:
    # What copies and sets memory is called differently in a graph and outside.
    stands_for = next((kind for part, kind in _STAND_INS.items() if part in event["name"]), None)
    return _DEVICE_WORK[event["cat"]] or stands_for or event["name"]


def _node_layers(operations: list[Event], annotations: _Ranges, engine: _Ranges, layers: set[str]) -> dict[int, str]:
    """The layer in whose forward each autograd node was made, by the node's sequence number. Several operations carry
    the number that is due next; the last of them made the node."""
    found: dict[int, str | None] = {}
    for op in sorted(operations, key=lambda e: e["ts"]):
        number = op.get("args", {}).get("Sequence number")
        if number is not None and not engine.around(op["ts"]):
            found[number] = next((a["name"] for a in annotations.around(op["ts"]) if a["name"] in layers), None)
    return {number: layer for number, layer in found.items() if layer is not None}


def _labels(
    times: Iterable[float], annotations: _Ranges, engine: _Ranges, nodes: dict[int, str], layers: set[str]
) -> Iterator[Label | None]:
    """The label of what is launched at each of these times; None outside of forward, backward and update."""
    of_node: dict[int, str | None] = {}
    before: str | None = None
    for event in engine.events:
        number = event.get("args", {}).get("Sequence number")
        # A node that only adds to `.grad` has no number; it runs right after the node that made the gradient.
        before = of_node[id(event)] = before if number is None else nodes.get(number)
    for time in times:
        names = [annotation["name"] for annotation in annotations.around(time)]
        running = engine.around(time)
        if UPDATE in names:
            yield Label(UPDATE, None)
        elif DIFFERENTIATE not in names:
            yield None
        elif running:
            yield Label(BACKWARD, of_node[id(running[0])])
        else:
            yield Label(FORWARD, next((name for name in names if name in layers), None))


def _eager_kernels(events: list[Event], step: Event, layers: set[str]) -> list[tuple[Event, Label]]:
    """The device's work of one eager iteration in the order in which it was launched, with its labels."""
    inside = [e for e in events if e.get("tid") == step["tid"] and _within(e, step)]
    annotations = _Ranges(e for e in inside if e.get("cat") == "user_annotation")
    operations = [e for e in inside if e.get("cat") == "cpu_op"]
    engine = _Ranges(e for e in operations if e["name"].startswith(_ENGINE))
    nodes = _node_layers(operations, annotations, engine, layers)
    launched = {e["args"].get("correlation"): e["ts"] for e in inside if e.get("cat") in _LAUNCHES}
    work = [e for e in events if e.get("cat") in _DEVICE_WORK and e["args"].get("correlation") in launched]
    work.sort(key=lambda e: (launched[e["args"]["correlation"]], e["ts"]))
    times = [launched[e["args"]["correlation"]] for e in work]
    labels = _labels(times, annotations, engine, nodes, layers)
    return [(kernel, label) for kernel, label in zip(work, labels, strict=True) if label is not None]


def _difference(replayed: list[Event], eager: list[Event]) -> str | None:
    """In what two sequences of kernels differ, in words; None where they do not."""
    for index, (left, right) in enumerate(zip_longest(replayed, eager)):
        ours, theirs = (event and _kind(event) for event in (left, right))
        if ours != theirs:
            shown = [name[:_SHOWN] if name else "nothing" for name in (ours, theirs)]
            return (
                f"a replay has {len(replayed)} kernels and an eager step {len(eager)}; number {index + 1} is "
                f"{shown[0]} in the replay and {shown[1]} in the eager step"
            )
    return None


def _track(kernels: list[Event], labels: list[Label], track: int) -> list[Event]:
    """Ranges over one replay: the phases, and inside them the layers."""
    found: list[Event] = []
    place = {"pid": kernels[0]["pid"], "tid": track}

    def add(name: str, part: list[Event], least: float) -> float:
        # Kernels may overlap their neighbours; ranges of one track must not.
        start = max(part[0]["ts"], least)
        end = max(start, *(_end(kernel) for kernel in part))
        args = {"kernels": len(part), "named by": "the order of kernels in an eager step"}
        times = {"ts": start, "dur": end - start}
        found.append({"ph": "X", "cat": "graph_layers", "name": name, **times, **place, "args": args})
        return end

    pairs = list(zip(kernels, labels, strict=True))
    last = float("-inf")
    for phase, in_phase in groupby(pairs, key=lambda pair: pair[1].phase):
        members = list(in_phase)
        inner = last
        last = add(phase, [kernel for kernel, _ in members], last)
        for layer, in_layer in groupby(members, key=lambda pair: pair[1].layer):
            part = [kernel for kernel, _ in in_layer]
            inner = add(layer, part, inner) if layer is not None else max(inner, *(_end(kernel) for kernel in part))
    return found


def _replayed_kernels(events: list[Event], step: Event) -> list[Event]:
    """The device's work that launches of graphs in a step caused, in order of time."""
    launches = {
        e["args"].get("correlation")
        for e in events
        if e.get("cat") in _LAUNCHES and "GraphLaunch" in e["name"] and _within(e, step)
    }
    work = (e for e in events if e.get("cat") in _DEVICE_WORK and e["args"].get("correlation") in launches)
    return sorted(work, key=lambda e: e["ts"])


def _unnamed(reason: str) -> Named:
    return Named([], {}, f"replayed kernels have no layer names: {reason}")


def name_replays(events: list[Event], run: str, eager: str, layers: Iterable[str]) -> Named:
    """Names the kernels of replayed iterations after those of an eager iteration in the same trace.

    Args:
        events: of a Chrome trace that PyTorch's profiler has written, times in microseconds.
        run: name of the range around each replayed step.
        eager: name of the range around each eager step; inside the last one, ranges called `DIFFERENTIATE` and `UPDATE`
            lie around these parts of an iteration, and ranges with the name of a layer around its forward. Its backward
            runs on the thread of the forward.
        layers: the names of the layers.
    """
    complete = [e for e in events if e.get("ph") == "X"]
    annotated = [e for e in complete if e.get("cat") == "user_annotation"]
    runs, eagers = ([e for e in annotated if e["name"] == name] for name in (run, eager))
    if not any(e.get("cat") == "kernel" for e in complete):
        return _unnamed("the trace has no kernels, since there is no GPU")
    replays = [_replayed_kernels(complete, step) for step in runs]
    if not replays or not all(replays):
        return _unnamed("a recorded step launched no graph")
    if not eagers:
        return _unnamed("the trace has no eager step")
    labelled = _eager_kernels(complete, eagers[-1], set(layers))
    expected, labels = [kernel for kernel, _ in labelled], [label for _, label in labelled]
    for kernels in replays:
        different = _difference(kernels, expected)
        if different is not None:
            return _unnamed(different)
    pid = replays[0][0]["pid"]
    track = max((e["tid"] for e in events if e.get("pid") == pid and isinstance(e.get("tid"), int)), default=0) + 1
    found = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "ts": 0, "args": {"name": "layers of replays"}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": track, "ts": 0, "args": {"sort_index": track}},
    ]
    phases: dict[str, float] = {}
    for kernels in replays:
        found += _track(kernels, labels, track)
        for kernel, label in zip(kernels, labels, strict=True):
            phases[label.phase] = phases.get(label.phase, 0.0) + kernel["dur"] / len(replays)
    in_layers = sum(label.layer is not None for label in labels)
    return Named(found, phases, f"{len(labels)} kernels of a replay named, {in_layers} of them as part of a layer")
