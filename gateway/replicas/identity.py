"""Decides whether a replica's record in the registry describes the engine that this gateway reaches by that id.

Two clusters may share one Redis without a namespace and use the same replica ids. If each registered its engines over
the other's, again and again, everything known of these replicas would be lost each time. So one of them gives way: the
id counts as taken, and belongs to the other engine. This is the case

- at another address: if an agent follows the registered engine, or another gateway is the pool's worker and finds that
  engine alive;
- at the same address: if this gateway has registered its own engine over that one before. (The first time, the other
  engine looks like the own one before a restart.)

While the id is taken, the gateway routes to its engine by hashing, and tells the store nothing about it. So the map
stays right, and no request fails. The gateway registers its engine again when no other gateway has been the pool's
worker for a while.

What may look like another engine, but is none:

- An engine that restarted has another incarnation at the same address.
- An engine that moved has another incarnation at another address. The agent of the old one is gone, or goes while the
  gateways learn the new address.
- An engine that is reached at several addresses has one incarnation.
- An engine that does not tell when it started cannot be compared. Its record counts as this gateway's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coordinator.registry import ReplicaRecord

Verdict = Literal["ours", "replace", "taken"]
"""ours: the record describes this gateway's engine. replace: it describes another engine, and this gateway registers
its own instead. taken: it describes another engine, which keeps the id."""


@dataclass(frozen=True, slots=True)
class IdentityFacts:
    """What a gateway knows about one of its replicas and about that replica's record."""

    started: str
    """When the engine started, as it tells itself: its incarnation. Empty if it never told."""
    url: str
    is_alive: bool
    record: ReplicaRecord | None
    is_followed: bool = False
    """Whether an agent holds the lease on the registered incarnation."""
    has_other_worker: bool = False
    """Whether another gateway is the pool's worker. A worker registers its own engines over any record."""


@dataclass(slots=True)
class Identity:
    """The verdict about one replica. Pure: callers pass the time in."""

    verdict: Verdict = "ours"
    _facts: IdentityFacts | None = None
    _replaced_incarnation: str = ""
    """The incarnation that this gateway last replaced by its own engine's. An earlier incarnation of the same engine
    cannot come back. If this one does, it is another engine."""
    _other_engine_since_s: float | None = None
    _no_other_worker_since_s: float | None = None

    @property
    def is_taken(self) -> bool:
        """Whether the id belongs to another engine in the registry."""
        return self.verdict == "taken"

    def judge(self, facts: IdentityFacts, now_s: float, patience_s: float) -> Verdict:
        """Update the verdict. A taken id is free when no other gateway has been the pool's worker for `patience_s`.
        This gateway does not become the worker while the id is taken."""
        self._facts = facts
        record = facts.record
        if record is None or not _is_comparable(facts.started, record) or record.incarnation == facts.started:
            self.verdict = "ours"
            self._other_engine_since_s = self._no_other_worker_since_s = None
            return self.verdict
        if self._other_engine_since_s is None:
            self._other_engine_since_s = now_s
        if facts.has_other_worker:
            self._no_other_worker_since_s = None
        elif self._no_other_worker_since_s is None:
            self._no_other_worker_since_s = now_s
        is_free = self._no_other_worker_since_s is not None and now_s - self._no_other_worker_since_s >= patience_s
        stays_taken = not is_free and (self.is_taken or record.incarnation == self._replaced_incarnation)
        if not facts.is_alive:  # its start time may be out of date
            self.verdict = "taken" if self.is_taken else "ours"
        elif stays_taken or (record.url != facts.url and _is_in_use(facts, record)):
            self.verdict = "taken"
        else:
            self.verdict, self._replaced_incarnation = "replace", record.incarnation
        return self.verdict

    def conflict(self, now_s: float, patience_s: float) -> str:
        """Describes the conflict if the id has been taken for longer than a restart or a move takes; else empty."""
        if not self.is_taken or self._other_engine_since_s is None or now_s - self._other_engine_since_s < patience_s:
            return ""
        ours = self._facts
        if ours is None or ours.record is None:
            return ""
        other = ours.record
        return (
            f"in the registry this id belongs to another engine, at {other.url} (started {other.incarnation}); this "
            f"gateway's engine is at {ours.url} (started {ours.started}), and served without the store: give clusters "
            "that share a Redis a redis.namespace each, and give all gateways of one cluster the same replicas"
        )


def _is_in_use(facts: IdentityFacts, record: ReplicaRecord) -> bool:
    """Whether the registered engine is another cluster's: an agent follows it, or another worker finds it alive."""
    return facts.is_followed or (facts.has_other_worker and record.state != "dead")


def _is_comparable(started: str, record: ReplicaRecord) -> bool:
    """Whether both tell when their engine started. A record `life-<n>` only counts incarnations."""
    return bool(started) and not record.incarnation.startswith("life-")
