"""All that can be wrong with a Redis and with the LMCache chunks in it. One set of checks serves:

- a gateway when it connects (coordinator/store_connection.py): the version and the policy
- the watch, every few seconds (coordinator/watch): every check whose kind names a condition
- `kvgate doctor` (gateway/doctor): all but the two that need what only the watch collects

A check is a function of what is known (RedisEvidence). It says nothing about facts that its caller did not collect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from coordinator.finding import Finding, FindingKind, Result, Unchecked
from coordinator.lmcache_chunks import NAME
from coordinator.redis.info import ALLOWS_OOM, NOTHING_KNOWN, OLDEST, RedisInfo

SUBJECT = "Redis"
CHUNKS = "LMCache's chunks"
RANDOM_PICKS = 1000
"""The number of random keys that the doctor looks at."""
MIB = 2**20
LARGE_VALUE_BYTES = 4 * MIB
LARGE_ALLOCATION_BYTES = int(5.5 * MIB)
"""The same by MEMORY USAGE: Redis' allocator gives a value of 4 MiB the next larger size, 5 MiB."""
_RECORD_BYTES = 128
_SLOW_MS = 10.0
_SHOWN = 60
_FULL_SHARE = 0.9
_LITTLE_SHARE = 0.1
_LARGE_SHARE = 0.5

# -- what is known ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledKey:
    """A key that a random pick found and that is not KVGate's."""

    name: str
    has_ttl: bool
    size_bytes: int
    """0 if its value is no string."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """What the name of a chunk tells (coordinator/lmcache_chunks.py). Replicas share chunks of equal `naming`."""

    model: str
    naming: str
    is_half: bool


@dataclass(frozen=True, slots=True)
class ChunkEvidence:
    """LMCache's chunks, as far as any were found."""

    found_any: bool = False
    without_ttl: int = 0
    largest_bytes: int = 0
    large_bytes: int = LARGE_VALUE_BYTES
    """The size from which a chunk is too large; it depends on how sizes were measured."""
    how: str = ""
    """How they were found."""
    example: str = ""
    """The beginning of the name of one without a TTL; what may follow there names a tenant."""
    stored: tuple[StoredChunk, ...] = ()
    """Empty if names were not kept."""


@dataclass(frozen=True, slots=True)
class LastMinute:
    """What only the watch can know, because it takes time."""

    chunks: ChunkEvidence
    refused_writes: int
    evictable_bytes: float
    """The memory of keys with a TTL, which a volatile-* policy may evict; estimated."""
    coordination_bytes: float
    """The memory of KVGate's keys; estimated."""
    evicted_coordination: str
    """One of KVGate's keys that was evicted; empty if none was."""
    hears_events: bool
    denied: str
    """Redis' answer when it refused the watch a command; empty if it refused none."""


@dataclass(frozen=True, slots=True)
class RedisEvidence:
    """What is known of a Redis at one moment."""

    info: RedisInfo = NOTHING_KNOWN
    hash_value_limit_bytes: int | None = None
    """Redis keeps a hash compact up to this length of its values."""
    ping_ms: float = 0.0
    """The median of a few."""
    clock_ahead_s: tuple[float, float] = (0.0, 0.0)
    """Its clock is ahead of this machine's by a time between these two."""
    keys: int = 0
    sampled_keys: tuple[SampledKey, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    """Why Redis refused a command, by command."""
    last_minute: LastMinute | None = None

    @property
    def chunks(self) -> ChunkEvidence:
        return _chunks_in(self.sampled_keys, self.keys) if self.last_minute is None else self.last_minute.chunks


def _chunks_in(keys: Iterable[SampledKey], all_keys: int) -> ChunkEvidence:
    found = [(key, chunk) for key in keys if (chunk := _chunk(key.name)) is not None]
    lasting = [key for key, _ in found if not key.has_ttl]
    return ChunkEvidence(
        found_any=bool(found),
        without_ttl=len(lasting),
        largest_bytes=max((key.size_bytes for key, _ in found), default=0),
        how=f"in {RANDOM_PICKS} random picks of {all_keys} keys",
        example=f"{lasting[0].name[:_SHOWN]}…" if lasting else "",
        stored=tuple(chunk for _, chunk in found),
    )


def _chunk(name: str) -> StoredChunk | None:
    found = NAME.fullmatch(name)
    if found is None:
        return None
    if found["kv_rank"]:
        prefix, _, model = found["head"].rpartition("@")
        named = f"prefix {prefix}" if prefix else "no prefix"
        naming = f"{named}, model {model}, world size {int(found['kv_rank'][:2], 16)}"
    else:
        model = found["head"]
        naming = f"in process, model {model}, world size {found['world_size']}, {found['dtype']}"
    return StoredChunk(model, naming, found["half"] is not None)


# -- what can be wrong -----------------------------------------------------------------------------------------------

UNREACHABLE = FindingKind(
    "redis-unreachable",
    "error",
    "without it every gateway routes by hashing alone, and agents cannot report what replicas hold",
    "start it, or correct --redis-url (KVGATE_REDIS_URL): host, port, user and password",
)
OLD = FindingKind(
    "redis-too-old",
    "error",
    "gateways refuse it, because the scripts need commands of Redis 6.2",
    "install Redis 7 or newer",
    ("redis_older_than_7",),
)
NO_ALLOW_OOM = FindingKind(
    "redis-before-7",
    "warning",
    "it refuses the scripts when its memory is full, so placements fail until something is evicted",
    "install Redis 7 or newer",
    ("redis_older_than_7",),
)
READ_ONLY = FindingKind(
    "redis-read-only",
    "error",
    "a replica of another Redis takes no writes, and every placement writes",
    "point redis.url (KVGATE_REDIS_URL) to its master, {master}",
)
WRITES_STOPPED = FindingKind(
    "redis-cannot-save",
    "error",
    "Redis refuses writes while it cannot write to its disk (stop-writes-on-bgsave-error)",
    "free space on its disk; or, because nothing in it is worth saving: redis-cli CONFIG SET save '' and CONFIG SET "
    "appendonly no",
)
NO_LIMIT = FindingKind(
    "redis-without-limit",
    "error",
    "it grows until the system kills it, and ownership, load and chunks are lost with it",
    "redis-cli CONFIG SET maxmemory {bytes} (three quarters of the machine's memory), and in redis.conf",
    ("maxmemory_unset",),
)
NEAR_MACHINE = FindingKind(
    "redis-limit-near-machine",
    "warning",
    "Redis needs memory beyond maxmemory for the data that it sends: chunks that are read can take gigabytes",
    "redis-cli CONFIG SET maxmemory {bytes} (three quarters of the machine's memory), and in redis.conf",
)
EVICTS_ALL = FindingKind(
    "redis-evicts-all",
    "error",
    "it may evict ownership and load, which have no TTL",
    "redis-cli CONFIG SET maxmemory-policy volatile-lru, and in redis.conf",
    ("policy_unfit", "coordination_evicted"),
)
CHUNK_POLICY = FindingKind(
    "redis-policy",
    "error",
    "only volatile-lru and volatile-ttl evict LMCache's chunks, oldest first, and nothing else",
    "redis-cli CONFIG SET maxmemory-policy volatile-lru, and in redis.conf",
    ("policy_unfit",),
)
EVICTS_OWN = FindingKind(
    "redis-evicts-own",
    "warning",
    "KVGate loses the exact length of some prompts and the places of stored responses; under allkeys-*, ownership and "
    "load, too",
    "raise maxmemory (redis-cli CONFIG SET maxmemory {bytes})",
    ("coordination_evicted",),
)
REFUSED_WRITES = FindingKind(
    "redis-refused-writes",
    "warning",
    "memory was full and nothing could be evicted, so Redis refused chunks and, before Redis 7, placements",
    "raise maxmemory, and see that every chunk has a TTL; redis-cli CONFIG RESETSTAT sets the count to 0",
    ("writes_refused",),
)
LOOSE_HASHES = FindingKind(
    "redis-loose-hashes",
    "warning",
    "the record of an owner is a little longer, so each key of the map takes 500 bytes instead of 360",
    "redis-cli CONFIG SET hash-max-{name}-value 128, and in redis.conf",
)
SLOW = FindingKind(
    "redis-slow",
    "warning",
    "a placement waits at most redis.budget_ms (20) for Redis; then the request is routed by hashing alone",
    "find the cause with redis-cli --latency and SLOWLOG GET; keep Redis near the gateways, give chunks a Redis of "
    "their own",
)
NO_TTL = FindingKind(
    "chunks-without-ttl",
    "error",
    "Redis evicts no chunk without a TTL, so it may fill up, and then it refuses chunks and other writes",
    "write chunks with LMCache's valkey adapter and ttl_seconds (kvgate replica-command prints how); a gateway with "
    "store.watch: true gives each chunk a TTL when it finds it",
    ("chunks_without_ttl",),
)
TWO_KEYS = FindingKind(
    "chunks-of-redis-adapter",
    "warning",
    "LMCache's redis:// adapter sets no TTL, and Redis may evict one half of its pairs alone",
    "use its valkey adapter instead (kvgate replica-command prints how)",
    ("chunks_without_ttl",),
)
LARGE = FindingKind(
    "chunks-too-large",
    "warning",
    "Redis serves one command at a time, so a placement waits while Redis copies a chunk",
    "lower lmcache.chunk_tokens (LMCache's --chunk-size) to chunks of 4 MiB, or give chunks a Redis of their own",
    ("chunks_too_large",),
)
NAMES_DIFFER = FindingKind(
    "chunks-named-differently",
    "warning",
    "replicas find each other's chunks only under the same prefix, model path, world size and dtype",
    "start all replicas from one file (kvgate replica-command); the other chunks go when their TTL ends",
)
WATCH_WARNS = FindingKind(
    "watch-warns",
    "warning",
    "the gateway that watches Redis saw it within the last minute, or sees it still",
    "follow its advice: docs/store.md says more about each condition",
)

# The following need what only the watch collects. The doctor repeats them in the words of the gateway that watches.
NOTHING_TO_EVICT = replace(
    WATCH_WARNS,
    why="Redis will refuse to write chunks",
    fix="raise maxmemory, or make sure that chunks have a TTL",
    conditions=("nothing_to_evict",),
)
COORDINATION_LARGE = replace(
    WATCH_WARNS,
    why="Redis never evicts these keys, so little memory is left for chunks",
    fix="raise maxmemory",
    conditions=("coordination_large",),
)
NOTIFICATIONS_OFF = replace(
    WATCH_WARNS,
    why="the watch finds chunks by random picks only",
    fix="redis-cli CONFIG SET notify-keyspace-events E$e, and in redis.conf",
    conditions=("notifications_off",),
)
NOT_PERMITTED = replace(
    WATCH_WARNS,
    why="the watch cannot do all of its work",
    fix="give the user the rights that docs/security.md lists",
    conditions=("not_permitted",),
)

CONDITIONS = tuple(
    dict.fromkeys(
        name for kind in list(globals().values()) if isinstance(kind, FindingKind) for name in kind.conditions
    )
)
"""The names under which the watch reports findings: `kvgate_store_condition` has one series for each."""

# -- the checks ------------------------------------------------------------------------------------------------------


def version(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether the scripts run, also when memory is full."""
    info = evidence.info
    if "INFO" in evidence.refused:
        yield Unchecked(SUBJECT, "version, memory, persistence, evictions", _refusal(evidence, "INFO"))
    elif info.version < OLDEST:
        yield OLD.seen(SUBJECT, f"it is Redis {info.version_text}")
    elif info.version < ALLOWS_OOM:
        yield NO_ALLOW_OOM.seen(SUBJECT, f"it is Redis {info.version_text}")


def nodes(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether there are other servers."""
    if evidence.info.mode == "cluster":
        why = "only the one that has kvgate:pools was asked: name each with --redis-url redis://NODE"
        yield Unchecked(SUBJECT, "the cluster's other nodes, and the chunks there", why)


def writable(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether Redis takes writes."""
    info = evidence.info
    if info.role == "slave":
        yield READ_ONLY.seen(SUBJECT, f"it is a replica of {info.master}", master=info.master)
    if info.failed_saves:
        yield WRITES_STOPPED.seen(SUBJECT, " and ".join(f"{name} is err" for name in info.failed_saves))


def memory_limit(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether there is a limit, with room beside it. Without chunks the map alone stays small."""
    info = evidence.info
    if info is NOTHING_KNOWN:
        return
    limit, machine, used = info.maxmemory_bytes, info.machine_bytes, info.used_bytes
    three_quarters = machine * 3 // 4 or "BYTES"
    of_machine = f" of the machine's {machine // MIB} MiB" if machine else ""
    if limit == 0 and (evidence.chunks.found_any or used > machine // 2 > 0):
        yield NO_LIMIT.seen(
            SUBJECT, f"maxmemory is 0, and {used // MIB} MiB{of_machine} are used", bytes=three_quarters
        )
    elif limit > machine * 3 // 4 > 0:
        what = f"maxmemory is {limit // MIB} MiB{of_machine}"
        yield NEAR_MACHINE.seen(SUBJECT, what, bytes=three_quarters)


def eviction(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether Redis evicts chunks, and only chunks."""
    info = evidence.info
    so_far = f"; {info.evicted_keys} keys were evicted so far" if info.evicted_keys else ""
    what = f"maxmemory-policy is {info.policy}{so_far}"
    if info.policy.startswith("allkeys-"):
        yield EVICTS_ALL.seen(SUBJECT, what)
    elif info.policy not in ("", "volatile-lru", "volatile-ttl") and evidence.chunks.found_any:
        yield CHUNK_POLICY.seen(SUBJECT, what)


def coordination_evicted(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether Redis evicted KVGate's keys. The watch hears of each; others infer it if there are no chunks."""
    info = evidence.info
    if evidence.last_minute is not None:
        key = evidence.last_minute.evicted_coordination
        what = f"{key} was evicted" if key else ""
    else:
        is_known = info.evicted_keys and not evidence.chunks.found_any and not info.policy.startswith("allkeys-")
        what = f"{info.evicted_keys} keys were evicted, and there are no LMCache chunks" if is_known else ""
    if what:
        yield EVICTS_OWN.seen(SUBJECT, what, bytes=info.maxmemory_bytes * 2)


def refused_writes(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether Redis refused writes because its memory was full."""
    if evidence.last_minute is not None:
        refused, period = evidence.last_minute.refused_writes, "in the last minute"
    else:
        refused, period = evidence.info.refused_writes, "since it started"
    if refused:
        yield REFUSED_WRITES.seen(SUBJECT, f"{refused} writes were refused for lack of memory {period}")


def hashes(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether Redis keeps owners' records compact."""
    limit = evidence.hash_value_limit_bytes
    if limit is None:
        yield Unchecked(SUBJECT, "hash-max-listpack-value", _refusal(evidence, "CONFIG"))
    elif limit < _RECORD_BYTES:
        name = "ziplist" if evidence.info.version < ALLOWS_OOM else "listpack"
        yield LOOSE_HASHES.seen(SUBJECT, f"hash-max-{name}-value is {limit}", name=name)


def latency(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether Redis answers this machine in time."""
    if evidence.ping_ms > _SLOW_MS:
        yield SLOW.seen(SUBJECT, f"a PING from here takes {evidence.ping_ms:.0f} ms (median)")


def sampled(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether the user may look at chunks."""
    if "RANDOMKEY" in evidence.refused:
        why = f"the user of the URL may not look for them ({evidence.refused['RANDOMKEY']})"
        yield Unchecked(CHUNKS, "TTLs, sizes, names", f"{why}: give an administrator's with --redis-url")


def expiry(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether Redis can evict each chunk."""
    chunks = evidence.chunks
    if chunks.without_ttl:
        like = f", like {chunks.example}" if chunks.example else ""
        yield NO_TTL.seen(CHUNKS, f"{chunks.without_ttl} chunks without a TTL were found {chunks.how}{like}")
    if any(chunk.is_half for chunk in chunks.stored):
        yield TWO_KEYS.seen(CHUNKS, "each chunk is two keys: one ends in kv_bytes and one in metadata")


def size(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether a chunk delays other commands."""
    chunks = evidence.chunks
    if chunks.largest_bytes > chunks.large_bytes:
        yield LARGE.seen(CHUNKS, f"a chunk of {chunks.largest_bytes / MIB:.1f} MiB was found {chunks.how}")


def names(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether replicas of one model use the same names. Models are the same if their paths end alike."""
    by_model: defaultdict[str, set[str]] = defaultdict(set)
    for chunk in evidence.chunks.stored:
        by_model[chunk.model.rstrip("/").rpartition("/")[2].lower()].add(chunk.naming)
    for namings in by_model.values():
        if len(namings) > 1:
            yield NAMES_DIFFER.seen(CHUNKS, "; ".join(sorted(namings)))


def room(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether there is room for chunks, now and when memory is full."""
    info = evidence.info
    if (watched := evidence.last_minute) is None:
        return
    if info.used_share > _FULL_SHARE and watched.evictable_bytes < _LITTLE_SHARE * info.maxmemory_bytes:
        evictable_mib = watched.evictable_bytes / MIB
        yield NOTHING_TO_EVICT.seen(
            SUBJECT, f"{info.used_share:.0%} of maxmemory is used, and only {evictable_mib:.0f} MiB of it have a TTL"
        )
    if info.maxmemory_bytes and watched.coordination_bytes > _LARGE_SHARE * info.maxmemory_bytes:
        coordination_mib = watched.coordination_bytes / MIB
        yield COORDINATION_LARGE.seen(
            SUBJECT, f"KVGate's keys take {coordination_mib:.0f} MiB, more than half of maxmemory"
        )


def watchable(evidence: RedisEvidence) -> Iterator[Result]:
    """Whether the watch can see and do everything."""
    if (watched := evidence.last_minute) is None:
        return
    if watched.chunks.found_any and not watched.hears_events:
        yield NOTIFICATIONS_OFF.seen(SUBJECT, "Redis publishes no events about writes")
    if watched.denied:
        yield NOT_PERMITTED.seen(SUBJECT, watched.denied)


def _refusal(evidence: RedisEvidence, command: str) -> str:
    refused = evidence.refused.get(command, "it did not say")
    return f"the user of the URL may not call {command} ({refused}): give an administrator's with --redis-url"


CHECKS: tuple[Callable[[RedisEvidence], Iterator[Result]], ...] = (
    *(version, nodes, writable, memory_limit, eviction, coordination_evicted, refused_writes, hashes, latency),
    *(sampled, expiry, size, names),
)
CHECKS_OF_WATCH = (room, watchable)
"""They need what only the watch collects."""


def findings(evidence: RedisEvidence) -> list[Finding]:
    """Everything that is wrong, as far as the evidence shows it."""
    return [
        result for check in (*CHECKS, *CHECKS_OF_WATCH) for result in check(evidence) if isinstance(result, Finding)
    ]


def conditions(evidence: RedisEvidence) -> dict[str, str]:
    """The same as sentences, by the watch's names; what has no such name is left out."""
    return {each.kind.conditions[0]: each.sentence for each in findings(evidence) if each.kind.conditions}


def settings_warnings(info: RedisInfo) -> list[str]:
    """What is wrong with a Redis of which only INFO is known: its version and its policy, as sentences."""
    evidence = RedisEvidence(info)
    return [each.sentence for check in (version, eviction) for each in check(evidence) if isinstance(each, Finding)]
