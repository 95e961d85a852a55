"""What the last agent of a replica knew, for the next one to go on from: its keys, and how far it had come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.agent.link import Attended, Link
from coordinator.agent.residency import Residency, Resident

_OVERDUE_S = 5.0
_APPLIED_POLL_S = 0.1
_APPLIED_POLLS = 20


@dataclass(frozen=True, slots=True)
class Inheritance:
    """The keys that the map said were resident when engine batch `seq` had been worked in."""

    seq: int
    residents: Sequence[Resident]
    overdue_at_s: float
    """When to stop waiting for the events to come as far (monotonic time)."""

    @classmethod
    async def find(cls, link: Link, answer: Attended) -> Inheritance | None:
        """None where nothing is left of this life. Raises StoreError."""
        before = answer.before
        if before is None or before.incarnation != link.incarnation or before.seq < 0:
            return None
        for _ in range(_APPLIED_POLLS):  # what was published last may still be on its way into the map
            if await link.is_applied(answer.entries):
                break
            await asyncio.sleep(_APPLIED_POLL_S)
        return cls(before.seq, await link.residents(), time.monotonic() + _OVERDUE_S)

    def is_due(self, seq: int) -> bool:
        """Whether the events have come to where the last agent was, or are not going to."""
        return seq >= self.seq or time.monotonic() > self.overdue_at_s

    def pass_on(self, residency: Residency, seq: int, is_complete: bool) -> None:
        """What was said holds; where the events tell the engine's whole history, only as far as they agree."""
        for resident in self.residents:
            residency.assume(resident, is_complete and seq >= self.seq)
