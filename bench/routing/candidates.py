"""Which replicas a placement in a large fleet looks at (ADR 12): as coordinator/lua/lib/orders.lua and
policies/prefix_kv_aware.lua nominate them, over lists instead of Redis.

One thing is simpler: the script meets only those lengths of a prefix that its bisection meets, and here owners of every
length are seen.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LOOK_AT_ALL = 16
"""So many replicas are looked at whole."""
_LOAD_PER_REQUEST = 128
_FULL_SHARE = 0.96
_BY_LOAD, _SEARCHED = 3, 16
_FEW_OWNERS, _PICKED_OWNERS, _ADDED_OWNERS = 4, 3, 8
_MANY_OWNERS, _MOST_ASKED = 32, 48


@dataclass
class Load:
    """The load of one replica when a prompt is placed."""

    active: int = 0
    backlog_tokens: int = 0
    owned_tokens: int = 0
    matched_tokens: int = 0


class Order:
    """The replicas in the order of a score. Only those whose score changes are moved."""

    def __init__(self, score: Callable[[Load], float], loads: Sequence[Load]) -> None:
        self._score = score
        self._scores = [score(load) for load in loads]
        self._sorted = sorted((score, replica) for replica, score in enumerate(self._scores))

    def update(self, replica: int, load: Load) -> None:
        before, now = self._scores[replica], self._score(load)
        if now != before:
            del self._sorted[bisect_left(self._sorted, (before, replica))]
            insort(self._sorted, (now, replica))
            self._scores[replica] = now

    def first(self, count: int, rng: random.Random) -> list[int]:
        """The replicas with the lowest scores. If all of these are equal, they are taken from a random place among
        their equals on."""
        count = min(count, len(self._sorted))
        score = self._sorted[0][0]
        if self._sorted[count - 1][0] != score:
            return self.ranked(0, count)
        equals = bisect_right(self._sorted, (score, len(self._sorted)))
        start = rng.randrange(equals)
        return [self._sorted[(start + number) % equals][1] for number in range(count)]

    def ranked(self, first: int, count: int) -> list[int]:
        return [replica for _, replica in self._sorted[first : first + count]]

    def score(self, replica: int) -> float:
        return self._scores[replica]


def occupied_tokens(load: Load, capacity_tokens: int) -> int:
    """A cache that is nearly full counts as full."""
    return capacity_tokens if load.owned_tokens > _FULL_SHARE * capacity_tokens else load.owned_tokens


class Candidates:
    """Follows the loads, and names candidates for prompts."""

    def __init__(self, loads: Sequence[Load], capacity_tokens: int, rng: random.Random) -> None:
        self._loads, self._rng = loads, rng
        self._by_load = Order(lambda load: load.backlog_tokens + _LOAD_PER_REQUEST * load.active, loads)
        self._in_flight = Order(lambda load: load.active + load.backlog_tokens / 1e9, loads)
        self._most_free_first = Order(lambda load: occupied_tokens(load, capacity_tokens), loads)
        self._capacity_tokens = capacity_tokens
        self._changed: set[int] = set()

    def changed(self, replica: int) -> None:
        """The replica's place in the orders may have changed."""
        self._changed.add(replica)

    def found(
        self, depths: Sequence[tuple[int, set[int]]], prompt_tokens: int, new_tokens: int, limit: float
    ) -> list[int]:
        """The candidates. `depths` are the prompt's owners by the blocks that they hold, the deepest first. The load
        guard allows replicas with fewer requests than `limit`."""
        self._reorder()
        more = min(4, new_tokens // 4000)
        first = self._by_load.first(_BY_LOAD + more, self._rng)
        most_free = self._most_free_first.first(1, self._rng)
        needed = min(prompt_tokens, self._room(most_free[0]))
        named = [*first, *most_free]
        if not self._is_met(first, needed):
            named += [*self._in_flight.first(1 + more, self._rng), *self._with_room(first, needed, 1 + more)]
        owners: list[int] = []
        for _, holders in depths:
            owners += self._owners(holders, first, limit)
        added = [owner for owner in dict.fromkeys(owners) if owner not in named][:_ADDED_OWNERS]
        return sorted({*named, *added})

    def _reorder(self) -> None:
        for replica in self._changed:
            for order in (self._by_load, self._in_flight, self._most_free_first):
                order.update(replica, self._loads[replica])
        self._changed.clear()

    def _room(self, replica: int) -> float:
        return self._capacity_tokens - self._most_free_first.score(replica)

    def _is_met(self, first: Sequence[int], needed: float) -> bool:
        """Whether one of the first by load is idle, or as good as idle, and has room."""
        least = self._by_load.score(first[0])
        return least <= _LOAD_PER_REQUEST and any(
            self._by_load.score(replica) == least and self._room(replica) >= needed for replica in first
        )

    def _with_room(self, first: Sequence[int], needed: float, count: int) -> list[int]:
        """Replicas that follow the first ones by load and have room, if none of the first has."""
        if any(self._room(replica) >= needed for replica in first):
            return []
        following = self._by_load.ranked(len(first), _SEARCHED)
        return [replica for replica in following if self._room(replica) >= needed][:count]

    def _owners(self, holders: set[int], first: Sequence[int], limit: float) -> list[int]:
        """Owners of a prefix: all if they are few; else the least loaded ones that the load guard allows, if none of
        the first by load is one."""
        if len(holders) <= _FEW_OWNERS:
            return sorted(holders)
        allowed = {replica for replica in holders if self._loads[replica].active < limit}
        if not allowed.isdisjoint(first):
            return []
        if len(holders) > _MANY_OWNERS:
            asked = min(math.ceil(_PICKED_OWNERS * len(self._loads) / len(holders)), _MOST_ASKED)
            picked = [replica for replica in self._by_load.ranked(0, asked) if replica in allowed]
            if picked:
                return picked[:_PICKED_OWNERS]
        sample = self._rng.sample(sorted(holders), min(len(holders), _MANY_OWNERS))
        below = [replica for replica in sample if replica in allowed]
        return sorted(below or sample, key=self._by_load.score)[:_PICKED_OWNERS]
