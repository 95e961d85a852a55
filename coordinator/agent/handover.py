"""What the last agent of a replica knew, for the next one to go on from: its keys, and how far it had come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from coordinator.agent.link import Attended, Link
from coordinator.agent.residency import Residency, Resident

_log = structlog.get_logger("kvgate.agent")

APPLIED_POLL_S = 0.25
APPLIED_POLLS = 32
"""For so long the map may be behind what the last agent said: a lease to apply has changed hands by then."""
_OVERDUE_S = 5.0


class NotApplied(Exception):
    """What was published last is still on its way into the map."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The keys that the map said were resident when engine batch `seq` had been worked in."""

    seq: int
    residents: Sequence[Resident]
    overdue_at_s: float
    """When to stop waiting for the events to come as far (monotonic time)."""

    @classmethod
    async def find(cls, link: Link, answer: Attended, may_wait: bool) -> Handover | None:
        """None where there is nothing that can be gone on from: nothing was left of this life, or the map is behind
        what was said, so that evictions would be taken back. Raises StoreError, and NotApplied instead of the latter
        where the caller may wait."""
        before = answer.before
        if before is None or before.incarnation != link.incarnation or before.seq < 0:
            return None
        if not await link.is_applied(answer.entries):
            if may_wait:
                raise NotApplied
            _log.warning("nobody applies what the last agent said: its replica is learned anew")
            return None
        return cls(before.seq, await link.residents(), time.monotonic() + _OVERDUE_S)

    def is_due(self, seq: int) -> bool:
        """Whether the events have come to where the last agent was, or are not going to."""
        return seq >= self.seq or time.monotonic() > self.overdue_at_s

    def pass_on(self, residency: Residency, seq: int, is_complete: bool) -> None:
        """What was said holds; where the events tell the engine's whole history, only as far as they agree."""
        for resident in self.residents:
            residency.assume(resident, is_complete and seq >= self.seq)
