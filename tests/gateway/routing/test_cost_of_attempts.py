"""What an attempt takes of budgets when it is over."""

from __future__ import annotations

from typing import Any, cast

from coordinator.placement import NOTHING, PlaceRequest, Used
from coordinator.spending import Bill, Price
from gateway.billing.prices import TokenCounts
from gateway.routing.ticket import Ticket
from tests.coordinator.stage import request

BILL = Bill((), Price(10**9, 10**8, 4 * 10**9, 7), 1000, 50, images=1)


class Pool:
    """Hears of the ends of reservations."""

    def __init__(self) -> None:
        self.used: list[Used | None] = []

    def done(self, _reservation: str, used: Used | None) -> None:
        self.used.append(used)


def ended(used: Used | None, tokens: TokenCounts | None, bill: Bill | None = BILL) -> Used | None:
    asked: PlaceRequest = request("a", ())
    asked.bill, pool = bill, Pool()
    ticket = Ticket(cast("Any", pool), asked, "r0", "1", "http://r0", "cold", 0, None)
    ticket.used, ticket.tokens = used, tokens
    ticket.done()
    [told] = pool.used
    return told


def test_it_pays_for_proven_cached_tokens_at_their_price_and_for_its_images() -> None:
    told = ended(Used(1, 2), TokenCounts(600, 400, 50))
    assert told == Used(1, 2, 600_000 + 40_000 + 200_000 + 7)


def test_an_attempt_that_failed_or_was_not_sent_costs_nothing() -> None:
    assert ended(NOTHING, TokenCounts(600, 400, 50)) == Used(0, 0, 0)
    assert ended(None, None) is None
    assert ended(Used(1, 2), TokenCounts(600, 400, 50), None) == Used(1, 2, 0)
