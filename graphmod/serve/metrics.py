"""What Prometheus is told: counters and times of requests, and the engine's own counters, read when it asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from graphmod.decode.results import DecodeStats

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class _Engine:
    """The counters of an engine, as a collector."""

    def __init__(self, stats: Callable[[], DecodeStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        tokens = CounterMetricFamily("graphmod_tokens", "Tokens, by kind", labels=["kind"])
        tokens.add_metric(["prompt"], stats.prompt_tokens)
        tokens.add_metric(["generated"], stats.tokens)
        yield tokens
        for name, counter, words in (
            ("graphmod_replays", "launches", "Decode steps that were replays of a graph"),
            ("graphmod_eager_steps", "eager_steps", "Decode steps without a graph"),
            ("graphmod_row_steps", "row_steps", "Rows of batches times decode steps"),
            ("graphmod_padding_row_steps", "padding_row_steps", "Those of them that made no token"),
        ):
            yield CounterMetricFamily(name, words, value=stats.total(counter))
        for name, value, words in (
            ("graphmod_waiting", stats.waiting, "Samples that wait for a row"),
            ("graphmod_running", stats.running, "Samples in the batch"),
            ("graphmod_blocks_used", stats.blocks_used, "Blocks of the key-value cache in use"),
            ("graphmod_blocks_total", stats.blocks_total, "Blocks of the key-value cache"),
        ):
            yield GaugeMetricFamily(name, words, value=value)
        yield CounterMetricFamily(
            "graphmod_prefix_tokens", "Tokens of prompts found in the cache", value=stats.prefix_tokens
        )


class Times:
    """A histogram, for one thread: that of `prometheus_client` takes a lock for each single value.

    Args:
        name, words: of the metric.
        limits: of its buckets, in seconds, ascending.
    """

    def __init__(self, name: str, words: str, limits: tuple[float, ...]) -> None:
        self._name, self._words, self._limits = name, words, limits
        self._counts = [0] * (len(limits) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Takes in a value, as often as it came."""
        self._counts[bisect_left(self._limits, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._limits), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._words, buckets=buckets, sum_value=self._sum)


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        stats: the engine's counters; None while there is no engine.
        ready: whether requests are taken.
    """

    def __init__(self, stats: Callable[[], DecodeStats | None]) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "graphmod_requests", "Requests, by what became of them", ["endpoint", "outcome"], registry=self._registry
        )
        self.first_token = Times("graphmod_time_to_first_token_seconds", "From a request to its first token", _LONG)
        self.between_tokens = Times("graphmod_time_between_tokens_seconds", "Between tokens of one completion", _SHORT)
        self.request_seconds = Times("graphmod_request_seconds", "From a request to the end of its answer", _LONG)
        for times in (self.first_token, self.between_tokens, self.request_seconds):
            self._registry.register(times)
        self._registry.register(_Engine(stats))

    def text(self) -> bytes:
        """All of them, in the text format of Prometheus."""
        return generate_latest(self._registry)
