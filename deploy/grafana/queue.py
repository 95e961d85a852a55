"""What is asked for, what there is, and who waits."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import JOB, JOBS, POOLS, quantile, rate, told

_POOL = f'{JOB},pool=~"$pool"'
_WAIT = "kvgate_queue_wait_seconds"


def _demand(name: str) -> str:
    """A figure of each pool's demand. One gateway exposes it; while another one takes over, both may."""
    return told(f"kvgate_demand_{name}", "pool", _POOL)


_DEMAND = Row(
    "Demand, of all gateways together",
    (
        Panel(
            "Slots",
            "Requests in flight on replicas, and how many the ready replicas may have (policy.max_active_requests; "
            "without it there is no such line). Good: below three quarters. At the line, requests wait.",
            (Query(_demand("running_requests"), "taken {{pool}}"), Query(_demand("slots"), "slots {{pool}}")),
        ),
        Panel(
            "Waiting",
            "Requests that wait for room, or for a replica (queue.hold_s). Good: 0, and short peaks.",
            (Query(_demand("waiting_requests"), "{{pool}}"),),
        ),
        Panel(
            "Longest wait",
            "How long the request has waited for room that has waited longest. At queue.wait_s (60 s) it is refused. "
            "Good: under 10 s.",
            (Query(_demand("oldest_wait_seconds"), "{{pool}}"),),
            unit="s",
        ),
        Panel(
            "Work",
            "How long the ready replicas need for the prompts that run and wait. Near queue.max_wait_s (10 s) no "
            "replica has room. Missing while none is ready.",
            (Query(_demand("work_seconds"), "{{pool}}"),),
            unit="s",
        ),
        Panel(
            "Prompt tokens to compute",
            "Of running requests, and of those that wait.",
            (
                Query(_demand("running_tokens"), "running {{pool}}"),
                Query(_demand("waiting_tokens"), "waiting {{pool}}"),
            ),
        ),
        Panel(
            "Replicas for requests",
            "Replicas that are ready and not drained. Those that are drained get no new requests.",
            (
                Query(_demand("ready_replicas"), "ready {{pool}}"),
                Query(f"sum({told('kvgate_replica_draining', where=JOB)})", "drained, of all pools"),
            ),
        ),
    ),
)

_QUEUE = Row(
    "The queue",
    (
        Panel(
            "Wait p50 by band",
            "Of the requests that had to wait and got room. None while none waited.",
            (Query(quantile(0.5, _WAIT, "band"), "{{band}}"),),
            unit="s",
        ),
        Panel(
            "Wait p99 by band",
            "Of the requests that had to wait and got room. Near queue.wait_s (60 s) a band starves.",
            (Query(quantile(0.99, _WAIT, "band"), "{{band}}"),),
            unit="s",
        ),
        Panel(
            "Granted, by band",
            "Requests per second that had to wait and got room. The others went to a replica at once.",
            (Query(rate(f"{_WAIT}_count", "band"), "{{band}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Refusals, by reason",
            "Per second. full: queue.max_waiting; unreachable: the wait would be too long; waited: it was. Of one "
            "tenant: full_tenant, and requests and tokens, its limits of a minute. Good: none but those of a tenant.",
            (Query(rate("kvgate_queue_refusals_total", "reason"), "{{reason}}"),),
            unit="reqps",
            stacked=True,
            width=12,
        ),
        Panel(
            "Waiting, by gateway",
            "Requests of each gateway that wait. All gateways share one queue, so this says where clients are.",
            (Query(f"sum by (instance) (kvgate_queue_waiting_requests{{{_POOL}}})", "{{instance}}"),),
            stacked=True,
            width=12,
        ),
    ),
)

QUEUE = Dashboard(
    "kvgate-queue",
    "Queue",
    "What all gateways are asked for, what the replicas can take, and who waits.",
    (JOBS, POOLS),
    (_DEMAND, _QUEUE),
)
