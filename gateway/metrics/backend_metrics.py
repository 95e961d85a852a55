"""The metrics of each backend of a configured model, so that two versions can be compared while one is rolled out.

They have labels of their own, and no tenant: a label `backend` on the metrics of requests would multiply their series.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge

from gateway.metrics.fast_counters import FastCounter, FastHistogram
from gateway.metrics.label_values import LabelValues


class BackendMetrics:
    """Of one gateway. A model without backends in the configuration has none of these."""

    def __init__(self, registry: CollectorRegistry, bounds_s: Sequence[float]) -> None:
        """`bounds_s`: those of the buckets of times to first token."""
        self._models, self._backends = LabelValues(), LabelValues()
        labels = ("model", "backend")
        self._requests = FastCounter(
            "kvgate_backend_requests",
            "Answered requests of models with backends, by the backend that was chosen last; it is empty if none was. "
            "Status broken: the answer had begun, and broke off. An alias counts as its model, a fallback as the model "
            "that answered.",
            (*labels, "status"),
            registry,
        )
        self._first_token_s = FastHistogram(
            "kvgate_backend_first_token_seconds",
            "Time from a request's arrival to the first bytes of its streamed answer, by backend.",
            labels,
            bounds_s,
            registry,
        )
        self._tokens = FastCounter(
            "kvgate_backend_tokens",
            "Tokens by backend, as engines report them at the end of answers; kind: prompt, cached (a part of prompt), "
            "output.",
            (*labels, "kind"),
            registry,
        )

        self._weight = Gauge(
            "kvgate_backend_weight", "A backend's weight, as it is configured.", labels, registry=registry
        )
        self._ready_replicas = Gauge(
            "kvgate_backend_ready_replicas",
            "Ready replicas of a backend, as this gateway knows them.",
            labels,
            registry=registry,
        )

    def set_states(self, models: Mapping[str, Mapping[str, tuple[int, int]]]) -> None:
        """Model → backend → its weight, and how many of its replicas are ready; there are no others."""
        self._weight.clear()
        self._ready_replicas.clear()
        for model, backends in models.items():
            for backend, (weight, ready) in backends.items():
                labels = self._labels(model, backend)
                self._weight.labels(*labels).set(weight)
                self._ready_replicas.labels(*labels).set(ready)

    def _labels(self, model: str, backend: str) -> tuple[str, ...]:
        return (*self._models.of(model), *(self._backends.of(backend) if backend else ("",)))

    def note(
        self, model: str, backend: str, status: str, first_byte_s: float | None, tokens: Mapping[str, int]
    ) -> None:
        """A request is over. `tokens` has a count for each kind, if the engine has told them."""
        labels = self._labels(model, backend)
        self._requests.inc(*labels, status)
        if first_byte_s is not None:
            self._first_token_s.observe(first_byte_s, *labels)
        for kind, count in tokens.items():
            self._tokens.inc(*labels, kind, by=count)
