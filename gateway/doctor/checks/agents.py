"""Whether each replica's events reach the map: its engine publishes, and its agent hears."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.finding import FindingKind, Result
from coordinator.registry import PARTIAL, UNCONFIRMED, ReplicaRecord
from coordinator.survey import PoolSnapshot
from gateway.doctor.evidence import PoolEvidence, ReplicaEvidence, Unknown

_RELEARNING_MS = 600_000
_SNAPSHOTS_NEEDED = 5
_NO_EVENT = -1
_COMPUTED_TOKENS = 1024
"""An engine that has computed this many tokens, beside the last ones of each prompt, which fill no block, has published
events about them."""
_BLOCK_TOKENS = 16
"""In a block of a replica that does not tell; vLLM's default."""
_MAX_DIGITS = 6

MISSING = FindingKind(
    "agent-missing",
    "warning",
    "KVGate guesses its cache from the requests it got: evictions and restarts stay unseen",
    "run on its host, with the gateways' KVGATE_REDIS_URL: kvgate agent --replica {replica} --url {url}",
)
GONE = FindingKind(
    "agent-gone",
    "error",
    "since then evictions and restarts stay unseen, and soon KVGate only guesses its cache",
    "read its log and start it, with the gateways' KVGATE_REDIS_URL: kvgate agent --replica {replica} --url {url}",
)
DEAF = FindingKind(
    "agent-deaf",
    "error",
    "its engine publishes KV events and none reach the agent: KVGate only guesses the replica's cache",
    "correct the agent's --events and --replay, open these ports to it, and make sure that vLLM binds its endpoint: "
    "it binds ipc:, and what has * or :: in it",
)
SILENT = FindingKind(
    "events-missing",
    "error",
    "a working engine publishes events about the blocks that it fills: they are lost on the way to the map",
    "give vLLM a replay_endpoint and the agent --replay, and make sure that vLLM binds its endpoint: it binds ipc:, "
    "and what has * or :: in it",
)
UNCONFIRMABLE = FindingKind(
    "events-unconfirmable",
    "warning",
    "its model has layers other than full attention. A prefix can be a miss although its blocks are held, so the "
    "replica is degraded, and only cached_tokens of its answers correct the map",
    "leave it so; or, for sliding windows, give vLLM --disable-hybrid-kv-cache-manager, which takes more memory",
)
RELEARNING = FindingKind(
    "agent-relearning",
    "warning",
    "events were lost, so the engine holds prefixes that the map does not know, until its cache has been refilled",
    "raise buffer_steps in --kv-events-config, start agents before their engines; restart vLLM to empty its cache",
)


def attended(pool: PoolEvidence) -> Iterator[Result]:
    """Whether a live agent hears each replica's events. Those of an engine that is too old are of no use."""
    too_old = {each.id for each in pool.replicas if each.names_no_sessions}
    for record in _alive(pool):
        if record.replica in too_old:
            continue
        subject, agent = f"replica {record.replica}", pool.agent(record.replica)
        values = {"replica": record.replica, "url": record.url}
        if agent is None:
            if not _is_foreign(pool, record.replica) and _publishes(pool, record.replica):
                yield MISSING.seen(subject, "it has no agent in its current life", **values)
        elif (late_ms := pool.last.state.now_ms - agent.lease_until_ms) > 0:
            yield GONE.seen(
                subject, f"the lease of its agent {agent.agent} ran out {late_ms / 1000:.0f} s ago", **values
            )
        elif agent.mode == "none" and _publishes(pool, record.replica):
            yield DEAF.seen(subject, f"its agent {agent.agent} hears no events (mode none)")
        elif agent.mode in (PARTIAL, UNCONFIRMED):
            yield UNCONFIRMABLE.seen(subject, f"events cannot confirm what it holds (mode {agent.mode})")


def heard(pool: PoolEvidence) -> Iterator[Result]:
    """Whether events come from the engines that compute."""
    for record in _followed(pool):
        subject = f"replica {record.replica}"
        block_tokens = _block_tokens(pool, record.replica)
        computed = [_computed(snapshot, record, block_tokens) for snapshot in pool.snapshots]
        seq, tokens = computed[-1]
        if seq < 0 and tokens >= _COMPUTED_TOKENS:
            yield SILENT.seen(subject, f"its engine has computed {tokens:.0f} tokens or more, and no event came")
        elif len({each[0] for each in computed}) == 1 and (lately := _lately(computed)) >= _COMPUTED_TOKENS:
            yield SILENT.seen(
                subject, f"its engine computed {lately:.0f} tokens or more just now, and no event came after {seq}"
            )


def learned(pool: PoolEvidence) -> Iterator[Result]:
    """Whether agents know the whole cache of their engines, even what was in it before they listened."""
    for record in _followed(pool):
        age_ms = pool.last.state.now_ms - record.since_ms
        if age_ms > _RELEARNING_MS and all(_is_relearning(snapshot, record.replica) for snapshot in pool.snapshots):
            what = f"its agent does not know the engine's whole cache; the engine has run for {age_ms / 60_000:.0f} min"
            yield RELEARNING.seen(f"replica {record.replica}", what)


CHECKS = (attended, heard, learned)


def _alive(pool: PoolEvidence) -> list[ReplicaRecord]:
    return [record for record in pool.records() if record.state == "ready"]


def _followed(pool: PoolEvidence) -> list[ReplicaRecord]:
    """Those whose agent reports that it hears events."""
    return [record for record in _alive(pool) if pool.last.state.is_told(record.replica)]


def _is_foreign(pool: PoolEvidence, replica: str) -> bool:
    """Whether it answers, but is not vLLM: then an agent has no events to hear."""
    return any(each.id == replica and each.answers and isinstance(each.cache, Unknown) for each in pool.replicas)


def _publishes(pool: PoolEvidence, replica: str) -> bool:
    """Whether it may publish events. If it publishes none, that is a finding of its own (events-off)."""
    known: dict[str, ReplicaEvidence] = {each.id: each for each in pool.replicas}
    endpoints = known[replica].endpoints if replica in known else Unknown("not asked")
    return isinstance(endpoints, Unknown) or bool(endpoints)


def _block_tokens(pool: PoolEvidence, replica: str) -> int:
    cache = next((each.cache for each in pool.replicas if each.id == replica), {})
    told = "" if isinstance(cache, Unknown) else cache.get("block_size", "")
    return int(told) if told.isdecimal() and len(told) <= _MAX_DIGITS else _BLOCK_TOKENS


def _computed(snapshot: PoolSnapshot, record: ReplicaRecord, block_tokens: int) -> tuple[int, float]:
    """The last event that its agent applied, and the prompt tokens that its engine computed in its current life, less
    those that may have filled no block: some of each prompt."""
    agent, figures = snapshot.state.agents.get(record.replica), snapshot.figures.engines.get(record.replica, {})
    if agent is None or agent.incarnation != record.incarnation:
        return _NO_EVENT, 0.0
    tokens = figures.get("prefix_queries_tokens", 0) - figures.get("prefix_hits_tokens", 0)
    prompts = figures.get("prefills", 0) + figures.get("running", 0)  # those that are over, and the others
    return agent.seq, tokens - prompts * (block_tokens - 1)


def _lately(computed: list[tuple[int, float]]) -> float:
    """The tokens computed in a span for which events must have come. Agents read counters up to a second later than
    events: the first snapshots may count tokens from before the span, and the last ones tokens whose events are due."""
    return computed[-2][1] - computed[-3][1] if len(computed) >= _SNAPSHOTS_NEEDED else 0.0


def _is_relearning(snapshot: PoolSnapshot, replica: str) -> bool:
    agent = snapshot.state.agents.get(replica)
    return agent is not None and agent.is_relearning
