"""Rendezvous hashing: gateways that know the same replicas try them in the same order.

Thaler and Ravishankar, "A Name-Based Mapping Scheme for Rendezvous" (1996). Each replica scores the request, and
the highest score comes first. A replica that leaves moves only the requests that it had.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3


def rendezvous_order(replicas: Iterable[str], affinity: bytes) -> list[str]:
    """The replicas' ids, best first, for a request's affinity digest."""
    return sorted(replicas, key=lambda replica: blake3(affinity + replica.encode()).digest(8), reverse=True)


def first_usable(order: Iterable[str], avoided: Iterable[str], tried: Iterable[str]) -> str | None:
    """The first replica of the order that was not tried. Replicas to avoid come last."""
    tried, avoided = set(tried), set(avoided)
    left = [replica for replica in order if replica not in tried]
    return next((replica for replica in left if replica not in avoided), left[0] if left else None)
