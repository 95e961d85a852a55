"""The attempts of one request so far."""

from __future__ import annotations

from typing import Any

from coordinator.placement import NOTHING
from coordinator.registry import ASLEEP
from gateway.relay.retries import HEDGED, SWITCHED, Failure
from gateway.relay.seam import Seam
from gateway.relay.second import Second
from gateway.relay.sent import Sent
from gateway.routing.ticket import Ticket

_MOST_SWITCHES = 4
"""Of one request: a replica may tell a role again and again that is not the one it takes requests for."""


class Tries:
    """Where a request was tried, and how each attempt failed. Only `Attempts` and `Attempt` change it."""

    __slots__ = ("failures", "last", "left", "rounds", "seam", "second", "sent", "switches", "tickets")

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.failures: list[Failure] = []
        """Of the attempts that failed, in the order of their tickets."""
        self.last: Ticket | None = None
        """The newest ticket; also one that does not count as a try."""
        self.second: Second | None = None
        """A second attempt that was sent beside the current one, and waits, has begun, or has failed. hedges.py sets
        it, and takes it away if the current one answers."""
        self.rounds = 0
        """How often it was tried everywhere in vain, and began again."""
        self.sent: Sent | None = None
        """What the client has got of the answer's first stream, if that could go on elsewhere."""
        self.seam: Seam | None = None
        """What the client has got since the stream broke first."""
        self.switches = 0
        """How often a replica refused it for its role, and it was placed again as if it had not been there."""
        self.left = ""
        """The replica that broke the stream off last; empty if none has."""

    @property
    def ticket(self) -> Ticket:
        """That of the current attempt."""
        return self.tickets[-1]

    @property
    def replicas(self) -> list[str]:
        return [ticket.replica for ticket in self.tickets]

    @property
    def failed_prefills(self) -> list[str]:
        """The replicas that were to compute its prompt for another one, and did not."""
        return [each.prefill.replica for each in self.tickets if each.prefill is not None and each.prefill.failure]

    @property
    def why_lost(self) -> str:
        """Why the rest of a stream does not fit to what the client had; empty if it does."""
        return self.seam.why_lost if self.seam is not None else ""

    def whole_usage(self, usage: dict[str, Any] | None) -> dict[str, Any] | None:
        """The usage of the whole answer, by that of its last stream."""
        return usage if self.seam is None or usage is None else self.seam.usage(usage)

    @property
    def has_stalled(self) -> bool:
        """Whether an attempt before was a stall: see moves.py."""
        return bool(self.failures) and any(failure.is_stall for failure in self.failures)  # most have none

    def failed(self, failure: Failure) -> bool:
        """The current attempt has failed. Whether it has done nothing, and so does not count as a try."""
        self.ticket.used = NOTHING
        is_switch = failure.reason == SWITCHED and self.switches < _MOST_SWITCHES
        self.switches += is_switch
        if is_switch or failure.reason in (ASLEEP, HEDGED):
            self.tickets.pop()
            return True
        self.ticket.failure = failure.reason
        self.failures.append(failure)
        return False

    def begin_again(self) -> None:
        """Forget where it was tried. The load of these attempts is given back: the last one's by the next placement."""
        if self.second is not None:
            self.second.give_back()
            self.second = None
        self.tickets.clear()
        self.failures.clear()
        self.rounds += 1

    def go_on(self) -> None:
        """The rest of the answer is asked for elsewhere, as if nothing had been tried. The load of the attempt that
        broke is given back by the next placement."""
        self.left = self.ticket.replica
        self.tickets, self.failures = [], []

    def failed_beside(self, second: Ticket, failure: Failure) -> None:
        """A second attempt has failed, and the current one goes on."""
        second.failure = failure.reason
        self.tickets.insert(-1, second)
        self.failures.append(failure)

    def follow(self, first: Ticket, second: Ticket) -> None:
        """A second attempt is the current one now. The first one holds nothing any more."""
        first.done()
        self.second, self.last = None, second
        self.tickets.append(second)

    def done(self) -> None:
        """No attempt holds load any more."""
        if self.second is not None:
            self.second.give_back()
        if self.sent is not None:
            self.sent.lose("over")
        for ticket in self.tickets:
            ticket.done()
        if self.last is not None and self.last not in self.tickets:
            self.last.done()
