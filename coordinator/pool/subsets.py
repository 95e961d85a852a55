"""The subsets of replicas that a gateway places on, as the store knows them.

A placement names its subset by a digest only. So a subset is declared before its first placement, on the same
connection, and again if the store has lost it. The gateways that use a subset keep it alive. One gateway at a time
keeps the orders of large subsets right: see lua/lib/subsets.lua.
"""

from __future__ import annotations

import time

from coordinator import breaker
from coordinator.pool.link import Link
from coordinator.subset import Subset

_KEEPER_LEASE_MS = 3000
_LEASE_MS = 5000
_USED_S, _FEW, _RECENTLY_S = 30.0, 4, 5.0
"""A subset that no placement has named for this time is not kept alive any more; if there are more than a few, after a
shorter time. Each change of the fleet makes another subset, and each subset makes changes of load dearer."""
_AT_ONCE = 64
"""Replicas in a piece: some 0.5 ms of Redis' time."""
_PIECES = 8
"""In a call of `keep`, which is part of a heartbeat: 1 000 replicas have their turn within a second."""


class Subsets:
    """The subsets that one gateway uses in one pool."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._declared: dict[str, Subset] = {}
        self._used_s: dict[str, float] = {}
        self._next = "", 0
        """The subset, and the rank of the first replica, of the next piece to put in order."""

    def forget(self) -> None:
        """The store may have lost its data: declare every subset again before its next placement."""
        self._declared.clear()

    def use(self, subset: Subset) -> None:
        """Declare a subset, unless that was done: the calls that follow on this connection may name it."""
        self._used_s[subset.digest] = time.monotonic()
        if subset.digest not in self._declared:
            self.declare(subset)

    def declare(self, subset: Subset) -> None:
        """Make a subset known to the store, in pieces."""
        self._declared[subset.digest] = subset
        names = sorted(subset.replicas)
        for start in range(0, len(names), _AT_ONCE):
            self._link.restate(
                "declare",
                digest=subset.digest,
                total=len(names),
                lease_ms=_LEASE_MS,
                probe_ms=breaker.OPEN_MS,
                names=names[start : start + _AT_ONCE],
            )

    async def keep(self) -> None:
        """Keep alive the subsets that are in use, and put a part of the orders right if this gateway keeps them."""
        unused_before_s = time.monotonic() - (_USED_S if len(self._used_s) <= _FEW else _RECENTLY_S)
        self._used_s = {digest: used_s for digest, used_s in self._used_s.items() if used_s >= unused_before_s}
        self._declared = {digest: each for digest, each in self._declared.items() if digest in self._used_s}
        if not self._declared:
            return
        unknown, with_orders = await self._link.run(
            "keep_subsets",
            gateway=self._link.gateway,
            lease_ms=_KEEPER_LEASE_MS,
            subset_lease_ms=_LEASE_MS,
            digests=list(self._declared),
        )
        for digest in unknown:
            if (subset := self._declared.get(digest.decode())) is not None:
                self.declare(subset)
        counts = {
            digest.decode(): int(count) for digest, count in zip(with_orders[::2], with_orders[1::2], strict=True)
        }
        for _ in range(_PIECES if counts else 0):
            await self._reorder(counts)

    async def _reorder(self, counts: dict[str, int]) -> None:
        """Put the next piece of the next subset in order. `counts` are the replicas of each subset."""
        digest, first = self._next
        if digest not in counts or first >= counts[digest]:
            later = sorted(each for each in counts if each > digest)
            digest, first = later[0] if later else min(counts), 0
        self._next = digest, first + _AT_ONCE
        await self._link.run(
            "reorder",
            digest=digest,
            first=first,
            last=first + _AT_ONCE - 1,
            probe_ms=breaker.OPEN_MS,
            is_last=first + _AT_ONCE >= counts[digest],
        )
