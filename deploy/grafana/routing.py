"""Whether routing pays off: cached tokens, the reasons of placements, and the balance of load."""

from __future__ import annotations

from deploy.grafana.panels import Dashboard, Panel, Query, Row
from deploy.grafana.promql import (
    ENGINE,
    ENGINES,
    JOB,
    JOBS,
    POOLS,
    REPLICA,
    REPLICAS,
    mean,
    rate,
    share,
    share_of,
    told,
)

_PROMPT = rate("kvgate_prompt_tokens_total", where=REPLICA)
_CACHED = rate("kvgate_cached_tokens_total", where=REPLICA)
_PREDICTED = rate("kvgate_predicted_cached_tokens_total", where=REPLICA)
_OVER = rate("kvgate_prediction_error_tokens_sum", where=f'{JOB},direction="over"')
_UNDER = rate("kvgate_prediction_error_tokens_sum", where=f'{JOB},direction="under"')
_PASSED_OVER = rate("kvgate_passed_over_tokens_total", where=REPLICA)
_AUDITED = rate("kvgate_prediction_error_tokens_count")
_ACTIVE = told("kvgate_replica_active_requests")
_ELSEWHERE = rate("kvgate_prefills_total", where=f'{JOB},outcome="computed"')
_BY_ROLE = (
    f"max by (replica, role) (kvgate_replica_active_requests{{{REPLICA}}} "
    f"* on (job, instance, replica) group_left (role) kvgate_replica_info{{{REPLICA}}})"
)
"""Joined at each gateway: two of them may name two roles for a while."""
_TRANSFER = "vllm:nixl_xfer_time_seconds"

_CACHE = Row(
    "Cache",
    (
        Panel(
            "Cache share",
            "The share of prompt tokens that engines served from their caches, as they count them themselves: what all "
            "of this is for. Good is what the same load gave when every conversation and document had a replica of its "
            "own; round robin over N replicas is the value to be well above. Engines that do not report cached tokens "
            "(vLLM: --enable-prompt-tokens-details) count as nothing cached.",
            (Query(share(_CACHED, _PROMPT), "cached"), Query(share(_PREDICTED, _PROMPT), "predicted")),
            unit="percentunit",
            max=1,
            width=12,
        ),
        Panel(
            "Prompt tokens",
            "Per second: what engines served from cache, and what they computed. Computed is what costs.",
            (Query(_CACHED, "from cache"), Query(f"{_PROMPT} - {_CACHED}", "computed")),
            stacked=True,
            width=12,
        ),
        Panel(
            "Cache share by replica",
            "Alike where the load is; a replica that stays far below has a smaller cache, has just been started, or "
            "forgets (see Wrong predictions).",
            (
                Query(
                    share(
                        rate("kvgate_cached_tokens_total", "replica", REPLICA),
                        rate("kvgate_prompt_tokens_total", "replica", REPLICA),
                    ),
                    "{{replica}}",
                ),
            ),
            unit="percentunit",
            max=1,
            width=12,
        ),
        Panel(
            "Prompt tokens computed by replica",
            "Per second. The work that is left after caching: even, while there is enough of it to be shared.",
            (
                Query(
                    f"{rate('kvgate_prompt_tokens_total', 'replica', REPLICA)}"
                    f" - {rate('kvgate_cached_tokens_total', 'replica', REPLICA)}",
                    "{{replica}}",
                ),
            ),
            stacked=True,
            width=12,
        ),
    ),
)

_WHY = Row(
    "Decisions",
    (
        Panel(
            "Placements by reason",
            "Per second. hit: to a replica that holds most of the prompt; partial_hit, rebalanced: to another, with "
            "some or nothing of it, by the policy (prefix_kv_aware: because that cost less); stored: no replica holds "
            "any of it, and it can be loaded from Redis; cold: it is cached nowhere; pinned: only one replica may "
            "serve it; last_resort: no replica was healthy; fallback: without the store. Good: hits, and cold for "
            "new prompts.",
            (Query(rate("kvgate_decisions_total", "why"), "{{why}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Placements by state",
            "Per second. exact: an agent tells what the replica holds; degraded: nobody does, ownership is predicted; "
            "fallback: the store did not decide. Good: exact alone.",
            (Query(rate("kvgate_decisions_total", "state"), "{{state}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Placements by policy",
            "Per second. prefix_kv_aware, unless another was configured or asked for in a header.",
            (Query(rate("kvgate_decisions_total", "policy"), "{{policy}}"),),
            unit="reqps",
            stacked=True,
        ),
    ),
)

_REGRET = Row(
    "Regret",
    (
        Panel(
            "Computed although it was promised",
            "The share of prompt tokens that the map had promised to be cached and the engine computed: what wrong "
            "predictions cost. Good: under 1 %. Beside it, what was cached beyond what the map knew; it knows prompts "
            "at their boundaries only, so a few percent are no mistake.",
            (
                Query(share(_OVER, _PROMPT), "promised, not cached"),
                Query(share(_UNDER, _PROMPT), "cached, not promised"),
            ),
            unit="percentunit",
        ),
        Panel(
            "Passed over",
            "The share of prompt tokens that another replica held and the one chosen did not: what sparing the other "
            "one cost. It buys an even load, and copies of what many ask for.",
            (Query(share(_PASSED_OVER, _PROMPT), "of all prompt tokens"),),
            unit="percentunit",
        ),
        Panel(
            "Sent past who held most",
            "The share of placements that left the replica with the longest match on purpose, as it was too busy for "
            "that to pay off. Low while load is even; it grows as a prefix that many want gains owners. High for long: "
            "a few replicas hold what everybody asks for.",
            (
                Query(
                    share_of("kvgate_decisions_total", 'why=~"partial_hit|rebalanced"'),
                    "of all placements",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Wrong predictions",
            "The share of audited answers whose cached tokens lay outside of what the map promised, by cause. "
            "in_flight comes with bursts: a prompt was promised while it was still being computed. evicted on an exact "
            "replica, untold and never_computed should be rare; restarted comes with restarts. Good: under 2 % without "
            "in_flight.",
            (
                Query(
                    share(rate("kvgate_wrong_predictions_total", "cause", REPLICA), f"scalar({_AUDITED})"), "{{cause}}"
                ),
            ),
            unit="percentunit",
            stacked=True,
        ),
    ),
)

_BALANCE = Row(
    "Balance",
    (
        Panel(
            "Requests in flight by replica",
            "Of all gateways together. Close to each other under load; no replica is given more than 1.5 times the "
            "mean once it has more than 8.",
            (Query(_ACTIVE, "{{replica}}"),),
        ),
        Panel(
            "Imbalance",
            "The busiest replica's requests in flight over the mean. 1 is even. Of interest under load only: with few "
            "requests in flight it is high for good reason. Choose one pool: those of two models do not share load.",
            (Query(f"max({_ACTIVE}) / avg({_ACTIVE})", "busiest / mean"),),
        ),
        Panel(
            "Retries",
            "Attempts per second that failed before their first byte and went elsewhere, by reason. Clients notice "
            "only that it took longer. Good: none.",
            (Query(rate("kvgate_retries_total", "reason"), "{{reason}}"),),
            unit="reqps",
        ),
    ),
)

_PAIRS = Row(
    "Pairs of prefill and decode (no data: no prompt was computed by another replica)",
    (
        Panel(
            "Where prompts are computed",
            "Placements per second: by a prefill replica, or where the request is decoded, and why, in the words of "
            "docs/disaggregation.md. Good: long new prompts by prefill replicas. Much no_room: there are too few.",
            (
                Query(_ELSEWHERE, "by a prefill replica"),
                Query(rate("kvgate_unpaired_total", "why"), "{{why}}"),
            ),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Failed prefills",
            "The share of prefills without use for the replica that decodes: it computes the prompt itself. failed: no "
            "usable answer; refused: not taken, or no reference (is the NixlConnector configured?); left: it died or "
            "was too late, or the client left; unstored: LMCache had not stored it in time. Good: none.",
            (
                Query(
                    share(
                        rate("kvgate_prefills_total", "outcome", f'{JOB},outcome!="computed"'),
                        f"scalar({rate('kvgate_prefills_total')})",
                    ),
                    "{{outcome}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
        ),
        Panel(
            "Load of a role",
            "The mean requests in flight on a replica of each role; a prompt computed for another replica counts "
            "at both. Prefill far above decode: first tokens wait, so give prefill more replicas, or the reverse.",
            (Query(f"avg by (role) ({_BY_ROLE})", "{{role}}"),),
        ),
        Panel(
            "Time of a transfer",
            "The mean time in which a decoding engine fetches a prompt's KV by NIXL, as it tells itself. It grows when "
            "the network is too slow or too full: then a prompt may be computed faster than it is fetched.",
            (Query(mean(_TRANSFER, ENGINE, "instance"), "{{instance}}"),),
            unit="s",
        ),
    ),
)

ROUTING = Dashboard(
    "kvgate-routing",
    "Routing",
    "What routing by what replicas hold brings, and why requests go where they go.",
    (JOBS, POOLS, REPLICAS, ENGINES),
    (_CACHE, _WHY, _PAIRS, _REGRET, _BALANCE),
)
