"""Whether the Redis is one that ownership and load are safe in."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.redis.info import ALLOWS_OOM, OLDEST, evicts_all, version_of
from coordinator.survey import Server
from gateway.ops.doctor.chunk_checks import chunks_of
from gateway.ops.doctor.finding import Finding, Kind, Result, Unchecked

SUBJECT = "Redis"
_RECORD_BYTES = 128
_SLOW_MS = 10.0
_MIB = 2**20

UNREACHABLE = Kind(
    "redis-unreachable",
    "error",
    "without it every gateway routes by hashing alone, and agents tell nobody what replicas hold",
    "start it, or correct --redis-url (KVGATE_REDIS_URL): host, port, user and password",
)
OLD = Kind(
    "redis-too-old",
    "error",
    "gateways refuse it: scripts use what came with 6.2",
    "install Redis 7 or newer",
)
NO_ALLOW_OOM = Kind(
    "redis-before-7",
    "warning",
    "its scripts cannot be let through when memory is full: then placements fail until something is evicted",
    "install Redis 7 or newer",
)
READ_ONLY = Kind(
    "redis-read-only",
    "error",
    "a replica of another Redis takes no writes, and every placement writes",
    "point redis.url (KVGATE_REDIS_URL) to its master, {master}",
)
WRITES_STOPPED = Kind(
    "redis-cannot-save",
    "error",
    "Redis refuses writes while it cannot write to its disk (stop-writes-on-bgsave-error)",
    "free its disk; or, as nothing in it is worth saving: redis-cli CONFIG SET save '' and CONFIG SET appendonly no",
)
NO_LIMIT = Kind(
    "redis-without-limit",
    "error",
    "it grows until the system kills it, and with it ownership, load and chunks",
    "redis-cli CONFIG SET maxmemory {bytes} (three quarters of the machine's memory), and in redis.conf",
)
NEAR_MACHINE = Kind(
    "redis-limit-near-machine",
    "warning",
    "what it sends to clients comes on top of maxmemory: chunks being read can take gigabytes",
    "redis-cli CONFIG SET maxmemory {bytes} (three quarters of the machine's memory), and in redis.conf",
)
EVICTS_ALL = Kind(
    "redis-evicts-all",
    "error",
    "it may evict ownership and load, which have no TTL",
    "redis-cli CONFIG SET maxmemory-policy volatile-lru, and in redis.conf",
)
CHUNK_POLICY = Kind(
    "redis-policy",
    "error",
    "beside LMCache's chunks only volatile-lru and volatile-ttl evict chunks, oldest first, and nothing else",
    "redis-cli CONFIG SET maxmemory-policy volatile-lru, and in redis.conf",
)
EVICTS_OWN = Kind(
    "redis-evicts-own",
    "warning",
    "with no chunks to evict, it evicts what binds requests to their events: agents cannot say what was computed",
    "raise maxmemory (redis-cli CONFIG SET maxmemory {bytes})",
)
REFUSED_WRITES = Kind(
    "redis-refused-writes",
    "warning",
    "memory was full and nothing could be evicted: chunks, and before Redis 7 placements too, were refused",
    "raise maxmemory, and see that every chunk has a TTL; redis-cli CONFIG RESETSTAT sets the count to 0",
)
LOOSE_HASHES = Kind(
    "redis-loose-hashes",
    "warning",
    "the record of an owner is a little longer, so each key of the map takes 500 bytes instead of 360",
    "redis-cli CONFIG SET hash-max-{name}-value 128, and in redis.conf",
)
SLOW = Kind(
    "redis-slow",
    "warning",
    "a placement waits for it at most redis.budget_ms (20): then requests are routed by hashing alone",
    "redis-cli --latency and SLOWLOG GET say what it does; keep it near the gateways, give chunks a Redis of their own",
)


def version(server: Server) -> Iterator[Result]:
    """Whether scripts run, whether or not memory is full."""
    text = server.info.get("redis_version")
    if text is None:
        yield Unchecked(SUBJECT, "version, memory, persistence, evictions", _refusal(server, "INFO"))
        return
    number = version_of(server.info)
    if number < OLDEST:
        yield OLD.seen(SUBJECT, f"it is Redis {text}")
    elif number < ALLOWS_OOM:
        yield NO_ALLOW_OOM.seen(SUBJECT, f"it is Redis {text}")


def nodes(server: Server) -> Iterator[Result]:
    """Whether this is all there is."""
    if server.info.get("redis_mode") == "cluster":
        why = "only the one that has kvgate:pools was asked: name each with --redis-url redis://NODE"
        yield Unchecked(SUBJECT, "the cluster's other nodes, and the chunks there", why)


def writable(server: Server) -> Iterator[Result]:
    """Whether it takes writes."""
    info = server.info
    if info.get("role") == "slave":
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        yield READ_ONLY.seen(SUBJECT, f"it is a replica of {master}", master=master)
    failed = [name for name in ("rdb_last_bgsave_status", "aof_last_write_status") if info.get(name) == "err"]
    if failed:
        yield WRITES_STOPPED.seen(SUBJECT, " and ".join(f"{name} is err" for name in failed))


def memory_limit(server: Server) -> Iterator[Result]:
    """Whether there is one, with room beside it. Without chunks the map alone stays small."""
    limit, machine, used = (_int(server, name) for name in ("maxmemory", "total_system_memory", "used_memory"))
    if not machine:
        return
    three_quarters = machine * 3 // 4
    if limit == 0 and (chunks_of(server) or used > machine // 2):
        what = f"maxmemory is 0, {used // _MIB} MiB of the machine's {machine // _MIB} are used"
        yield NO_LIMIT.seen(SUBJECT, what, bytes=three_quarters)
    elif limit > three_quarters:
        what = f"maxmemory is {limit // _MIB} MiB on a machine with {machine // _MIB}"
        yield NEAR_MACHINE.seen(SUBJECT, what, bytes=three_quarters)


def eviction(server: Server) -> Iterator[Result]:
    """Whether the right things are evicted."""
    policy, evicted = server.info.get("maxmemory_policy", ""), _int(server, "evicted_keys")
    so_far = f"; {evicted} keys were evicted so far" if evicted else ""
    if evicts_all(policy):
        yield EVICTS_ALL.seen(SUBJECT, f"maxmemory-policy is {policy}{so_far}")
    elif policy and chunks_of(server):
        if policy not in ("volatile-lru", "volatile-ttl"):
            yield CHUNK_POLICY.seen(SUBJECT, f"maxmemory-policy is {policy}{so_far}")
    elif evicted:
        what = f"{evicted} keys were evicted, and no LMCache chunks are in it"
        yield EVICTS_OWN.seen(SUBJECT, what, bytes=_int(server, "maxmemory") * 2)


def refused_writes(server: Server) -> Iterator[Result]:
    """Whether it was full."""
    refused = server.info.get("errorstat_OOM", "count=0").removeprefix("count=")
    if refused != "0":
        yield REFUSED_WRITES.seen(SUBJECT, f"{refused} writes were refused for lack of memory since it started")


def hashes(server: Server) -> Iterator[Result]:
    """Whether owners' records are kept compact."""
    limit = server.hash_value_limit_bytes
    if limit is None:
        yield Unchecked(SUBJECT, "hash-max-listpack-value", _refusal(server, "CONFIG"))
    elif limit < _RECORD_BYTES:
        name = "ziplist" if server.info.get("redis_version", "").startswith("6.") else "listpack"
        yield LOOSE_HASHES.seen(SUBJECT, f"hash-max-{name}-value is {limit}", name=name)


def latency(server: Server) -> Iterator[Result]:
    """Whether it answers in time, as seen from here."""
    if server.ping_ms > _SLOW_MS:
        yield SLOW.seen(SUBJECT, f"a PING from here takes {server.ping_ms:.0f} ms (median)")


def unreachable(why: str) -> Finding:
    """What is said of a Redis that does not answer."""
    return UNREACHABLE.seen(SUBJECT, why)


CHECKS = (version, nodes, writable, memory_limit, eviction, refused_writes, hashes, latency)


def _refusal(server: Server, command: str) -> str:
    refused = server.refused.get(command, "it did not say")
    return f"the user of the URL may not call {command} ({refused}): give an administrator's with --redis-url"


def _int(server: Server, name: str) -> int:
    return int(server.info.get(name, "0"))
