"""Replicas that have work and do none of it, whatever their /health says.

Such a replica sends nothing to any gateway. Its engine publishes no event, and none of its counters moves. The registry
then says `hung`, and placements treat it as dead. It is `ready` again once it shows something. It is also after a
while: without requests, it has nothing to show.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

import structlog

from coordinator.errors import StoreError
from coordinator.progress import mark, shown
from coordinator.registry import ReplicaRecord
from coordinator.store import Store
from gateway.checks import engine_facts
from gateway.limit_settings import HealthSettings
from gateway.member import Member
from gateway.progress import Progress
from gateway.tasks import Tasks
from gateway.upstream import Upstream, UpstreamError

_log = structlog.get_logger("kvgate.hangs")

_LOOK_S = 1.0
_FORGIVEN_AFTER = 3
"""Times `hang_s`."""
_COUNTERS = ("prefix_queries_tokens", "prefills", "generated_tokens", "kv_usage")
"""What moves with an engine's steps. Not its queue, which grows while it hangs."""


class StandStill:
    """Since when what a replica shows has not changed. Pure: the clock is passed in."""

    def __init__(self) -> None:
        self.has_changed = False
        self.looked_s = 0.0
        """When somebody looked last."""
        self._shown: Hashable = None
        self._since_s: float | None = None

    def lasts_s(self, shown: Hashable, now_s: float) -> float:
        """For how long it has shown this, as far as anybody looked; 0 where it has just shown something else."""
        if self._since_s is None or shown != self._shown:
            self.has_changed = self._since_s is not None
            self._shown, self._since_s = shown, now_s
        return now_s - self._since_s


class Hangs:
    """Says in the registry which replicas hang."""

    def __init__(self, health: HealthSettings, store: Store, upstream: Upstream, progress: Progress) -> None:
        self._hang_s = health.hang_s
        self._timeout_s = health.timeout_s
        self._store = store
        self._upstream = upstream
        self._progress = progress
        self._looks: dict[tuple[str, str], StandStill] = {}
        """By replica and state."""
        self._tasks = Tasks()

    async def close(self) -> None:
        await self._tasks.close()

    def forget(self, replica: str) -> None:
        """It has no work from here that it does not do."""
        self._looks.pop((replica, "ready"), None)

    def look_at(self, member: Member, record: ReplicaRecord) -> None:
        """It may hang, or not hang any more: look, at most once a second."""
        now_s = time.monotonic()
        look = self._looks.setdefault((member.id, record.state), StandStill())
        if now_s - look.looked_s >= _LOOK_S and self._store.is_up(member.pool):
            look.looked_s = now_s
            self._tasks.spawn(self._look(member, record, look), "look for progress")

    async def _look(self, member: Member, record: ReplicaRecord, look: StandStill) -> None:
        try:
            shows = await self._shows(member)
        except StoreError:
            return  # what others have seen is not known
        if shows is None:
            return
        still_s, pool = look.lasts_s(shows, time.monotonic()), self._store.pool(member.pool)
        if record.state == "ready" and still_s >= self._hang_s and member.answers:
            _log.warning("hangs", replica=member.id, still_s=round(still_s), hint="it has work, and shows no progress")
            mark(pool, member.id, record.incarnation, "ready", "hung")
            self._looks.pop((member.id, "ready"), None)
        elif record.state == "hung" and (look.has_changed or still_s >= _FORGIVEN_AFTER * self._hang_s):
            _log.info("hangs no more" if look.has_changed else "may hang no more", replica=member.id)
            mark(pool, member.id, record.incarnation, "hung", "ready")
            self._looks.pop((member.id, "hung"), None)

    async def _shows(self, member: Member) -> Hashable:
        """All that it shows, to this gateway, to others and to its agent; None where it never told any counters: then
        it may be slow for all that is known. Raises StoreError."""
        pool = self._store.pool(member.pool)
        told = await shown(pool, member.id)
        agent = pool.fleet.agents.get(member.id) if pool.fleet is not None else None
        if agent is not None and pool.fleet is not None and pool.fleet.is_followed(member.id):
            figures = pool.fleet.engines.get(member.id, {})
        else:
            figures = await self._figures(member)
        if not any(name in known for known in (figures, member.facts.figures) for name in _COUNTERS):
            return None
        counters = tuple(figures.get(name) for name in _COUNTERS)
        return self._progress.pieces[member.id], told, agent.seq if agent is not None else None, counters

    async def _figures(self, member: Member) -> dict[str, float]:
        """Where no agent tells the engine's counters, it is asked itself."""
        try:
            return (await engine_facts(self._upstream, member, self._timeout_s)).figures
        except UpstreamError:
            return {}
