"""Remembers how the replicas failed for this gateway, and tells the breakers that all gateways share."""

from __future__ import annotations

import time

from gateway.routing.outcomes import ReplicaOutcomes
from gateway.routing.ticket import Ticket


class ReplicaFailures:
    """Of one gateway. A replica whose outcomes are over is forgotten."""

    def __init__(self) -> None:
        self._outcomes: dict[str, ReplicaOutcomes] = {}

    def is_suspect(self, replica: str) -> bool:
        """Whether it failed recently for this gateway."""
        outcomes = self._outcomes.get(replica)
        return outcomes is not None and outcomes.is_suspect(time.monotonic())

    def failed(self, ticket: Ticket) -> None:
        """The replica itself failed: reports that to its shared breaker."""
        outcomes, now_s = self._outcomes_of(ticket.replica), time.monotonic()
        unreported = outcomes.failed(now_s)
        ticket.pool.report(ticket.replica, ticket.incarnation, "failure", unreported, outcomes.errs_in_a_row(now_s))

    def erred(self, ticket: Ticket) -> None:
        """The replica answered with an error, or broke the connection. Whose fault that is, is not known yet."""
        self._outcomes_of(ticket.replica).erred(ticket.sent_s, time.monotonic())

    def errs_in_a_row(self, replica: str) -> bool:
        """Whether it answers each request of this gateway with an error, as it did not before."""
        outcomes = self._outcomes.get(replica)
        return outcomes is not None and outcomes.errs_in_a_row(time.monotonic())

    def broke_off(self, ticket: Ticket) -> None:
        """The replica failed in the middle of an answer, which was counted as a success when it began."""
        self._outcomes_of(ticket.replica).broke_off(ticket.sent_s, time.monotonic())
        self.failed(ticket)

    def succeeded(self, ticket: Ticket, is_proof: bool) -> None:
        """The replica answered. If its breaker was open and this request was the probe, the breaker closes. `is_proof`:
        its engine has worked for this request."""
        self._outcomes_of(ticket.replica).succeeded(time.monotonic(), is_proof)
        fleet = ticket.pool.state
        if fleet is not None and fleet.open_until_ms.get(ticket.replica):
            ticket.pool.report(ticket.replica, ticket.incarnation, "success")

    def ended_well(self, ticket: Ticket) -> None:
        """The replica's answer is complete."""
        outcomes = self._outcomes.get(ticket.replica)
        if outcomes is not None:
            outcomes.ended_well(time.monotonic())

    def _outcomes_of(self, replica: str) -> ReplicaOutcomes:
        outcomes = self._outcomes.get(replica)
        if outcomes is None:
            now = time.monotonic()
            self._outcomes = {name: each for name, each in self._outcomes.items() if not each.are_over(now)}
            outcomes = self._outcomes[replica] = ReplicaOutcomes()
        return outcomes
