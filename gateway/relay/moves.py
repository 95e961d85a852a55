"""Attempts of which the client has no byte yet, and what becomes of them when their replica dies.

They would wait for as long as a slow engine may take. So they are placed elsewhere, where another replica is ready:
- when the registry says that theirs is dead, and this gateway gets no answer from it either;
- when it hangs;
- when this gateway alone cannot reach it.
They do not move all at once, but over a second. They stay where much of a pool died together.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType

import structlog

from coordinator.pool.pool import Pool
from coordinator.registry import ReplicaRecord
from coordinator.store import Store
from gateway.deadlines import Limit
from gateway.replicas.fleet import Fleet, Member
from gateway.replicas.hangs import Hangs, Progress
from gateway.replicas.health_checks import Checks
from gateway.routing.ticket import Ticket

_log = structlog.get_logger("kvgate.moves")

TICK_S = 0.25
SPREAD_S = 1.0
SILENT_S = 1.0
"""A replica that has sent nothing for so long, though something waits for it, is asked whether it lives."""
_SHARE_EVERY = 4
"""Ticks."""
WINDOW_S = 10.0
SHARE = 1 / 3


class Deaths:
    """Of one pool, which replicas died by themselves, and which with many others. Pure: the clock is passed in.

    When much of a pool dies at once, the network has failed, or the gateway that checks. What waits on them is then
    better left where it is: all of it moved to the rest of the pool would be too much for that.
    """

    def __init__(self) -> None:
        self._died_s: dict[str, float] = {}
        self._with_others: set[str] = set()
        self._ready: set[str] = set()
        self.alone: frozenset[str] = frozenset()
        """Those that are dead, where no more than a third of the pool died within 10 s of that."""

    def observe(self, states: Mapping[str, str], now_s: float) -> None:
        """What the registry says of every replica now."""
        ready = {replica for replica, state in states.items() if state == "ready"}
        for replica in self._ready - ready:
            self._died_s[replica] = now_s
        self._ready = ready
        self._with_others -= ready
        self._died_s = {
            replica: died_s for replica, died_s in self._died_s.items() if replica in states and replica not in ready
        }
        recent = {replica for replica, died_s in self._died_s.items() if now_s - died_s < WINDOW_S}
        if len(recent) > max(1, SHARE * len(states)):
            self._with_others |= recent
        self.alone = frozenset(self._died_s.keys() - self._with_others)

    def died_alone(self, replica: str) -> bool:
        """Whether it is one of `alone`."""
        return replica in self.alone


class WaitingAttempt:
    """One attempt, from its placement until its client gets a byte."""

    __slots__ = ("_limit", "_moves", "is_going", "member", "moved", "replica", "serving", "since_s", "tried")

    def __init__(
        self,
        moves: Moves,
        replica: str,
        member: Member | None,
        serving: Collection[str],
        tried: Sequence[Ticket],
        limit: Limit,
    ) -> None:
        self._moves = moves
        self._limit = limit
        self.replica = replica
        self.member = member
        """Who had the replica's id when it was placed; None where nobody had."""
        self.serving = serving
        self.tried = tried
        self.since_s = 0.0
        self.is_going = False
        """It is to be taken away within a second."""
        self.moved = ""
        """Why it was taken away: dead, hung or unreachable; empty where it was not."""

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

    def move(self, why: str) -> None:
        """Its limit ends now."""
        self.moved = why
        self._limit.expire()


class Moves:
    """Takes attempts away from replicas that died. `run()` as a task."""

    def __init__(self, fleet: Fleet, checks: Checks, store: Store, progress: Progress, hangs: Hangs) -> None:
        self.waiting: dict[str, dict[WaitingAttempt, None]] = {}
        """By replica, oldest first."""
        self._fleet = fleet
        self._checks = checks
        self._store = store
        self._progress = progress
        self._hangs = hangs
        self._deaths: dict[str, Deaths] = {}
        """By pool, as the registry has it."""
        self._lost: dict[str, Deaths] = {}
        """The same, as this gateway's own checks have it."""
        self._heard: dict[str, tuple[int, float]] = {}
        """Of each replica that is waited for: how many pieces it had sent, and since when it is silent."""

    def attempt(self, replica: str, serving: Collection[str], tried: Sequence[Ticket], limit: Limit) -> WaitingAttempt:
        """`with moves.attempt(…) as waiting:` until the client gets a byte, within `limit`. It may go to those replicas
        of `serving` that were not tried."""
        return WaitingAttempt(self, replica, self._fleet.members.get(replica), serving, tried, limit)

    async def run(self) -> None:
        """Look after them until cancelled."""
        tick = 0
        try:
            while True:
                await asyncio.sleep(TICK_S)
                tick += 1
                if tick % _SHARE_EVERY == 0:
                    self._progress.share()
                    self._hangs.keep_only(self._fleet.members)
                self._look(time.monotonic())
        finally:
            await self._hangs.close()

    def _look(self, now_s: float) -> None:
        for name in self._store.pool_names():
            pool = self._store.pool(name)
            states = {record.replica: record.state for record in pool.records.values()}
            self._deaths.setdefault(name, Deaths()).observe(states, now_s)
            seen = {each.id: "ready" if each.alive else "dead" for each in self._fleet.used if each.pool == name}
            self._lost.setdefault(name, Deaths()).observe(seen, now_s)
            self._look_at_hung(pool)
        for replica in self._heard.keys() - self.waiting.keys():
            del self._heard[replica]
            self._hangs.forget(replica)
        for replica in list(self.waiting):
            self._look_at(replica, now_s)

    def _look_at_hung(self, pool: Pool) -> None:
        """One gateway sees for all whether they hang no more."""
        if pool.is_worker:
            for record in pool.records.values():
                member = self._fleet.members.get(record.replica)
                if record.state == "hung" and member is not None and not member.identity.is_left:
                    self._hangs.look_at(member, record)

    def _look_at(self, replica: str, now_s: float) -> None:
        """Something waits for this replica."""
        self._look_at_left(replica)
        known = self._known(replica)
        if known is None or known[0].identity.is_left:
            return
        member, record = known
        if now_s - self._silent_since_s(replica) < SILENT_S:
            self._hangs.forget(replica)
            return
        self._checks.suspect(member)
        if record.state == "ready" and member.answers:  # what cannot be reached shows nothing
            self._hangs.look_at(member, record)
        if why := self._why_gone(member, record):
            self._let_go(replica, why, [each for each in self.waiting[replica] if each.member is member])

    def _look_at_left(self, replica: str) -> None:
        """Some attempts may wait at an address that the replica had before. They stay there while that one answers."""
        left = [(each, member) for each in self.waiting[replica] if (member := self._left(each)) is not None]
        for _, member in left:
            self._checks.suspect(member)
        self._let_go(replica, "dead", [each for each, member in left if not member.alive])

    def _left(self, waiting: WaitingAttempt) -> Member | None:
        """The engine that it waits for, where the replica's id has another address by now; else None."""
        return None if waiting.member is self._fleet.members.get(waiting.replica) else waiting.member

    def _let_go(self, replica: str, why: str, waiting: Iterable[WaitingAttempt]) -> None:
        """Those that can go do so, within SPREAD_S."""
        going = [each for each in waiting if not each.is_going and self._can_go(each)]
        for each in going:
            each.is_going = True
            asyncio.get_running_loop().call_later(random.uniform(0, SPREAD_S), self._move, each)
        if going:
            _log.warning("moving requests away", replica=replica, why=why, requests=len(going))

    def _known(self, replica: str) -> tuple[Member, ReplicaRecord] | None:
        """A replica as this gateway knows it, and as the registry does; None where either does not."""
        member = self._fleet.members.get(replica)
        if member is None or not member.pool:
            return None
        record = self._store.pool(member.pool).records.get(replica)
        return (member, record) if record is not None else None

    def _silent_since_s(self, replica: str) -> float:
        pieces = self._progress.pieces[replica]
        counted, since_s = self._heard.get(replica, (-1, 0.0))
        if pieces != counted:
            oldest = next(iter(self.waiting[replica]))
            since_s = oldest.since_s if counted < 0 else time.monotonic()
            self._heard[replica] = pieces, since_s
        return since_s

    def _why_gone(self, member: Member, record: ReplicaRecord) -> str:
        """dead or hung, where it is that for all and for this gateway too; unreachable, where its own checks alone get
        no answer; empty where it is there, or did not go alone."""
        agrees = record.state == "hung" or not member.answers
        if record.state != "ready" and agrees and self._deaths[member.pool].died_alone(member.id):
            return record.state
        if record.state == "ready" and not member.alive and self._lost[member.pool].died_alone(member.id):
            return "unreachable"
        return ""

    def unreachable(self, serving: Collection[str], pool: str) -> Collection[str]:
        """The replicas that this gateway alone cannot reach: not to be tried while another of `serving` is ready."""
        lost = self._lost[pool].alone if pool in self._lost else ()
        if not lost or not any(self._fleet.is_ready(each) for each in serving if each not in lost):
            return ()
        return lost

    def _can_go(self, waiting: WaitingAttempt) -> bool:
        """Whether another replica is ready for it."""
        tried = [ticket.replica for ticket in waiting.tried]
        return any(self._fleet.is_ready(replica) for replica in waiting.serving if replica not in tried)

    def _move(self, waiting: WaitingAttempt) -> None:
        """A moment has passed: it may have ended, and its replica may be there again."""
        waiting.is_going = False
        if waiting in self.waiting.get(waiting.replica, {}) and self._can_go(waiting) and (why := self._why(waiting)):
            waiting.move(why)

    def _why(self, waiting: WaitingAttempt) -> str:
        """Why it is to go; empty where it is not, or not any more."""
        if (left := self._left(waiting)) is not None:
            return "" if left.alive else "dead"
        known = self._known(waiting.replica)
        return self._why_gone(*known) if known is not None else ""
