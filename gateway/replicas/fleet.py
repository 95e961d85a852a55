"""Which replicas there are, and what they serve.

Every gateway asks each replica for its models, and registers what it finds: see `checks`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from coordinator.registry import ReplicaRecord
from coordinator.store import Store
from gateway.replicas.member import Member
from gateway.replicas.served import Served, index
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.upstream import Upstream

_PROBLEMS = {
    "hung": "it has work, and shows no progress",
    "dead": "it answers this gateway, but not the one that checks it for all",
}


class Fleet:
    """The replicas that this gateway knows of."""

    def __init__(self, replicas: Sequence[ReplicaSettings], store: Store, upstream: Upstream) -> None:
        self.members: dict[str, Member] = {}
        """Those that get requests from this gateway, and others that are only watched."""
        self.changed = asyncio.Event()
        """There are others than before: they are to be asked."""
        self.findings: dict[str, str] = {}
        """By replica, that its id is another engine's in the registry; empty where it is not."""
        self._used: tuple[str, ...] = ()
        self._store = store
        self._upstream = upstream
        self._served: dict[str, Served] = {}
        self.use(replicas)

    def use(self, replicas: Sequence[ReplicaSettings]) -> None:
        """From now on these get requests, and no others do. Requests go on where they are; who has left is watched on,
        as other gateways may still send it some."""
        for replica in replicas:
            member = self.members.get(replica.id)
            if member is None or (member.url, member.dp_rank) != (replica.url, replica.dp_rank) or not member.cards:
                self.members[replica.id] = Member(replica.id, replica.url, replica.dp_rank)
            elif replica.id not in self._used:
                self.doubt(replica.id)  # it may have restarted while nobody asked
        self._used = tuple(replica.id for replica in replicas)
        self._upstream.keep_only(replica.url for replica in replicas)
        self.index()
        self.changed.set()

    @property
    def used(self) -> list[Member]:
        """Those that get requests from this gateway."""
        return [self.members[name] for name in self._used]

    def uses(self, replica: str) -> bool:
        """Whether it gets requests from this gateway."""
        return replica in self._used

    def describe(self) -> dict[str, str]:
        """Every replica's state in words: ready, or why it is not."""
        return {member.id: "alive" if member.alive else member.problem for member in self.members.values()}

    def resolve(self, model: str) -> Served | None:
        """What a client's model name stands for; None when no replica serves it."""
        return self._served.get(model)

    @property
    def served(self) -> dict[str, Served]:
        return self._served

    def only_pool(self) -> Served | None:
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
        if member is None or not member.pool or member.identity.is_left or not self._store.is_up(member.pool):
            return False
        fleet = self._store.pool(member.pool).state
        return fleet is not None and fleet.is_exact(replica)

    def ready_replicas(self) -> list[str]:
        return [name for name in self._used if self.is_ready(name)]

    def cards(self) -> list[dict[str, Any]]:
        """The union of the ready replicas' model cards, by id."""
        union: dict[str, dict[str, Any]] = {}
        for name in self.ready_replicas():
            for card in self.members[name].cards:
                union.setdefault(card.id, card.document)
        return [union[name] for name in sorted(union)]

    def problems(self) -> dict[str, str]:
        """Why each replica that is not ready is not."""
        unready = (self.members[name] for name in sorted(self._used) if not self.is_ready(name))
        told = ((member, _PROBLEMS.get(self._state(member), "not registered yet")) for member in unready)
        return {member.id: member.problem or problem for member, problem in told}

    def taken_ids(self) -> dict[str, str]:
        """Of replicas whose id is another engine's in the registry: what is wrong, and what to do about it."""
        return {name: said for name in sorted(self._used) if (said := self.findings.get(name))}

    def _state(self, member: Member) -> str:
        if member.identity.is_left:  # what is registered is not this engine
            return "ready" if member.alive else "dead"
        record = self._store.pool(member.pool).records.get(member.id) if member.pool else None
        return record.state if record is not None else ""

    def doubt(self, replica: str) -> None:
        """A request to it broke: look at the next round whether it has restarted."""
        member = self.members.get(replica)
        if member is not None:
            member.failures = max(member.failures, 1)

    def index(self) -> None:
        """What is served has changed."""
        self._served = index(self.used)


def ready_records(records: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
    """Those of the registry's replicas that are ready; all of them when none is."""
    everyone = list(records)
    return [record for record in everyone if record.state == "ready"] or everyone
