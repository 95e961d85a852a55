"""The speed of LMCache's loads, as a histogram of its /metrics in the form that its OpenTelemetry exports."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_BOUNDS = (
    0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 2500.0, 5000.0, 7500.0, 10000.0,
    float("inf"),
)  # fmt: skip
_SCOPE = {"otel_scope_name": "lmcache_mp.perf", "otel_scope_schema_url": "", "otel_scope_version": ""}
_GB = 1e9


class Throughput(Collector):
    """GB/s of each transfer. The metric does not exist before the first one."""

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        """`name` as in `lmcache_mp_<name>_throughput_GB_per_second`."""
        self._name = f"lmcache_mp_{name}_throughput_GB_per_second"
        self._labels = {**labels, **_SCOPE}
        self._counts = [0] * len(_BOUNDS)
        self._sum = 0.0

    def record(self, num_bytes: int, seconds: float) -> None:
        """A transfer is over. One that took no time has no speed."""
        if num_bytes > 0 and seconds > 0:
            gb_per_s = num_bytes / seconds / _GB
            self._counts[bisect_left(_BOUNDS, gb_per_s)] += 1
            self._sum += gb_per_s

    def collect(self) -> Iterable[Metric]:
        if any(self._counts):
            family = HistogramMetricFamily(self._name, "Throughput in GB/s.", labels=list(self._labels))
            buckets = zip(map(floatToGoString, _BOUNDS), accumulate(self._counts), strict=True)
            family.add_metric(list(self._labels.values()), list(buckets), self._sum)
            yield family
