"""Moves requests that wait for a first byte away from a replica that dies.

Without this they would wait as long as a slow engine may take. A waiting attempt is placed on another replica if one is
ready, and if one of these holds:

- The registry says that its replica is dead, and the replica does not answer this gateway either.
- The registry says that its replica hangs.
- The registry says that its replica sleeps. Then the attempt ends at once, whether or not another replica is ready.
  (Not a stream that has begun: engines can pause with `mode=wait` or `keep`, and then do not end it.)
- The registry says that its replica is ready, but this gateway cannot reach it.
- Its replica is drained, and an operator wants it empty soon.

Streams move in the same way after their first byte if they can go on elsewhere (resumptions.py). Others wait: a replica
that froze may come back.

Attempts of one replica move within a second, not all at once. They stay if a large part of the pool died at the same
time (`PoolDeaths`), or if the replica does not answer checks in time but still works, and answers no other gateway.

A prompt can keep a server's event loop busy for so long that the server seems dead. It would do the same to each
replica that it is moved to. So an attempt can be a *stall*: its replica fell silent as soon as the request came. After
a second stall, the request is not sent to a third replica.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType

import structlog

from coordinator.errors import StoreError
from coordinator.pool.draining import moving
from coordinator.pool.pool import Pool
from coordinator.registry import ASLEEP, ReplicaRecord
from coordinator.store import Store
from gateway.deadlines import Limit
from gateway.relay.retries import DRAINED
from gateway.replicas.fleet import Fleet
from gateway.replicas.hangs import AnswerProgress, HangDetector
from gateway.replicas.health_checks import HealthChecks
from gateway.replicas.member import Member
from gateway.routing.ticket import Ticket

_log = structlog.get_logger("kvgate.moves")

_TICK_S = 0.25
_SHARE_TICKS = 4
"""Ticks between two times that this gateway shares its progress counts."""
_READ_S = 1.0
"""By this time after a request was sent, its replica has begun to work on it."""
_SPREAD_S = 1.0
"""The attempts of one replica move within this time."""
_SILENT_S = 1.0
"""A replica that has sent nothing for this long, while requests wait for it, gets a health check."""
_FAILURES = 3
"""After so many failed checks in a row, a replica that is ready by the registry and makes progress is heard by others:
a server that is busy with a prompt would be silent to all, and so dead by the registry."""
DEATH_WINDOW_S = 10.0
_MAX_DEAD_SHARE = 1 / 3


class WaitingAttempt:
    """One attempt, until its client gets a byte; or from then on, if its stream can go on elsewhere."""

    __slots__ = (
        "_limit", "_moves", "can_go_on", "has_place", "has_stalled", "is_prefilling", "is_scheduled", "is_stall",
        "may_leave", "member", "move_reason", "replica", "serving", "since_s", "size_bytes", "tried",
    )  # fmt: skip

    def __init__(
        self,
        moves: Moves,
        replica: str,
        member: Member | None,
        serving: Collection[str],
        tried: Sequence[Ticket],
        limit: Limit,
        may_leave: bool,
        has_stalled: bool,
        size_bytes: int,
        can_go_on: Callable[[], bool] | None,
    ) -> None:
        self._moves = moves
        self._limit = limit
        self.replica = replica
        self.member = member
        """The replica's address and engine at the time of the placement; None if this gateway did not know it."""
        self.serving = serving
        self.tried = tried
        self.may_leave = may_leave
        """Whether the request may be sent again. One with effects may not."""
        self.has_stalled = has_stalled
        """Whether an earlier attempt of the request was a stall."""
        self.has_place = False
        """Whether it leaves for a place that it has. Then it leaves a replica that died together with others, too."""
        self.is_prefilling = False
        """Whether another replica computes its prompt now. So its own one has nothing to do for it yet."""
        self.can_go_on = can_go_on
        """Of a stream whose client has got the first byte: whether its rest can be asked for elsewhere."""
        self.is_stall = False
        self.size_bytes = size_bytes
        self.since_s = 0.0
        self.is_scheduled = False
        """Whether it moves within the next second, or was to move and cannot."""
        self.move_reason = ""
        """Why it was moved: asleep, dead, hung, unreachable, drained, hedged or unprefilled; empty if it was not."""

    def waits_for_prefill(self) -> None:
        """Another replica computes its prompt. If that takes too long, that replica is to blame."""
        self.is_prefilling = True
        self._limit.pause()

    def is_prefilled(self) -> None:
        """The other replica has done so, or will not."""
        self.is_prefilling = False
        self._limit.restart()

    @property
    def has_begun(self) -> bool:
        """Whether its client has got the first byte."""
        return self.can_go_on is not None

    def __enter__(self) -> WaitingAttempt:
        self.since_s = time.monotonic()
        self._moves.waiting.setdefault(self.replica, {})[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        of_replica = self._moves.waiting[self.replica]
        del of_replica[self]
        if not of_replica:
            del self._moves.waiting[self.replica]

    def move(self, reason: str) -> None:
        """End the attempt now, by its time limit."""
        self.move_reason = reason
        self._limit.expire()


class Moves:
    """Moves waiting attempts away from replicas that died. `run()` is a background task."""

    def __init__(
        self, fleet: Fleet, health_checks: HealthChecks, store: Store, progress: AnswerProgress, hangs: HangDetector
    ) -> None:
        self.waiting: dict[str, dict[WaitingAttempt, None]] = {}
        """Replica → its waiting attempts, oldest first."""
        self._fleet = fleet
        self._health_checks = health_checks
        self._store = store
        self._progress = progress
        self._hangs = hangs
        self._registry_deaths: dict[str, PoolDeaths] = {}
        """Pool → deaths according to the registry."""
        self._local_deaths: dict[str, PoolDeaths] = {}
        """Pool → deaths according to this gateway's own checks."""
        self._emptied: set[str] = set()
        """Drained replicas whose requests are to go on elsewhere."""
        self._silences: dict[str, tuple[int, float]] = {}
        """Replica that requests wait for → how many pieces of answers it has sent, and since when it is silent."""

    def attempt(
        self,
        replica: str,
        serving: Collection[str],
        tried: Sequence[Ticket],
        limit: Limit,
        may_leave: bool = True,
        has_stalled: bool = False,
        size_bytes: int = 0,
        can_go_on: Callable[[], bool] | None = None,
    ) -> WaitingAttempt:
        """`with moves.attempt(…) as waiting:` surrounds an attempt until its client gets a byte, inside `limit`. The
        attempt may move to the replicas in `serving` that are not in `tried`."""
        member = self._fleet.members.get(replica)
        return WaitingAttempt(
            self, replica, member, serving, tried, limit, may_leave, has_stalled, size_bytes, can_go_on
        )

    async def answers(self, replica: str) -> bool:
        """Whether the replica answers now."""
        member = self._fleet.members.get(replica)
        return member is not None and await self._health_checks.answers(member)

    def unreachable(self, serving: Collection[str], pool: str) -> Collection[str]:
        """The replicas that this gateway alone cannot reach. Empty if no other replica of `serving` is ready: then
        these are tried as well."""
        dead = self._local_deaths[pool].died_alone if pool in self._local_deaths else ()
        if not dead or not any(self._fleet.is_ready(each) for each in serving if each not in dead):
            return ()
        return dead

    async def run(self) -> None:
        """Check the waiting attempts until cancelled."""
        tick = 0
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                tick += 1
                if tick % _SHARE_TICKS == 0:
                    await self._look_at_drains()
                    self._progress.share()
                    self._hangs.forget_all_but(self._fleet.members)
                self._check_all(time.monotonic())
        finally:
            await self._hangs.close()

    async def _look_at_drains(self) -> None:
        """Which drained replicas, of those that requests wait for, are to be emptied. Without the store, as before."""
        emptied = set[str]()
        for name in self._store.pool_names():
            pool = self._store.pool(name)
            drained = {each.replica for each in pool.records.values() if each.state == "draining"}
            if here := drained.intersection(self.waiting):
                try:
                    emptied |= await moving(pool, here)
                except StoreError:
                    emptied |= here & self._emptied
        self._emptied = emptied

    def _check_all(self, now_s: float) -> None:
        for name in self._store.pool_names():
            pool = self._store.pool(name)
            states = {
                name: "ready" if record.is_serving or record.state == ASLEEP else record.state
                for name, record in pool.records.items()
            }
            self._registry_deaths.setdefault(name, PoolDeaths()).observe(states, now_s)
            seen = {each.id: "ready" if each.alive else "dead" for each in self._fleet.targets if each.pool == name}
            self._local_deaths.setdefault(name, PoolDeaths()).observe(seen, now_s)
            self._recheck_hung(pool)
        for replica in self._silences.keys() - self.waiting.keys():
            del self._silences[replica]
            self._hangs.forget(replica)
        for replica in list(self.waiting):
            self._check_old_address(replica)
            self._check_replica(replica, now_s)

    def _recheck_hung(self, pool: Pool) -> None:
        """The pool's worker checks for all gateways whether hung replicas make progress again."""
        if pool.is_worker:
            for record in pool.records.values():
                member = self._fleet.members.get(record.replica)
                if record.state == "hung" and member is not None and not member.identity.is_taken:
                    self._hangs.check(member, record)

    def _check_replica(self, replica: str, now_s: float) -> None:
        """Check a replica that requests wait for."""
        known = self._member_and_record(replica)
        if known is None or known[0].identity.is_taken:
            return
        member, record = known
        if record.state == ASLEEP:
            for waiting in [each for each in self.waiting[replica] if each.may_leave and each.member is member]:
                if not waiting.has_begun:  # its engine aborts it, ends it first, or goes on with it
                    waiting.move(ASLEEP)
            return
        if replica in self._emptied:
            self._schedule(replica, DRAINED, [each for each in self.waiting[replica] if self._move_reason(each)])
            return
        if now_s - self._silent_since_s(replica) < _SILENT_S:
            self._hangs.forget(replica)
            return
        self._health_checks.check_silent(member)
        if all(each.is_prefilling for each in self.waiting[replica]):
            self._hangs.forget(replica)
        elif member.is_silent or (record.is_serving and member.is_answering):
            self._hangs.check(member, record)
        if reason := self._gone_reason(member, record, together=True):
            going = [each for each in self.waiting[replica] if each.member is member and self._move_reason(each)]
            for each in going:
                each.is_stall = self._is_stall(each, member, record)
            self._schedule(replica, reason, going)

    def _check_old_address(self, replica: str) -> None:
        """Attempts may wait at an address that the replica had before. They stay while the engine there answers."""
        at_old = [(each, member) for each in self.waiting[replica] if (member := self._old_member(each)) is not None]
        for _, member in at_old:
            self._health_checks.check_silent(member)
        self._schedule(replica, "dead", [each for each, _ in at_old if self._move_reason(each)])

    def _old_member(self, waiting: WaitingAttempt) -> Member | None:
        """The engine that the attempt waits for, if the replica has another address by now; else None."""
        return None if waiting.member is self._fleet.members.get(waiting.replica) else waiting.member

    def _schedule(self, replica: str, reason: str, waiting: Iterable[WaitingAttempt]) -> None:
        """Move these attempts, each at a random time within _SPREAD_S."""
        moving = [each for each in waiting if not each.is_scheduled]
        for each in moving:
            each.is_scheduled = True
            asyncio.get_running_loop().call_later(random.uniform(0, _SPREAD_S), self._move_if_still_gone, each)
        if moving:
            _log.warning("moving requests away", replica=replica, why=reason, requests=len(moving))

    def _move_if_still_gone(self, waiting: WaitingAttempt) -> None:
        """Since it was scheduled, the attempt may have ended, or its replica may have come back."""
        is_waiting = waiting in self.waiting.get(waiting.replica, {})
        reason = self._move_reason(waiting) if is_waiting else ""
        if reason and waiting.can_go_on is not None and not waiting.can_go_on():
            return  # it waits for its replica, which may come back; it stays scheduled, so that it is not read again
        waiting.is_scheduled = False
        if reason:
            waiting.move(reason)

    def _can_move(self, waiting: WaitingAttempt) -> bool:
        """Whether another replica is ready for it."""
        tried = [ticket.replica for ticket in waiting.tried]
        return any(self._fleet.is_ready(replica) for replica in waiting.serving if replica not in tried)

    def _move_reason(self, waiting: WaitingAttempt) -> str:
        """Why the attempt should move; empty if it should stay."""
        if (old := self._old_member(waiting)) is not None:
            # A server that stops answers no checks, and still ends the streams that it has begun.
            return "" if waiting.has_begun or old.alive or not self._can_move(waiting) else "dead"
        known = self._member_and_record(waiting.replica)
        if known is None:
            return ""
        if waiting.has_place or (waiting.has_stalled and self._is_stall(waiting, *known)):
            return self._gone_reason(*known, together=True)
        return self._gone_reason(*known) if self._can_move(waiting) else ""

    def _gone_reason(self, member: Member, record: ReplicaRecord, *, together: bool = False) -> str:
        """Why attempts should leave this replica: dead, hung, unreachable or drained, as the top of this file tells.
        Empty if it serves or, unless `together`, if it died together with many others."""
        if member.id in self._emptied:
            return DRAINED
        is_heard = (record.is_serving and member.failures >= _FAILURES) or self._hangs.answers_others(member)
        if member.is_silent and self._hangs.has_progressed_lately(member.id) and not is_heard:
            return ""  # its server may be busy with one of these prompts
        is_agreed = record.state == "hung" or not member.is_answering
        if not record.is_serving and is_agreed:
            return record.state if together or member.id in self._registry_deaths[member.pool].died_alone else ""
        if record.is_serving and not member.alive:
            return "unreachable" if together or member.id in self._local_deaths[member.pool].died_alone else ""
        return ""

    def _is_stall(self, waiting: WaitingAttempt, member: Member, record: ReplicaRecord) -> bool:
        """Whether this request may be what keeps the replica busy: the replica has answered no check since it came, and
        no longer request of this gateway waits there."""
        if waiting.has_begun:
            return False
        is_quiet = record.state == "hung" or (member.is_silent and member.answered_s < waiting.since_s + _READ_S)
        others = (each for each in self.waiting[waiting.replica] if not each.has_begun)
        return is_quiet and all(waiting.size_bytes >= each.size_bytes for each in others)

    def _member_and_record(self, replica: str) -> tuple[Member, ReplicaRecord] | None:
        """The replica as this gateway knows it, and as the registry does. None if either does not know it."""
        member = self._fleet.members.get(replica)
        if member is None or not member.pool:
            return None
        record = self._store.pool(member.pool).records.get(replica)
        return (member, record) if record is not None else None

    def _silent_since_s(self, replica: str) -> float:
        pieces = self._progress.pieces[replica]
        last_pieces, since_s = self._silences.get(replica, (-1, 0.0))
        if pieces != last_pieces:
            oldest = next(iter(self.waiting[replica]))
            since_s = oldest.since_s if last_pieces < 0 else time.monotonic()
            self._silences[replica] = pieces, since_s
        return since_s


class PoolDeaths:
    """Tells replicas of a pool that died alone from those that died with many others. Pure: callers pass the time in.

    If a large part of a pool dies at once, the cause is the network, or the gateway that checks. Attempts then stay
    where they are, because the rest of the pool could not carry all of them.
    """

    def __init__(self) -> None:
        self._died_s: dict[str, float] = {}
        self._died_together: set[str] = set()
        self._ready: set[str] = set()
        self.died_alone: frozenset[str] = frozenset()
        """The dead replicas around whose death, within 10 s, at most one replica or a third of the pool died."""

    def observe(self, states: Mapping[str, str], now_s: float) -> None:
        """Take in the current state of every replica of the pool."""
        ready = {replica for replica, state in states.items() if state == "ready"}
        for replica in self._ready - ready:
            self._died_s[replica] = now_s
        self._ready = ready
        self._died_together -= ready
        self._died_s = {
            replica: died_s for replica, died_s in self._died_s.items() if replica in states and replica not in ready
        }
        recent = {replica for replica, died_s in self._died_s.items() if now_s - died_s < DEATH_WINDOW_S}
        if len(recent) > max(1, _MAX_DEAD_SHARE * len(states)):
            self._died_together |= recent
        self.died_alone = frozenset(self._died_s.keys() - self._died_together)
