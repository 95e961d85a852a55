"""vLLM's metrics, under vLLM's names. They are read from the engines at scrape time, so that requests stay cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.simulator.engine import SimEngine
from gateway.simulator.images import ImageReader
from gateway.simulator.settings import SimSettings
from gateway.simulator.sleep import Sleep

_LABELS = ("model_name", "engine")
_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_E2E_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_FINISHED_REASONS = ("stop", "length", "abort")

_GAUGES: dict[str, Callable[[SimEngine], float]] = {
    "vllm:num_requests_running": lambda engine: len(engine.running),
    "vllm:num_requests_waiting": lambda engine: len(engine.waiting),
    "vllm:kv_cache_usage_perc": lambda engine: engine.cache.num_held / engine.cache.num_blocks,
}
_COUNTERS: dict[str, Callable[[SimEngine], float]] = {
    "vllm:prefix_cache_queries": lambda engine: engine.stats.prefix_queries_tokens,
    "vllm:prefix_cache_hits": lambda engine: engine.stats.prefix_hits_tokens,
    "vllm:external_prefix_cache_queries": lambda engine: engine.stats.external_queries_tokens,
    "vllm:external_prefix_cache_hits": lambda engine: engine.stats.external_hits_tokens,
    "vllm:num_preemptions": lambda engine: engine.stats.preemptions,
    "vllm:prompt_tokens": lambda engine: engine.stats.prompt_tokens,
    "vllm:generation_tokens": lambda engine: engine.stats.generation_tokens,
}
_Sum = tuple[Callable[[SimEngine], float], Callable[[SimEngine], float]]
"""Of a histogram that has a sum and a count only."""
_DECODES: dict[str, _Sum] = {
    "vllm:inter_token_latency_seconds": (lambda engine: engine.stats.decode_s, lambda engine: engine.stats.decode_steps)
}
_PREFILLS: dict[str, _Sum] = {
    "vllm:request_prefill_time_seconds": (
        lambda engine: engine.stats.prefill_s,
        lambda engine: engine.stats.prefills,
    ),
    "vllm:request_prefill_kv_computed_tokens": (
        lambda engine: engine.stats.prefill_computed_tokens,
        lambda engine: engine.stats.prefills,
    ),
}


class SimMetrics:
    """One replica's registry. Engines write the two histograms; the other metrics are read from the engines."""

    def __init__(self, settings: SimSettings, images: ImageReader) -> None:
        self._registry = CollectorRegistry()
        self._model_name = settings.served_names[0]
        ProcessCollector(registry=self._registry)
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token.",
            _LABELS,
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds",
            "End to end request latency.",
            _LABELS,
            buckets=_E2E_BUCKETS_S,
            registry=self._registry,
        )
        self._settings = settings
        self._images = images

    def observers(self, rank: int) -> tuple[Callable[[float], None], Callable[[float], None]]:
        """The two callbacks of engine `rank`: the seconds to a request's first token, and to its end."""
        labels = (self._model_name, str(rank))
        return self._ttft.labels(*labels).observe, self._e2e.labels(*labels).observe

    def watch(self, engines: Sequence[SimEngine], sleep: Sleep) -> None:
        self._registry.register(_EngineCollector(self._settings, engines, self._images, sleep))

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, settings: SimSettings, engines: Sequence[SimEngine], images: ImageReader, sleep: Sleep) -> None:
        self._settings = settings
        self._sleep = sleep
        self._engines = engines
        self._images = images
        self._model_name = settings.served_names[0]

    def collect(self) -> Iterable[Metric]:
        for name, read in _GAUGES.items():
            yield self._per_engine(GaugeMetricFamily(name, name, labels=_LABELS), read)
        for name, read in _COUNTERS.items():
            yield self._per_engine(CounterMetricFamily(name, name, labels=_LABELS), read)
        finished = CounterMetricFamily(
            "vllm:request_success", "Finished requests.", labels=(*_LABELS, "finished_reason")
        )
        for rank, engine in zip(self._settings.ranks, self._engines, strict=True):
            for reason in {*_FINISHED_REASONS, *engine.stats.requests}:
                finished.add_metric((self._model_name, str(rank), reason), engine.stats.requests[reason])
        yield finished
        for name, value in (("queries", self._images.queries), ("hits", self._images.hits)):
            family = CounterMetricFamily(f"vllm:mm_cache_{name}", "Image processor cache.", labels=_LABELS)
            family.add_metric((self._model_name, str(self._settings.ranks[0])), value)
            yield family
        # With LMCache, the configured credit for loading applies; a measured one would be zero.
        for name, sums in (_DECODES if self._settings.lmcache else _DECODES | _PREFILLS).items():
            yield self._histogram(name, *sums)
        yield self._sleep_state()
        yield self._cache_config()

    def _sleep_state(self) -> Metric:
        level = self._sleep.level
        states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
        family = GaugeMetricFamily("vllm:engine_sleep_state", "Engine sleep state.", labels=(*_LABELS, "sleep_state"))
        for rank in self._settings.ranks:
            for name, is_so in states.items():
                family.add_metric((self._model_name, str(rank), name), is_so)
        return family

    def _histogram(
        self, name: str, read_sum: Callable[[SimEngine], float], read_count: Callable[[SimEngine], float]
    ) -> Metric:
        family = HistogramMetricFamily(name, name, labels=_LABELS)
        for rank, engine in zip(self._settings.ranks, self._engines, strict=True):
            count = [("+Inf", float(read_count(engine)))]
            family.add_metric((self._model_name, str(rank)), count, read_sum(engine))
        return family

    def _per_engine(
        self, family: GaugeMetricFamily | CounterMetricFamily, read: Callable[[SimEngine], float]
    ) -> Metric:
        for rank, engine in zip(self._settings.ranks, self._engines, strict=True):
            family.add_metric((self._model_name, str(rank)), read(engine))
        return family

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
