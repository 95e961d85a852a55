"""Each possible fault, alone in a cluster that is otherwise healthy: the doctor finds this fault and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.engine.kv_transfers import KvTransfers
from coordinator.redis.info import NOTHING_KNOWN as NO_INFO
from coordinator.registry import ReplicaFigures
from gateway.doctor.evidence import Evidence, FailingPrefill, LmcacheEvidence, Unknown
from gateway.doctor.examine import examine, kinds
from gateway.settings.gateway_settings import build_settings
from tests.gateway.doctor.cluster import (
    HASH,
    HEALTHY,
    NOW_MS,
    POOL,
    REDIS,
    UNREADABLE,
    card,
    chunk,
    info,
    replica,
    told,
    with_gateway,
    with_redis,
    with_replica,
    with_snapshots,
    with_state,
)

GIB = 2**30


def unfollowed(**changes: Any) -> Evidence:
    pool = replace(with_state(agents=None).pools[0], replicas=with_replica(**changes).pools[0].replicas)
    return replace(HEALTHY, pools=(pool,))


FOUND = {"discovery": {"kubernetes": {"service": "replica"}}}
LIMITED = {"name": "a", "limits": {"concurrency": 8}}
SPENDING = {"name": "a", "budgets": [{"per": "month", "money": 5}]}
PRICED: dict[str, Any] = {"billing": {"prices": [{"model": "sim", "output_per_mtok": 1}]}}
LIMITED_KEY = {
    "api_keys": [{"name": "k", "sha256": "0" * 64, "tenant": "b", "limits": {"concurrency": 1}}],
    "share_cache": True,
}


def with_settings(**sections: Any) -> Evidence:
    key = {"name": "k", "tenant": "a", "sha256": "0" * 64}
    settings = build_settings({"security": {"api_keys": [key], "share_cache": True}, **sections}, {})
    return replace(HEALTHY, settings=settings)


def counted(tokens: float, prompt_tokens: float) -> dict[str, float]:
    prompts = tokens // prompt_tokens
    return {"prefix_queries_tokens": tokens, "prefix_hits_tokens": 0.0, "prefills": prompts - 1, "running": 1.0}


def unheard_while_computing(*tokens_at_each_snapshot: int, prompt_tokens: int = 500, seq: int = 100) -> Evidence:
    snapshots = []
    for snapshot, tokens in zip(POOL.snapshots, tokens_at_each_snapshot, strict=True):
        agents = snapshot.state.agents | {"r1": replace(snapshot.state.agents["r1"], seq=seq)}
        figures = ReplicaFigures({}, snapshot.figures.engines | {"r1": counted(tokens, prompt_tokens)})
        snapshots.append(replace(snapshot, state=replace(snapshot.state, agents=agents), figures=figures))
    return replace(HEALTHY, pools=(replace(POOL, snapshots=tuple(snapshots)),))


def too_old(**of_its_agent: Any) -> Evidence:
    """A replica of an old version, and its agent."""
    pool = with_state(agents=of_its_agent).pools[0]
    replicas = tuple(replace(each, version="0.29.1") if each.id == "r1" else each for each in pool.replicas)
    return replace(HEALTHY, pools=(replace(pool, replicas=replicas),))


def another_pool() -> Evidence:
    other = replace(replica("r9"), pool="n", cards=card(root="/models/m"))
    here = POOL.snapshots[0].state
    state = replace(
        here,
        replicas={"r9": replace(here.replicas["r0"], replica="r9")},
        agents={"r9": here.agents["r0"]},
    )
    figures = ReplicaFigures({}, {})
    snapshots = tuple(replace(snapshot, pool="n", state=state, figures=figures) for snapshot in POOL.snapshots)
    return replace(HEALTHY, pools=(POOL, replace(POOL, name="n", replicas=(other,), snapshots=snapshots)))


def cached(**labels: str) -> Evidence:
    known = replica("r1").cache
    return with_replica(cache={**known, **labels})


def with_chunk(name: str, **of_it: Any) -> Evidence:
    return replace(HEALTHY, redis=chunk(name, **of_it))


def paired(protocol: str, **connectors: list[str]) -> Evidence:
    """r0 computes prompts for r1; each with these connectors, as its metrics tell."""
    roles = dict(zip(("r0", "r1"), ("prefill", "decode"), strict=True))
    evidence = with_gateway(pairs_protocol=protocol, roles=roles)
    told = (replace(replica(name), transfers=KvTransfers(frozenset(has), 0, 0)) for name, has in connectors.items())
    return replace(evidence, pools=(replace(POOL, replicas=tuple(told)),))


def of_rust_front_ends(evidence: Evidence) -> Evidence:
    [pool] = evidence.pools
    untold = tuple(replace(each, cache=Unknown("not told")) for each in pool.replicas)
    return replace(evidence, pools=(replace(pool, replicas=untold),))


def with_lmcache(*servers: LmcacheEvidence) -> Evidence:
    return replace(HEALTHY, lmcache=servers)


FAILING = {"r1": FailingPrefill(20, {"no_reference": 18})}
GONE = with_state(replicas={"state": "dead"})
UNLIMITED = told(maxmemory="0", used_memory=str(5 * GIB), evicted_keys="0")
AWAY = replace(POOL, snapshots=())

# The finding, the evidence, and other findings that follow from the same fault.
CASES: list[tuple[str, Evidence, set[str]]] = [
    ("redis-unreachable", replace(HEALTHY, redis=Unknown("connection refused"), pools=(AWAY,)), set()),
    ("redis-too-old", told(redis_version="6.0.16"), set()),
    ("redis-before-7", told(redis_version="6.2.14"), set()),
    ("redis-read-only", told(role="slave", master_host="redis-0", master_port="6379"), set()),
    ("redis-cannot-save", told(rdb_last_bgsave_status="err"), set()),
    ("redis-cannot-save", told(aof_last_write_status="err"), set()),
    ("redis-without-limit", told(maxmemory="0"), set()),
    ("redis-without-limit", replace(UNLIMITED, redis=replace(UNLIMITED.redis, sampled_keys=())), set()),
    ("redis-limit-near-machine", told(maxmemory=str(7 * GIB)), set()),
    ("redis-evicts-all", told(maxmemory_policy="allkeys-lru"), set()),
    ("redis-evicts-all", told(maxmemory_policy="allkeys-random"), set()),
    ("redis-policy", told(maxmemory_policy="noeviction"), set()),
    ("redis-policy", told(maxmemory_policy="volatile-lfu"), set()),
    ("redis-evicts-own", with_redis(sampled_keys=()), set()),
    ("redis-refused-writes", told(errorstat_OOM="count=12"), set()),
    ("redis-loose-hashes", with_redis(hash_value_limit_bytes=64), set()),
    ("redis-slow", with_redis(ping_ms=11.0), set()),
    ("chunks-without-ttl", with_chunk(f"kvchunk@org/m@01000100@0@{HASH}@salt", has_ttl=False), set()),
    ("chunks-without-ttl", with_chunk("m2@1@0@-12ff@bfloat16", has_ttl=False), set()),
    ("chunks-without-ttl", with_chunk("/models/m2@v1@1@0@12ff@bfloat16", has_ttl=False), set()),
    ("chunks-of-redis-adapter", with_chunk("m2@1@0@12ff@bfloat16kv_bytes"), set()),
    ("chunks-of-redis-adapter", with_chunk("m2@1@0@12ff@bfloat16@tag%ametadata"), set()),
    ("chunks-too-large", with_chunk(f"kvchunk@org/m@01000100@1@{HASH}", size_bytes=15 * 2**20), set()),
    ("chunks-named-differently", with_chunk(f"kvchunk@/models/m@01000100@0@{HASH}"), set()),
    ("chunks-named-differently", with_chunk(f"kvchunk@org/m@02000200@0@{HASH}"), set()),
    ("chunks-named-differently", with_chunk(f"org/m@01000100@0@{HASH}"), set()),
    ("chunks-named-differently", with_chunk("org/m@1@0@ff@bfloat16"), set()),
    ("gateway-unreachable", with_gateway(problem="no answer", id=""), set()),
    ("gateway-not-ready", with_gateway(is_ready=False, reasons=("this gateway is shutting down",)), set()),
    ("gateway-without-redis", with_gateway(store_problem="connection refused"), set()),
    ("gateway-in-other-redis", with_gateway(id="gw1.cccccc"), set()),
    ("watch-warns", with_gateway(store_warnings={"coordination_large": "KVGate's keys take 1200 MiB"}), set()),
    ("gateway-versions-differ", with_gateway(version="0.2.0"), set()),
    ("gateway-versions-differ", with_gateway(version="0.2.0", settings={"policy": "aa", "replicas": "cc"}), set()),
    ("gateway-settings-differ", with_gateway(settings={"policy": "aa", "replicas": "cc"}), set()),
    ("gateway-keys-differ", with_gateway(keys=("k1", "k3")), set()),
    ("gateway-views-differ", with_gateway(exact=frozenset({"r0"})), set()),
    ("gateway-config-not-used", with_gateway(config_problems=("port: must be a whole number",)), set()),
    ("gateway-needs-restart", with_gateway(needs_a_restart=("queue.wait_s",)), set()),
    ("gateway-keys-older", with_gateway(has_older_keys=True), set()),
    ("records-ignored", with_gateway(ignored_records={"key/k-1": "its signature is not by the secret"}), set()),
    ("replica-unhealthy", with_replica(problem="/health answered 503"), set()),
    ("replica-unhealthy", with_replica(problem="no answer within 2 s", answers=False), set()),
    ("vllm-names-no-sessions", with_replica(version="0.29.1"), {"vllm-versions-differ"}),
    ("vllm-names-no-sessions", too_old(mode="unconfirmed"), {"vllm-versions-differ"}),
    ("vllm-names-no-sessions", too_old(mode="none"), {"vllm-versions-differ"}),
    ("vllm-versions-differ", with_replica(version="0.33.0"), set()),
    ("prefix-caching-off", cached(enable_prefix_caching="False"), set()),
    ("events-off", with_replica(endpoints=()), set()),
    ("events-off", unfollowed(endpoints=()), set()),
    ("events-exposed", with_replica(open_endpoints={"tcp://*:5557": "10.0.0.5 port 5557"}), set()),
    ("replica-id-taken", with_gateway(taken_ids={"r1": "another engine"}), set()),
    ("replica-dead", GONE, set()),
    ("replica-dead", replace(GONE, gateways=with_gateway(failing_prefills=FAILING).gateways), set()),
    ("replica-hangs", with_state(replicas={"state": "hung"}), set()),
    ("replica-asleep", with_state(replicas={"state": "asleep"}), set()),
    ("replica-slow", with_snapshots(slow=("r1",)), set()),
    ("replica-drained", with_snapshots(drained_since_ms={"r1": NOW_MS - 3_700_000}), set()),
    ("breaker-open", with_state(open_until_ms=NOW_MS + 60_000), set()),
    ("no-gateway", with_snapshots(gateway_leases_ms={}), {"gateway-in-other-redis"}),
    ("records-unreadable", with_snapshots(unreadable=(UNREADABLE,)), set()),
    ("hash-settings-differ", cached(block_size="32"), set()),
    ("hash-settings-differ", cached(prefix_caching_hash_algo="xxhash"), set()),
    ("replicas-serve-differently", with_replica(cards=card("other")), set()),
    ("replicas-serve-differently", with_replica(cards=card(max_model_len=8192)), set()),
    ("name-in-several-pools", another_pool(), set()),
    ("name-in-several-pools", with_gateway(several_pools={"m": ("m-1", "m-2")}), set()),
    ("model-down", with_gateway(models_down=("other",)), set()),
    ("model-on-fallback", with_gateway(models_down=("other",), answered_by={"other": ("m",)}), set()),
    ("fallback-unknown", with_gateway(unknown_fallbacks={"m": ("smal",)}), set()),
    ("backend-without-replicas", with_gateway(without_replicas={"chat": ("v2",)}), set()),
    ("pool-only-prefill", with_gateway(roles={"r0": "prefill", "r1": "prefill"}), set()),
    ("pool-lacks-role", with_gateway(roles={"r1": "decode"}), set()),
    ("pool-lacks-role", with_gateway(roles={"r1": "prefill"}), set()),
    ("pairs-other-connector", paired("nixl", r0=[], r1=["nixl"]), set()),
    ("pairs-other-connector", paired("nixl", r0=["nixl"], r1=["mooncake"]), set()),
    ("pairs-other-connector", paired("mooncake", r0=[], r1=["nixl"]), set()),
    ("pairs-other-connector", paired("store", r0=["nixl"], r1=[]), set()),
    ("pairs-fail", with_gateway(failing_prefills=FAILING), set()),
    ("pairs-not-fetched", with_replica(transfers=KvTransfers(frozenset({"nixl"}), done=3, expired=5)), set()),
    ("weights-approximate", with_gateway(are_weights_approximate=True), set()),
    ("replica-not-registered", with_state(replicas=None, agents=None), set()),
    ("replica-unreached", with_gateway(not_ready={"r7": "connection refused"}), set()),
    ("agent-missing", with_state(agents=None), set()),
    ("agent-missing", with_state(agents={"incarnation": "1800"}), set()),
    ("agent-gone", with_state(agents={"lease_until_ms": NOW_MS - 60_000}), set()),
    ("agent-deaf", with_state(agents={"mode": "none"}), set()),
    ("events-unconfirmable", with_state(agents={"mode": "partial"}), set()),
    ("events-unconfirmable", with_state(agents={"mode": "unconfirmed"}), set()),
    ("events-missing", with_state(agents={"seq": -1}), set()),
    ("events-missing", unheard_while_computing(*range(90_000, 90_500, 100), seq=-1), set()),
    ("events-missing", unheard_while_computing(9000, 10_000, 11_000, 13_000, 14_000), set()),
    ("agent-relearning", with_state(agents={"is_relearning": True}), set()),
    ("clock-skew", with_redis(clock_ahead_s=(3.0, 3.1)), set()),
    ("clock-skew", with_redis(clock_ahead_s=(-60.0, -58.0)), set()),
    ("redis-clock-stepped", with_snapshots(went_back=(NOW_MS - 60_000, 5000)), set()),
    ("lmcache-unreachable", with_lmcache(LmcacheEvidence("http://r0:5580", "no answer")), set()),
    (
        "lmcache-differs",
        with_lmcache(
            LmcacheEvidence("http://r0:5580", "", "256", "blake3"),
            LmcacheEvidence("http://r1:5580", "", "64", "blake3"),
        ),
        set(),
    ),
    ("tenant-without-key", with_settings(tenants=[{"name": "b"}]), set()),
    (
        "limits-per-pool",
        with_settings(tenants=[LIMITED], redis={"url": "redis+cluster://a:6379,b:6379"}),
        set(),
    ),
    (
        "limits-per-pool",
        with_settings(security=LIMITED_KEY, redis={"url": "redis+cluster://a:6379,b:6379"}),
        set(),
    ),
    (
        "limits-per-pool",
        with_settings(tenants=[SPENDING], **PRICED, redis={"url": "redis+cluster://a:6379,b:6379"}),
        set(),
    ),
    ("budget-without-price", with_settings(tenants=[SPENDING]), set()),
    ("budget-without-price", with_gateway(models_without_price=("sim",)), set()),
    (
        "budget-without-price",
        with_settings(tenants=[SPENDING], **PRICED, models=[{"name": "free", "backends": [{"match": {"model": "x"}}]}]),
        set(),
    ),
    ("queue-wait-unreached", with_settings(queue={"wait_s": 600}, timeouts={"request_s": 600}), set()),
    ("queue-hold-unreached", with_settings(queue={"hold_s": 600}, timeouts={"request_s": 600}, **FOUND), set()),
    ("queue-hold-in-vain", with_settings(queue={"hold_s": 60}), set()),
    ("keep-alive-unreached", with_settings(queue={"keep_alive_s": 60}), set()),
    ("keep-alive-unreached", with_settings(queue={"keep_alive_s": 90, "hold_s": 70}, **FOUND), set()),
    (
        "engine-priority-without-bands",
        with_settings(queue={"engine_priority": True, "bands": [{"name": "all"}], "default_band": "all"}),
        set(),
    ),
    ("queue-bound-unreached", with_settings(queue={"max_waiting": 10, "max_waiting_per_tenant": 11}), set()),
]


@pytest.mark.parametrize(("code", "evidence", "follows"), CASES, ids=[case[0] for case in CASES])
def test_what_is_wrong_is_found_and_nothing_else(code: str, evidence: Evidence, follows: set[str]) -> None:
    found = {finding.code for finding in examine(evidence).findings}
    assert found - follows == {code} - follows
    assert code in found


def test_there_is_a_case_for_every_finding() -> None:
    assert {case[0] for case in CASES} == {kind.code for kind in kinds()}


def test_every_finding_is_one_of_its_own() -> None:
    codes = [kind.code for kind in kinds()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("evidence", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_every_finding_says_what_is_so_and_fills_in_its_fix(evidence: Evidence) -> None:
    for finding in examine(evidence).findings:
        assert finding.what
        assert "{" not in finding.fix
        assert "\n" not in finding.why + finding.what


# -- healthy clusters ------------------------------------------------------------------------------------------


def test_of_a_healthy_cluster_nothing_is_said() -> None:
    diagnosis = examine(HEALTHY)
    assert (diagnosis.findings, diagnosis.unchecked) == ((), ())
    assert examine(with_settings(tenants=[LIMITED])).findings == ()
    assert diagnosis.looked_at == (
        "Redis (1000 random picks of 3 keys), 2 gateways, 2 replicas, 2 agents, 2 LMCache servers"
    )
    assert diagnosis.checks >= 40


@pytest.mark.parametrize(
    "evidence",
    [
        told(maxmemory_policy="volatile-ttl"),
        replace(
            told(maxmemory="0", evicted_keys="0"), redis=replace(REDIS, info=info({"maxmemory": "0"}), sampled_keys=())
        ),
        with_chunk(f"kvchunk@org/m@01000200@0@{HASH}"),
        with_chunk(f"kvchunk@another/model@01000100@0@{HASH}"),
        with_redis(clock_ahead_s=(-0.5, 3.0)),
        with_replica(version="0.32.0", endpoints=("ipc:///run/vllm/events",)),
        with_snapshots(drained_since_ms={"r1": NOW_MS - 3_500_000}),
        with_settings(queue={"hold_s": 60, "keep_alive_s": 65, "wait_s": 70, "engine_priority": True}, **FOUND),
        paired("nixl", r0=["nixl"], r1=["mooncake", "nixl"]),
        paired("mooncake", r0=[], r1=["mooncake"]),
        of_rust_front_ends(paired("nixl", r0=[], r1=[])),
        replace(another_pool(), gateways=with_gateway(models=frozenset({"sim"})).gateways),
    ],
    ids=[
        "volatile-ttl",
        "a small map without a limit",
        "another rank of one world",
        "another model's chunks",
        "a clock that may be right",
        "events on a socket",
        "a drain that is under way",
        "held requests that are kept alive",
        "a connector beside the other one",
        "a connector of an older vLLM without metrics",
        "front ends that tell less",
        "a model whose backends are configured",
    ],
)
def test_what_is_harmless_is_not_found(evidence: Evidence) -> None:
    assert examine(evidence).findings == ()


def also_told_by_the_watch(evidence: Evidence, condition: str) -> Evidence:
    first, second = evidence.gateways
    return replace(evidence, gateways=(first, replace(second, store_warnings={condition: "the same"})))


@pytest.mark.parametrize(
    ("condition", "evidence"),
    [
        ("maxmemory_unset", told(maxmemory="0")),
        ("policy_unfit", told(maxmemory_policy="allkeys-lru")),
        ("policy_unfit", told(maxmemory_policy="noeviction")),
        ("redis_older_than_7", told(redis_version="6.2.14")),
        ("writes_refused", told(errorstat_OOM="count=12")),
        ("chunks_without_ttl", with_chunk("m2@1@0@-12ff@bfloat16", has_ttl=False)),
        ("chunks_too_large", with_chunk(f"kvchunk@org/m@01000100@1@{HASH}", size_bytes=15 * 2**20)),
        ("coordination_evicted", with_redis(sampled_keys=())),
    ],
)
def test_what_the_watch_says_too_is_found_once_and_what_it_alone_met_is_not_lost(
    condition: str, evidence: Evidence
) -> None:
    assert examine(also_told_by_the_watch(evidence, condition)).findings == examine(evidence).findings
    alone = examine(also_told_by_the_watch(HEALTHY, condition)).findings
    assert [finding.code for finding in alone] == ["watch-warns"]


def test_a_server_that_is_not_vllm_is_not_asked_to_have_an_agent() -> None:
    assert examine(unfollowed(cache=Unknown("/metrics is not what vLLM answers"))).findings == ()


def test_counters_that_come_later_than_the_events_do_not_make_an_agent_deaf() -> None:
    assert examine(unheard_while_computing(9000, 99_000, 99_000, 99_000, 99_000)).findings == ()
    assert examine(unheard_while_computing(9000, 50_000, 99_000, 99_000, 99_000)).findings == ()
    assert examine(unheard_while_computing(9000, 9000, 9000, 9000, 99_000)).findings == ()


def test_prompts_that_fill_no_block_make_no_agent_deaf() -> None:
    assert examine(unheard_while_computing(*range(90_000, 90_500, 100), prompt_tokens=15, seq=-1)).findings == ()
    assert examine(unheard_while_computing(*range(90_000, 110_000, 4000), prompt_tokens=15)).findings == ()


def test_an_agent_that_relearns_since_its_engine_started_is_given_time() -> None:
    evidence = with_state(agents={"is_relearning": True}, replicas={"since_ms": NOW_MS - 60_000})
    assert examine(evidence).findings == ()


# -- missing evidence -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "subject", "what"),
    [
        (with_redis(info=NO_INFO, refused={"INFO": "NOPERM"}), "Redis", "version, memory, persistence, evictions"),
        (told(redis_mode="cluster"), "Redis", "the cluster's other nodes, and the chunks there"),
        (with_redis(hash_value_limit_bytes=None, refused={"CONFIG": "NOPERM"}), "Redis", "hash-max-listpack-value"),
        (
            with_redis(sampled_keys=(), info=NO_INFO, refused={"RANDOMKEY": "NOPERM"}),
            "LMCache's chunks",
            "TTLs, sizes, names",
        ),
        (replace(HEALTHY, redis=Unknown("away"), pools=(AWAY,)), "clocks", "whether they agree"),
        (replace(HEALTHY, redis=Unknown("away"), pools=(AWAY,)), "pool m", "its gateways, agents and events"),
        (replace(HEALTHY, gateways=()), "gateways", "whether they serve and agree"),
        (replace(HEALTHY, gateways=HEALTHY.gateways[:1]), "gateway gw1.aaaaaa", "whether it agrees with the others"),
        (with_gateway(keys=Unknown("an admin key")), "gateway gw1", "whether its keys are the others'"),
        (with_replica(problem="x", answers=False), "replica r1", "its version, settings, events and clock"),
        (with_replica(version=Unknown("404")), "replica r1", "vLLM's version"),
        (with_replica(version="dev"), "replica r1", "vLLM's version"),
        (with_replica(cache=Unknown("404")), "replica r1", "its cache's settings"),
        (with_replica(cards=Unknown("401")), "replica r1", "what it serves"),
        (with_replica(endpoints=Unknown("404")), "replica r1", "whether its KV events can be reached from here"),
        (with_replica(open_endpoints=Unknown("?")), "replica r1", "whether its KV events can be reached from here"),
    ],
)
def test_what_could_not_be_checked_is_said_with_its_reason(evidence: Evidence, subject: str, what: str) -> None:
    unchecked = examine(evidence).unchecked
    assert (subject, what) in {(each.subject, each.what) for each in unchecked}
    assert all(each.why for each in unchecked)
    assert examine(evidence).checks < examine(HEALTHY).checks
