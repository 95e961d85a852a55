"""docs/metrics.md, made from the metrics: `python -m gateway.metrics.page > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

from coordinator.redis.info import read_info
from coordinator.watch.key_samples import Samples
from coordinator.watch.watch_session import Report
from coordinator.watch.watcher import Watcher
from gateway.metrics.gateway_metrics import Metrics
from gateway.metrics.store_metrics import StoreMetrics

_HEAD = """\
# Metrics

Every gateway exposes these on /metrics, by Prometheus' conventions. [deploy/grafana](../deploy/grafana/README.md) shows
them; [alerts.md](alerts.md) says what each alert means. All gateways show the same of a replica. Only one gateway
exposes a pool's `kvgate_demand_…`: the one that does the pool's maintenance. Only the process that watches Redis
([store.md](store.md)) exposes `kvgate_store_used_memory_bytes` and the metrics below it. To tell models apart:
`… * on (job, instance, replica) group_left (pool) kvgate_replica_info`.
This page is made from the code: `python -m gateway.metrics.page > docs/metrics.md`.

| metric | type | labels | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole document."""
    return _HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    metrics = Metrics()
    report = Report(read_info(b""), Samples().estimate(0), {}, 0, 0, 0, 0, {}, hears=False, largest_chunk_bytes=0)
    StoreMetrics(cast("Watcher", SimpleNamespace(report=report)), metrics.registry)
    for collector in metrics.registry._collector_to_names:  # noqa: SLF001, it has no other list
        for metric in collector.collect():
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            labels = ", ".join(getattr(collector, "_labelnames", getattr(metric, "_labelnames", ())))
            yield f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
