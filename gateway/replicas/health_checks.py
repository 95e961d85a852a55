"""Health checks of replicas: whether they live, which life it is, and what everybody is told of that.

Health is checked by the gateway that holds the pool's worker lease, and shared through the store; while the store is
down, by every gateway for itself. A gateway whose requests get no answer looks at once (`look_at`).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

import structlog

from coordinator.chores.worker import forget
from coordinator.engine.facts import EngineFacts, base_card, parse_metrics, parse_models
from coordinator.errors import StoreError
from coordinator.keys import pool_slug
from coordinator.registry import ReplicaRecord
from coordinator.store import Store
from gateway.replicas.fleet import Fleet
from gateway.replicas.identity import IdentityFacts
from gateway.replicas.member import Member
from gateway.settings.limit_settings import HealthSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream, UpstreamError

_log = structlog.get_logger("kvgate.checks")

_SEARCH_S = 0.25
_DISCOVER_EVERY = 5
_PATIENCE_S = 6.0
"""Longer than any lease in the store, and so than a restart or a move makes two disagree on who a replica is."""


class Checks:
    """Watches a fleet's replicas. `run()` as a task."""

    def __init__(self, fleet: Fleet, health: HealthSettings, store: Store, upstream: Upstream) -> None:
        self._fleet = fleet
        self._health = health
        self._store = store
        self._upstream = upstream
        self._patience_s = max(_PATIENCE_S, 3 * health.interval_s)
        self._round = 0
        self._first_round = asyncio.Event()
        self._tasks = Tasks()

    async def first_round(self) -> None:
        """Wait until every replica that was known by then was asked once."""
        await self._first_round.wait()

    async def run(self) -> None:
        """Check replicas forever; quickly while one has never been reached."""
        try:
            while True:
                self._fleet.changed.clear()
                self._adopt_registered()
                first = [self.look_at(member) for member in self._members() if self._is_due(member)]
                if not self._first_round.is_set():
                    await asyncio.gather(*first, return_exceptions=True)
                    self._first_round.set()
                self._share_chores()
                await self._forget_gone()
                self._round += 1
                searching = any(not member.cards for member in self._members()) and self._round < 240
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SEARCH_S if searching else self._health.interval_s):
                        await self._fleet.changed.wait()
        finally:
            await self._tasks.close()

    def _share_chores(self) -> None:
        """Who does a pool's chores says of all its replicas whether they live: this gateway cannot, where one's id is
        another engine's for it."""
        left = {member.pool for member in self._fleet.used if member.identity.is_left}
        for name in self._store.pool_names():
            self._store.pool(name).does_chores = name not in left

    def look_at(self, member: Member) -> asyncio.Task[None]:
        """Ask a replica now, unless that is being done."""
        if member.check is None or member.check.done():
            member.check = self._tasks.spawn(self._look(member), "health check")
        return member.check

    def suspect(self, member: Member) -> None:
        """It is waited for, and silent: ask it, as often as the gateway does that checks it for all."""
        if time.monotonic() - member.asked_s >= self._health.interval_s:
            self.look_at(member)

    async def _look(self, member: Member) -> None:
        """Ask once; where one that was alive does not answer, again and again, `interval_s` apart, until it is dead."""
        loop = asyncio.get_running_loop()
        while True:
            began_s, was_alive = loop.time(), member.alive
            await self._check(member)
            if not (was_alive and member.failures and self._fleet.members.get(member.id) is member):
                return
            await asyncio.sleep(max(0.0, began_s + self._health.interval_s - loop.time()))

    def _members(self) -> list[Member]:
        return list(self._fleet.members.values())

    def _adopt_registered(self) -> None:
        """Replicas that others registered are watched as well: one that left every configuration must still be found
        dead. What this gateway was not told of itself gets no request from it."""
        for pool_name in self._store.pool_names():  # of one that is not served any more, this gateway may do the chores
            for record in self._store.pool(pool_name).records.values():
                if record.replica not in self._fleet.members:
                    same = [each.id for each in self._members() if each.facts.started == record.incarnation]
                    _log.info(
                        "registered by others, unknown here: it gets no requests",
                        replica=record.replica,
                        **({"hint": f"it may be {same[0]}: its agent must be given that id"} if same else {}),
                    )
                    self._fleet.members[record.replica] = Member(record.replica, record.url, pool=pool_name)

    def _is_due(self, member: Member) -> bool:
        if not self._fleet.uses(member.id) and member.failures > self._health.failures:
            return self._round % _DISCOVER_EVERY == 0  # gone, for all that is known
        if not member.cards or self._may_have_restarted(member) or not self._store.is_up(member.pool):
            return True
        return self._store.pool(member.pool).is_worker or self._round % _DISCOVER_EVERY == 0

    def _may_have_restarted(self, member: Member) -> bool:
        """Whether something failed since it was last seen well, or others know it by another life."""
        if not member.alive or member.failures:
            return True
        known = self._store.pool(member.pool).records.get(member.id)
        return known is not None and known.incarnation != member.incarnation(known)

    async def _check(self, member: Member) -> None:
        was_alive, member.asked_s = member.alive, time.monotonic()
        try:
            is_ours = self._fleet.uses(member.id) and self._fleet.members.get(member.id) is member
            status, _ = await self._upstream.fetch(member.url + "/health", self._health.timeout_s, with_key=is_ours)
            if status >= 500:
                raise UpstreamError("unhealthy", f"/health answered {status}")
            if is_ours and (self._may_have_restarted(member) or self._round % _DISCOVER_EVERY == 0):
                await self._discover(member)
        except UpstreamError as error:
            member.failures += 1
            member.answers = False
            if was_alive and member.failures < self._health.failures:
                return
            member.alive, member.problem = False, str(error)
        else:
            member.failures, member.alive, member.problem = 0, True, ""
            member.answers, member.answered_s = True, time.monotonic()
        if was_alive != member.alive:
            log = _log.info if member.alive else _log.warning
            log("replica", replica=member.id, alive=member.alive, problem=member.problem)
        await self._meet(member)
        self._publish(member)

    async def _meet(self, member: Member) -> None:
        """Before anything is said of a pool: what others have said of it."""
        pool = self._store.pool(member.pool) if member.pool else None
        if pool is not None and pool.state is None and self._store.is_up(pool.name):
            with suppress(StoreError):
                await pool.beat()

    async def _discover(self, member: Member) -> None:
        timeout_s = self._health.timeout_s
        cards = parse_models(await self._upstream.fetch_json(member.url + "/v1/models", timeout_s))
        base = base_card(cards)
        if base is None:
            raise UpstreamError("protocol", "/v1/models lists no model")
        try:
            facts = await engine_facts(self._upstream, member, timeout_s)
        except UpstreamError:
            facts, member.lacks_metrics = member.facts, True
        else:
            member.lacks_metrics = False
        if facts.engines > 1 and member.dp_rank is None:
            raise UpstreamError(
                "refused",
                f"a data-parallel server with {facts.engines} ranks behind one address: list it once per rank, "
                "each with its own id and dp_rank",
            )
        member.facts = facts if facts.started else replace(facts, started=member.facts.started)
        if cards != member.cards:
            member.cards, member.pool = cards, pool_slug(base.root)
            self._fleet.index()
        self._store.pool(member.pool).prefills.observe(member.id, facts.figures)

    def _publish(self, member: Member) -> None:
        """Register what was found: a replica or a later life of it by any gateway, other changes by the pool's
        worker alone."""
        if not member.pool or self._fleet.members.get(member.id) is not member:
            return  # of no known model, or it has moved while it was asked
        pool = self._store.pool(member.pool)
        known = pool.records.get(member.id)
        state, incarnation = "ready" if member.alive else "dead", member.incarnation(known)
        if member.alive and known is not None and (known.state, known.incarnation) == ("hung", incarnation):
            state = "hung"  # its /health says nothing about that
        if not self._fleet.uses(member.id):
            if known is None:
                return  # forgotten
            wanted = replace(known, state=state)  # all that is looked at here is its health
        elif self._is_left(member, known):
            return
        else:
            wanted = ReplicaRecord(
                replica=member.id,
                incarnation=incarnation,
                state=state,
                capacity_tokens=member.facts.capacity_tokens,
                since_ms=known.since_ms if known else 0,
                url=member.url,
                floor=known.floor if known else 0,
            )
        if known == wanted:
            return
        if pool.is_worker or not self._store.is_up(member.pool):
            pool.register(wanted)
        elif known is None or known.incarnation != wanted.incarnation:
            pool.register(wanted, only_if_absent=True)

    def _is_left(self, member: Member, known: ReplicaRecord | None) -> bool:
        """Whether its id is another engine's."""
        pool, identity = self._store.pool(member.pool), member.identity
        was_left, now_s = identity.is_left, time.monotonic()
        if pool.state is not None and self._store.is_up(pool.name) and not member.lacks_metrics:
            followed, opposed = pool.state.is_followed(member.id), pool.state.worker not in ("", pool.gateway)
            facts = IdentityFacts(member.facts.started, member.url, member.alive, known, followed, opposed)
            identity.judge(facts, now_s, self._patience_s)
        if was_left != identity.is_left:
            self._fleet.index()
        self._tell(member, identity.finding(now_s, self._patience_s))
        return identity.is_left

    def _tell(self, member: Member, finding: str) -> None:
        """Say once that its id is another engine's, and once that it is no more."""
        if finding and not self._fleet.findings.get(member.id):
            _log.warning("its id is taken", replica=member.id, problem=finding)
        elif not finding and self._fleet.findings.get(member.id):
            _log.info("its id is its own again", replica=member.id)
        self._fleet.findings[member.id] = finding

    async def _forget_gone(self) -> None:
        """Those that get no requests from here: the pool's worker forgets who has not answered for long, and who is
        forgotten is not watched any more."""
        for member in list(self._fleet.members.values()):
            if self._fleet.uses(member.id) or self._fleet.members.get(member.id) is not member:
                continue  # it may have been found again while another was forgotten
            pool = self._store.pool(member.pool) if member.pool else None
            if pool is None or member.id not in pool.records:
                del self._fleet.members[member.id]
                self._fleet.findings.pop(member.id, None)
            elif pool.is_worker and time.monotonic() > member.answered_s + self._health.forget_s:
                with suppress(StoreError):  # tried again in the next round
                    if await forget(pool, pool.records[member.id]):
                        _log.info("forgotten", replica=member.id, silent_s=round(time.monotonic() - member.answered_s))


async def engine_facts(upstream: Upstream, member: Member, timeout_s: float) -> EngineFacts:
    """What a replica's /metrics tell of its engine. Raises UpstreamError."""
    _, metrics = await upstream.fetch(member.url + "/metrics", timeout_s)
    return parse_metrics(metrics.decode("utf-8", "replace"), member.dp_rank)
