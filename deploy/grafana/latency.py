"""How long clients wait, and which part of it KVGate takes."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import ENGINE, ENGINES, JOB, JOBS, PATHS, mean, quantile, rate, share, share_of

_PATH = f'{JOB},path=~"$path"'
_TTFT = "kvgate_time_to_first_token_seconds"
_TOTAL = "kvgate_request_duration_seconds"
_PLACEMENT = "kvgate_placement_seconds"


def _quantiles(histogram: str, where: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, histogram, where=where), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99))


_CLIENTS = Row(
    "Clients",
    (
        Panel(
            "Time to the first token",
            "Of streamed answers, from the request's arrival to the first bytes of its answer: queueing and the "
            "prompt's computation, and what routing saves. Good depends on model and prompts; p50 should be near that "
            "of a cached prompt, and p99 near that of a new one.",
            _quantiles(_TTFT, _PATH),
            unit="s",
            width=12,
        ),
        Panel(
            "Time to the end",
            "From a request's arrival to the end of its answer; mostly as long as the answer is.",
            _quantiles(_TOTAL, _PATH),
            unit="s",
            width=12,
        ),
        Panel(
            "First tokens, spread",
            "How many first tokens came after how long. Two bands are cached prompts and new ones.",
            (Query(rate(f"{_TTFT}_bucket", "le", _PATH), "{{le}}"),),
            unit="s",
            kind="heatmap",
            width=12,
        ),
        Panel(
            "Time to the first token, as engines see it",
            "vLLM's own, without the gateway and the network. The distance to what clients see is theirs; good is some "
            "milliseconds.",
            _quantiles("vllm:time_to_first_token_seconds", ENGINE),
            unit="s",
            width=12,
        ),
    ),
)

_PLACING = Row(
    "Placing",
    (
        Panel(
            "Time to choose a replica",
            "One round trip to Redis and its script. Good: p50 under 1 ms, p99 under 5 ms. If Redis takes longer than "
            "redis.budget_ms (20 ms), a placement falls back.",
            (*_quantiles(_PLACEMENT, JOB), Query(mean(_PLACEMENT), "mean")),
            unit="s",
        ),
        Panel(
            "Slower than 5 ms",
            "The share of placements. Good: under 1 %. More: Redis or the gateways are short of CPU, or chunks of more "
            "than 4 MiB stand in front (see Store).",
            (
                Query(
                    "1 - "
                    + share(rate(f"{_PLACEMENT}_bucket", where=f'{JOB},le="0.005"'), rate(f"{_PLACEMENT}_count")),
                    "of all placements",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Fallbacks",
            "The share of placements that were made without the store, and of those that Redis or the gateway itself "
            "made too late. Good: none.",
            (
                Query(share_of("kvgate_decisions_total", 'state="fallback"'), "of all placements"),
                *(
                    Query(
                        share(
                            rate("kvgate_store_late_total", where=f'{JOB},cause="{cause}"'),
                            rate("kvgate_decisions_total"),
                        ),
                        f"late: {cause}",
                    )
                    for cause in ("redis", "gateway")
                ),
            ),
            unit="percentunit",
        ),
    ),
)

_ANSWERS = Row(
    "Answers",
    (
        Panel(
            "Requests by status",
            "Per second. 499: the client hung up. 429: limits.max_in_flight, or all replicas are full. 5xx: see "
            "Alerts.",
            (Query(rate("kvgate_requests_total", "status", _PATH), "{{status}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Error share",
            "5xx of all requests. Good: 0. What a replica fails before its first byte is retried, and not in here.",
            (Query(share_of("kvgate_requests_total", 'status=~"5.."', _PATH), "of all requests"),),
            unit="percentunit",
        ),
        Panel(
            "Cut short",
            "Per second: streams that a replica broke off after their first byte (they end with an error event), and "
            "requests whose client hung up.",
            (
                Query(rate("kvgate_broken_streams_total"), "broken streams"),
                Query(rate("kvgate_client_disconnects_total"), "clients gone"),
            ),
            unit="reqps",
        ),
        Panel(
            "Requests by path",
            "Per second.",
            (Query(rate("kvgate_requests_total", "path", _PATH), "{{path}}"),),
            unit="reqps",
            stacked=True,
            width=12,
        ),
        Panel(
            "Requests by model",
            "Per second. From the 101st model on, all share the name `others`.",
            (Query(rate("kvgate_requests_total", "model", _PATH), "{{model}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Tokens by tenant",
            "Per second, of prompts and of answers, as engines count them. From the 101st tenant on, all share one "
            "name, `others`.",
            (Query(rate("kvgate_tokens_total", "tenant", f'{JOB},kind=~"prompt|output"'), "{{tenant}}"),),
            stacked=True,
        ),
        Panel(
            "Requests in flight by gateway",
            "Being served. Near limits.max_in_flight (see configs/gateway.yaml), more are refused with 429.",
            (Query(f"kvgate_requests_in_flight{{{JOB}}}", "{{instance}}"),),
            stacked=True,
            width=12,
        ),
    ),
)

_BACKEND = "model, backend"
_OF_BACKENDS = "kvgate_backend_requests_total"
_BACKEND_TOKENS = "kvgate_backend_tokens_total"


def _failed_share() -> str:
    """It is 0, and not missing, while a backend has no errors."""
    whole = rate(_OF_BACKENDS, _BACKEND)
    failed = rate(_OF_BACKENDS, _BACKEND, f'{JOB},status=~"5..|broken"')
    return f"({failed} or 0 * {whole}) / {whole}"


_BACKENDS = Row(
    "Backends of a model",
    (
        Panel(
            "Share of requests",
            "Of a configured model, by backend; an empty name: no backend was chosen. Good: the weights, but for "
            "conversations, which stay with their backend.",
            (
                Query(
                    f"{rate(_OF_BACKENDS, _BACKEND)} / on (model) group_left () {rate(_OF_BACKENDS, 'model')}",
                    "{{model}} {{backend}}",
                ),
            ),
            unit="percentunit",
            max=1,
            width=12,
        ),
        Panel(
            "Time to the first token by backend",
            "Of streamed answers. A new version that is slower shows here; one with few requests has cold caches.",
            tuple(
                Query(
                    quantile(q, "kvgate_backend_first_token_seconds", _BACKEND), f"{{{{model}}}} {{{{backend}}}} {name}"
                )
                for q, name in ((0.5, "p50"), (0.95, "p95"))
            ),
            unit="s",
            width=12,
        ),
        Panel(
            "Error share by backend",
            "5xx and answers that broke off, of all requests of the backend. Good: 0. A request that another backend "
            "answered after a retry counts there.",
            (Query(_failed_share(), "{{model}} {{backend}}"),),
            unit="percentunit",
            width=12,
        ),
        Panel(
            "Cached share by backend",
            "Prompt tokens that engines served from their caches, of all. It rises in the first minutes of a backend.",
            (
                Query(
                    share(
                        rate(_BACKEND_TOKENS, _BACKEND, f'{JOB},kind="cached"'),
                        rate(_BACKEND_TOKENS, _BACKEND, f'{JOB},kind="prompt"'),
                    ),
                    "{{model}} {{backend}}",
                ),
            ),
            unit="percentunit",
            max=1,
            width=12,
        ),
    ),
)

LATENCY = Dashboard(
    "kvgate-latency",
    "Latency",
    "How long clients wait for their first token and for the whole answer, and what placing takes of it.",
    (JOBS, PATHS, ENGINES),
    (_CLIENTS, _PLACING, _ANSWERS, _BACKENDS),
)
