"""One rank of `graphmod check --ranks N`: `python -m graphmod.check.one_rank FOLDER`, and what was given to that.

It is alone: it has process groups of the size that the program asks for, in which collectives do nothing. So ranks that
diverge do not hang, and no GPU is needed. Objects (`broadcast_object_list` and its like), which programs use to agree
on settings, do reach the other ranks.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from graphmod.check.cli import checked_as_given, outcome_of, parser
from graphmod.check.meeting import Meeting, objects_exchanged
from graphmod.errors import ConfigError, GraphmodError
from graphmod.torch_private import register_comm_hook
from graphmod.trace.dispatch import current, hidden
from graphmod.trace.hazards import Reason
from graphmod.trace.lines import lines

_EXCHANGED = Reason("exchanges Python objects, which a replay would not do", "do it before or after the captured call")
_HOMES = (distributed, distributed_c10d, device_mesh)


def pretend(store: Any, meeting: Meeting) -> None:
    """Lets this process be one of several ranks, which share `store`, of a program that is imported after this, for
    good."""
    from graphmod.torch_private import fake_process_group  # noqa: F401 - importing it registers the backend

    rank, ranks = meeting.rank, meeting.ranks
    initialize, new_group = distributed_c10d.init_process_group, distributed_c10d.new_group

    @functools.wraps(initialize)
    def init_process_group(*args: Any, **settings: Any) -> None:
        asked = inspect.signature(initialize).bind(*args, **settings).arguments.get("world_size", -1)
        if asked not in (-1, ranks):
            raise ConfigError(f"the program makes a group of {asked} ranks; check it with --ranks {asked}")
        initialize("fake", rank=rank, world_size=ranks, store=store)

    @functools.wraps(new_group)
    def new_group_without_backend(*args: Any, **settings: Any) -> Any:
        asked = inspect.signature(new_group).bind(*args, **settings)
        for name in ("backend", "pg_options", "device_id"):  # of a backend that is not there
            asked.arguments.pop(name, None)
        return new_group(*asked.args, **asked.kwargs)

    _replace("init_process_group", init_process_group)
    _replace("new_group", new_group_without_backend)
    objects = _Objects(meeting)
    for name in ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"):
        _replace(name, getattr(objects, name))
    _average_in_python()


def _replace(name: str, function: Callable) -> None:
    for home in _HOMES:
        if hasattr(home, name):
            setattr(home, name, function)


def _average_in_python() -> None:
    """Lets DistributedDataParallel get the result of each bucket, which it asks for and fake groups do not have."""
    before = DistributedDataParallel._pre_forward
    done: weakref.WeakSet = weakref.WeakSet()

    def average(model: DistributedDataParallel, bucket: distributed.GradBucket) -> torch.futures.Future:
        distributed.all_reduce(bucket.buffer(), group=model.process_group)
        there = torch.futures.Future()
        there.set_result(bucket.buffer())
        return there

    @functools.wraps(before)
    def pre_forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if self.reducer is not None and not self._comm_hooks and self not in done:
            done.add(self)
            register_comm_hook(self.reducer, self, average)
        return before(self, *args, **kwargs)

    DistributedDataParallel._pre_forward = pre_forward


class _Objects:
    """Collectives of Python objects, which go through the store."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def broadcast_object_list(
        self, object_list: list, src: int | None = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        root = _root(group, src, group_src)
        object_list[:] = self._exchange("broadcast_object_list", object_list, group, root)[root]

    def all_gather_object(self, object_list: list, obj: Any, group: Any = None) -> None:
        object_list[:] = self._exchange("all_gather_object", obj, group).values()

    def gather_object(
        self, obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None, group_dst: Any = None
    ) -> None:
        everything = self._exchange("gather_object", obj, group, _root(group, dst, group_dst))
        if object_gather_list is not None:
            object_gather_list[:] = everything.values()

    def scatter_object_list(
        self,
        scatter_object_output_list: list,
        scatter_object_input_list: Any = None,
        src: Any = None,
        group: Any = None,
        group_src: Any = None,
    ) -> None:
        root = _root(group, src, group_src)
        everything = self._exchange("scatter_object_list", scatter_object_input_list, group, root)
        scatter_object_output_list[0] = everything[root][list(everything).index(self._meeting.rank)]

    def _exchange(self, name: str, value: Any, group: Any, root: int | None = None) -> dict[int, Any]:
        """What each rank gives; it waits for all of them."""
        ranks = tuple(distributed.get_process_group_ranks(group))
        recorder = current()
        if recorder is not None:
            self._meeting.note(objects_exchanged(name, ranks, root, lines()))
            recorder.refuse(name, _EXCHANGED)
        with hidden():
            return self._meeting.exchange(value, ranks, ("objects", ranks))


def _root(group: Any, rank: int | None, in_group: int | None) -> int:
    """The rank of the program that gives or gets everything."""
    if in_group is None:
        return rank or 0
    return in_group if group is None else distributed.get_global_rank(group, in_group)


def main(folder: Path, arguments: list[str]) -> int:
    """Leaves its outcome in the folder; returns the exit status."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    given = parser("graphmod check").parse_args(arguments)
    store = distributed.FileStore(str(folder / "store"), ranks)
    meeting = Meeting(store, rank, ranks, given.timeout, waits=False)
    pretend(store, meeting)
    outcome, status = None, 0
    try:
        outcome = checked_as_given(given, meeting)
    except GraphmodError as error:
        outcome, status = str(error), 2
    file = outcome_of(folder, rank)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.replace(file)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
