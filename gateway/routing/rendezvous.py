"""Rendezvous hashing: gateways that know the same replicas try them in the same order.

Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996). Each replica scores the request, and
the highest score comes first. A replica that leaves moves only the requests that it had.

To score a thousand replicas takes a millisecond. So in a large fleet only CONTENDERS of them score a request: those
that follow it on a ring, as in consistent hashing (Karger et al., 1997). The ring is made once for each fleet. If a
replica leaves, another contender takes its place, and wins one in CONTENDERS of the requests that the others had.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from heapq import nlargest

from blake3 import blake3

from coordinator.registry import ASLEEP, ReplicaRecord
from coordinator.subset import Subset

CONTENDERS = 32
_WITHOUT_RING = 128
"""Up to so many replicas, all of them score each request: a ring would favour some of them."""
_POINTS = 4
"""Of each replica on the ring: with fewer, some replicas are contenders for many more requests than others."""


def rendezvous_order(replicas: Subset, affinity: bytes, is_usable: Callable[[str], bool]) -> list[str]:
    """The ids of usable replicas, best first, for a request's affinity digest: at most CONTENDERS of them; of all
    replicas if none is usable."""
    contenders = _contenders(replicas, affinity, is_usable) or _contenders(replicas, affinity, lambda _: True)
    return nlargest(CONTENDERS, contenders, key=lambda replica: blake3(affinity + replica.encode()).digest(8))


def fallback_order(records: Mapping[str, ReplicaRecord], replicas: Subset, pinned: str, affinity: bytes) -> list[str]:
    """The order in which all gateways try replicas without a store: the ready ones; if none is ready, all but the
    drained and sleeping ones."""
    if pinned:
        return [pinned] if pinned in replicas and pinned in records else []
    order = rendezvous_order(replicas, affinity, lambda name: name in records and records[name].state == "ready")
    return [name for name in order if name in records and records[name].state not in ("draining", ASLEEP)]


def first_usable(order: Iterable[str], avoided: Iterable[str], tried: Iterable[str]) -> str | None:
    """The first replica of the order that was not tried. Replicas to avoid come last."""
    tried, avoided = set(tried), set(avoided)
    left = [replica for replica in order if replica not in tried]
    return next((replica for replica in left if replica not in avoided), left[0] if left else None)


def _contenders(replicas: Subset, affinity: bytes, is_usable: Callable[[str], bool]) -> list[str]:
    if len(replicas.replicas) <= _WITHOUT_RING:
        return [replica for replica in replicas.replicas if is_usable(replica)]
    points, names = _ring(replicas)
    at = bisect_left(points, blake3(affinity).digest(8))
    seen: set[str] = set()
    usable: list[str] = []
    for step in range(len(names)):
        replica = names[(at + step) % len(names)]
        if replica not in seen:
            seen.add(replica)
            usable += [replica] if is_usable(replica) else []
            if len(seen) >= CONTENDERS and usable:
                break
    return usable


@lru_cache(maxsize=64)
def _ring(replicas: Subset) -> tuple[list[bytes], list[str]]:
    """The points of all replicas in order, and the replica of each."""
    points = sorted(
        (blake3(b"%d " % n + one.encode()).digest(8), one) for one in replicas.replicas for n in range(_POINTS)
    )
    return [point for point, _ in points], [replica for _, replica in points]
