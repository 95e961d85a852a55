"""Prometheus metrics of one gateway, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.job import PROMPT_PATHS

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PLACEMENT_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """Every metric that a gateway exports; docs/behaviour.md lists what each is for."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "kvgate_requests", "Requests answered, by path and status.", ("path", "status"), registry=registry
        )
        self.in_flight = Gauge("kvgate_requests_in_flight", "Requests being served.", registry=registry)
        self.time_to_first_token_s = Histogram(
            "kvgate_time_to_first_token_seconds",
            "From the request's arrival to the first bytes of a streamed answer.",
            ("path",),
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.duration_s = Histogram(
            "kvgate_request_duration_seconds",
            "From the request's arrival to the end of its answer.",
            ("path",),
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.placement_s = Histogram(
            "kvgate_placement_seconds",
            "Time to choose a replica, the store included.",
            buckets=_PLACEMENT_S,
            registry=registry,
        )
        self.decisions = Counter(
            "kvgate_decisions", "Placements by policy, kind and state.", ("policy", "why", "state"), registry=registry
        )
        self._add_tokens(registry)
        self._add_trouble(registry)

    def _add_tokens(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = Counter(
            "kvgate_prompt_tokens", "Prompt tokens, as the engines count them.", ("replica",), registry=registry
        )
        self.cached_tokens = Counter(
            "kvgate_cached_tokens", "Prompt tokens the engines served from cache.", ("replica",), registry=registry
        )
        self.predicted_tokens = Counter(
            "kvgate_predicted_cached_tokens",
            "Prompt tokens predicted to be cached, of requests whose engine reported what was.",
            ("replica",),
            registry=registry,
        )
        self.prediction_error_tokens = Histogram(
            "kvgate_prediction_error_tokens",
            "Distance between predicted and actual cached tokens, by direction.",
            ("direction",),
            buckets=_TOKENS,
            registry=registry,
        )

    def _add_trouble(self, registry: CollectorRegistry) -> None:
        self.retries = Counter("kvgate_retries", "Attempts sent elsewhere, by reason.", ("reason",), registry=registry)
        self.broken_streams = Counter(
            "kvgate_broken_streams", "Streams ended by an error event after their first byte.", registry=registry
        )
        self.disconnects = Counter(
            "kvgate_client_disconnects", "Requests whose client hung up first.", registry=registry
        )
        self.store_up = Gauge("kvgate_store_up", "1 while placements go through the store.", registry=registry)
        self.store_reconnects = Counter(
            "kvgate_store_connections", "Times the store's connection was (re)established.", registry=registry
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

    def path_label(self, path: str) -> str:
        """A bounded set of labels: clients choose paths."""
        return path if path in PROMPT_PATHS else "other"

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
