"""When to look at which chunk. Re-checks each chunk at half its remaining TTL, so that none expires unchecked."""

from __future__ import annotations

import heapq

MOST_CHUNKS = 200_000
"""The most chunks that are remembered; only random picks find others. So many chunks of 1 MiB take 200 GB of Redis, and
40 MB here."""
_SOONEST_S = 1.0
_TAKEN = float("inf")
_OLD_ENTRIES = 1000


class ChunkSchedule:
    """The known chunks. Times are the caller's."""

    def __init__(self) -> None:
        self.bytes = 0
        """The size of all chunks that were checked."""
        self._bytes: dict[str, int] = {}
        self._lives_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        """The entries of `_due_s`, and outdated ones, which `take` skips."""

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, key: str, now_s: float) -> bool:
        """A chunk was written or found: it is due now. Returns False if there is no room for it."""
        has_room = key in self._due_s or len(self._due_s) < MOST_CHUNKS
        if has_room:
            self._set(key, now_s)
        return has_room

    def life_s(self, key: str) -> float:
        """The TTL with which the chunk was written, as far as that is known; else 0."""
        return self._lives_s.get(key, 0.0)

    def checked(self, key: str, ttl_s: float, size_bytes: int, life_s: float, now_s: float) -> None:
        """The chunk was checked. It is due when half of its life is over, and then each time when half of the rest is
        over. Does nothing for a chunk that was forgotten meanwhile."""
        if key in self._due_s:
            self.bytes += size_bytes - self._bytes.get(key, 0)
            self._bytes[key], self._lives_s[key] = size_bytes, life_s
            self._set(key, now_s + max(_SOONEST_S, ttl_s / 2, ttl_s - life_s / 2))

    def forget(self, key: str) -> None:
        self._due_s.pop(key, None)
        self._lives_s.pop(key, None)
        self.bytes -= self._bytes.pop(key, 0)

    def take(self, now_s: float, most: int) -> list[str]:
        """Up to `most` chunks that are due. They are not due again before `add` or `checked` is called for them."""
        taken: list[str] = []
        while self._heap and self._heap[0][0] <= now_s and len(taken) < most:
            due_s, key = heapq.heappop(self._heap)
            if self._due_s.get(key) == due_s:
                self._due_s[key] = _TAKEN
                taken.append(key)
        return taken

    def _set(self, key: str, due_s: float) -> None:
        if self._due_s.get(key) == due_s:
            return
        self._due_s[key] = due_s
        heapq.heappush(self._heap, (due_s, key))
        if len(self._heap) > 2 * len(self._due_s) + _OLD_ENTRIES:
            self._heap = [(due_s, key) for key, due_s in self._due_s.items() if due_s < _TAKEN]
            heapq.heapify(self._heap)
