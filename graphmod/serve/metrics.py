"""What Prometheus is told: counters and times of requests, and the engine's own counters, read when it asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_LONG = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class _Engine:
    """The counters of an engine, as a collector.

    Attributes:
        counters: as `Host` tells them; None while there is no engine.
    """

    counters: dict[str, float] | None = None

    def collect(self) -> Iterator[Metric]:
        if (found := self.counters) is None:
            return
        tokens = CounterMetricFamily("graphmod_tokens", "Tokens, by kind", labels=["kind"])
        tokens.add_metric(["prompt"], found["prompt_tokens"])
        tokens.add_metric(["generated"], found["tokens"])
        yield tokens
        for name, counter, words in (
            ("graphmod_replays", "replays", "Decode steps that were replays of a graph"),
            ("graphmod_eager_steps", "eager_steps", "Decode steps without a graph"),
            ("graphmod_row_steps", "row_steps", "Rows of batches times decode steps"),
            ("graphmod_padding_row_steps", "padding_row_steps", "Those of them that made no token"),
        ):
            yield CounterMetricFamily(name, words, value=found[counter])
        for counter, words in (
            ("waiting", "Samples that wait for a row"),
            ("running", "Samples in the batch"),
            ("blocks_used", "Blocks of the key-value cache in use"),
            ("blocks_total", "Blocks of the key-value cache"),
        ):
            yield GaugeMetricFamily(f"graphmod_{counter}", words, value=found[counter])
        yield CounterMetricFamily(
            "graphmod_prefix_tokens", "Tokens of prompts found in the cache", value=found["prefix_tokens"]
        )


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "graphmod_requests", "Requests, by what became of them", ["endpoint", "outcome"], registry=self._registry
        )
        self.first_token = Histogram(
            "graphmod_time_to_first_token_seconds",
            "From a request to its first token",
            buckets=_LONG,
            registry=self._registry,
        )
        self.between_tokens = Histogram(
            "graphmod_time_between_tokens_seconds",
            "Between tokens of one completion",
            buckets=_SHORT,
            registry=self._registry,
        )
        self.request_seconds = Histogram(
            "graphmod_request_seconds",
            "From a request to the end of its answer",
            buckets=_LONG,
            registry=self._registry,
        )
        self._engine = _Engine()
        self._registry.register(self._engine)

    def text(self, counters: dict[str, float] | None) -> bytes:
        """All of them, in the text format of Prometheus.

        Args:
            counters: of the engine; None while there is none.
        """
        self._engine.counters = counters
        return generate_latest(self._registry)
