"""Says everything again that a replica holds, in pieces, so that the pieces of many agents leave Redis to others.

A piece is made from what is resident at that moment, after everything that happened before it was published. So events
can be published between two pieces, and the last word about each key is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from coordinator.agent.agent_store import PIECE, AgentStore
from coordinator.agent.residency import Residency, Resident

REST_S_AN_AGENT = 0.001
"""Between two pieces, for each agent that says everything again. Redis takes half a ms for a piece. So the pieces of
all agents take half of its time at most, even if all agents begin at once, as after a failover."""


class Restatement:
    """One restatement of what `residency` holds when it begins."""

    def __init__(
        self, residency: Residency, now_s: float, agents: int, draw: Callable[[], float] = random.random
    ) -> None:
        """`agents` is how many may say everything again together: they do not begin at once."""
        self._residency = residency
        self._left: list[str] | None = None
        self._first_entry = 0
        self.since_s = now_s
        """Since when the map may have missed something (event loop time)."""
        self.due_s = now_s + draw() * agents * REST_S_AN_AGENT
        """When the next piece is due (event loop time)."""

    async def publish_piece(self, store: AgentStore, seq: int, now_s: float, agents: int) -> bool:
        """Publish a piece; returns whether it was the last. `agents` say everything again now. Raises StoreError and
        Fenced."""
        if self._left is None:
            self._left = [each.key for each in self._residency.residents()]
        piece, self._left = self._found(self._left[:PIECE]), self._left[PIECE:]
        if piece:
            entry = await store.publish(piece, 0.0, None)
            self._first_entry = self._first_entry or entry
        self.due_s = now_s + max(1, agents) * REST_S_AN_AGENT
        if self._left:
            return False
        await store.void_before(self._first_entry, seq)
        return True

    def _found(self, keys: list[str]) -> list[Resident]:
        return [resident for key in keys if (resident := self._residency.find(key)) is not None]
