"""What one gateway knows of a pool's replicas, and tells the store of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from coordinator import breaker
from coordinator.pool.link import Link
from coordinator.pool.settlements import Settlements
from coordinator.registry import ReplicaRecord


class Replicas:
    """`settlements`: waiting requests get the room of a replica that has come, or changed."""

    def __init__(self, link: Link, settlements: Settlements) -> None:
        self._link, self._settlements = link, settlements
        self.records: dict[str, ReplicaRecord] = {}
        """Every replica known to this gateway: from the store, or discovered while the store was away."""
        self._has_written = False

    def take_written(self) -> bool:
        """Whether records were changed since the last call: the next heartbeat must not tell older ones."""
        has_written, self._has_written = self._has_written, False
        return has_written

    def restate(self) -> None:
        """State all of them again. With its text a script is long, and there may be a thousand replicas: only the first
        one is sent with it."""
        self._has_written = True
        for number, record in enumerate(self.records.values()):
            state = self._link.tell if number else self._link.restate
            state("register", **record.register_arguments(only_if_absent=True))

    def register(self, record: ReplicaRecord, only_if_absent: bool = False) -> asyncio.Future[Any]:
        """Make a replica known, or correct what is known of it; a new incarnation inherits nothing."""
        self.records[record.replica] = record
        self._has_written = True
        registered = self._link.run("register", **record.register_arguments(only_if_absent))
        self._settlements.room(record.replica)
        return registered

    def change_state(self, replica: str, incarnation: str, before: str, after: str) -> None:
        """Change a replica's state in the registry, if it still has this incarnation and that state."""
        record = self.records.get(replica)
        if record is not None and (record.incarnation, record.state) == (incarnation, before):
            self.records[replica] = replace(record, state=after)
        self._has_written = True
        self._link.run("mark", replica=replica, incarnation=incarnation, before=before, after=after)
        self._settlements.room(replica)

    def report(self, replica: str, incarnation: str, outcome: str, successes: int = 0, in_a_row: bool = False) -> None:
        """Report to a replica's shared breaker: a `failure`, with the successes not reported yet; or a probe's
        `success`. After failures `in_a_row`, no success before them counts."""
        self._link.tell(
            "report",
            replica=replica,
            incarnation=incarnation,
            outcome=outcome,
            min_failures=breaker.FAILURES,
            error_rate=0 if in_a_row else breaker.ERROR_RATE,
            window_ms=breaker.WINDOW_MS,
            open_ms=breaker.OPEN_MS,
            successes=successes,
        )
        if outcome == "success":
            self._settlements.room(replica)
