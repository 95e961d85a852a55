"""A second attempt of a request, beside one that waits for its first byte (see hedges.py)."""

from __future__ import annotations

from coordinator.placement import NOTHING
from gateway.relay.held import HeldBytes
from gateway.request.admission import Admission
from gateway.routing.ticket import Ticket
from gateway.upstream import Answer


class Second:
    """What it holds."""

    def __init__(self, ticket: Ticket, admission: Admission) -> None:
        self.ticket = ticket
        self.held = HeldBytes(admission)
        self.answer: Answer | None = None
        self.plain_bytes = 0
        """So much of its beginning is known not to say that it is unfinished."""

    def end(self) -> None:
        """Nobody reads its answer any more."""
        if self.answer is not None:
            self.answer.close()
        self.held.let_go()

    def give_back(self) -> None:
        """Nobody wants its answer."""
        self.end()
        self.ticket.used = NOTHING
        self.ticket.ended()
        self.ticket.done()
