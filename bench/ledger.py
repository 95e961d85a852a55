"""Checks the store's sums of load against the reservations. No I/O: the caller runs the scripts on Redis and passes
their replies as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.keys import PoolKeys
from coordinator.registry import ReplicaRecord

# One script reads all, so that no reservation comes or goes in between.
_LOOK = """
local look = { redis.call('HGETALL', ARGV[1]), redis.call('HGETALL', ARGV[2]), redis.call('HGETALL', ARGV[3]) }
for _, flight in ipairs(redis.call('KEYS', ARGV[4])) do
  look[#look + 1] = redis.call('HVALS', flight)
end
return look
"""
_ENTRY_FIELDS = 5


@dataclass(frozen=True, slots=True)
class Sums:
    """One consistent view: the stored sums, and the sums recomputed from the reservations in flight."""

    active: dict[str, int]
    backlog_tokens: dict[str, int]
    counted: dict[str, int]
    counted_backlog_tokens: dict[str, int]
    in_flight: int
    """Entries in flight, including those on an earlier incarnation."""

    @property
    def total(self) -> int:
        return sum(self.active.values())

    @property
    def are_zero(self) -> bool:
        return not self.in_flight and not any(self.active.values()) and not any(self.backlog_tokens.values())

    def problems(self) -> list[str]:
        """Impossible values: a negative sum, or a sum that differs from its reservations."""
        found = []
        for name, kept, counted in (
            ("active", self.active, self.counted),
            ("backlog_tokens", self.backlog_tokens, self.counted_backlog_tokens),
        ):
            for replica in kept.keys() | counted.keys():
                value = kept.get(replica, 0)
                if value < 0 or value != counted.get(replica, 0):
                    found.append(f"{name} of {replica} is {value}, its reservations make {counted.get(replica, 0)}")
        return found


def ask_sums(keys: PoolKeys) -> tuple[Any, ...]:
    """The arguments of an EVAL. `sums` reads its reply."""
    return (_LOOK, 0, keys.replicas, keys.active, keys.backlog_tokens, keys.flight("*"))


def sums(look: Sequence[Sequence[str]]) -> Sums:
    """Reads the reply. An entry in flight that cannot be read is no load. Raises ValueError for anything else that
    cannot be read."""
    replicas, active, backlog = map(_mapping, look[:3])
    entries = [entry for flight in look[3:] for entry in flight if entry.count(" ") == _ENTRY_FIELDS - 1]
    lives = {name: ReplicaRecord.parse(name, text) for name, text in replicas.items()}
    counted: dict[str, int] = {}
    counted_backlog: dict[str, int] = {}
    for entry in entries:
        replica, incarnation, since_ms, backlog_tokens, _ = entry.split(" ")
        life = lives.get(replica)
        if life is not None and (life.incarnation, str(life.since_ms)) == (incarnation, since_ms):
            counted[replica] = counted.get(replica, 0) + 1
            counted_backlog[replica] = counted_backlog.get(replica, 0) + int(backlog_tokens)
    return Sums(
        {name: int(value) for name, value in active.items()},
        {name: int(value) for name, value in backlog.items()},
        counted,
        counted_backlog,
        len(entries),
    )


def _mapping(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
