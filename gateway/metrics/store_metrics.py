"""The store's metrics. Only the process that watches the store exports them, because there is one store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from coordinator.redis.checks import CONDITIONS
from coordinator.watch.key_samples import KEY_KINDS
from coordinator.watch.watch_session import Report
from coordinator.watch.watcher import Watcher

_Label = TypeVar("_Label", bound=str)


class StoreMetrics(Collector):
    """Exports nothing while another process watches."""

    def __init__(self, watcher: Watcher, registry: CollectorRegistry) -> None:
        self._watcher = watcher
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return iter(())  # otherwise the registry calls `collect`, before there is a report

    def collect(self) -> Iterator[Metric]:
        report = self._watcher.report
        if report is not None:
            yield from _server(report)
            yield from _keyspace(report)
            yield from _chunks(report)


def _server(report: Report) -> Iterator[Metric]:
    """The figures of INFO."""
    info = report.info
    yield _gauge("used_memory_bytes", "Memory that Redis uses.", info.used_bytes)
    yield _gauge("maxmemory_bytes", "Memory that Redis may use; 0: no limit.", info.maxmemory_bytes)
    yield _counter("evicted_keys", "Keys that Redis evicted to make room.", info.evicted_keys)
    yield _counter("expired_keys", "Keys whose TTL ran out.", info.expired_keys)
    yield _counter("refused_commands", "Commands that Redis refused because its memory was full.", info.refused_writes)
    yield _counter("keyspace_hits", "Reads that found their key, chunks' and coordination's together.", info.hits)
    missed = "Reads that did not find their key, chunks' and coordination's together."
    yield _counter("keyspace_misses", missed, info.misses)
    received = "Bytes that Redis received, most of them chunks that are stored."
    yield _counter("received_bytes", received, info.input_bytes)
    yield _counter("sent_bytes", "Bytes that Redis sent, most of them chunks that are loaded.", info.output_bytes)
    yield _counter("commands", "Commands: get, set and exists are LMCache's for the most part.", info.calls, "command")
    seconds = "Time that Redis took for commands: evalsha is all of coordination's."
    yield _counter("command_seconds", seconds, info.seconds, "command")


def _keyspace(report: Report) -> Iterator[Metric]:
    estimate, holds = report.estimate, report.conditions
    yield _gauge("estimated_bytes", "Memory by kind of key, estimated from samples.", estimate.bytes, "kind")
    yield _gauge("estimated_keys", "Keys by kind, estimated from samples.", estimate.keys, "kind")
    yield _gauge("evictable_bytes", "Memory of keys with a TTL, estimated.", estimate.evictable_bytes)
    evicted = {kind: report.evicted.get(kind, 0) for kind in KEY_KINDS}
    heard = "Evictions that the watcher received events about, by kind of key."
    yield _counter("evictions_heard", heard, evicted, "kind")
    yield _counter("samples", "Keys that random picks found.", report.samples)
    conditions = {name: float(name in holds) for name in CONDITIONS}
    yield _gauge("condition", "1 while an operator should act: see docs/store.md.", conditions, "condition")


def _chunks(report: Report) -> Iterator[Metric]:
    yield _gauge("known_chunks", "Chunks of LMCache's that the watcher knows by name.", report.chunks)
    yield _gauge("largest_chunk_bytes", "The largest chunk found in the last minute.", report.largest_chunk_bytes)
    yield _counter("ttls_given", "Chunks that had no TTL and got one.", report.ttls_given)
    yield _counter("chunks_renewed", "Chunks that were read late in their life and got a new one.", report.renewed)
    yield _gauge("hears_events", "1 while events about writes and evictions arrive.", report.hears)


_Figures = float | Mapping[_Label, float]
"""One figure, or one for each value of the label."""


def _gauge(name: str, text: str, figures: _Figures[_Label], label: str = "") -> Metric:
    return _filled(GaugeMetricFamily(f"kvgate_store_{name}", text, labels=label.split()), figures)


def _counter(name: str, text: str, figures: _Figures[_Label], label: str = "") -> Metric:
    return _filled(CounterMetricFamily(f"kvgate_store_{name}", text, labels=label.split()), figures)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, figures: _Figures[_Label]) -> Metric:
    rows = [([name], figures[name]) for name in figures] if isinstance(figures, Mapping) else [([], figures)]
    for labels, value in rows:
        family.add_metric(labels, value)
    return family
