"""Finds replicas that hang: they have work and make no progress, although /health may be good.

A replica hangs if, for `health.hang_s`, none of these changes:

- the pieces of answers that it sends to any gateway (`AnswerProgress`, shared through the store),
- the number of its engine's last event,
- its engine's counters.

The registry then says `hung`, and placements treat the replica as dead. It is `ready` again when something changes. It
is also `ready` again after a few times `hang_s`, because a replica without requests has no progress to show.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from math import inf

import structlog

from coordinator.errors import StoreError
from coordinator.pool.progress import read_progress, write_progress
from coordinator.registry import SERVING, ReplicaRecord
from coordinator.store import Store
from gateway.replicas.fleet import Fleet
from gateway.replicas.health_checks import engine_facts
from gateway.replicas.member import Member
from gateway.settings.limit_settings import HealthSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream, UpstreamError

_log = structlog.get_logger("kvgate.hangs")

_LATELY_S = 2.0
_HEARD_S = 3.0
"""A gateway knows within this time what a replica has sent to others. They share their counts every second, and a check
reads the counts every second."""
_CHECK_S = 1.0
"""A replica is checked at most this often."""
_RETRIED_AFTER = 3
"""Times `hang_s` until a hung replica is ready again without having shown progress."""
_COUNTERS = ("prefix_queries_tokens", "prefills", "generated_tokens")
"""The counters that change with an engine's steps. Its queue is not one of them: it grows while the engine hangs."""


class AnswerProgress:
    """Counts the pieces of answers that each replica sends to this gateway, and shares the counts through the store."""

    def __init__(self, fleet: Fleet, store: Store) -> None:
        self.pieces: Counter[str] = Counter()
        """Replica → pieces of answer bodies. The relay counts them; headers do not count."""
        self._fleet = fleet
        self._store = store
        self._shared: dict[str, int] = {}

    def share(self) -> None:
        """Write the counts that changed since the last call to the store."""
        for gone in self.pieces.keys() - self._fleet.members.keys():
            del self.pieces[gone]
        changed: dict[str, dict[str, int]] = {}
        for replica, count in self.pieces.items():
            member = self._fleet.members[replica]
            if member.pool and not member.identity.is_taken and self._shared.get(replica) != count:
                changed.setdefault(member.pool, {})[replica] = count
        for pool, counts in changed.items():
            write_progress(self._store.pool(pool), counts)
        self._shared = dict(self.pieces)


class StallTimer:
    """Measures for how long a replica has shown no progress, in one incarnation and one state. Pure: callers pass the
    time in."""

    def __init__(self, incarnation: str, state: str, figures: Mapping[str, float]) -> None:
        self.incarnation = incarnation
        self.state = state
        self.has_progressed = False
        """Whether the last call of `stalled_s` found a change."""
        self.progressed_s = -inf
        """When a check last found a change."""
        self.answered_others_s = -inf
        """When a check last found that another gateway has got more of the replica's answers."""
        self.checked_s = 0.0
        """When the last check began."""
        self.is_checking = False
        self._figures = figures
        self._peak_usage = 0.0
        self._last_seq = -1
        self._last_shared: bytes | None = None
        self._progress: Hashable = None
        self._since_s: float | None = None
        self._updated_s = 0.0

    def note_shared(self, shared: bytes | None, gateway: str, now_s: float) -> None:
        """What a gateway shared last: its name, and its count. This gateway, named `gateway`, may be that one."""
        last, self._last_shared = self._last_shared, shared
        if last is not None and shared not in (None, last) and not shared.startswith(gateway.encode() + b" "):
            self.answered_others_s = now_s

    def work_done(self, figures: Mapping[str, float], seq: int) -> Hashable:
        """The numbers that change when the engine works: the last event's number, the highest use of the cache, and its
        counters. None if the engine never told any figures. Empty `figures`, and -1 for `seq`, leave the last known
        ones. The highest use counts because the use also falls when clients hang up."""
        self._figures = figures or self._figures
        usage = self._figures.get("kv_usage")
        if usage is None and not any(name in self._figures for name in _COUNTERS):
            return None
        self._peak_usage = max(self._peak_usage, usage or 0.0)
        self._last_seq = max(self._last_seq, seq)
        return self._last_seq, self._peak_usage, *(self._figures.get(name) for name in _COUNTERS)

    def stalled_s(self, progress: Hashable, now_s: float, patience_s: float) -> float:
        """For how long `progress` has been the same. 0 if it has just changed, or if the last call is longer ago than
        `patience_s`."""
        if self._since_s is None or progress != self._progress or now_s - self._updated_s > patience_s:
            self.has_progressed = self._since_s is not None and progress != self._progress
            self._progress, self._since_s = progress, now_s
            self.progressed_s = now_s if self.has_progressed else self.progressed_s
        self._updated_s = now_s
        return now_s - self._since_s


class HangDetector:
    """Marks replicas in the registry as hung, and as ready again."""

    def __init__(
        self, fleet: Fleet, health: HealthSettings, store: Store, upstream: Upstream, progress: AnswerProgress
    ) -> None:
        self._fleet = fleet
        self.use(health)
        self._store = store
        self._upstream = upstream
        self._progress = progress
        self._timers: dict[str, StallTimer] = {}
        """By replica."""
        self._tasks = Tasks()

    def use(self, health: HealthSettings) -> None:
        """These times hold from now on."""
        self._hang_s = health.hang_s
        self._timeout_s = health.timeout_s
        self._patience_s = 3 * (_CHECK_S + health.timeout_s)

    async def close(self) -> None:
        await self._tasks.close()

    def forget(self, replica: str) -> None:
        """The replica works, or has no work from this gateway: stop measuring it, unless it is hung."""
        timer = self._timers.get(replica)
        if timer is not None and timer.state != "hung":
            del self._timers[replica]

    def forget_all_but(self, replicas: Collection[str]) -> None:
        """Stop measuring replicas that this gateway does not know any more."""
        for replica in self._timers.keys() - replicas:
            del self._timers[replica]

    def check(self, member: Member, record: ReplicaRecord) -> None:
        """Check, at most once a second, whether a replica hangs, or whether a hung one works again, or whether a silent
        one still works."""
        now_s, timer, is_hung = time.monotonic(), self._timers.get(member.id), record.state == "hung"
        if timer is None or timer.incarnation != record.incarnation or is_hung != (timer.state == "hung"):
            timer = self._timers[member.id] = StallTimer(record.incarnation, record.state, member.facts.figures)
        timer.state = record.state
        if not timer.is_checking and now_s - timer.checked_s >= _CHECK_S and self._store.is_connected(member.pool):
            timer.checked_s, timer.is_checking = now_s, True
            self._tasks.spawn(self._check_once(member, timer), "hang check")

    def has_progressed_lately(self, replica: str) -> bool:
        """Whether the last checks of a replica found that it works."""
        timer = self._timers.get(replica)
        return timer is not None and time.monotonic() - timer.progressed_s < _LATELY_S

    def answers_others(self, member: Member) -> bool:
        """Whether a replica that is silent to this gateway has sent answers to others since then."""
        timer = self._timers.get(member.id)
        return timer is not None and timer.answered_others_s > member.answered_s + _HEARD_S

    async def _check_once(self, member: Member, timer: StallTimer) -> None:
        try:
            progress = await self._progress_of(member, timer)
        except StoreError:
            return  # the other gateways' progress is unknown
        finally:
            timer.is_checking = False
        if progress is None or self._timers.get(member.id) is not timer:
            return
        stalled_s = timer.stalled_s(progress, time.monotonic(), self._patience_s)
        pool = self._store.pool(member.pool)
        if timer.state in SERVING and stalled_s >= self._hang_s and member.is_answering:
            hint = "it has work, and shows no progress"
            _log.warning("hangs", replica=member.id, still_s=round(stalled_s), hint=hint)
            pool.change_state(member.id, timer.incarnation, timer.state, "hung")
            del self._timers[member.id]
        elif timer.state == "hung" and (timer.has_progressed or stalled_s >= _RETRIED_AFTER * self._hang_s):
            _log.info("hangs no more" if timer.has_progressed else "may hang no more", replica=member.id)
            pool.change_state(member.id, timer.incarnation, "hung", "ready")
            del self._timers[member.id]

    async def _progress_of(self, member: Member, timer: StallTimer) -> Hashable:
        """All progress that the replica shows to this gateway, to the others and to its agent. None if its engine never
        told any counters: then it may just be slow. Raises StoreError."""
        pool = self._store.pool(member.pool)
        last_shared, seq, figures = await read_progress(pool, member.id)
        timer.note_shared(last_shared, pool.gateway, time.monotonic())
        if pool.state is None or not pool.state.is_told(member.id):
            figures = await self._engine_figures(member)
        work = timer.work_done(figures, seq)
        return None if work is None else (self._progress.pieces[member.id], last_shared, work)

    async def _engine_figures(self, member: Member) -> dict[str, float]:
        """The engine's counters, read from the replica itself, because no agent tells them."""
        is_ours = self._fleet.is_ours(member)
        try:
            return (await engine_facts(self._upstream, member, self._timeout_s, with_key=is_ours)).figures
        except UpstreamError:
            return {}
