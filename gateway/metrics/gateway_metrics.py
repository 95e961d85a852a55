"""Prometheus metrics of one gateway, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from coordinator.chores.applier import Applied
from gateway.metrics.fast_counters import FastCounter, FastHistogram

# Each at most twice the one before, and mostly less: a quantile is interpolated between two of them.
_LATENCY_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30,
    60, 120, 300, 600,
)  # fmt: skip
_PLACEMENT_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_ENGINE = {
    "running": ("running_requests", "Requests that the engine runs, as its agent reads its metrics."),
    "waiting": ("waiting_requests", "Requests that wait in the engine's queue."),
    "kv_usage": ("kv_cache_usage_ratio", "The share of the engine's KV cache that running requests hold."),
    "prefix_queries_tokens": ("prefix_cache_queries_tokens", "Tokens that the engine looked up in its prefix cache."),
    "prefix_hits_tokens": ("prefix_cache_hits_tokens", "Tokens that it found there."),
}
_LAG_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_LOOP_LAG_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)


class EventMetrics:
    """What whoever applies event streams tells of it: a gateway, or a coordinator that stands alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag_s = FastHistogram(
            "kvgate_event_lag_seconds",
            "From an engine's KV event to the map, of the streams that this process applies.",
            ("replica",),
            _LAG_S,
            registry,
        )
        self._transitions = FastCounter(
            "kvgate_key_transitions", "Key transitions applied to the map.", ("replica",), registry
        )
        self._gaps = FastCounter(
            "kvgate_event_stream_gaps", "Times a stream's cap cut off what was not applied.", ("replica",), registry
        )

    def applied(self, applied: Applied) -> None:
        """Count one entry of an event stream."""
        self._lag_s.observe(max(0, applied.lag_ms) / 1000, applied.replica)
        self._transitions.inc(applied.replica, by=applied.transitions)
        self._gaps.inc(applied.replica, by=int(applied.entries_missing))  # from 0 on: an increase from nothing is none


class Metrics:
    """Every metric that a gateway exports; docs/behaviour.md lists what each is for."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = FastCounter(
            "kvgate_requests", "Requests answered, by path and status.", ("path", "status"), registry
        )
        self.in_flight = Gauge("kvgate_requests_in_flight", "Requests being served.", registry=registry)
        self.uploads = Gauge("kvgate_uploads", "Requests whose body is still coming.", registry=registry)
        self.held_bytes = Gauge(
            "kvgate_held_bytes", "Bytes accounted for: bodies, reading them, answers not sent yet.", registry=registry
        )
        self.time_to_first_token_s = FastHistogram(
            "kvgate_time_to_first_token_seconds",
            "From the request's arrival to the first bytes of a streamed answer.",
            ("path",),
            _LATENCY_S,
            registry,
        )
        self.duration_s = FastHistogram(
            "kvgate_request_duration_seconds",
            "From the request's arrival to the end of its answer.",
            ("path",),
            _LATENCY_S,
            registry,
        )
        self.placement_s = FastHistogram(
            "kvgate_placement_seconds", "Time to choose a replica, the store included.", (), _PLACEMENT_S, registry
        )
        self.decisions = FastCounter(
            "kvgate_decisions", "Placements by policy, kind and state.", ("policy", "why", "state"), registry
        )
        self.worker_reads = FastCounter(
            "kvgate_worker_reads", "Bodies read in another process, as that takes long.", (), registry
        )
        self.loop_lag_s = FastHistogram(
            "kvgate_event_loop_lag_seconds",
            "How late the event loop runs a timer: for so long something held it.",
            (),
            _LOOP_LAG_S,
            registry,
        )
        self.events = EventMetrics(registry)
        self._add_tokens(registry)
        self._add_trouble(registry)
        self._add_fleet(registry)

    def _add_tokens(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = FastCounter(
            "kvgate_prompt_tokens", "Prompt tokens, as the engines count them.", ("replica",), registry
        )
        self.cached_tokens = FastCounter(
            "kvgate_cached_tokens", "Prompt tokens the engines served from cache.", ("replica",), registry
        )
        self.predicted_tokens = FastCounter(
            "kvgate_predicted_cached_tokens",
            "Prompt tokens predicted to be cached, of requests whose engine reported what was.",
            ("replica",),
            registry,
        )
        self.passed_over_tokens = FastCounter(
            "kvgate_passed_over_tokens",
            "Prompt tokens that another replica held, and the one chosen did not: what sparing the other one cost.",
            ("replica",),
            registry,
        )
        self.prediction_error_tokens = FastHistogram(
            "kvgate_prediction_error_tokens",
            "Distance between predicted and actual cached tokens, by direction.",
            ("direction",),
            _TOKENS,
            registry,
        )

        self.wrong_predictions = FastCounter(
            "kvgate_wrong_predictions",
            "Answers whose cached tokens lie outside of what the map promised, by cause.",
            ("replica", "cause"),
            registry,
        )
        self.doubts = FastCounter(
            "kvgate_residency_doubts",
            "Prefixes that a replica's events had promised, that it did not hold, and of which no event told.",
            ("replica",),
            registry,
        )

    def _add_trouble(self, registry: CollectorRegistry) -> None:
        self.retries = FastCounter("kvgate_retries", "Attempts sent elsewhere, by reason.", ("reason",), registry)
        self.retries_withheld = FastCounter(
            "kvgate_retries_withheld", "Attempts that were not made because the retry budget was spent.", (), registry
        )
        self.broken_streams = FastCounter(
            "kvgate_broken_streams", "Streams ended by an error event after their first byte.", (), registry
        )
        self.disconnects = FastCounter(
            "kvgate_client_disconnects", "Requests whose client hung up first.", (), registry
        )
        self.store_up = Gauge("kvgate_store_up", "1 while placements go through the store.", registry=registry)
        self.store_reconnects = FastCounter(
            "kvgate_store_connections", "Times the store's connection was (re)established.", (), registry
        )
        self.unreadable = FastCounter(
            "kvgate_unreadable_records",
            "Records in Redis that this gateway found unreadable and mended, by key.",
            ("key",),
            registry,
        )
        self.discovery_up = Gauge(
            "kvgate_discovery_up", "1 while a source tells which replicas there are.", ("source",), registry=registry
        )

    def _add_fleet(self, registry: CollectorRegistry) -> None:
        self.replica_info = Gauge(
            "kvgate_replica_info", "1, with the pool that a replica is in.", ("replica", "pool"), registry=registry
        )
        self.breaker_open = Gauge(
            "kvgate_breaker_open", "1 while a replica's breaker is open.", ("replica",), registry=registry
        )
        self.replica_ready = Gauge(
            "kvgate_replica_ready", "1 while a replica is ready.", ("replica",), registry=registry
        )
        self.replica_active = Gauge(
            "kvgate_replica_active_requests",
            "Requests in flight on a replica, of all gateways.",
            ("replica",),
            registry=registry,
        )
        self.replica_exact = Gauge(
            "kvgate_replica_exact", "1 while an agent tells what a replica holds.", ("replica",), registry=registry
        )
        self.replica_id_taken = Gauge(
            "kvgate_replica_id_taken",
            "1 while the registry means another engine by a replica's id.",
            ("replica",),
            registry=registry,
        )
        self.engine = {
            figure: Gauge(f"kvgate_engine_{name}", text, ("replica",), registry=registry)
            for figure, (name, text) in _ENGINE.items()
        }
        self.per_replica = (
            *(self.replica_info, self.breaker_open, self.replica_ready, self.replica_active, self.replica_exact),
            self.replica_id_taken,
            *self.engine.values(),
        )
        """Gauges of which each replica has its own."""

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
