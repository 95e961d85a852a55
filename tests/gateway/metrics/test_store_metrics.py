"""The store's metrics: they follow Prometheus' naming conventions, are complete, and only the watcher exports them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.redis.checks import CONDITIONS
from coordinator.redis.info import read_info
from coordinator.watch.key_samples import Sample, Samples
from coordinator.watch.watch_session import Report
from gateway.metrics.page import page
from gateway.metrics.store_metrics import StoreMetrics

DOCS = Path(__file__).resolve().parents[3] / "docs"
INFO = b"redis_version:7.2.4\r\nused_memory:1000\r\nmaxmemory:4000\r\ncmdstat_get:calls=3,usec=1500000\r\n"


@dataclass
class Watching:
    report: Report | None = None


def report() -> Report:
    samples = Samples()
    samples.add(Sample("chunk", 30, has_ttl=True))
    samples.add(Sample("coordination", 10, has_ttl=False))
    return Report(
        info=read_info(INFO),
        estimate=samples.estimate(200),
        conditions={"writes_refused": "full"},
        chunks=5,
        ttls_given=6,
        renewed=7,
        samples=8,
        evicted={"chunk": 9},
        hears=True,
        largest_chunk_bytes=10,
    )


def exported(watching: Watching) -> dict[str, float]:
    """Every sample, by name and label."""
    registry = CollectorRegistry()
    StoreMetrics(watching, registry)  # type: ignore[arg-type]
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    for family in families:
        assert re.fullmatch(r"kvgate_store_[a-z_]+", family.name)
        assert family.documentation.endswith("."), family.name
        assert family.type in ("counter", "gauge")
    return {" ".join([one.name, *one.labels.values()]): one.value for family in families for one in family.samples}


def test_who_does_not_watch_exports_nothing() -> None:
    assert exported(Watching()) == {}


def test_the_watcher_exports_what_it_found() -> None:
    found = exported(Watching(report()))
    assert found["kvgate_store_used_memory_bytes"] == 1000
    assert found["kvgate_store_command_seconds_total get"] == 1.5
    assert found["kvgate_store_estimated_keys chunk"] == 100
    assert found["kvgate_store_estimated_bytes coordination"] == 1000
    assert found["kvgate_store_evictable_bytes"] == 3000
    assert found["kvgate_store_evictions_heard_total chunk"] == 9
    assert found["kvgate_store_evictions_heard_total coordination"] == 0
    assert found["kvgate_store_chunks_renewed_total"] == 7
    conditions = {name: found[f"kvgate_store_condition {name}"] for name in CONDITIONS}
    assert [name for name, value in conditions.items() if value] == ["writes_refused"]


def test_the_page_lists_every_metric_as_the_code_has_it() -> None:
    assert (DOCS / "metrics.md").read_text() == page(), "python -m gateway.metrics.page > docs/metrics.md"
    assert set(re.findall(r"^\| `(kvgate_store_\w+)`", page(), flags=re.MULTILINE)) >= {
        name.split(" ")[0] for name in exported(Watching(report()))
    }


def test_the_documents_list_every_condition() -> None:
    told = re.findall(r"^\| `(\w+)` \|", (DOCS / "store.md").read_text(), flags=re.MULTILINE)
    assert sorted(told) == sorted(CONDITIONS)
