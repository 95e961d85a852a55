"""Prompts of engines before vLLM 0.30 that are measured before events have named all of their blocks. Pure.

An event that was missed comes by a replay, a second later, and a prompt's length may come between the two. Where events
name sessions, that does not matter. Without them, a prompt's blocks are looked up when it is measured
(token_id_matching.py), so such a prompt is kept back for a while.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.agent.agent_store import Measured
from coordinator.agent.residency import Residency

LATE_S = 5.0
"""After this time a prompt is taken as far as it is held. The rest was evicted, or no event will tell."""
_MAX_KEPT_TOKENS = 200_000
"""In the prompts that are kept back, which are looked up at each heartbeat: in some 20 ms."""


class LatePrompts:
    """The prompts that are kept back."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, Measured]] = []
        """With the time at which each is taken in any case, the oldest first."""

    def due(self, measured: Iterable[Measured], residency: Residency, now_s: float) -> list[Measured]:
        """Those of these prompts, and of those kept back, that can be taken now. Call it after each heartbeat."""
        kept: list[tuple[float, Measured]] = []
        due: list[Measured] = []
        for until_s, prompt in (*self._kept, *((now_s + LATE_S, each) for each in measured)):
            if now_s < until_s and residency.lacks(prompt.tip, prompt.token_ids):
                kept.append((until_s, prompt))
            else:
                due.append(prompt)
        tokens = sum(len(prompt.token_ids) for _, prompt in kept)
        while tokens > _MAX_KEPT_TOKENS:
            _, oldest = kept.pop(0)
            tokens -= len(oldest.token_ids)
            due.append(oldest)
        self._kept = kept
        return due
