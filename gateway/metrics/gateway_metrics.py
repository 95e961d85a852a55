"""Prometheus metrics of one gateway, in a registry of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from coordinator.pool.demand import Demand
from gateway.metrics.backend_metrics import BackendMetrics
from gateway.metrics.fast_counters import FastCounter, FastHistogram
from gateway.metrics.first_tokens import FirstTokens
from gateway.metrics.label_values import MOST_PAIRS, LabelValues

# Each bound is at most twice the one before, mostly less, because quantiles are interpolated between bounds.
_LATENCY_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30,
    60, 120, 300, 600,
)  # fmt: skip
_PLACEMENT_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_ENGINE = {
    "running": ("running_requests", "Requests that the engine runs, as its agent reads it from the engine's metrics."),
    "waiting": ("waiting_requests", "Requests in the engine's own queue."),
    "kv_usage": ("kv_cache_usage_ratio", "Share of the engine's KV cache that running requests hold."),
    "prefix_queries_tokens": ("prefix_cache_queries_tokens", "Tokens that the engine looked up in its prefix cache."),
    "prefix_hits_tokens": ("prefix_cache_hits_tokens", "Tokens that the engine found in its prefix cache."),
    "event_delay_s": (
        "event_delay_seconds",
        "Time from a KV event to the map, as the agent measures it: the slowest of the last 15 to 30 s.",
    ),
    "key_transitions": ("key_transitions", "Keys that became resident or were evicted, as the agent said."),
}
_DEMAND = {
    "waiting_requests": "Requests of all gateways that are queued for room or for a replica.",
    "waiting_tokens": "Prompt tokens that queued requests have to compute, as estimated when they came.",
    "running_requests": "Requests of all gateways that are in flight on replicas: slots in use.",
    "running_tokens": "Prompt tokens of running requests that are not computed yet.",
    "work_seconds": "Time that the ready replicas need for all running and queued prompts; absent if none is ready.",
    "oldest_wait_seconds": "The longest time that a request has been queued for room.",
    "slots": "Requests that the ready replicas may serve at once, if policy.max_active_requests is set.",
    "ready_replicas": "Replicas that are ready and not drained.",
}
_LOOP_LAG_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """The metrics of a gateway, except those in store_metrics.py and loop_lag.py. docs/metrics.md is made from them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.per_replica: list[Gauge] = []
        """The gauges whose label is the replica."""
        self._counted_per_replica: list[FastCounter] = []
        self._add_requests()
        self.in_flight = self._gauge("kvgate_requests_in_flight", "Requests that this gateway is serving.")
        self.uploads = self._gauge("kvgate_uploads", "Requests whose body is still arriving.")
        self.held_bytes = self._gauge(
            "kvgate_held_bytes",
            "Bytes that count against limits.max_buffered_bytes: request bodies, reading them, and unsent answers.",
        )
        self.first_tokens = FirstTokens()
        self.time_to_first_token_s = self._histogram(
            "kvgate_time_to_first_token_seconds",
            "Time from a request's arrival to the first bytes of its streamed answer.",
            _LATENCY_S,
            "path model tenant",
        )
        self.duration_s = self._histogram(
            "kvgate_request_duration_seconds",
            "Time from a request's arrival to the end of its answer.",
            _LATENCY_S,
            "path",
        )
        self.placement_s = self._histogram(
            "kvgate_placement_seconds",
            "Time to choose a replica, including the call to Redis, without the time in the queue.",
            _PLACEMENT_S,
        )
        self.decisions = self._counter(
            "kvgate_decisions",
            "Placements; why: hit, partial_hit, rebalanced, stored, cold, pinned, last_resort, fallback.",
            "policy why state",
        )
        self.worker_reads = self._counter(
            "kvgate_worker_reads", "Bodies that were read in another process because they take long."
        )
        self._add_queue()
        self._add_tokens()
        self._add_trouble()
        self._add_streams()
        self._add_store()
        self._add_fleet()

    def _add_requests(self) -> None:
        self.names = LabelValues(MOST_PAIRS)
        self.requests = self._counter(
            "kvgate_requests",
            "Answered requests; status 499: the client hung up. Model and tenant are empty if a request was refused "
            "before they were known, or names no model. A model that nobody serves is called others. From the "
            f"{MOST_PAIRS + 1}st pair of a model and a tenant on, both are called others.",
            "path status model tenant",
        )
        self.tokens = self._counter(
            "kvgate_tokens",
            "Tokens, as engines report them at the end of answers; kind: prompt, cached (a part of prompt), output.",
            "kind model tenant",
        )
        self.cost = self._counter(
            "kvgate_cost",
            "What requests have cost, in units of billing.currency. An alias counts as its model, a fallback as the "
            "model that answered.",
            "model tenant",
        )
        self.backends = BackendMetrics(self.registry, _LATENCY_S)

    def _add_queue(self) -> None:
        self.queue_waiting = self._gauge(
            "kvgate_queue_waiting_requests",
            "Requests of this gateway that are queued for room (in Redis or, while it is away, here) or for a replica.",
            "pool",
        )
        self.queue_wait_s = self._histogram(
            "kvgate_queue_wait_seconds",
            "Time in the queue until a replica had room, of requests that were queued.",
            _LATENCY_S,
            "band",
        )
        self.queue_refusals = self._counter(
            "kvgate_queue_refusals",
            "Requests that were refused; reason: full, full_tenant, unreachable (the wait would be too long), waited "
            "(it was), requests or tokens (a limit of a minute), budget_exceeded, budget_reserved.",
            "reason",
        )
        self.budget_used = self._gauge(
            "kvgate_budget_used_ratio",
            "The spent part of a budget in its day, week or month, over all gateways; account: a tenant, or key:<id>. "
            "Only the 100 budgets of which most is spent.",
            "account per unit",
        )
        self.budget_soft = self._gauge(
            "kvgate_budget_soft_ratio", "The part of a budget from which on clients are warned.", "account per unit"
        )
        self.demand = {name: self._gauge(f"kvgate_demand_{name}", text, "pool") for name, text in _DEMAND.items()}

    def set_demand(self, pool: str, demand: Demand, slots: int | None) -> None:
        """A pool's demand. `slots` are the requests that a replica may have; None: any number."""
        figures = {
            "work_seconds": demand.work_s,
            "oldest_wait_seconds": demand.oldest_wait_s,
            "slots": slots * demand.ready_replicas if slots else None,
        }
        for name, gauge in self.demand.items():
            figure = figures[name] if name in figures else getattr(demand, name)
            if figure is not None:
                gauge.labels(pool).set(figure)

    def _add_tokens(self) -> None:
        self.prompt_tokens = self._counter("kvgate_prompt_tokens", "Prompt tokens, counted by the engines.", "replica")
        self.cached_tokens = self._counter(
            "kvgate_cached_tokens", "Prompt tokens that the engines served from their caches.", "replica"
        )
        self.predicted_tokens = self._counter(
            "kvgate_predicted_cached_tokens",
            "Prompt tokens that were predicted to be cached, for requests whose engine reported its cached tokens.",
            "replica",
        )
        self.passed_over_tokens = self._counter(
            "kvgate_passed_over_tokens",
            "Prompt tokens that another replica held, and that the chosen one neither held nor could load from Redis: "
            "the price of sparing the other one.",
            "replica",
        )
        self.prediction_error_tokens = self._histogram(
            "kvgate_prediction_error_tokens",
            "Difference between predicted and actual cached tokens; direction: over or under.",
            _TOKENS,
            "direction",
        )
        self.wrong_predictions = self._counter(
            "kvgate_wrong_predictions",
            "Answers with more or fewer cached tokens than the map allows; cause: evicted, untold, in_flight, "
            "never_computed, restarted.",
            "replica cause",
        )
        self.doubts = self._counter(
            "kvgate_residency_doubts",
            "Prefixes that a replica lacked although its events had reported them and had not reported their removal.",
            "replica",
        )

    def _add_trouble(self) -> None:
        self.loop_lag_s = self._histogram(
            "kvgate_event_loop_lag_seconds",
            "How late the event loop runs a timer: something held the loop, and every stream, for this long.",
            _LOOP_LAG_S,
        )
        self.config_is_used = self._gauge(
            "kvgate_config_last_reload_successful",
            "1: the configuration file was right when it was last read; 0: it is wrong, and the settings of before are "
            "used.",
        )
        self.config_is_used.set(1)
        self.logins = self._counter(
            "kvgate_console_logins", "Logins at the console, by outcome: ok, or why not.", "outcome"
        )
        self.retries = self._counter(
            "kvgate_retries",
            "Attempts repeated on another replica; reason, of the attempt before: asleep, dead, hung, unreachable "
            "(by this gateway alone), refused, reset, timeout, protocol, idle, empty, aborted (by the engine), "
            "error_event, switched (its role), no_prefill (and it does not compute prompts), status_500 and other "
            "statuses.",
            "reason",
        )
        self.fallbacks = self._counter(
            "kvgate_fallbacks",
            "Requests that another model answers, as models[].fallback allows; why: no_replica of its own is ready, "
            "no_room in time, or failed: every attempt did.",
            "why",
        )
        self.retries_withheld = self._counter(
            "kvgate_retries_withheld", "Retries that were not made because the retry budget was spent."
        )
        self.disconnects = self._counter(
            "kvgate_client_disconnects", "Requests whose client hung up before the answer was complete."
        )
        self.access_log_dropped = self._counter(
            "kvgate_access_log_dropped", "Lines of the access log that could not be written."
        )
        self.traces_sent = self._counter("kvgate_traces_sent", "Traces that the backend took.")
        self.traces_lost = self._counter("kvgate_traces_lost", "Traces that no backend got.")
        self.gateway_ready = self._gauge("kvgate_gateway_ready", "1 while /ready answers 200.")
        self.discovery_up = self._gauge(
            "kvgate_discovery_up",
            "1 while a source can say which replicas or InferenceObjectives there are.",
            "source",
        )

    def _add_streams(self) -> None:
        self.broken_streams = self._counter(
            "kvgate_broken_streams",
            "Answers, streamed or large, that broke after their first byte. A stream then ends with an error event.",
        )
        self.streams = self._counter(
            "kvgate_streams",
            "Streamed answers, by whether another replica could have gone on with them: yes, or the reason why not. "
            "Calls of tools and reasoning in chats are seen only when a stream breaks: until then they count as yes.",
            "resumable",
        )
        self.resumptions = self._counter(
            "kvgate_stream_resumptions",
            "Answers that broke after their first byte, by outcome: another replica has begun the rest, by token ids "
            "(exact) or by text; only the end was missing (closed); or none: the answer ended with an error, or its "
            "client left before. The reason is why it broke; of none, why it did not go on.",
            "outcome reason",
        )

        self.hedges = self._counter(
            "kvgate_hedges",
            "Streams whose first byte was late, by outcome: a second replica began first (won), or the first one did "
            "after all (lost), or the second one failed (failed). Or there was no second attempt: the allowance was "
            "used up (withheld), no other replica was ready and not slow (no_replica), none had room or requests "
            "waited for room (no_room), the server of the first one was silent (silent), or Redis did not answer or a "
            "limit was reached (refused).",
            "outcome",
        )

        self.prefills = self._counter(
            "kvgate_prefills",
            "Prompts that one replica was to compute for another one: computed, unstored (LMCache did not store it in "
            "time), failed (the replica gave no usable answer, or its engine was gone before the other one had all), "
            "refused (it did not take the request), or left (it died, or the client left).",
            "outcome",
        )
        self.unpaired = self._counter(
            "kvgate_unpaired",
            "Placements without another replica to compute the prompt, where some do: less is missing than "
            "pairs.min_tokens (short), the replica computes all its prompts (itself), the others have no room or "
            "need too much time (no_room), none of them can be asked (none), or one has failed before (failed); "
            "docs/disaggregation.md has the others.",
            "why",
        )
        self.hedged_tokens = self._counter(
            "kvgate_hedged_tokens", "Prompt tokens that second replicas had to compute for late streams."
        )

    def _add_store(self) -> None:
        self.store_up = self._gauge("kvgate_store_up", "1 while Redis decides placements, 0 while they fall back.")
        self.store_reconnects = self._counter(
            "kvgate_store_connections",
            "Times that placements began to go through Redis: a connection was made, or a pause was over.",
        )
        self.store_late = self._counter(
            "kvgate_store_late",
            "Placements that fell back because they took too long; cause: redis, gateway (its event loop did not run).",
            "cause",
        )
        for cause in ("redis", "gateway"):
            self.store_late.inc(cause, by=0)  # increase() needs a start
        self.decisions_not_kept = self._counter(
            "kvgate_decisions_not_kept",
            "Records of requests that are not kept for `kvgate explain`; why: store_away, store_full (its memory), "
            "too_many waited to be sent, too_large.",
            "why",
        )
        self.ignored_records = self._gauge(
            "kvgate_ignored_records",
            "Records of keys in Redis that are not signed with this gateway's records_secret; /ready names them.",
        )
        self.unreadable = self._counter(
            "kvgate_unreadable_records", "Unreadable records in Redis that this gateway found, by key.", "key"
        )
        self.maintenance_lag_s = self._gauge(
            "kvgate_chores_lag_seconds",
            "How long the oldest maintenance task in Redis has been due, in pools whose maintenance this gateway does.",
            "pool",
        )
        self.models_down = self._gauge("kvgate_models_down", "Models that no ready replica serves; /ready names them.")
        self.models_in_several_pools = self._gauge(
            "kvgate_models_in_several_pools",
            "Models that ready replicas of several pools serve, as in an update of weights; /ready names them.",
        )

    def _add_fleet(self) -> None:
        self.replica_info = self._gauge(
            "kvgate_replica_info",
            "Always 1; the labels tell the pool of each replica, and its role in force: prefill, decode, both, or "
            "changing (it takes nothing).",
            "replica pool role",
        )
        self.breaker_open = self._gauge("kvgate_breaker_open", "1 while a replica's breaker is open.", "replica")
        self.replica_ready = self._gauge("kvgate_replica_ready", "1 while a replica is ready.", "replica")
        self.replica_draining = self._gauge("kvgate_replica_draining", "1 while a replica is drained.", "replica")
        self.replica_asleep = self._gauge(
            "kvgate_replica_asleep", "1 while a replica's engine sleeps or is paused.", "replica"
        )
        self.replica_slow = self._gauge(
            "kvgate_replica_slow",
            "1 while the first bytes of a replica's streams are late again and again; placements count it as slower.",
            "replica",
        )
        self.replica_active = self._gauge(
            "kvgate_replica_active_requests",
            "Requests of all gateways that are in flight on a replica; while Redis is away, as they were read last.",
            "replica",
        )
        self.replica_exact = self._gauge(
            "kvgate_replica_exact", "1 while an engine's events confirm what its replica holds.", "replica"
        )
        self.replica_id_taken = self._gauge(
            "kvgate_replica_id_taken",
            "1 while Redis means another engine by a replica's id: give clusters that share it a redis.namespace each.",
            "replica",
        )
        self.engine = {
            figure: self._gauge(f"kvgate_engine_{name}", help_text, "replica")
            for figure, (name, help_text) in _ENGINE.items()
        }

    def keep(self, replicas: Collection[str]) -> None:
        """Forget the counts of other replicas: where replicas come and go under new names, these would never end."""
        for counter in self._counted_per_replica:
            counter.keep(replicas)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, labels: str = "") -> FastCounter:
        """`labels` are names with spaces between them."""
        counter = FastCounter(name, help_text, labels.split(), self.registry)
        if labels.startswith("replica"):
            self._counted_per_replica.append(counter)
        return counter

    def _histogram(self, name: str, help_text: str, bounds: Sequence[float], labels: str = "") -> FastHistogram:
        return FastHistogram(name, help_text, labels.split(), bounds, self.registry)

    def _gauge(self, name: str, help_text: str, labels: str = "") -> Gauge:
        gauge = Gauge(name, help_text, labels.split(), registry=self.registry)
        if labels.startswith("replica"):
            self.per_replica.append(gauge)
        return gauge
