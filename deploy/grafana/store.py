"""The Redis that gateways share, with its chunks, and the event streams that keep the map true."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import JOB, JOBS, POOLS, REPLICA, REPLICAS, rate

_SCRIPTS = f'{JOB},command=~"eval|evalsha"'


def _of_store(metric: str, by: str = "") -> str:
    """One process watches the store. If another one takes over, the series continues."""
    return f"max{f' by ({by})' if by else ''} ({metric}{{{JOB}}})"


_MEMORY = Row(
    "Memory",
    (
        Panel(
            "Used memory",
            "Redis' own figures. Full is normal where chunks are stored: used then stays at maxmemory, as long as what "
            "can be evicted (keys with a TTL, from samples) is well above nothing. A maxmemory of 0 is no limit.",
            (
                Query(_of_store("kvgate_store_used_memory_bytes"), "used"),
                Query(_of_store("kvgate_store_maxmemory_bytes"), "maxmemory"),
                Query(_of_store("kvgate_store_evictable_bytes"), "evictable"),
            ),
            unit="bytes",
        ),
        Panel(
            "Memory by kind",
            "From samples: coordination (KVGate's own keys, never evicted), chunks of LMCache's, and others. Good: "
            "coordination far below half of maxmemory.",
            (Query(_of_store("kvgate_store_estimated_bytes", "kind"), "{{kind}}"),),
            unit="bytes",
            stacked=True,
        ),
        Panel(
            "Keys by kind",
            "From samples. Coordination grows with what the replicas' caches hold, and stops there.",
            (Query(_of_store("kvgate_store_estimated_keys", "kind"), "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "Evictions and refusals",
            "Keys per second that Redis evicted, by its own count and by kind as it told of them, those whose TTL ran "
            "out, and commands refused as memory was full. Good: chunks alone are evicted, nothing is refused.",
            (
                Query(rate("kvgate_store_evicted_keys_total"), "evicted"),
                Query(rate("kvgate_store_evictions_heard_total", "kind"), "evicted: {{kind}}"),
                Query(rate("kvgate_store_expired_keys_total"), "expired"),
                Query(rate("kvgate_store_refused_commands_total"), "refused"),
            ),
            unit="ops",
        ),
        Panel(
            "Conditions",
            "What the watcher says should be done something about; docs/store.md says what. Good: all clear.",
            (Query(_of_store("kvgate_store_condition", "condition"), "{{condition}}"),),
            kind="state-timeline",
            states={0: ("clear", "green"), 1: ("holds", "red")},
            max=1,
            width=16,
        ),
    ),
)

_WORK = Row(
    "Work",
    (
        Panel(
            "Time per script",
            "What coordination's scripts take of Redis on average: every placement waits for one, and for those before "
            "it. Good: under 0.3 ms.",
            (
                Query(
                    f"{rate('kvgate_store_command_seconds_total', where=_SCRIPTS)}"
                    f" / {rate('kvgate_store_commands_total', where=_SCRIPTS)}",
                    "mean",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Redis' time by command",
            "The share of its one core. eval and evalsha are coordination; get, set and exists move chunks. Good: "
            "under 0.6 together; above, placements queue.",
            (Query(rate("kvgate_store_command_seconds_total", "command"), "{{command}}"),),
            unit="percentunit",
            stacked=True,
        ),
        Panel(
            "Commands",
            "Per second.",
            (Query(rate("kvgate_store_commands_total", "command"), "{{command}}"),),
            unit="ops",
            stacked=True,
        ),
        Panel(
            "Bytes",
            "Per second. Received are mostly chunks being stored, sent are chunks being loaded.",
            (
                Query(rate("kvgate_store_received_bytes_total"), "received"),
                Query(rate("kvgate_store_sent_bytes_total"), "sent"),
            ),
            unit="Bps",
        ),
        Panel(
            "Reads that found their key",
            "Chunks' and coordination's together: of interest where chunks are most of the reads.",
            (
                Query(
                    f"{rate('kvgate_store_keyspace_hits_total')} / ({rate('kvgate_store_keyspace_hits_total')}"
                    f" + {rate('kvgate_store_keyspace_misses_total')})",
                    "found",
                ),
            ),
            unit="percentunit",
            max=1,
        ),
        Panel(
            "Store as gateways see it",
            "1 while a gateway's placements go through the store, 0 while they fall back.",
            (Query(f"kvgate_store_up{{{JOB}}}", "{{instance}}"),),
            kind="state-timeline",
            states={0: ("away", "red"), 1: ("up", "green")},
            max=1,
        ),
    ),
)

_CHUNKS = Row(
    "Chunks",
    (
        Panel(
            "Known chunks",
            "Chunks that the watcher knows by name, of at most 200 000.",
            (Query(_of_store("kvgate_store_known_chunks"), "known"),),
        ),
        Panel(
            "Largest chunk",
            "Met in the last minute. Good: up to 4 MiB, as Redis counts it 5; a placement waits behind each that is "
            "read.",
            (Query(_of_store("kvgate_store_largest_chunk_bytes"), "largest"),),
            unit="bytes",
        ),
        Panel(
            "TTLs",
            "Per second: chunks that came without a TTL and were given one (good: none), and chunks that were read "
            "late in their life and live on.",
            (
                Query(rate("kvgate_store_ttls_given_total"), "given"),
                Query(rate("kvgate_store_chunks_renewed_total"), "renewed"),
            ),
            unit="ops",
        ),
    ),
)

_TRANSITIONS = f"max by (replica) (rate(kvgate_engine_key_transitions{{{REPLICA}}}[$__rate_interval]))"
_EVENTS = Row(
    "Events",
    (
        Panel(
            "Event delay",
            "From an engine's KV event to the map: the slowest of the last 15 to 30 s, as the replica's agent measures "
            "it. Good: below 100 ms. Constant seconds on one replica are the clocks of its hosts.",
            (Query(f"max by (replica) (kvgate_engine_event_delay_seconds{{{REPLICA}}})", "{{replica}}"),),
            unit="s",
        ),
        Panel(
            "Key transitions",
            "Prefixes per second that became resident, moved or went, by replica. Steady and high with few new "
            "prompts: the caches are too small for what is asked for.",
            (Query(_TRANSITIONS, "{{replica}}"),),
        ),
        Panel(
            "Maintenance behind",
            "How long the oldest task of a pool has been due: trimming, sweeping, removing what was forgotten. Good: "
            "seconds; minutes after many replicas restarted at once.",
            (Query(_of_store("kvgate_chores_lag_seconds", "pool"), "{{pool}}"),),
            unit="s",
        ),
        Panel(
            "Residency doubted",
            "Per second: prefixes that events had promised and that were not there. Good: none.",
            (Query(rate("kvgate_residency_doubts_total", "replica", REPLICA), "{{replica}}"),),
        ),
    ),
)

STORE = Dashboard(
    "kvgate-store",
    "Store",
    "The Redis that coordination and LMCache's chunks share, and how the map follows the engines.",
    (JOBS, POOLS, REPLICAS),
    (_MEMORY, _WORK, _CHUNKS, _EVENTS),
)
