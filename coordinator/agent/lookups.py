"""Which sessions' chains an agent asks for: once, and again where they may have changed. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from coordinator.agent.events import Stored
from coordinator.agent.feed import Item, Received
from coordinator.agent.residency import Residency

_AGAIN_S = 0.5
"""A chain that was not found is asked for again after so long: its gateway may have been late in writing it down."""
_MAX_REMEMBERED = 16_384
_REPORTS_S = 10.0
"""So long after an agent was relearning, its engine may still be reporting what it was asked to."""


class Lookups:
    """Remembers what was asked for."""

    def __init__(self) -> None:
        self._asked_at_s: OrderedDict[str, float] = OrderedDict()
        self._relearning_at_s: float | None = None

    def due(self, items: Iterable[Item], residency: Residency, now_s: float) -> list[str]:
        """The sessions named in these events whose chains are to be asked for now. While relearning, those of chains
        that are known too: whether a request was asked to report is written down with its chain."""
        named = {
            event.session
            for item in items
            if isinstance(item, Received)
            for event in item.batch.events
            if isinstance(event, Stored) and event.session
        }
        due = [name for name in named if self._is_due(name, residency, now_s)]
        for name in due:
            self._asked_at_s[name] = now_s
            self._asked_at_s.move_to_end(name)
        while len(self._asked_at_s) > _MAX_REMEMBERED:
            self._asked_at_s.popitem(last=False)
        return due

    def _is_due(self, session: str, residency: Residency, now_s: float) -> bool:
        if residency.is_bound(session):
            return residency.is_relearning
        return now_s - self._asked_at_s.get(session, -_AGAIN_S) >= _AGAIN_S

    def may_report(self, residency: Residency, now_s: float) -> bool:
        """Whether the engine may be reporting blocks that it reuses. An agent that has just started does not know what
        the one before it was doing."""
        if residency.is_relearning or self._relearning_at_s is None:
            self._relearning_at_s = now_s
        return now_s - self._relearning_at_s < _REPORTS_S

    def forget(self) -> None:
        """What was asked of another store tells nothing."""
        self._asked_at_s.clear()
