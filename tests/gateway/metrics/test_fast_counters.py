"""Our own counters and histograms, in the form that Prometheus reads."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics.fast_counters import FastCounter, FastHistogram
from gateway.metrics.gateway_metrics import Metrics


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples of a scrape, without the start times that prometheus_client adds."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}


def test_a_scrape_reads_what_it_would_of_prometheus_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bounds, values = (0.1, 1, 10), (0.05, 0.1, 0.5, 1, 2, 100)
    tally, counter = (
        FastCounter("asked", "Text.", ("path",), ours),
        Counter("asked", "Text.", ("path",), registry=theirs),
    )
    spread = FastHistogram("took_seconds", "Text.", ("path",), bounds, ours)
    histogram = Histogram("took_seconds", "Text.", ("path",), buckets=bounds, registry=theirs)
    for index, value in enumerate(values):
        path = f"/{index % 2}"
        tally.inc(path, by=index)
        counter.labels(path).inc(index)
        spread.observe(value, path)
        histogram.labels(path).observe(value)
    assert samples(ours) == samples(theirs)


def test_what_has_no_labels_is_there_from_the_beginning() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    FastCounter("lost", "Text.", (), ours)
    FastHistogram("lag_seconds", "Text.", (), (1, 2), ours)
    Counter("lost", "Text.", registry=theirs)
    Histogram("lag_seconds", "Text.", buckets=(1, 2), registry=theirs)
    assert samples(ours) == samples(theirs)


def test_one_name_is_not_given_twice() -> None:
    registry = CollectorRegistry()
    FastCounter("asked", "Text.", (), registry)
    with pytest.raises(ValueError, match="Duplicated"):
        FastCounter("asked", "Text.", (), registry)


def test_the_counts_of_replicas_that_are_gone_leave() -> None:
    metrics = Metrics()
    metrics.prompt_tokens.inc("r0", by=3)
    metrics.prompt_tokens.inc("gone", by=5)
    metrics.wrong_predictions.inc("gone", "lost")
    metrics.keep({"r0"})
    exposed = metrics.exposition().decode()
    assert 'kvgate_prompt_tokens_total{replica="r0"} 3.0' in exposed
    assert '"gone"' not in exposed
