"""Health checks: find out whether replicas are alive and which incarnation they are, and register that in the store.

One gateway, the pool's worker, checks for all. While the store is down, every gateway checks for itself. A gateway
whose requests get no answer checks that replica too (`check_silent`).

Only the worker says that a replica is dead. But its own network may be broken. So any gateway that hears a dead replica
twice in a row says that it is ready. A gateway that still does not hear it is overruled: it says nothing of that
replica for a while, and leaves the worker's part to another gateway.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import structlog

from coordinator.engine.facts import (
    EngineFacts,
    base_card,
    decode_tokens_per_s,
    parse_metrics,
    parse_models,
    parse_sleep,
)
from coordinator.engine.light_json import parse_answer
from coordinator.errors import StoreError
from coordinator.keys import pool_slug
from coordinator.maintenance.held_keys import forget
from coordinator.redis.wire import has_result
from coordinator.registry import ASLEEP, ReplicaRecord
from coordinator.store import Store
from gateway.replicas.fleet import Fleet
from gateway.replicas.identity import IdentityFacts
from gateway.replicas.member import Member, is_same_life
from gateway.replicas.model_states import ModelLog, model_states
from gateway.replicas.told_role import PATH, parse_role
from gateway.settings.limit_settings import HealthSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream, UpstreamError

_log = structlog.get_logger("kvgate.checks")

INTERVAL_S = 1.0
"""Between two checks of a replica. A check costs it next to nothing."""
FAILURES = 2
"""Consecutive failed checks after which a replica is dead. A single one may be a lost packet. After as many good ones,
a gateway that is not the worker contradicts it."""
FORGET_S = 3600.0
"""A dead replica that is neither configured nor found is forgotten then, with all it owned. A restart takes less."""
_SEARCH_S = 0.25
"""Between two rounds while a replica has never been reached."""
_SEARCH_ROUNDS = 240
_DISCOVER_ROUNDS, _DISCOVERED_PER_ROUND = 5, 40
"""Once in 5 rounds, a replica's models and metrics are read too, and gateways that are not the worker check it as well.
In a fleet of more than 200 it is less often: a gateway makes 40 such checks in a round."""
_STAND_ASIDE_S = 10.0
"""A gateway that was overruled offers itself as worker again after this time: three times the lease of the worker."""
_KEPT_STATES = ("hung", "draining", ASLEEP)
"""States that a good /health does not end."""
_MOST_LEFT = 10_000
_PATIENCE_S = 6.0
"""Longer than any lease in the store. After a restart or a move, the record and the replica disagree for less than this
time."""


class HealthChecks:
    """Checks the replicas of a fleet. `run()` is a background task."""

    def __init__(self, fleet: Fleet, health: HealthSettings, store: Store, upstream: Upstream) -> None:
        self._fleet = fleet
        self.use(health)
        self._store = store
        self._upstream = upstream
        self._round = 0
        self._first_round = asyncio.Event()
        self._tasks = Tasks()
        self._model_log = ModelLog()
        self._leaving: dict[tuple[str, str, str], bool] = {}
        """Pool, replica and incarnation of records whose replicas serve another model now → whether they were removed.
        One that comes back is the record of another engine: that of a cluster which has the same ids."""

    def use(self, health: HealthSettings) -> None:
        """Checks that begin from now on have this timeout."""
        self._timeout_s = health.timeout_s

    async def first_round(self) -> None:
        """Wait until every replica that was known at the start was checked once."""
        await self._first_round.wait()

    async def run(self) -> None:
        """Check replicas until cancelled; more often while one of them has never been reached."""
        try:
            while True:
                self._round += 1  # before the checks begin: they ask whose turn it is
                self._fleet.changed.clear()
                self._watch_registered()
                checks = [self.check_now(member) for member in self._members() if self._is_due(member)]
                if not self._first_round.is_set():
                    await asyncio.gather(*checks, return_exceptions=True)
                    self._first_round.set()
                self._offer_as_worker()
                self._model_log.note(model_states(self._fleet))
                await self._leave_old_pools()
                await self._forget_gone()
                is_searching = any(not member.cards for member in self._members()) and self._round < _SEARCH_ROUNDS
                with suppress(TimeoutError):
                    async with asyncio.timeout(_SEARCH_S if is_searching else INTERVAL_S):
                        await self._fleet.changed.wait()
        finally:
            await self._tasks.close()

    def _offer_as_worker(self) -> None:
        """A pool's worker registers the health of all its replicas. So this gateway is not the worker of a pool in
        which an id belongs to another engine, or in which others hear a replica that this gateway does not."""
        now_s = time.monotonic()
        unfit = {each.pool for each in self._fleet.targets if each.identity.is_taken}
        unfit |= {each.pool for each in self._members() if each.is_overruled(now_s)}
        for name in self._store.pool_names():
            self._store.pool(name).does_maintenance = name not in unfit

    def check_now(self, member: Member) -> asyncio.Task[None]:
        """Check a replica now, unless a check is running."""
        if member.check is None or member.check.done():
            member.check = self._tasks.spawn(self._check_until_settled(member), "health check")
        return member.check

    def check_silent(self, member: Member) -> None:
        """Check a replica that is silent while requests wait for it, as often as the pool's worker does."""
        if time.monotonic() - member.checked_s >= INTERVAL_S:
            self.check_now(member)

    async def answers(self, member: Member) -> bool:
        """Whether the replica answers now."""
        try:
            await self._ask_health(member, self._fleet.is_ours(member))
        except UpstreamError:
            return False
        return True

    async def _ask_health(self, member: Member, is_ours: bool) -> None:
        """Raises UpstreamError if it is not well."""
        health = await self._upstream.get(member.url, "/health", self._timeout_s, with_key=is_ours)
        if health.status >= 500:
            raise UpstreamError("unhealthy", f"/health answered {health.status}")

    async def _check_until_settled(self, member: Member) -> None:
        """Check once. If a replica that was alive fails, check it every INTERVAL_S until it is well again or dead."""
        loop = asyncio.get_running_loop()
        while True:
            began_s, was_alive = loop.time(), member.alive
            await self._check_once(member)
            if not (was_alive and member.failures and self._fleet.members.get(member.id) is member):
                return
            await asyncio.sleep(max(0.0, began_s + INTERVAL_S - loop.time()))

    def _members(self) -> list[Member]:
        return list(self._fleet.members.values())

    def _watch_registered(self) -> None:
        """Check the replicas of other gateways as well: a replica that no gateway is configured with any more must
        still be found dead. They get no requests from this gateway."""
        for pool_name in self._store.pool_names():  # this gateway may be the worker of pools that it does not serve
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
        if not self._fleet.is_target(member.id) and member.failures > FAILURES:
            return self._is_turn(member)  # probably gone for good
        if not member.cards or self._may_have_restarted(member) or not self._store.is_connected(member.pool):
            return True
        if member.told_role is not None and self._fleet.is_ours(member):
            return True  # every gateway has to hear soon that it has another one
        return self._store.pool(member.pool).is_worker or self._is_turn(member)

    def _is_turn(self, member: Member) -> bool:
        """Whether it is time for a full check. A small fleet is checked in one round: so a gateway sees at once whether
        one replica is gone or many are."""
        rounds = len(self._fleet.members) // _DISCOVERED_PER_ROUND
        if rounds <= _DISCOVER_ROUNDS:
            return self._round % _DISCOVER_ROUNDS == 0
        return (self._round + crc32(member.id.encode())) % rounds == 0

    def _may_have_restarted(self, member: Member) -> bool:
        """Whether something failed since the last good check, or the registry says that it is gone or has another
        incarnation: it may serve other models now."""
        if not member.alive or member.failures:
            return True
        if member.reads_again:
            return True
        known = self._store.pool(member.pool).records.get(member.id)
        return known is None or known.state == "dead" or known.incarnation != member.incarnation(known)

    async def _check_once(self, member: Member) -> None:
        was_alive, member.checked_s, is_full = member.alive, time.monotonic(), False
        is_ours, before = self._fleet.is_ours(member), self._record(member)
        try:
            await self._ask_health(member, is_ours)
            is_full = is_ours and (self._may_have_restarted(member) or self._is_turn(member))
            if is_ours:
                await self._ask_role(member)
            if is_full:
                await self._discover(member)
        except UpstreamError as error:
            member.failures, member.heard_dead = member.failures + 1, 0
            member.is_answering, member.is_silent = False, error.reason == "timeout"
            if was_alive and member.failures < FAILURES:
                return
            member.alive, member.problem = False, str(error)
        else:
            member.failures, member.alive, member.problem = 0, True, ""
            member.is_answering, member.is_silent, member.answered_s = True, False, time.monotonic()
            is_heard = is_full and not member.lacks_metrics and before is not None and before.state == "dead"
            member.heard_dead = member.heard_dead + 1 if is_heard else 0
        if was_alive != member.alive:
            log = _log.info if member.alive else _log.warning
            log("replica", replica=member.id, alive=member.alive, problem=member.problem)
        await self._read_pool_once(member)
        self._note_overruled(member)
        self._register(member)
        if member.is_answering and self._fleet.is_ours(member):
            self._note_sleep(member, await self._ask_sleep(member, is_full))

    async def _ask_role(self, member: Member) -> None:
        """Learn its role from its server, before it gets requests. Most have no such path: they are asked once in a
        life, and only if there are roles."""
        if self._may_have_restarted(member):
            member.was_asked_role = False
        if member.told_role is None and (member.was_asked_role or not self._fleet.has_roles):
            return
        with suppress(UpstreamError):
            answer = await self._upstream.get(member.url, PATH, self._timeout_s)
            if answer.status in (200, 404, 405):
                member.was_asked_role = True
                self._fleet.learn_role(member, parse_role(answer.body) if answer.status == 200 else None)

    async def _ask_sleep(self, member: Member, is_full: bool) -> bool | None:
        """Whether the engine sleeps; None if this check does not tell. Agents read it twice a second. So an engine that
        an agent follows is asked with a full check only."""
        state = self._store.pool(member.pool).state if self._store.is_connected(member.pool) else None
        is_followed = state is not None and state.is_told(member.id)
        if is_followed and not is_full:
            return None
        if member.tells_sleep:
            try:
                answer = await self._upstream.get(member.url, "/is_sleeping", self._timeout_s)
            except UpstreamError:
                return None  # an engine answers between two steps, and one may last long
            with suppress(ValueError):
                if (told := parse_sleep(parse_answer("GET /is_sleeping", answer.status, answer.body))) is not None:
                    return told
            member.tells_sleep = False  # it has no such path, or it stops: vLLM 0.33 never exits while a question waits
        told = member.facts.is_asleep if is_full else None
        return told or (None if is_followed else told)

    def _note_sleep(self, member: Member, is_asleep: bool | None) -> None:
        """Say in the registry that a replica sleeps, or is awake again; any gateway may."""
        pool = self._store.pool(member.pool)
        record = pool.records.get(member.id)
        if is_asleep is None or record is None or record.incarnation != member.incarnation(record):
            return
        has_woken, member.is_asleep = member.is_asleep and not is_asleep, is_asleep
        is_told = is_asleep == (record.state == ASLEEP)
        if has_woken and record.state == "draining":  # a gateway of an older version may have called its sleep so
            is_told = False
        if not is_told and record.state != "dead" and not member.identity.is_taken:
            _log.info("asleep" if is_asleep else "awake", replica=member.id)
            pool.change_state(member.id, record.incarnation, record.state, ASLEEP if is_asleep else "ready")

    async def _read_pool_once(self, member: Member) -> None:
        """Learn what other gateways registered in a pool before this one registers anything there."""
        pool = self._store.pool(member.pool) if member.pool else None
        if pool is not None and pool.state is None and self._store.is_connected(pool.name):
            with suppress(StoreError):
                await pool.beat()

    async def _discover(self, member: Member) -> None:
        timeout_s = self._timeout_s
        cards = parse_models(await self._upstream.get_json(member.url, "/v1/models", timeout_s))
        base = base_card(cards)
        if base is None:
            raise UpstreamError("protocol", "/v1/models lists no model")
        try:
            facts = await engine_facts(self._upstream, member, timeout_s, with_key=True)
        except UpstreamError:
            facts, member.lacks_metrics = member.facts, True
        else:
            member.lacks_metrics = False
        if contradiction := facts.contradiction(member.dp_rank):
            raise UpstreamError("refused", contradiction)
        if facts.started != member.facts.started:
            member.tells_sleep, member.takes_media, member.forces_usage = True, False, None
            member.was_asked_role = False
        pace = decode_tokens_per_s(member.facts.figures, facts.figures)
        member.tokens_per_s = pace or member.tokens_per_s
        member.reads_again = False
        member.facts = facts if facts.started else replace(facts, started=member.facts.started)
        if cards != member.cards:
            member.cards, member.pool = cards, pool_slug(base.root)
            self._fleet.update_served()
        self._store.pool(member.pool).prefills.observe(member.id, facts.figures)

    def _record(self, member: Member) -> ReplicaRecord | None:
        return self._store.pool(member.pool).records.get(member.id) if member.pool else None

    def _note_overruled(self, member: Member) -> None:
        """Note whether another gateway hears a replica that was called dead, and that this gateway cannot hear."""
        known = self._record(member)
        if member.alive or known is None or not self._store.is_connected(member.pool):
            # A store that was away may have lost what was said.
            member.called_dead, member.overruled_until_s = "", 0.0
            return
        state = self._store.pool(member.pool).state
        shown = state.replicas.get(member.id) if state is not None else None
        if shown is not None and shown.state == "dead":
            member.called_dead = shown.incarnation
        elif member.called_dead and known.state != "dead":
            if is_same_life(member.called_dead, known.incarnation):
                member.overruled_until_s = time.monotonic() + _STAND_ASIDE_S
                _log.warning("others hear it, this gateway does not", replica=member.id, problem=member.problem)
            member.called_dead = ""

    def _register(self, member: Member) -> None:
        """Register what the check found. Any gateway registers a new replica or a new incarnation, and that it hears a
        dead one. Only the pool's worker registers other changes."""
        if not member.pool or self._fleet.members.get(member.id) is not member:
            return  # its model is unknown, or it moved during the check
        pool = self._store.pool(member.pool)
        known = pool.records.get(member.id)
        state, incarnation = "ready" if member.alive else "dead", member.incarnation(known)
        if member.alive and known is not None and known.incarnation == incarnation and known.state in _KEPT_STATES:
            state = known.state
        if not self._fleet.is_target(member.id):
            if known is None:
                return  # forgotten
            wanted = replace(known, state=state)  # the check read its health only
        elif self._judge_identity(member, known):
            return
        else:
            # An agent raises a capacity that is less than the engine holds.
            seen_tokens = known.capacity_tokens if known and known.incarnation == incarnation else 0
            wanted = ReplicaRecord(
                replica=member.id,
                incarnation=incarnation,
                state=state,
                capacity_tokens=max(member.facts.capacity_tokens, seen_tokens),
                since_ms=known.since_ms if known else 0,
                url=member.url,
                floor=known.floor if known else 0,
            )
        if known == wanted:
            return
        if state == "draining":  # the script knows whether it still is
            wanted = replace(wanted, state="ready")
        self._say(member, known, wanted)

    def _say(self, member: Member, known: ReplicaRecord | None, wanted: ReplicaRecord) -> None:
        """Say in the registry what this gateway may say."""
        pool, is_overruled = self._store.pool(member.pool), member.is_overruled(time.monotonic())
        if (pool.is_worker and not is_overruled) or not self._store.is_connected(member.pool):
            registered = pool.register(wanted)
            if not member.alive:
                registered.add_done_callback(partial(self._has_called_dead, member, wanted.incarnation))
        elif known is None or not is_same_life(known.incarnation, wanted.incarnation):
            pool.register(wanted, only_if_absent=True)
        elif known.state == "dead" and member.heard_dead >= FAILURES:
            member.heard_dead = 0
            if known.incarnation == wanted.incarnation:
                pool.change_state(member.id, known.incarnation, "dead", "ready")
            else:
                pool.register(wanted, only_if_absent=True)

    def _has_called_dead(self, member: Member, incarnation: str, registered: asyncio.Future[Any]) -> None:
        """The store has this gateway's word, unless it was lost."""
        if has_result(registered) and not member.alive:
            member.called_dead = incarnation

    def _judge_identity(self, member: Member, known: ReplicaRecord | None) -> bool:
        """Update the verdict on the replica's id. Returns whether the id belongs to another engine in the registry."""
        pool, identity = self._store.pool(member.pool), member.identity
        was_taken, now_s = identity.is_taken, time.monotonic()
        if pool.state is not None and self._store.is_connected(pool.name) and not member.lacks_metrics:
            facts = IdentityFacts(
                started=member.facts.started,
                url=member.url,
                is_alive=member.alive,
                record=known,
                is_followed=pool.state.is_told(member.id),
                has_other_worker=pool.state.worker not in ("", pool.gateway),
            )
            identity.judge(facts, now_s, _PATIENCE_S)
        if was_taken != identity.is_taken:
            self._fleet.update_served()
        self._note_conflict(member, identity.conflict(now_s, _PATIENCE_S))
        return identity.is_taken

    def _note_conflict(self, member: Member, conflict: str) -> None:
        """Keep the conflict for /ready and metrics, and log once when it begins and when it ends."""
        if conflict and not self._fleet.id_conflicts.get(member.id):
            _log.warning("its id is taken", replica=member.id, problem=conflict)
        elif not conflict and self._fleet.id_conflicts.get(member.id):
            _log.info("its id is its own again", replica=member.id)
        self._fleet.id_conflicts[member.id] = conflict

    async def _leave_old_pools(self) -> None:
        """The worker of a pool removes a replica that serves another model now, at the same address: it is in another
        pool. Another gateway may have seen a change that this one has not, so the replica's models are read first."""
        for name in self._store.pool_names():
            pool = self._store.pool(name)
            for record in list(pool.records.values()) if pool.is_worker else ():
                member, left = self._fleet.members.get(record.replica), (name, record.replica, record.incarnation)
                if member is None or not self._has_left(member, record, name) or self._leaving.get(left):
                    continue
                if left not in self._leaving:
                    if len(self._leaving) >= _MOST_LEFT:
                        self._leaving.clear()
                    self._leaving[left] = False
                    self._fleet.read_again(member.id)
                elif not member.reads_again:
                    pool.change_state(record.replica, record.incarnation, record.state, "dead")
                    with suppress(StoreError):  # or its old agent is still there: tried again in the next round
                        self._leaving[left] = await forget(pool, record)
                        if self._leaving[left]:
                            _log.info("serves another model now", replica=record.replica, was_in=name, pool=member.pool)

    def _has_left(self, member: Member, record: ReplicaRecord, pool: str) -> bool:
        """Whether a replica of this gateway is in another pool than this one."""
        is_elsewhere = member.pool not in ("", pool) and member.url == record.url
        return is_elsewhere and member.alive and self._fleet.is_ours(member)

    async def _forget_gone(self) -> None:
        """Of replicas that are no targets: the pool's worker removes those that have not answered for FORGET_S from
        the store, and every gateway stops checking those that are not in the store any more."""
        for member in list(self._fleet.members.values()):
            if self._fleet.is_target(member.id) or self._fleet.members.get(member.id) is not member:
                continue  # it may have been found again while the store removed another one
            pool = self._store.pool(member.pool) if member.pool else None
            if pool is None or member.id not in pool.records:
                del self._fleet.members[member.id]
                self._fleet.id_conflicts.pop(member.id, None)
            elif pool.is_worker and time.monotonic() > member.answered_s + FORGET_S:
                with suppress(StoreError):  # tried again in the next round
                    if await forget(pool, pool.records[member.id]):
                        _log.info("forgotten", replica=member.id, silent_s=round(time.monotonic() - member.answered_s))


async def engine_facts(upstream: Upstream, member: Member, timeout_s: float, with_key: bool) -> EngineFacts:
    """Reads a replica's /metrics. Raises UpstreamError."""
    metrics = await upstream.get(member.url, "/metrics", timeout_s, with_key)
    return parse_metrics(metrics.body.decode("utf-8", "replace"), member.dp_rank)
