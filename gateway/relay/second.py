"""A second attempt of a request, beside one that waits for its first byte (see hedges.py)."""

from __future__ import annotations

import asyncio

from coordinator.placement import NOTHING
from gateway.relay.held import HeldBytes
from gateway.relay.retries import Failure
from gateway.request.admission import Admission
from gateway.routing.ticket import Ticket
from gateway.upstream import Answer


class Second:
    """What it holds. `waiting` is the task that waits until its answer begins, or until it fails."""

    def __init__(self, ticket: Ticket, admission: Admission, waiting: asyncio.Task[None]) -> None:
        self.ticket = ticket
        self.waiting = waiting
        self.held = HeldBytes(admission)
        self.answer: Answer | None = None
        self.plain_bytes = 0
        """So much of its beginning is known not to say that it is unfinished."""
        self.failure: Failure | None = None

    def failed(self, failure: Failure) -> None:
        """Its answer did not begin. What is kept of it counts as held until `end`."""
        self.failure = failure
        if self.answer is not None:
            self.answer.close()
        self._done()

    def end(self) -> None:
        """Nobody reads its answer any more."""
        self.waiting.cancel()
        if self.answer is not None:
            self.answer.close()
        self.held.let_go()

    def give_back(self) -> None:
        """Nobody wants its answer."""
        self.end()
        self._done()

    def _done(self) -> None:
        self.ticket.used = NOTHING
        self.ticket.ended()
        self.ticket.done()
