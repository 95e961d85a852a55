"""The gateways and replicas: their state and their load."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import ENGINE, ENGINES, JOB, JOBS, POOLS, REPLICA, REPLICAS, rate, share, told

_READY = told("kvgate_replica_ready")
_EXACT = told("kvgate_replica_exact")
_WINDOW = f"{{{REPLICA}}}[$__rate_interval]"

_NOW = Row(
    "Now",
    (
        Panel(
            "Gateways",
            "That are scraped, and have a store.",
            (
                Query(f"count(kvgate_store_up{{{JOB}}})", "running"),
                Query(f"sum(kvgate_store_up{{{JOB}}})", "with store"),
            ),
            kind="stat",
            width=6,
            height=4,
            good_from=1,
        ),
        Panel(
            "Replicas ready",
            "As the gateways' health checks find them.",
            (Query(f"sum({_READY})", "ready"), Query(f"count({_READY})", "known")),
            kind="stat",
            width=6,
            height=4,
            good_from=1,
        ),
        Panel(
            "Replicas exact",
            "Whose agent tells what they hold. Good: all that are ready.",
            (Query(f"sum({_EXACT})", "exact"),),
            kind="stat",
            width=6,
            height=4,
            good_from=1,
        ),
        Panel(
            "Breakers open",
            "Replicas that failed too many of their requests and are left alone for a while. Good: 0.",
            (Query(f"sum({told('kvgate_breaker_open')})", "open"),),
            kind="stat",
            width=6,
            height=4,
            good_to=1,
        ),
        Panel(
            "Replicas",
            "ready, exact, breaker: 1 is yes. running and waiting are the engine's own figures, as its agent reads "
            "them (none without an agent); in flight is what all gateways have placed there and not yet given back.",
            (
                Query(told("kvgate_replica_info", "replica, pool, role"), "known"),
                Query(_READY, "ready"),
                Query(_EXACT, "exact"),
                Query(told("kvgate_breaker_open"), "breaker"),
                Query(told("kvgate_replica_active_requests"), "in flight"),
                Query(told("kvgate_engine_running_requests"), "running"),
                Query(told("kvgate_engine_waiting_requests"), "waiting"),
                Query(told("kvgate_engine_kv_cache_usage_ratio"), "KV in use"),
            ),
            kind="table",
            width=12,
        ),
        Panel(
            "State of replicas",
            "exact: its agent tells what it holds. degraded: it serves, and its ownership is predicted. Not ready: no "
            "request goes there while another is. Drained: it gets no new requests until `kvgate undrain`.",
            (Query(f"{_READY} + {_READY} * {_EXACT} + 3 * {told('kvgate_replica_draining')}", "{{replica}}"),),
            kind="state-timeline",
            states={0: ("not ready", "red"), 1: ("degraded", "orange"), 2: ("exact", "green"), 3: ("drained", "blue")},
            max=3,
            width=12,
        ),
    ),
)

_LOAD = Row(
    "Load",
    (
        Panel(
            "In flight",
            "Requests on a replica, of all gateways.",
            (Query(told("kvgate_replica_active_requests"), "{{replica}}"),),
        ),
        Panel(
            "Running in the engine",
            "Requests that the engine computes. Well below those in flight, for long: requests wait, or others than "
            "KVGate send there.",
            (Query(told("kvgate_engine_running_requests"), "{{replica}}"),),
        ),
        Panel(
            "Waiting in the engine",
            "Good: 0. More on all replicas: they are too few. More on one: see Routing, Balance.",
            (Query(told("kvgate_engine_waiting_requests"), "{{replica}}"),),
        ),
        Panel(
            "KV cache in use",
            "The share that running requests hold. Near 1 the engine preempts and queues.",
            (Query(told("kvgate_engine_kv_cache_usage_ratio"), "{{replica}}"),),
            unit="percentunit",
            max=1,
        ),
        Panel(
            "Prefix cache hits",
            "Of the tokens that the engine looked up, those it found: all of its requests, KVGate's or not.",
            (
                Query(
                    share(
                        f"max by (replica) (rate(kvgate_engine_prefix_cache_hits_tokens{_WINDOW}))",
                        f"max by (replica) (rate(kvgate_engine_prefix_cache_queries_tokens{_WINDOW}))",
                    ),
                    "{{replica}}",
                ),
            ),
            unit="percentunit",
            max=1,
        ),
        Panel(
            "Prompt tokens",
            "Per second, of requests that KVGate placed there.",
            (Query(rate("kvgate_prompt_tokens_total", "replica", REPLICA), "{{replica}}"),),
        ),
    ),
)

_ENGINES = Row(
    "Engines, by what they tell Prometheus themselves",
    (
        Panel(
            "Tokens generated",
            "Per second. The fleet's throughput.",
            (Query(rate("vllm:generation_tokens_total", "instance", ENGINE), "{{instance}}"),),
            stacked=True,
        ),
        Panel(
            "Preemptions",
            "Per second. Requests that lost their place as KV memory ran out, and are computed again. Good: none.",
            (Query(rate("vllm:num_preemptions_total", "instance", ENGINE), "{{instance}}"),),
        ),
        Panel(
            "Requests finished",
            "Per second, by reason. abort: the client hung up, or a gateway gave up.",
            (Query(rate("vllm:request_success_total", "finished_reason", ENGINE), "{{finished_reason}}"),),
            unit="reqps",
            stacked=True,
        ),
    ),
)

_GATEWAYS = Row(
    "Gateways",
    (
        Panel(
            "Requests by gateway",
            "Per second. Even behind a load balancer that spreads requests; any spread routes as well.",
            (Query(rate("kvgate_requests_total", "instance"), "{{instance}}"),),
            unit="reqps",
            stacked=True,
            width=12,
        ),
        Panel(
            "Ready replicas by gateway",
            "All gateways see the same. One that stays behind cannot reach what the others do.",
            (Query(f"sum by (instance) (kvgate_replica_ready{{{REPLICA}}})", "{{instance}}"),),
            width=12,
        ),
        Panel(
            "Models",
            "Without a ready replica, and with replicas that run different models under one name. Good: none.",
            (
                Query(f"max(kvgate_models_down{{{JOB}}})", "without a ready replica"),
                Query(f"max(kvgate_models_in_several_pools{{{JOB}}})", "in several pools"),
            ),
            width=12,
        ),
        Panel(
            "Sources of replicas",
            "Where replicas are looked up (discovery), by gateway. Where that fails, those found last stay in use.",
            (Query(f"kvgate_discovery_up{{{JOB}}}", "{{instance}} {{source}}"),),
            kind="state-timeline",
            states={0: ("fails", "red"), 1: ("tells", "green")},
            max=1,
            width=12,
        ),
        Panel(
            "Connections to the store",
            "Per second. Each is a reconnect. Good: none.",
            (Query(rate("kvgate_store_connections_total", "instance"), "{{instance}}"),),
            width=12,
        ),
    ),
)

FLEET = Dashboard(
    "kvgate-fleet",
    "Fleet",
    "Gateways and replicas: who is there, in what state, and how busy.",
    (JOBS, POOLS, REPLICAS, ENGINES),
    (_NOW, _LOAD, _ENGINES, _GATEWAYS),
)
