"""Chooses the pool of a request whose model is served by several pools, as in a rolling update of weights. Pure.

Each pool has a hash tag of its own, so one script can only choose among the replicas of one pool. Which pool is asked
is decided here, from what heartbeats tell. Pools share by their ready replicas. A conversation stays with its pool,
through every gateway, because gateways choose by weighted rendezvous hashing of its first message (Schindelhauer and
Schomaker, "Weighted Distributed Hash Tables", 2005). Another pool gets the request while this one is much busier, or
while requests wait for room there and not elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log
from typing import NamedTuple

from blake3 import blake3

_FEW_REQUESTS, _MUCH_BUSIER = 8, 1.5
"""As in the load guard of a pool: see coordinator/lua/lib/costs.lua."""


class PoolRoom(NamedTuple):
    """The room of one pool for a request."""

    ready: int
    """Ready replicas that can serve it."""
    in_flight: float = 0.0
    """Requests in flight there, of all gateways, as this gateway estimates them."""
    has_waiting: bool = False
    """Whether requests wait there for room."""
    slots: float = inf
    """Requests that each replica may serve at once."""


def choose_pool(rooms: Mapping[str, PoolRoom], affinity: bytes) -> str | None:
    """The pool for a request with this affinity; None if no pool has a ready replica. A pool is too busy if its
    replicas have no free slot; or if they have more than _FEW_REQUESTS each, and more than _MUCH_BUSIER times
    as many as those of the least busy pool would have with one more."""
    ready = {pool: room for pool, room in rooms.items() if room.ready}
    if not ready:
        return None
    least = min((room.in_flight + 1) / room.ready for room in ready.values())
    limit = max(_FEW_REQUESTS, _MUCH_BUSIER * least)

    def rank(pool: str) -> tuple[bool, bool, float]:
        room = ready[pool]
        each = room.in_flight / room.ready
        return not room.has_waiting, each < room.slots and each <= limit, _score(pool, room.ready, affinity)

    return max(ready, key=rank)


def choose_option(weights: Mapping[str, int], affinity: bytes) -> str:
    """One of a model's backends, for a conversation: so that all gateways choose alike while nobody counts. Backends
    without weight share alike."""
    total = sum(weights.values())
    return max(weights, key=lambda name: _score(name, weights[name] if total else 1, affinity))


def _score(pool: str, weight: int, affinity: bytes) -> float:
    digest = blake3(affinity + pool.encode()).digest(8)
    return -weight / log((int.from_bytes(digest) + 0.5) / 2**64)
