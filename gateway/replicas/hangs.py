"""Replicas that have work and do none of it, whatever their /health says.

Such a replica sends nothing to any gateway. Its engine publishes no event, and none of its counters moves. The registry
then says `hung`, and placements treat it as dead. It is `ready` again once it shows something. It is also `ready` again
after a while, because a replica without requests has nothing to show.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping

import structlog

from coordinator.errors import StoreError
from coordinator.pool.progress import read_progress
from coordinator.registry import ReplicaRecord
from coordinator.store import Store
from gateway.replicas.health_checks import engine_facts
from gateway.replicas.member import Member
from gateway.replicas.progress import Progress
from gateway.settings.limit_settings import HealthSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream, UpstreamError

_log = structlog.get_logger("kvgate.hangs")

_LOOK_S = 1.0
_FORGIVEN_AFTER = 3
"""Times `hang_s`."""
_COUNTERS = ("prefix_queries_tokens", "prefills", "generated_tokens")
"""What moves with an engine's steps. Not its queue, which grows while it hangs."""


class StandStill:
    """Since when what a replica shows has not changed, in one life and one state. Pure: the clock is passed in."""

    def __init__(self, incarnation: str, state: str, figures: Mapping[str, float]) -> None:
        self.incarnation = incarnation
        self.state = state
        self.has_changed = False
        self.looked_s = 0.0
        """When somebody began to look last."""
        self.is_looking = False
        self._figures = figures
        self._peak_usage = 0.0
        self._last_seq = -1
        self._shown: Hashable = None
        self._since_s: float | None = None
        self._told_s = 0.0

    def work(self, figures: Mapping[str, float], seq: int) -> Hashable:
        """The numbers that change when the engine works: the last event's, the cache's highest use, its counters.
        None if it never told any figures. Empty figures, or no event number (-1), leave the last ones as they are. Only
        the highest use counts, because the use also falls when clients hang up."""
        self._figures = figures or self._figures
        usage = self._figures.get("kv_usage")
        if usage is None and not any(name in self._figures for name in _COUNTERS):
            return None
        self._peak_usage = max(self._peak_usage, usage or 0.0)
        self._last_seq = max(self._last_seq, seq)
        return self._last_seq, self._peak_usage, *(self._figures.get(name) for name in _COUNTERS)

    def lasts_s(self, shown: Hashable, now_s: float, patience_s: float) -> float:
        """For how long it has shown this; 0 where it has just shown something else, or where nobody looked for longer
        than `patience_s`."""
        if self._since_s is None or shown != self._shown or now_s - self._told_s > patience_s:
            self.has_changed = self._since_s is not None and shown != self._shown
            self._shown, self._since_s = shown, now_s
        self._told_s = now_s
        return now_s - self._since_s


class Hangs:
    """Says in the registry which replicas hang."""

    def __init__(self, health: HealthSettings, store: Store, upstream: Upstream, progress: Progress) -> None:
        self._hang_s = health.hang_s
        self._timeout_s = health.timeout_s
        self._store = store
        self._upstream = upstream
        self._progress = progress
        self._patience_s = 3 * (_LOOK_S + health.timeout_s)
        self._looks: dict[str, StandStill] = {}
        """By replica."""
        self._tasks = Tasks()

    async def close(self) -> None:
        await self._tasks.close()

    def forget(self, replica: str) -> None:
        """It has no work from here that it does not do."""
        look = self._looks.get(replica)
        if look is not None and look.state == "ready":
            del self._looks[replica]

    def keep_only(self, replicas: Collection[str]) -> None:
        """All others are gone."""
        for replica in self._looks.keys() - replicas:
            del self._looks[replica]

    def look_at(self, member: Member, record: ReplicaRecord) -> None:
        """It may hang, or not hang any more: look, at most once a second."""
        now_s, look = time.monotonic(), self._looks.get(member.id)
        if look is None or (look.incarnation, look.state) != (record.incarnation, record.state):
            look = self._looks[member.id] = StandStill(record.incarnation, record.state, member.facts.figures)
        if not look.is_looking and now_s - look.looked_s >= _LOOK_S and self._store.is_up(member.pool):
            look.looked_s, look.is_looking = now_s, True
            self._tasks.spawn(self._look(member, look), "look for progress")

    async def _look(self, member: Member, look: StandStill) -> None:
        try:
            shows = await self._shows(member, look)
        except StoreError:
            return  # what others have seen is not known
        finally:
            look.is_looking = False
        if shows is None or self._looks.get(member.id) is not look:
            return
        still_s = look.lasts_s(shows, time.monotonic(), self._patience_s)
        pool = self._store.pool(member.pool)
        if look.state == "ready" and still_s >= self._hang_s and member.answers:
            _log.warning("hangs", replica=member.id, still_s=round(still_s), hint="it has work, and shows no progress")
            pool.change_state(member.id, look.incarnation, "ready", "hung")
            del self._looks[member.id]
        elif look.state == "hung" and (look.has_changed or still_s >= _FORGIVEN_AFTER * self._hang_s):
            _log.info("hangs no more" if look.has_changed else "may hang no more", replica=member.id)
            pool.change_state(member.id, look.incarnation, "hung", "ready")
            del self._looks[member.id]

    async def _shows(self, member: Member, look: StandStill) -> Hashable:
        """All that it shows, to this gateway, to others and to its agent; None where it never told any counters: then
        it may be slow for all that is known. Raises StoreError."""
        pool = self._store.pool(member.pool)
        told = await read_progress(pool, member.id)
        agent = pool.state.agents.get(member.id) if pool.state is not None else None
        if agent is not None and pool.state is not None and pool.state.is_followed(member.id):
            figures = pool.state.engines.get(member.id, {})
        else:
            figures = await self._figures(member)
        work = look.work(figures, agent.seq if agent is not None else -1)
        return None if work is None else (self._progress.pieces[member.id], told, work)

    async def _figures(self, member: Member) -> dict[str, float]:
        """Where no agent tells the engine's counters, it is asked itself."""
        try:
            return (await engine_facts(self._upstream, member, self._timeout_s)).figures
        except UpstreamError:
            return {}
