"""The evidence of a healthy cluster, and functions that change one thing in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.engine.facts import ModelCard
from coordinator.engine.kv_transfers import KvTransfers
from coordinator.redis.checks import RedisEvidence, SampledKey
from coordinator.redis.info import RedisInfo, read_info
from coordinator.registry import AgentRecord, PoolState, ReplicaFigures, ReplicaRecord
from coordinator.survey import PoolSnapshot, UnreadableRecords
from gateway.doctor.evidence import Evidence, GatewayEvidence, LmcacheEvidence, PoolEvidence, ReplicaEvidence

NOW_MS = 1_800_000_000_000
LIFE = "19a0"
HASH = "ab" * 32
UNREADABLE = UnreadableRecords("active", 2, NOW_MS, "r1")
IDS = ("r0", "r1")

INFO = {
    "redis_version": "7.2.4",
    "role": "master",
    "rdb_last_bgsave_status": "ok",
    "maxmemory": str(2 * 2**30),
    "maxmemory_policy": "volatile-lru",
    "total_system_memory": str(8 * 2**30),
    "used_memory": str(2**30),
    "evicted_keys": "7",
}


def info(fields: dict[str, str]) -> RedisInfo:
    """INFO with these fields."""
    return read_info("".join(f"{name}:{value}\r\n" for name, value in fields.items()).encode())


REDIS = RedisEvidence(
    info=info(INFO),
    hash_value_limit_bytes=128,
    ping_ms=0.2,
    clock_ahead_s=(-0.001, 0.001),
    keys=3,
    sampled_keys=(
        SampledKey(f"kvchunk@org/m@01000100@0@{HASH}", True, 2**20),
        SampledKey("a-session-of-somebody", False, 9),
    ),
)


def chunk(name: str, has_ttl: bool = True, size_bytes: int = 2**20) -> RedisEvidence:
    """The healthy Redis with one more chunk."""
    return replace(REDIS, sampled_keys=(*REDIS.sampled_keys, SampledKey(name, has_ttl, size_bytes)))


def told(**fields: str) -> Evidence:
    """The healthy cluster, with other fields in its Redis' INFO."""
    return replace(HEALTHY, redis=replace(REDIS, info=info(INFO | fields)))


def replica(name: str) -> ReplicaEvidence:
    endpoint = "tcp://[::ffff:127.0.0.1]:5557"
    return ReplicaEvidence(
        id=name,
        url=f"http://{name}:8000",
        pool="m",
        version="0.32.0",
        cards=(ModelCard("sim", "org/m", None, {"id": "sim", "max_model_len": 4096}),),
        cache={"enable_prefix_caching": "True", "prefix_caching_hash_algo": "sha256", "block_size": "16"},
        transfers=KvTransfers(frozenset(), 0, 0),
        started=LIFE,
        endpoints=(endpoint,),
    )


def snapshot_at(at_s: float = 0.0) -> PoolSnapshot:
    now_ms = NOW_MS + int(at_s * 1000)
    return PoolSnapshot(
        pool="m",
        state=PoolState(
            known=True,
            expired_gateways=(),
            replicas={
                name: ReplicaRecord(name, LIFE, "ready", 100_000, NOW_MS - 3_600_000, f"http://{name}:8000")
                for name in IDS
            },
            open_until_ms={},
            worker="gw0.aaaaaa",
            now_ms=now_ms,
            agents={
                name: AgentRecord(f"{name}.bbbbbb", LIFE, now_ms + 2500, "session", False, 0, 100 + int(at_s))
                for name in IDS
            },
        ),
        figures=ReplicaFigures(
            {}, {name: {"prefix_queries_tokens": 9000.0, "prefix_hits_tokens": 4000.0} for name in IDS}
        ),
        gateway_leases_ms={"gw0.aaaaaa": now_ms + 2500, "gw1.aaaaaa": now_ms + 2500},
    )


def gateway(name: str) -> GatewayEvidence:
    return GatewayEvidence(
        url=f"http://{name}:8080",
        id=f"{name}.aaaaaa",
        version="0.1.0",
        settings={"policy": "aa", "replicas": "bb"},
        is_ready=True,
        replicas=frozenset(IDS),
        exact=frozenset(IDS),
        pools=("m",),
        keys=("k1", "k2"),
    )


POOL = PoolEvidence("m", tuple(map(replica, IDS)), tuple(map(snapshot_at, range(5))))
HEALTHY = Evidence(
    redis=REDIS,
    pools=(POOL,),
    gateways=(gateway("gw0"), gateway("gw1")),
    lmcache=(
        LmcacheEvidence("http://r0:5580", "", "256", "blake3"),
        LmcacheEvidence("http://r1:5580", "", "256", "blake3"),
    ),
)


def with_replica(**changes: Any) -> Evidence:
    """The healthy cluster, with changes to replica r1."""
    return replace(HEALTHY, pools=(replace(POOL, replicas=(replica("r0"), replace(replica("r1"), **changes))),))


def with_gateway(**changes: Any) -> Evidence:
    """The healthy cluster, with changes to gateway gw1."""
    return replace(HEALTHY, gateways=(gateway("gw0"), replace(gateway("gw1"), **changes)))


def with_state(**changes: Any) -> Evidence:
    """The healthy cluster, with changes to r1's registry entries in all snapshots. None removes the entry."""

    def changed(snapshot: PoolSnapshot) -> PoolSnapshot:
        fields = {}
        for field, change in changes.items():
            entries = getattr(snapshot.state, field) | {}
            if change is None:
                del entries["r1"]
            elif isinstance(change, dict) and field in ("replicas", "agents"):
                entries["r1"] = replace(entries["r1"], **change)
            else:
                entries["r1"] = change
            fields[field] = entries
        return replace(snapshot, state=replace(snapshot.state, **fields))

    return replace(HEALTHY, pools=(replace(POOL, snapshots=tuple(map(changed, POOL.snapshots))),))


def with_snapshots(**changes: Any) -> Evidence:
    """The healthy cluster, with changes to all snapshots."""
    return replace(
        HEALTHY, pools=(replace(POOL, snapshots=tuple(replace(snapshot, **changes) for snapshot in POOL.snapshots)),)
    )


def with_redis(**changes: Any) -> Evidence:
    return replace(HEALTHY, redis=replace(REDIS, **changes))


def card(name: str = "sim", root: str = "org/m", max_model_len: int = 4096) -> tuple[ModelCard, ...]:
    return (ModelCard(name, root, None, {"max_model_len": max_model_len}),)
