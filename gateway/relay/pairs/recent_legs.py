"""What became of the last legs of each prefill replica, at one gateway: for /ready, and so for the doctor.

A leg that fails costs its request time and nothing else, so pairs that never work would go unseen.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

from coordinator.pool.pool import Pool
from gateway.relay.pairs.protocol import COMPUTED
from gateway.relay.retries import SWITCHED
from gateway.routing.ticket import Ticket

_KEPT: Final = 20
_LEAST: Final = 5
"""Fewer tell nothing."""
_LATELY_S: Final = 3600.0
_NOT_ITS_FAULT: Final = frozenset({"left", SWITCHED, "not_cut", "status_400", "status_413", "status_422"})
"""The client left, the server has another role by now, or the request may be to blame: its first token may be its
last one (`not_cut`)."""


@dataclass(slots=True)
class _Life:
    """A life of a replica."""

    pool: Pool
    incarnation: str
    legs: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """When they ended, and why they failed, if they did."""


class RecentLegs:
    """Those of one gateway."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}

    def note(self, leg: Ticket, outcome: str) -> None:
        """It is over; `outcome` is that of kvgate_prefills_total."""
        why = "" if outcome == COMPUTED else leg.failure or outcome
        if why in _NOT_ITS_FAULT:
            return
        life = self._lives.get(leg.replica)
        if life is None or life.incarnation != leg.incarnation:
            self._forget()
            life = self._lives[leg.replica] = _Life(leg.pool, leg.incarnation)
        life.legs.append((time.monotonic(), why))

    def clear(self) -> None:
        """Legs are asked for otherwise from now on."""
        self._lives.clear()

    def failing(self) -> dict[str, dict[str, Any]]:
        """The replicas of which most of the last legs failed, in their present life: how many legs there were, and how
        many failed by each word of the records of requests."""
        self._forget()
        told = {}
        for replica, life in sorted(self._lives.items()):
            failed = Counter(why for _, why in life.legs if why)
            if len(life.legs) >= _LEAST and 2 * failed.total() > len(life.legs):
                told[replica] = {"legs": len(life.legs), "failed": dict(failed.most_common())}
        return told

    def _forget(self) -> None:
        """Legs of long ago, and those of lives that are over."""
        since_s = time.monotonic() - _LATELY_S
        for replica, life in list(self._lives.items()):
            while life.legs and life.legs[0][0] < since_s:
                life.legs.popleft()
            record = life.pool.records.get(replica)
            if not life.legs or record is None or record.incarnation != life.incarnation:
                del self._lives[replica]
