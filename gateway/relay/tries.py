"""The attempts of one request so far."""

from __future__ import annotations

from gateway.relay.retries import Failure
from gateway.routing.ticket import Ticket


class Tries:
    """Where a request was tried, and how each attempt failed. Only `Attempts` changes it."""

    __slots__ = ("failures", "last", "rounds", "tickets")

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.failures: list[Failure] = []
        """Of the attempts that failed, in the order of their tickets."""
        self.last: Ticket | None = None
        """The newest ticket; also one that does not count as a try."""
        self.rounds = 0
        """How often it was tried everywhere in vain, and began again."""

    @property
    def ticket(self) -> Ticket:
        """That of the current attempt."""
        return self.tickets[-1]

    @property
    def replicas(self) -> list[str]:
        return [ticket.replica for ticket in self.tickets]

    @property
    def has_stalled(self) -> bool:
        """Whether an attempt before was a stall: see moves.py."""
        return bool(self.failures) and any(failure.is_stall for failure in self.failures)  # most have none

    def begin_again(self) -> None:
        """Forget where it was tried. The load of these attempts is given back: the last one's by the next placement."""
        self.tickets.clear()
        self.failures.clear()
        self.rounds += 1

    def done(self) -> None:
        """No attempt holds load any more."""
        for ticket in self.tickets:
            ticket.done()
        if self.last is not None and self.last not in self.tickets:
            self.last.done()
