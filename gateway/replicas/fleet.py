"""The replicas that a gateway knows of, and the models that they serve.

`Member` is one replica. `Served` is one model name, with the replicas that serve it. `Fleet` has all of both. The
health checks (`health_checks`) fill them in.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.engine.facts import EngineFacts, ModelCard, base_card
from coordinator.registry import ReplicaRecord
from coordinator.store import Store
from gateway.replicas.identity import Identity
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.upstream import Upstream

_PROBLEMS = {
    "hung": "it has work, and shows no progress",
    "dead": "it answers this gateway, but not the one that checks it for all",
}
_LIVES = re.compile(r"life-(\d{1,15})")


@dataclass(slots=True)
class Member:
    """A replica as this gateway knows it."""

    id: str
    url: str
    dp_rank: int | None = None
    cards: list[ModelCard] = field(default_factory=list)
    pool: str = ""
    facts: EngineFacts = field(default_factory=EngineFacts)
    alive: bool = False
    failures: int = 0
    problem: str = "not reached yet"
    is_answering: bool = False
    """Whether it answered this gateway when it was asked last."""
    checked_s: float = 0.0
    answered_s: float = field(default_factory=time.monotonic)
    """When it answered last, or was first heard of."""
    lacks_metrics: bool = False
    """Whether it did not answer when it was last asked for its metrics: `facts` may be those of an earlier life."""
    identity: Identity = field(default_factory=Identity)
    check: asyncio.Task[None] | None = None
    """It is being asked whether it lives, until this is done."""

    def incarnation(self, known: ReplicaRecord | None) -> str:
        """Its engine's start time; where it does not tell, a count that goes up when it comes back from the dead."""
        if known is not None and (not self.alive or self.lacks_metrics):
            return known.incarnation  # dying is not another life
        if self.facts.started:
            return self.facts.started
        lives = _LIVES.fullmatch(known.incarnation) if known is not None else None
        if known is None or lives is None:
            return "life-1"
        return f"life-{int(lives[1]) + (self.alive and known.state == 'dead')}"


@dataclass(frozen=True, slots=True)
class Served:
    """A served model name: the pool behind it, and what enters the prompt's root."""

    pool: str
    root_model: str
    adapter: str | None
    replicas: dict[str, str]
    """Where the replicas that serve it are, as this gateway is configured or has found out: nobody who can write to
    the store can send prompts elsewhere."""
    unshared: dict[str, str] = field(default_factory=dict)
    """The lives of those whose id means another engine in the store: see `identity`."""

    @property
    def shared(self) -> tuple[str, ...]:
        """Those among which the store may choose."""
        if not self.unshared:
            return tuple(self.replicas)
        return tuple(name for name in self.replicas if name not in self.unshared)


class Fleet:
    """The replicas that this gateway knows of."""

    def __init__(self, replicas: Sequence[ReplicaSettings], store: Store, upstream: Upstream) -> None:
        self.members: dict[str, Member] = {}
        """Those that get requests from this gateway, and others that are only watched."""
        self.changed = asyncio.Event()
        """There are others than before: they are to be asked."""
        self.id_conflicts: dict[str, str] = {}
        """By replica, that its id is another engine's in the registry; empty where it is not."""
        self._targets: tuple[str, ...] = ()
        self._store = store
        self._upstream = upstream
        self._served: dict[str, Served] = {}
        self.set_targets(replicas)

    def set_targets(self, replicas: Sequence[ReplicaSettings]) -> None:
        """From now on these get requests, and no others do. Requests go on where they are; who has left is watched on,
        as other gateways may still send it some."""
        for replica in replicas:
            member = self.members.get(replica.id)
            if member is None or (member.url, member.dp_rank) != (replica.url, replica.dp_rank) or not member.cards:
                self.members[replica.id] = Member(replica.id, replica.url, replica.dp_rank)
            elif replica.id not in self._targets:
                self.recheck(replica.id)  # it may have restarted while nobody asked
        self._targets = tuple(replica.id for replica in replicas)
        self._upstream.keep_only(replica.url for replica in replicas)
        self.index()
        self.changed.set()

    @property
    def targets(self) -> list[Member]:
        """Those that get requests from this gateway."""
        return [self.members[name] for name in self._targets]

    def is_target(self, replica: str) -> bool:
        """Whether it gets requests from this gateway."""
        return replica in self._targets

    def describe(self) -> dict[str, str]:
        """Every replica's state in words: ready, or why it is not."""
        return {member.id: "alive" if member.alive else member.problem for member in self.members.values()}

    def resolve(self, model: str) -> Served | None:
        """What a client's model name stands for; None when no replica serves it."""
        return self._served.get(model)

    @property
    def served(self) -> dict[str, Served]:
        return self._served

    def only_base_model(self) -> Served | None:
        """The one base model there is, for requests that name none; None when there are several, or none."""
        pools = {served.pool: served for served in self._served.values() if served.adapter is None}
        return next(iter(pools.values())) if len(pools) == 1 else None

    def block_tokens(self, replica: str) -> int:
        """Tokens in one block of the replica's cache; vLLM's default where it does not tell."""
        member = self.members.get(replica)
        return (member.facts.block_size if member is not None else 0) or 16

    def is_ready(self, replica: str) -> bool:
        """Alive and usable, as the pool's checker (or, without a store, this gateway) last saw it."""
        member = self.members.get(replica)
        return member is not None and self._state(member) == "ready"

    def is_exact(self, replica: str) -> bool:
        """Whether an agent tells what the replica holds, as the last heartbeat had it."""
        member = self.members.get(replica)
        if member is None or not member.pool or member.identity.is_taken or not self._store.is_up(member.pool):
            return False
        fleet = self._store.pool(member.pool).fleet
        return fleet is not None and fleet.is_exact(replica)

    def ready_replicas(self) -> list[str]:
        return [name for name in self._targets if self.is_ready(name)]

    def model_cards(self) -> list[dict[str, Any]]:
        """The union of the ready replicas' model cards, by id."""
        union: dict[str, dict[str, Any]] = {}
        for name in self.ready_replicas():
            for card in self.members[name].cards:
                union.setdefault(card.id, card.document)
        return [union[name] for name in sorted(union)]

    def problems(self) -> dict[str, str]:
        """Why each replica that is not ready is not."""
        unready = (self.members[name] for name in sorted(self._targets) if not self.is_ready(name))
        told = ((member, _PROBLEMS.get(self._state(member), "not registered yet")) for member in unready)
        return {member.id: member.problem or problem for member, problem in told}

    def taken_ids(self) -> dict[str, str]:
        """Of replicas whose id is another engine's in the registry: what is wrong, and what to do about it."""
        return {name: said for name in sorted(self._targets) if (said := self.id_conflicts.get(name))}

    def _state(self, member: Member) -> str:
        if member.identity.is_taken:  # what is registered is not this engine
            return "ready" if member.alive else "dead"
        record = self._store.pool(member.pool).records.get(member.id) if member.pool else None
        return record.state if record is not None else ""

    def recheck(self, replica: str) -> None:
        """A request to it broke: look at the next round whether it has restarted."""
        member = self.members.get(replica)
        if member is not None:
            member.failures = max(member.failures, 1)

    def index(self) -> None:
        """What is served has changed."""
        self._served = index(self.targets)


def index(members: Iterable[Member]) -> dict[str, Served]:
    """What these replicas serve."""
    names: dict[str, Served] = {}
    for member in sorted(members, key=lambda each: each.id):
        base = base_card(member.cards)
        for card in member.cards:
            assert base is not None
            adapter = card.id if card.parent is not None else None
            known = names.get(card.id)
            if known is None or known.pool != member.pool:
                known = Served(member.pool, base.root, adapter, {})
            replicas = {**known.replicas, member.id: member.url}
            unshared = (
                {**known.unshared, member.id: member.facts.started} if member.identity.is_taken else known.unshared
            )
            names[card.id] = Served(member.pool, base.root, adapter, replicas, unshared)
    return names


def ready_or_all(records: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
    """Those of the registry's replicas that are ready; all of them when none is."""
    everyone = list(records)
    return [record for record in everyone if record.state == "ready"] or everyone
