"""Whether each replica serves and caches, and whether the replicas of a pool are equal."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.engine.facts import ModelCard
from coordinator.finding import FindingKind, Result, Unchecked
from coordinator.registry import ASLEEP
from gateway.doctor.evidence import Evidence, PoolEvidence, ReplicaEvidence, Unknown, grouped

UNHEALTHY = FindingKind(
    "replica-unhealthy",
    "error",
    "gateways stop sending it requests when their own health checks fail",
    "read its log and start it again: curl -i {url}/health must answer 200",
)
BEFORE_SESSIONS = FindingKind(
    "vllm-names-no-sessions",
    "warning",
    "this version is older than 0.30, and its events do not name requests: the replica is degraded, and KVGate guesses "
    "its cache from the requests it got",
    "install vLLM 0.30 or newer",
)
NOT_CACHING = FindingKind(
    "prefix-caching-off",
    "error",
    "it computes every prompt from the start: no routing can save that",
    "start vLLM with --enable-prefix-caching",
)
PUBLISHES_NOTHING = FindingKind(
    "events-off",
    "warning",
    "KVGate guesses its cache from the requests it got: evictions and restarts stay unseen",
    "start vLLM with --kv-events-config and an agent beside it (kvgate replica-command prints both)",
)
EXPOSED = FindingKind(
    "events-exposed",
    "error",
    "KV events contain the prompts' tokens, and everybody who connects gets them",
    "publish on ipc:///run/vllm/events, or on tcp://[::ffff:127.0.0.1]:PORT (replays on tcp://127.0.0.1:PORT); or let "
    "only the agent's host connect to it (docs/security.md)",
)

_LATELY_MS = 3_600_000
_LONG_MS = 3_600_000
"""A drain that is under way ends with the longest request. One that lasts for an hour was forgotten."""
_HASHING = ("prefix_caching_hash_algo", "block_size", "cache_dtype")

DEAD = FindingKind(
    "replica-dead",
    "error",
    "its health checks fail, so gateways send it nothing, and the other replicas carry its share of the load",
    "start it again at {url}; if it is gone for good, remove it from the gateways' `replicas`",
)
HUNG = FindingKind(
    "replica-hangs",
    "error",
    "it has work and makes no progress, so gateways send it nothing, even if its /health answers 200",
    "check its log and its GPU, and restart it: {url}; gateways use it again when it makes progress",
)
SLEEPS = FindingKind(
    "replica-asleep",
    "warning",
    "its engine was put to sleep or is paused: it gets no requests, and the other replicas carry its share of the load",
    "wake it up: curl -X POST {url}/wake_up (or /resume, if it was paused); gateways use it again by themselves",
)
BREAKER_OPEN = FindingKind(
    "breaker-open",
    "warning",
    "too many requests to it failed lately: gateways send it one request at a time, as a test",
    "its log and kvgate_retries_total, by reason, show how it fails; restart it if it keeps failing",
)
SLOW = FindingKind(
    "replica-slow",
    "warning",
    "the first bytes of its streams are late again and again, so placements count it as four times slower",
    "look at its GPU (clock, temperature, other processes) and its log: {url}",
)
DRAINED = FindingKind(
    "replica-drained",
    "warning",
    "it gets no new requests, and the other replicas carry its share of the load",
    "take it back: kvgate undrain {replica}; or stop it, if it is not needed any more",
)
UNWATCHED = FindingKind(
    "no-gateway",
    "warning",
    "nobody checks these replicas or applies their agents' events",
    "start a gateway: kvgate gateway --config FILE",
)
UNREADABLE = FindingKind(
    "records-unreadable",
    "warning",
    "somebody else writes into KVGate's keys: KVGate ignored these records, and made again what depends on them",
    "find the writer: redis-cli MONITOR | grep 'kvgate:'; give others a user without these keys, or another database",
)
VERSIONS_DIFFER = FindingKind(
    "vllm-versions-differ",
    "warning",
    "two versions may hash, render and answer differently: one prompt then gets different blocks",
    "finish the upgrade: run one version in all replicas",
)
HASHING_DIFFERS = FindingKind(
    "hash-settings-differ",
    "warning",
    "one prompt gets different blocks and hashes: the replicas cannot share KV, and the map is exact to different "
    "lengths",
    "start all with the same --prefix-caching-hash-algo, --block-size and --kv-cache-dtype (kvgate replica-command)",
)
SERVING_DIFFERS = FindingKind(
    "replicas-serve-differently",
    "warning",
    "one replica serves a request that another refuses, and the client gets the refusal",
    "start all with the same --max-model-len, --served-model-name and adapters",
)
UNREGISTERED = FindingKind(
    "replica-not-registered",
    "error",
    "no gateway of this Redis sends it requests: a gateway would have registered it",
    "list it in the gateways' `replicas`; if it is there, their /ready says why they cannot reach it",
)
UNREACHED = FindingKind(
    "replica-unreached",
    "error",
    "it gets no requests: no gateway has found out what it serves",
    "start it, or correct its address (kvgate replicas list shows it, and where it comes from); one that was added by "
    "mistake: kvgate replicas remove {replica}",
)
ID_TAKEN = FindingKind(
    "replica-id-taken",
    "error",
    "Redis has another engine under its id, so gateways place requests to this one by hashing alone: two clusters "
    "share the Redis, or the gateways of one cluster have different configurations",
    "give each cluster that shares a Redis its own redis.namespace, and its gateways the same `replicas`",
)


# -- a replica alone -------------------------------------------------------------------------------------------------


def health(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether the replica can serve."""
    if replica.problem:
        yield UNHEALTHY.seen(replica.subject, f"{replica.url}: {replica.problem}", url=replica.url)
    if not replica.answers:
        yield Unchecked(replica.subject, "its version, settings, events and clock", "it does not answer")


def version(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether its events name requests."""
    if isinstance(replica.version, Unknown):
        yield Unchecked(replica.subject, "vLLM's version", replica.version.why)
        return
    if not replica.version_number:
        yield Unchecked(replica.subject, "vLLM's version", f"{replica.version!r} is no number")
    elif replica.names_no_sessions:
        yield BEFORE_SESSIONS.seen(replica.subject, f"it runs vLLM {replica.version}")


def caching(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether it keeps prefixes."""
    if isinstance(replica.cache, Unknown):
        yield Unchecked(replica.subject, "its cache's settings", replica.cache.why)
    elif replica.cache.get("enable_prefix_caching") == "False":
        yield NOT_CACHING.seen(replica.subject, "enable_prefix_caching is False in its vllm:cache_config_info")


def events(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether it publishes what it caches."""
    if isinstance(replica.endpoints, Unknown):
        yield Unchecked(replica.subject, "whether its KV events can be reached from here", replica.endpoints.why)
    elif not replica.endpoints:
        yield PUBLISHES_NOTHING.seen(replica.subject, "/kv_event_sources names no ZeroMQ publisher")


def exposure(replica: ReplicaEvidence) -> Iterator[Result]:
    """Whether hosts other than its own can read its KV events."""
    reached = replica.open_endpoints
    if isinstance(reached, Unknown):
        yield Unchecked(replica.subject, "whether its KV events can be reached from here", reached.why)
        return
    for endpoint, address in reached.items():
        yield EXPOSED.seen(replica.subject, f"{endpoint} answers on {address}, from here")


CHECKS = (health, version, caching, events, exposure)


# -- the replicas of a pool ------------------------------------------------------------------------------------------


_STATES = {
    "dead": (DEAD, "gateways found {} dead"),
    "hung": (HUNG, "gateways found that {} hangs"),
    ASLEEP: (SLEEPS, "gateways found that {} sleeps"),
}
"""The finding of each state that is not good."""


def states(pool: PoolEvidence) -> Iterator[Result]:
    """Whether gateways found a replica dead, without progress, or asleep."""
    answering_badly = {replica.id for replica in pool.replicas if replica.problem}
    for record in pool.records():
        if record.state in _STATES and not (record.state == "dead" and record.replica in answering_badly):
            kind, what = _STATES[record.state]  # a dead replica that answers badly has the finding of `health`
            yield kind.seen(f"replica {record.replica}", what.format(record.url), url=record.url)


def slow(pool: PoolEvidence) -> Iterator[Result]:
    """Whether a ready replica is slower than it was."""
    for record in pool.records():
        if record.state == "ready" and record.replica in pool.last.slow:
            yield SLOW.seen(f"replica {record.replica}", f"gateways found that {record.url} is slow", url=record.url)


def drained(pool: PoolEvidence) -> Iterator[Result]:
    """Whether a replica has been drained for long."""
    for replica, since_ms in pool.last.drained_since_ms.items() if pool.snapshots else ():
        minutes = (pool.last.state.now_ms - since_ms) // 60_000
        if minutes * 60_000 >= _LONG_MS:
            yield DRAINED.seen(f"replica {replica}", f"it has been drained for {minutes} minutes", replica=replica)


def broken(pool: PoolEvidence) -> Iterator[Result]:
    """Whether a replica failed so often that its breaker is open."""
    for record in pool.records():
        state = pool.last.state
        open_ms = state.open_until_ms.get(record.replica, 0) - state.now_ms
        if record.state == "ready" and open_ms > 0:
            yield BREAKER_OPEN.seen(f"replica {record.replica}", f"its breaker is open for another {open_ms} ms")


def watched(pool: PoolEvidence) -> Iterator[Result]:
    """Whether the pool has a gateway."""
    if not pool.snapshots:
        yield Unchecked(pool.subject, "its gateways, agents and events", "Redis does not answer")
    elif max(pool.last.gateway_leases_ms.values(), default=0) < pool.last.state.now_ms:
        yield UNWATCHED.seen(pool.subject, f"no gateway has a lease on its {len(pool.records())} replicas")


def readable(pool: PoolEvidence) -> Iterator[Result]:
    """Whether every record in the pool's keys was readable in the last hour."""
    if pool.snapshots:
        snapshot = pool.last
        late = [each for each in snapshot.unreadable if each.last_ms > snapshot.state.now_ms - _LATELY_MS]
        if late:
            told = ", ".join(f"{each.key} ({each.times} so far, the last in field {each.field})" for each in late)
            yield UNREADABLE.seen(pool.subject, f"unreadable records in the last hour: {told}")


def versions(pool: PoolEvidence) -> Iterator[Result]:
    """Whether all run the same vLLM."""
    known = {replica.id: replica.version for replica in pool.replicas if not isinstance(replica.version, Unknown)}
    if differing := grouped(known):
        yield VERSIONS_DIFFER.seen(pool.subject, f"vLLM {differing}")


def hashing(pool: PoolEvidence) -> Iterator[Result]:
    """Whether one prompt makes the same blocks everywhere."""
    caches = {replica.id: replica.cache for replica in pool.replicas if not isinstance(replica.cache, Unknown)}
    for label in _HASHING:
        if differing := grouped({name: cache[label] for name, cache in caches.items() if label in cache}):
            yield HASHING_DIFFERS.seen(pool.subject, f"{label} {differing}")


def serving(pool: PoolEvidence) -> Iterator[Result]:
    """Whether all serve the same requests."""
    for replica in pool.replicas:
        if replica.answers and isinstance(replica.cards, Unknown):
            yield Unchecked(replica.subject, "what it serves", replica.cards.why)
    cards = {replica.id: replica.cards for replica in pool.replicas if not isinstance(replica.cards, Unknown)}
    if differing := grouped({name: ", ".join(sorted(card.id for card in each)) for name, each in cards.items()}):
        yield SERVING_DIFFERS.seen(pool.subject, f"models served: {differing}")
    if differing := grouped({name: _length(each) for name, each in cards.items()}):
        yield SERVING_DIFFERS.seen(pool.subject, f"max_model_len {differing}")


CHECKS_OF_POOL = (states, slow, drained, broken, watched, readable, versions, hashing, serving)


def registered(evidence: Evidence) -> Iterator[Result]:
    """Whether every configured replica is known in Redis."""
    registered = {record.replica for pool in evidence.pools for record in pool.records()}
    for pool in evidence.pools:
        for replica in pool.replicas:
            if pool.snapshots and replica.id not in registered and not replica.problem:
                yield UNREGISTERED.seen(
                    replica.subject, f"{replica.url} answers, and no gateway or agent has registered it"
                )


def reached(evidence: Evidence) -> Iterator[Result]:
    """Whether gateways have reached every replica that they know, be it added or discovered. Replicas that the doctor
    knows by itself have other findings."""
    known = {record.replica for pool in evidence.pools for record in pool.records()}
    known |= {replica.id for replica in evidence.replicas()}
    said = {name: (gateway, why) for gateway in evidence.gateways for name, why in gateway.not_ready.items()}
    for name in sorted(said.keys() - known):
        gateway, why = said[name]
        yield UNREACHED.seen(f"replica {name}", f"{gateway.name} says: {why}", replica=name)


def identities(evidence: Evidence) -> Iterator[Result]:
    """Whether the engine that answers is the one that Redis has under its id."""
    said = {
        replica: f"{gateway.name} says: {what}"
        for gateway in evidence.gateways
        for replica, what in gateway.taken_ids.items()
    }
    for pool in evidence.pools:
        for replica in pool.replicas:
            found = (snapshot.state.replicas.get(replica.id) for snapshot in pool.snapshots)
            records = [record for record in found if record is not None]
            lives = {record.incarnation for record in records}
            are_start_times = bool(lives) and not any(life.startswith("life-") for life in lives)
            if replica.started and are_start_times and replica.started not in lives:
                what = f"{replica.url} started {replica.started}, and Redis has {records[-1].url}, started "
                said.setdefault(replica.id, what + records[-1].incarnation)
    for name, what in sorted(said.items()):
        yield ID_TAKEN.seen(f"replica {name}", what)


CHECKS_OF_ALL = (registered, reached, identities)


def _length(cards: tuple[ModelCard, ...]) -> str:
    """The base models' longest prompt and answer; adapters have their base's."""
    return ", ".join(sorted({str(card.document.get("max_model_len")) for card in cards if card.parent is None}))
