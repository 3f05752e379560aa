"""The graphs of the decode step: a wrapper for each batch size, context and kind of sampling, one pool, counters."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from graphmod.config import CompileMode, CUDAGraphConfig, Verify
from graphmod.decode.config import EngineConfig
from graphmod.decode.results import BucketStats
from graphmod.decode.step.sampling import TOP
from graphmod.decode.step.step import BatchState, DecodeStep
from graphmod.fuse.compiler import StepCompiler
from graphmod.wrap.extension import Group
from graphmod.wrap.module import CUDAGraphModule

log = logging.getLogger("graphmod")

_LEAST_VISITED = 256  # below it attention costs no time to speak of

Key = tuple[int, int | None, int]  # batch size, visited tokens, kind of sampling


def context_sizes(block_size: int, most: int, stops_at_context: bool) -> list[int | None]:
    """Numbers of visited tokens that have graphs of their own, ascending: doubling, the last one `most`.

    Args:
        block_size: they are multiples of it, or less than one block.
        most: tokens of a block table.
        stops_at_context: then there is one graph for all, which None stands for.
    """
    if stops_at_context:
        return [None]
    size = _LEAST_VISITED if block_size >= _LEAST_VISITED else -(-_LEAST_VISITED // block_size) * block_size
    found = []
    while size < most:
        found.append(size)
        size *= 2
    if block_size > _LEAST_VISITED:  # a multiple of a block from the first that is longer than one
        found = [size if size <= block_size else -(-size // block_size) * block_size for size in found]
    return [*sorted({*(size for size in found if size < most), most})]


def _state(states: list[str]) -> str:
    if "captured" in states:
        return "valid"
    return "disabled" if "disabled" in states else "invalid"


def counters(wrappers: Iterable[CUDAGraphModule], own: BucketStats, released: int) -> BucketStats:
    """The counters of some wrappers together.

    Args:
        own: what they do not count: steps without a wrapper, and rows.
        released: captures whose graphs were freed by a `reset`.
    """
    graphs = [wrapper.stats for wrapper in wrappers]
    captures = sum(graph.captures for graph in graphs)
    return BucketStats(
        state=_state([graph.state for graph in graphs]),
        launches=sum(graph.replays for graph in graphs),
        captures=captures,
        recaptures=max(0, captures - released - sum(graph.captures > 0 for graph in graphs)),
        eager_steps=own.eager_steps + sum(graph.eager_calls for graph in graphs),
        failures=sum(graph.failures for graph in graphs),
        row_steps=own.row_steps,
        padding_row_steps=own.padding_row_steps,
    )


def free_memory(device: torch.device) -> dict[str, Any]:
    """For a bar: the free memory of a GPU."""
    if device.type != "cuda":
        return {}
    return {"free": f"{torch.cuda.mem_get_info(device)[0] / 2**30:.1f} GiB"}


class BucketGraphs:
    """Launches decode steps in the smallest bucket that holds the batch.

    Args:
        step: what is captured.
        state: whose rows it works on.
        config: buckets, warm-up, failures, backend, and whether there are graphs at all.
        contexts: from `context_sizes`.
        compiles: whether the first step of a batch size compiles attention.
    """

    def __init__(
        self,
        step: DecodeStep,
        state: BatchState,
        config: EngineConfig,
        contexts: list[int | None],
        compiles: bool,
    ) -> None:
        self.step, self.state, self.config, self.contexts = step, state, config, contexts
        self.sizes = config.bucket_sizes()
        self.settings = CUDAGraphConfig(
            warmup_steps=config.warmup_steps,
            max_failures=config.max_failures,
            backend=config.backend,
            max_graphs=1,
            verify=Verify.off,  # a token would come late
        )
        # The last warm-up step is recorded: compilers take several times as long under its watch as in one before it.
        self._of_steps = replace(self.settings, warmup_steps=config.warmup_steps + compiles)
        self.group = Group()
        self.wrappers: dict[Key, CUDAGraphModule] = {}
        self._counts = {size: BucketStats() for size in self.sizes}
        self._released = dict.fromkeys(self.sizes, 0)  # captures whose graphs `reset` freed
        self.capturing: int | None = None
        self.compiler: StepCompiler | None = None
        if config.compile is not CompileMode.none and state.device.type == "cuda":
            self.compiler = StepCompiler(config.compile is CompileMode.max, config.compile_in_background)
        elif config.compile is not CompileMode.none:
            log.warning("compile=%s is for a GPU and is ignored on this %s", config.compile.value, state.device.type)

    def bucket(self, rows: int) -> int:
        """The smallest batch size with a graph that holds `rows` rows."""
        return next(size for size in self.sizes if size >= rows)

    def visited(self, context: int) -> int | None:
        """The smallest number of visited tokens that holds `context`."""
        return next(size for size in self.contexts if size is None or size >= context)

    def launch(self, rows: int, context: int, kind: int, steps: int = 1) -> int:
        """Launches steps; returns the bucket they run in. Call it in inference mode, with the model's attention set."""
        size, visited = self.bucket(rows), self.visited(context)
        state = self.state.rows(size, kind >= TOP)
        if not self.config.graphs:
            self._counts[size].eager_steps += steps
            for _ in range(steps):
                self.step(state, visited, kind)
            return size
        key = (size, visited, kind)
        wrapper = self.wrappers.get(key)
        if wrapper is None:
            name = f"decode step of {size} row{'s' if size != 1 else ''}"
            wrapper = self.wrappers[key] = CUDAGraphModule(self.step, self._of_steps, name=name, group=self.group)
        while steps > 0:
            if self.compiler is None:
                wrapper(state, visited, kind)
            else:
                self.compiler.call(wrapper, state, visited, kind)
            steps -= 1 + wrapper.replay(steps - 1)
        return size

    def count(self, size: int, row_steps: int, tokens: int) -> None:
        """Adds the row steps of a chunk and how many of them made a token."""
        self._counts[size].row_steps += row_steps
        self._counts[size].padding_row_steps += row_steps - tokens

    def capture(
        self, sizes: Iterable[int], contexts: Iterable[int | None], kinds: Iterable[int], progress: bool
    ) -> None:
        """Captures ahead of time, largest first, with rows that are all padding: such a step changes nothing."""
        wanted = [
            (size, visited, kind)
            for size in sorted(sizes, reverse=True)
            for visited in sorted(contexts, key=lambda c: c or 0, reverse=True)
            for kind in sorted(kinds, reverse=True)
        ]
        # None: a bar on a terminal only.
        with tqdm(wanted, desc="capturing", unit="graph", disable=None if progress else True) as bar:
            for size, visited, kind in bar:
                self.capturing = size
                try:
                    # Compiled code runs once before it is captured.
                    for _ in range(self._of_steps.warmup_steps + (1 if self.compiler is None else 3)):
                        self.launch(size, visited or 1, kind)
                finally:
                    self.capturing = None
                bar.set_postfix(rows=size, **free_memory(self.state.device), refresh=False)

    def stats(self) -> tuple[dict[int, BucketStats], float, int]:
        """Counters of each bucket, seconds spent capturing, and bytes of the pool."""
        buckets, wrappers = {}, list(self.wrappers.items())  # another thread may add some
        for size in self.sizes:
            graphs = [wrapper for (rows, _, _), wrapper in wrappers if rows == size]
            buckets[size] = counters(graphs, self._counts[size], self._released[size])
            if size == self.capturing:
                buckets[size].state = "capturing"
        every = [wrapper.stats for _, wrapper in wrappers]
        seconds = sum((graph.capture_seconds for graph in every), 0.0)
        return buckets, seconds, max((graph.pool_bytes for graph in every), default=0)

    def reset(self) -> None:
        """Frees the graphs; what was disabled stays so, and what is captured next is no recapture."""
        for (size, _, _), wrapper in self.wrappers.items():
            self._released[size] += wrapper.stats.state == "captured"
            wrapper.reset()
        if self.compiler is not None:
            self.compiler.forget()

    def force_enable(self) -> None:
        """Lets buckets that failures disabled be captured again."""
        for wrapper in self.wrappers.values():
            wrapper.force_enable()
