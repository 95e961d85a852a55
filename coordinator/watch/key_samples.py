"""Random keys as a sample: whose they are, and how much memory each kind takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from coordinator.keys import PREFIX
from coordinator.lmcache_chunks import NAME

KeyKind = Literal["coordination", "chunk", "other"]
"""KVGate's, LMCache's (a chunk of KV), or somebody else's, which the watch never touches."""
KEY_KINDS: tuple[KeyKind, ...] = ("coordination", "chunk", "other")
_KEPT_SAMPLES = 10_000


def kind_of(key: str) -> KeyKind:
    """By the key's name."""
    if key.startswith(f"{PREFIX}:"):
        return "coordination"
    return "chunk" if NAME.fullmatch(key) else "other"


class Sample(NamedTuple):
    """A key that a random pick found."""

    kind: KeyKind
    bytes: int
    has_ttl: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """The keys of a Redis and their memory by kind, estimated from the last samples."""

    keys: Mapping[KeyKind, float]
    bytes: Mapping[KeyKind, float]
    evictable_bytes: float
    """The memory of keys with a TTL, which a volatile-* policy may evict."""


class Samples:
    """The last samples."""

    def __init__(self) -> None:
        self._last: deque[Sample] = deque(maxlen=_KEPT_SAMPLES)

    def add(self, sample: Sample) -> None:
        self._last.append(sample)

    def estimate(self, keys: int) -> Estimate:
        """An estimate for a Redis with this number of keys."""
        keys_each = keys / max(1, len(self._last))
        counts, sizes, evictable = dict.fromkeys(KEY_KINDS, 0.0), dict.fromkeys(KEY_KINDS, 0.0), 0.0
        for kind, size, has_ttl in self._last:
            counts[kind] += keys_each
            sizes[kind] += keys_each * size
            evictable += keys_each * size if has_ttl else 0.0
        return Estimate(counts, sizes, evictable)
