"""Which replicas there are, what they serve, and whether they live.

Every gateway asks each replica for its models, and registers what it finds. Health is checked by the gateway that
holds the pool's worker lease and shared through the store; while the store is down, by every gateway for itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import structlog

from coordinator.errors import StoreError
from coordinator.keys import pool_slug
from coordinator.registry import ReplicaRecord
from coordinator.store import Store
from coordinator.worker import forget
from gateway.facts import base_card, parse_metrics, parse_models
from gateway.limit_settings import HealthSettings
from gateway.member import Member
from gateway.settings import ReplicaSettings
from gateway.upstream import Upstream, UpstreamError

_log = structlog.get_logger("kvgate.fleet")

_SEARCH_S = 0.25
_DISCOVER_EVERY = 5


@dataclass(frozen=True, slots=True)
class Served:
    """A served model name: the pool behind it, and what enters the prompt's root."""

    pool: str
    root_model: str
    adapter: str | None
    replicas: dict[str, str]
    """Where the replicas that serve it are, as this gateway is configured or has found out: nobody who can write to
    the store can send prompts elsewhere."""


class Fleet:
    """Discovers and watches replicas. `run()` as a task."""

    def __init__(
        self, replicas: Sequence[ReplicaSettings], health: HealthSettings, store: Store, upstream: Upstream
    ) -> None:
        self.members: dict[str, Member] = {}
        """Those that get requests from this gateway, and others that are only watched."""
        self._used: tuple[str, ...] = ()
        self._health = health
        self._store = store
        self._upstream = upstream
        self._served: dict[str, Served] = {}
        self._round = 0
        self._first_round = asyncio.Event()
        self._changed = asyncio.Event()
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
        self._index()
        self._changed.set()

    @property
    def used(self) -> list[Member]:
        """Those that get requests from this gateway."""
        return [self.members[name] for name in self._used]

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
        if member is None or not member.pool:
            return False
        record = self._store.pool(member.pool).records.get(replica)
        return record is not None and record.state == "ready"

    def is_exact(self, replica: str) -> bool:
        """Whether an agent tells what the replica holds, as the last heartbeat had it."""
        member = self.members.get(replica)
        if member is None or not member.pool or not self._store.is_up(member.pool):
            return False
        fleet = self._store.pool(member.pool).fleet
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
        return {member.id: member.problem or "marked dead" for member in unready}

    async def first_round(self) -> None:
        """Wait until every replica that was known by then was asked once."""
        await self._first_round.wait()

    async def run(self) -> None:
        """Check replicas forever; quickly while one has never been reached."""
        while True:
            self._changed.clear()
            self._adopt_registered()
            due = [member for member in self.members.values() if self._is_due(member)]
            await asyncio.gather(*(self._check(member) for member in due))
            await self._forget_gone()
            self._round += 1
            self._first_round.set()
            searching = any(not member.cards for member in self.members.values()) and self._round < 240
            with suppress(TimeoutError):
                async with asyncio.timeout(_SEARCH_S if searching else self._health.interval_s):
                    await self._changed.wait()

    def _adopt_registered(self) -> None:
        """Replicas that others registered are watched as well: one that left every configuration must still be found
        dead. What this gateway was not told of itself gets no request from it."""
        for pool_name in self._store.pool_names():  # of one that is not served any more, this gateway may do the chores
            for record in self._store.pool(pool_name).records.values():
                if record.replica not in self.members:
                    same = [each.id for each in self.members.values() if each.facts.started == record.incarnation]
                    _log.info(
                        "registered by others, unknown here: it gets no requests",
                        replica=record.replica,
                        **({"hint": f"it may be {same[0]}: its agent must be given that id"} if same else {}),
                    )
                    self.members[record.replica] = Member(record.replica, record.url, pool=pool_name)

    def _is_due(self, member: Member) -> bool:
        if member.id not in self._used and member.failures > self._health.failures:
            return self._round % _DISCOVER_EVERY == 0  # gone; an address without a host holds every round up
        if not member.cards or not member.alive or member.failures or not self._store.is_up(member.pool):
            return True
        return self._is_worker(member) or self._round % _DISCOVER_EVERY == 0

    def _is_worker(self, member: Member) -> bool:
        pool = self._store.pool(member.pool)
        return pool.fleet is not None and pool.fleet.worker == pool.gateway

    def doubt(self, replica: str) -> None:
        """A request to it broke: look at the next round whether it has restarted."""
        member = self.members.get(replica)
        if member is not None:
            member.failures = max(member.failures, 1)

    def _may_have_restarted(self, member: Member) -> bool:
        """Whether something failed since it was last seen well, or others know it by another life."""
        if not member.alive or member.failures:
            return True
        known = self._store.pool(member.pool).records.get(member.id)
        return known is not None and known.incarnation != member.incarnation(known)

    async def _check(self, member: Member) -> None:
        was_alive = member.alive
        try:
            is_ours = member.id in self._used
            status, _ = await self._upstream.fetch(member.url + "/health", self._health.timeout_s, with_key=is_ours)
            if status >= 500:
                raise UpstreamError("unhealthy", f"/health answered {status}")
            if is_ours and (self._may_have_restarted(member) or self._round % _DISCOVER_EVERY == 0):
                await self._discover(member)
        except UpstreamError as error:
            member.failures += 1
            if was_alive and member.failures < self._health.failures:
                return
            member.alive, member.problem = False, str(error)
        else:
            member.failures, member.alive, member.problem = 0, True, ""
            member.answered_s = time.monotonic()
        if was_alive != member.alive:
            _log.info("replica", replica=member.id, alive=member.alive, problem=member.problem)
        self._publish(member)

    async def _discover(self, member: Member) -> None:
        timeout_s = self._health.timeout_s
        cards = parse_models(await self._upstream.fetch_json(member.url + "/v1/models", timeout_s))
        base = base_card(cards)
        if base is None:
            raise UpstreamError("protocol", "/v1/models lists no model")
        try:
            _, metrics = await self._upstream.fetch(member.url + "/metrics", timeout_s)
            facts = parse_metrics(metrics.decode("utf-8", "replace"), member.dp_rank)
            member.lacks_metrics = False
        except UpstreamError:
            facts, member.lacks_metrics = member.facts, True
        if facts.engines > 1 and member.dp_rank is None:
            raise UpstreamError(
                "refused",
                f"a data-parallel server with {facts.engines} ranks behind one address: list it once per rank, "
                "each with its own id and dp_rank",
            )
        member.facts = facts if facts.started else replace(facts, started=member.facts.started)
        if cards != member.cards:
            member.cards, member.pool = cards, pool_slug(base.root)
            self._index()
        self._store.pool(member.pool).prefills.observe(member.id, facts.figures)

    def _publish(self, member: Member) -> None:
        """Register what was found: a replica or a later life of it by any gateway, other changes by the pool's
        worker alone."""
        if not member.pool or self.members.get(member.id) is not member:
            return  # of no known model, or it has moved while it was asked
        pool = self._store.pool(member.pool)
        known = pool.records.get(member.id)
        state = "ready" if member.alive else "dead"
        if member.id not in self._used:
            if known is None:
                return  # forgotten
            wanted = replace(known, state=state)  # all that is looked at here is its health
        else:
            wanted = ReplicaRecord(
                replica=member.id,
                incarnation=member.incarnation(known),
                state=state,
                capacity_tokens=member.facts.capacity_tokens,
                since_ms=known.since_ms if known else 0,
                url=member.url,
                floor=known.floor if known else 0,
            )
        if known == wanted:
            return
        if self._is_worker(member) or not self._store.is_up(member.pool):
            pool.register(wanted)
        elif known is None or known.incarnation != wanted.incarnation:
            pool.register(wanted, only_if_absent=True)

    async def _forget_gone(self) -> None:
        """Those that get no requests from here: the pool's worker forgets who has not answered for long, and who is
        forgotten is not watched any more."""
        for member in list(self.members.values()):
            if member.id in self._used or self.members.get(member.id) is not member:
                continue  # it may have been found again while another was forgotten
            pool = self._store.pool(member.pool) if member.pool else None
            if pool is None or member.id not in pool.records:
                del self.members[member.id]
            elif self._is_worker(member) and time.monotonic() > member.answered_s + self._health.forget_s:
                with suppress(StoreError):  # tried again in the next round
                    if await forget(pool, pool.records[member.id]):
                        _log.info("forgotten", replica=member.id, silent_s=round(time.monotonic() - member.answered_s))

    def _index(self) -> None:
        names: dict[str, Served] = {}
        for name in sorted(self._used):
            member = self.members[name]
            base = base_card(member.cards)
            for card in member.cards:
                assert base is not None
                adapter = card.id if card.parent is not None else None
                known = names.get(card.id)
                replicas = known.replicas if known and known.pool == member.pool else {}
                names[card.id] = Served(member.pool, base.root, adapter, {**replicas, member.id: member.url})
        self._served = names


def ready_records(records: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
    """Those of the registry's replicas that are ready; all of them when none is."""
    everyone = list(records)
    return [record for record in everyone if record.state == "ready"] or everyone
