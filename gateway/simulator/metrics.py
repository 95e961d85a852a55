"""vLLM's metrics, under vLLM's names. They are read from the engines at scrape time, so that requests stay cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.simulator.engine import SimEngine
from gateway.simulator.images import ImageReader
from gateway.simulator.settings import SimSettings

_LABELS = ("model_name", "engine")
_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_FINISHED_REASONS = ("stop", "length", "abort")

_GAUGES: dict[str, Callable[[SimEngine], float]] = {
    "vllm:num_requests_running": lambda engine: len(engine.running),
    "vllm:num_requests_waiting": lambda engine: len(engine.waiting),
    "vllm:kv_cache_usage_perc": lambda engine: engine.cache.num_held / engine.cache.num_blocks,
}
_COUNTERS = {
    "vllm:prefix_cache_queries": "prefix_queries_tokens",
    "vllm:prefix_cache_hits": "prefix_hits_tokens",
    "vllm:external_prefix_cache_queries": "external_queries_tokens",
    "vllm:external_prefix_cache_hits": "external_hits_tokens",
    "vllm:num_preemptions": "preemptions",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "generation_tokens",
}
"""Each counter's field of EngineStats."""
_DECODES = {"vllm:inter_token_latency_seconds": ("decode_s", "decode_steps")}
_PREFILLS = {
    "vllm:request_prefill_time_seconds": ("prefill_s", "prefills"),
    "vllm:request_prefill_kv_computed_tokens": ("prefill_computed_tokens", "prefills"),
}
"""The fields of the sum and of the count of histograms that have no buckets here."""
_TRANSFERS = {"vllm:nixl_xfer_time_seconds": ("transfers", "transfers")}
"""Each takes a second, which nobody reads."""


class SimMetrics(Collector):
    """One replica's registry. Engines write one histogram; the other metrics are read from the engines."""

    def __init__(self, settings: SimSettings, images: ImageReader) -> None:
        self.registry = CollectorRegistry()
        if not settings.rust_frontend:
            ProcessCollector(registry=self.registry)
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Time to first token.", _LABELS,
            buckets=_TTFT_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self._settings = settings
        self._images = images

    def observer(self, rank: int) -> Callable[[float], None]:
        """The callback of engine `rank`: the seconds to a request's first token."""
        return self._ttft.labels(*self._labels(rank)).observe

    def watch(self, engines: Sequence[SimEngine], sleep_level: Callable[[], int | None]) -> None:
        self._engines = dict(zip(map(self._labels, self._settings.ranks), engines, strict=True))
        self._sleep_level = sleep_level
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        engines = self._engines.items()
        for name, read in _GAUGES.items():
            gauge = GaugeMetricFamily(name, name, labels=_LABELS)
            for labels, engine in engines:
                gauge.add_metric(labels, read(engine))
            yield gauge
        for name, field in _COUNTERS.items():
            counter = CounterMetricFamily(name, name, labels=_LABELS)
            for labels, engine in engines:
                counter.add_metric(labels, getattr(engine.stats, field))
            yield counter
        # With LMCache, the configured credit for loading applies; a measured one would be zero.
        transfers = _TRANSFERS if self._settings.nixl else {}
        for name, (total, count) in (_DECODES | transfers | ({} if self._settings.lmcache else _PREFILLS)).items():
            histogram = HistogramMetricFamily(name, name, labels=_LABELS)
            for labels, engine in engines:
                buckets = [("+Inf", float(getattr(engine.stats, count)))]
                histogram.add_metric(labels, buckets, getattr(engine.stats, total))
            yield histogram
        yield self._finished()
        if self._settings.mooncake:
            p2p = CounterMetricFamily("vllm:prompt_tokens_cached_by_source", "By source.", labels=(*_LABELS, "source"))
            for labels, engine in engines:
                p2p.add_metric((*labels, "p2p"), engine.stats.transfers)
            yield p2p
        for name, value in (("queries", self._images.queries), ("hits", self._images.hits)):
            family = CounterMetricFamily(f"vllm:mm_cache_{name}", "Image processor cache.", labels=_LABELS)
            family.add_metric(self._labels(self._settings.ranks[0]), value)
            yield family
        if not self._settings.rust_frontend:
            yield self._asleep()
            yield self._cache_config()

    def _finished(self) -> Metric:
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished requests.", labels=(*_LABELS, "finished_reason")
        )
        for labels, engine in self._engines.items():
            for reason in _FINISHED_REASONS:
                finished.add_metric((*labels, reason), engine.stats.requests[reason])
        return finished

    def _asleep(self) -> Metric:
        asleep = GaugeMetricFamily("vllm:engine_sleep_state", "Engine sleep state.", labels=(*_LABELS, "sleep_state"))
        level = self._sleep_level()
        for labels in self._engines:
            for state, of_level in (("awake", None), ("weights_offloaded", 1), ("discard_all", 2)):
                asleep.add_metric((*labels, state), level == of_level)
        return asleep

    def _labels(self, rank: int) -> tuple[str, str]:
        return self._settings.served_names[0], str(rank)

    def _cache_config(self) -> Metric:
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching", "engine"),
        )
        size, blocks, ranks = self._settings.block_size, self._settings.num_gpu_blocks, self._settings.ranks
        for rank in ranks:  # as in vLLM, the blocks are those of all ranks, and the tokens those of one
            info.add_metric([str(size), str(blocks * len(ranks)), str(blocks * size), "True", str(rank)], 1)
        return info
