"""Which replicas died by themselves, and which with many others. Pure: the clock is passed in.

When much of a pool dies at once it is the network, or who checks them. What waits on them is then better left where it
is: all of it moved to the rest of the pool would be too much for that.
"""

from __future__ import annotations

from collections.abc import Mapping

WINDOW_S = 10.0
SHARE = 1 / 3


class Deaths:
    """Of one pool."""

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
