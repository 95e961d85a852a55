"""INFO and samples of keys, as numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.redis.info import policy_of, read_fields, version_of
from coordinator.watch.kinds import KINDS, Kind

COMMANDS = ("get", "set", "exists", "eval", "evalsha")
"""Told of one by one: the first three move chunks, the others are coordination's scripts."""
_LAST_SAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Info:
    """What INFO says. Counters count from the server's start, or from CONFIG RESETSTAT."""

    version: tuple[int, int]
    policy: str
    used_bytes: int
    maxmemory_bytes: int
    """0: no limit."""
    evicted_keys: int
    expired_keys: int
    hits: int
    misses: int
    input_bytes: int
    output_bytes: int
    refused_writes: int
    """Replies that began with -OOM."""
    calls: Mapping[str, int]
    seconds: Mapping[str, float]
    """Of COMMANDS."""

    @property
    def used_share(self) -> float:
        """Of what it may use; 0 without a limit."""
        return self.used_bytes / self.maxmemory_bytes if self.maxmemory_bytes else 0.0


def read_info(reply: bytes) -> Info:
    """Raises ValueError where a number is none; what a server does not tell is 0."""
    told = read_fields(reply)
    commands = {name: _fields(told.get(f"cmdstat_{name}", "")) for name in COMMANDS}
    return Info(
        version=version_of(told),
        policy=policy_of(told),
        used_bytes=int(told.get("used_memory", 0)),
        maxmemory_bytes=int(told.get("maxmemory", 0)),
        evicted_keys=int(told.get("evicted_keys", 0)),
        expired_keys=int(told.get("expired_keys", 0)),
        hits=int(told.get("keyspace_hits", 0)),
        misses=int(told.get("keyspace_misses", 0)),
        input_bytes=int(told.get("total_net_input_bytes", 0)),
        output_bytes=int(told.get("total_net_output_bytes", 0)),
        refused_writes=int(_fields(told.get("errorstat_OOM", "")).get("count", 0)),
        calls={name: int(fields.get("calls", 0)) for name, fields in commands.items()},
        seconds={name: int(fields.get("usec", 0)) / 1e6 for name, fields in commands.items()},
    )


def _fields(text: str) -> dict[str, str]:
    """`calls=1,usec=10` by name."""
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


class Sample(NamedTuple):
    """A key that was met by chance."""

    kind: Kind
    bytes: int
    has_ttl: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the keyspace is made of, by the last samples."""

    keys: Mapping[Kind, float]
    bytes: Mapping[Kind, float]
    evictable_bytes: float
    """Of keys with a TTL, which is what a volatile-* policy may evict."""


class Samples:
    """The last keys that were met by chance."""

    def __init__(self) -> None:
        self._last: deque[Sample] = deque(maxlen=_LAST_SAMPLES)

    def add(self, sample: Sample) -> None:
        self._last.append(sample)

    def estimate(self, keys: int) -> Estimate:
        """Of a keyspace of so many keys."""
        keys_each = keys / max(1, len(self._last))
        counts, sizes, evictable = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0), 0.0
        for kind, size, has_ttl in self._last:
            counts[kind] += keys_each
            sizes[kind] += keys_each * size
            evictable += keys_each * size if has_ttl else 0.0
        return Estimate(counts, sizes, evictable)
