"""A quantity that clients share: places, bytes. What one of them holds is bounded while others want some."""

from __future__ import annotations

from collections.abc import Callable

FAIR_FACTOR = 8
"""While others hold or want some, nobody takes more than so many times what is left. This is the dynamic threshold of
shared switch buffers (Choudhury and Hahne, 1998): n greedy holders leave a part of 1 / (1 + 8 n) free for the next."""
WANTED_S = 10.0
"""For so long a refused client counts as one that wants some."""
_MAX_REMEMBERED = 1024


class Shares:
    """So many units of one thing. `now_s` is a monotonic clock."""

    def __init__(self, limit: int, now_s: Callable[[], float]) -> None:
        self.limit = limit
        self.taken = 0
        self._now_s = now_s
        self._by_holder: dict[str, int] = {}
        self._refused_s: dict[str, float] = {}
        """When each holder was refused last, the latest last."""

    def try_take(self, holder: str, count: int) -> bool:
        """Take `count` units if they are there, and if that leaves enough for others who want some."""
        held = self._by_holder.get(holder, 0)
        left = self.limit - self.taken - count
        is_greedy = held > 0 and held + count > FAIR_FACTOR * left
        if left < 0 or (is_greedy and self._is_wanted_by_others(holder)):
            self._refuse(holder)
            return False
        self.take(holder, count)
        return True

    def take(self, holder: str, count: int) -> None:
        """Take `count` units, whether they are there or not: so many are in use."""
        self._by_holder[holder] = self._by_holder.get(holder, 0) + count
        self.taken += count

    def give_back(self, holder: str, count: int) -> None:
        """Give back what was taken."""
        self.taken -= count
        held = self._by_holder[holder] - count
        if held:
            self._by_holder[holder] = held
        else:
            del self._by_holder[holder]

    def _is_wanted_by_others(self, holder: str) -> bool:
        if len(self._by_holder) > 1:
            return True
        since_s = self._now_s() - WANTED_S
        return any(refused_s > since_s for other, refused_s in self._refused_s.items() if other != holder)

    def _refuse(self, holder: str) -> None:
        self._refused_s.pop(holder, None)
        self._refused_s[holder] = self._now_s()
        if len(self._refused_s) > _MAX_REMEMBERED:
            del self._refused_s[next(iter(self._refused_s))]
