"""What the doctor collected, for the checks to judge."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

from coordinator.engine.facts import SESSIONS_SINCE, ModelCard
from coordinator.engine.kv_transfers import KvTransfers
from coordinator.redis.checks import RedisEvidence
from coordinator.registry import AgentRecord, ReplicaRecord
from coordinator.survey import PoolSnapshot
from gateway.settings.gateway_settings import GatewaySettings

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands for something that could not be learned, with the reason."""

    why: str


@dataclass(frozen=True, slots=True)
class ReplicaEvidence:
    """A replica as it answers, and its pool (empty if nobody knows it)."""

    id: str
    url: str
    pool: str = ""
    problem: str = ""
    """Why it is not healthy, as seen from this machine; empty if it is."""
    answers: bool = True
    """Whether it answered /health in any way."""
    version: str | Unknown = Unknown("not asked")
    """The version of vLLM."""
    cards: tuple[ModelCard, ...] | Unknown = Unknown("not asked")
    cache: dict[str, str] | Unknown = Unknown("not asked")
    """The settings of its cache: the labels of vllm:cache_config_info."""
    transfers: KvTransfers | Unknown = Unknown("not asked")
    started: str = ""
    """When its engine started, which names its life; empty if it does not say so."""
    endpoints: tuple[str, ...] | Unknown = Unknown("not asked")
    """Where it publishes and replays KV events; empty if it publishes none."""
    open_endpoints: dict[str, str] | Unknown = field(default_factory=dict)
    """The endpoints that this machine reaches over a network, each with the address that answered."""

    @property
    def subject(self) -> str:
        return f"replica {self.id}"

    @property
    def version_number(self) -> tuple[int, ...]:
        """Major and minor of its version; empty if they are not known."""
        found = () if isinstance(self.version, Unknown) else _NUMBERS.findall(self.version)[:2]
        return tuple(int(part) for part in found) if len(found) == 2 else ()

    @property
    def names_no_sessions(self) -> bool:
        """Whether its version is so old that its events tell nothing of prompts."""
        return () < self.version_number < SESSIONS_SINCE


@dataclass(frozen=True, slots=True)
class PoolEvidence:
    """A pool: a few snapshots of it in Redis, a second apart, and its replicas as they answer."""

    name: str
    replicas: tuple[ReplicaEvidence, ...] = ()
    snapshots: tuple[PoolSnapshot, ...] = ()
    """Oldest first; none if Redis does not answer."""
    retired: frozenset[str] = frozenset()
    """Replicas that are registered, but in no configuration any more."""

    @property
    def subject(self) -> str:
        return f"pool {self.name}"

    @property
    def last(self) -> PoolSnapshot:
        """The newest snapshot, if Redis answered at all."""
        return self.snapshots[-1]

    def records(self) -> list[ReplicaRecord]:
        """The registered replicas, as of the last snapshot."""
        if not self.snapshots:
            return []
        return [record for name, record in sorted(self.last.state.replicas.items()) if name not in self.retired]

    def agent(self, replica: str) -> AgentRecord | None:
        """The agent of a registered replica in its current life; None if it has none."""
        state = self.last.state
        agent, record = state.agents.get(replica), state.replicas[replica]
        return agent if agent is not None and agent.incarnation == record.incarnation else None


@dataclass(frozen=True, slots=True)
class FailingPrefill:
    """The last prompts that a replica was to compute for others: how many, and how many failed by each reason."""

    legs: int
    failed: dict[str, int]


@dataclass(frozen=True, slots=True)
class GatewayEvidence:
    """A gateway as it answers. If it does not, `problem` says why, and the rest is empty."""

    url: str
    problem: str = ""
    id: str = ""
    version: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    """A digest of each section of its settings."""
    is_ready: bool = False
    reasons: tuple[str, ...] = ()
    config_problems: tuple[str, ...] = ()
    needs_a_restart: tuple[str, ...] = ()
    """Fields of its file."""
    has_older_keys: bool = False
    """Whether another gateway has a newer file, whose API keys count."""
    ignored_records: dict[str, str] = field(default_factory=dict)
    """Fields of the records in Redis that it ignores, and why."""
    store_problem: str = ""
    store_warnings: dict[str, str] = field(default_factory=dict)
    """Its warnings about Redis, by condition, if it holds the watch's lease."""
    taken_ids: dict[str, str] = field(default_factory=dict)
    """Its words about replicas whose id belongs to another engine in Redis."""
    replicas: frozenset[str] = frozenset()
    """The replicas that are ready, as it sees them."""
    not_ready: dict[str, str] = field(default_factory=dict)
    """The replicas that are not ready, as it sees them, and why."""
    exact: frozenset[str] = frozenset()
    roles: dict[str, str] = field(default_factory=dict)
    """Of the replicas that have a label for it."""
    pairs_protocol: str = ""
    """Empty if no replica has a role."""
    failing_prefills: dict[str, FailingPrefill] = field(default_factory=dict)
    pools: tuple[str, ...] = ()
    models_down: tuple[str, ...] = ()
    """Models without a ready replica."""
    answered_by: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Model without a ready replica → its fallbacks that have one."""
    unknown_fallbacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Model → its fallbacks that no replica serves."""
    several_pools: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Model → its pools, if several serve it."""
    models: frozenset[str] = frozenset()
    """Models whose backends are configured."""
    without_replicas: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Model → its backends that have weight and no ready replica."""
    models_without_price: tuple[str, ...] = ()
    """Models whose requests spend nothing, if there are budgets in money."""
    are_weights_approximate: bool = False
    keys: tuple[str, ...] | Unknown = Unknown("not asked")
    """The prefix keys that it gives to a prompt. The doctor asks all gateways about the same prompt."""

    @property
    def name(self) -> str:
        return self.id.rpartition(".")[0] or self.url

    @property
    def subject(self) -> str:
        return f"gateway {self.name}"


@dataclass(frozen=True, slots=True)
class LmcacheEvidence:
    """An `lmcache server`, as its /status describes it."""

    url: str
    problem: str = ""
    chunk_tokens: str = ""
    hash_algorithm: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was collected."""

    redis: RedisEvidence | Unknown
    pools: tuple[PoolEvidence, ...] = ()
    homeless: tuple[ReplicaEvidence, ...] = ()
    """Replicas whose pool nobody knows."""
    gateways: tuple[GatewayEvidence, ...] = ()
    lmcache: tuple[LmcacheEvidence, ...] = ()
    settings: GatewaySettings | Unknown | None = None
    """The configuration that the doctor was given, or why it could not be read."""

    def replicas(self) -> tuple[ReplicaEvidence, ...]:
        return tuple(replica for pool in self.pools for replica in pool.replicas) + self.homeless


def grouped(values: dict[str, str]) -> str:
    """Who has which value, like `r0, r1: 16; r2: 32`; empty if all have the same."""
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in sorted(values.items()):
        holders[value].append(name)
    return "" if len(holders) < 2 else "; ".join(f"{', '.join(names)}: {value}" for value, names in holders.items())
