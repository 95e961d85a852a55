"""What replicas show of their work: pieces of answers. It tells one that is slow from one that hangs."""

from __future__ import annotations

from collections import Counter

from coordinator.pool.progress import write_progress
from coordinator.store import Store
from gateway.replicas.fleet import Fleet


class Progress:
    """Counts, by replica, the pieces of answers that this gateway was sent, and lets all gateways know of them."""

    def __init__(self, fleet: Fleet, store: Store) -> None:
        self.pieces: Counter[str] = Counter()
        """What relays add to: of answers, not of their announcements."""
        self._fleet = fleet
        self._store = store
        self._shared: dict[str, int] = {}

    def share(self) -> None:
        """Tell the store of the replicas that have shown something since this was called last."""
        for gone in self.pieces.keys() - self._fleet.members.keys():
            del self.pieces[gone]
        news: dict[str, list[str]] = {}
        for replica, count in self.pieces.items():
            member = self._fleet.members[replica]
            if not member.pool or member.identity.is_left:
                continue
            if self._shared.get(replica) != count:
                news.setdefault(member.pool, []).append(replica)
        for pool_name, replicas in news.items():
            pool = self._store.pool(pool_name)
            write_progress(pool, {replica: self.pieces[replica] for replica in replicas})
        self._shared = dict(self.pieces)
