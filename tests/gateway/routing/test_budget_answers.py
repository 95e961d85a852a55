"""What an answer tells of budgets."""

from __future__ import annotations

import pytest

from coordinator.errors import OverBudget
from coordinator.spending import AccountBudget, Bill, Price, Spent
from gateway.billing.prices import NANOS
from gateway.routing.budget_answers import budget_headers, budget_refused, money

ENDS_S = 1_796_083_200  # 2026-12-01
MONTH = AccountBudget("team", "month", "money", 100 * NANOS, 0.8, "2026-11", ENDS_S, "2026-11/money/team")
DAY = AccountBudget("key:k", "day", "tokens", 1000, 0.5, "2026-11-28", ENDS_S - 2 * 86_400, "2026-11-28/tokens/key:k")
BILL = Bill((MONTH, DAY), Price(10**9, 10**8, 4 * 10**9), 100, 50, currency="USD")
"""It takes 150 tokens at most: 300 000 nanos."""


def test_the_headers_tell_of_the_budget_that_has_the_smallest_part_left_and_warn_beyond_its_soft_limit() -> None:
    told = budget_headers(BILL, (Spent("1", 20 * NANOS, 0), Spent("1", 100, 0)), 100)
    assert told == {
        "x-kvgate-budget": "left=750 tokens; of=1000 tokens; per=day; account=key; resets=2026-11-29T00:00:00Z"
    }
    told = budget_headers(BILL, (Spent("1", 80 * NANOS, 10 * NANOS), Spent("1", 400, 200)), 100)
    assert told["x-kvgate-budget"].startswith("left=9.9997 USD; of=100.00 USD; per=month; account=tenant;")
    assert told["x-kvgate-budget-warning"] == "90% of the monthly budget of your tenant is used or reserved"


@pytest.mark.parametrize(
    ("month", "day", "code", "retry_s"),
    [
        (Spent("1", 100 * NANOS, 0), Spent("1", 0, 0), "budget_exceeded", 3 * 86_400),
        (Spent("1", 100 * NANOS - 1, 0), Spent("1", 1000, 0), "budget_exceeded", 3 * 86_400),
        (Spent("1", 0, 0), Spent("1", 851, 0), "budget_exceeded", 86_400),
        (Spent("1", 0, 100 * NANOS), Spent("1", 1000, 0), "budget_exceeded", 86_400),
        (Spent("1", 0, 100 * NANOS), Spent("1", 850, 0), "budget_reserved", 2),
    ],
)
def test_a_refusal_says_for_how_long_and_requests_in_flight_are_no_reason_to_wait_for_the_next_month(
    month: Spent, day: Spent, code: str, retry_s: int
) -> None:
    error = budget_refused(OverBudget([(MONTH, month, 300_000), (DAY, day, 150)]), ENDS_S - 3 * 86_400, "USD")
    assert (error.status, error.code, error.headers["retry-after"]) == (429, code, str(retry_s))
    assert (error.headers.get("x-should-retry") == "false") == (code == "budget_exceeded")
    assert error.headers["x-kvgate-budget"].startswith("left=")


def test_a_request_that_would_fit_if_it_were_smaller_is_told_so() -> None:
    error = budget_refused(OverBudget([(DAY, Spent("1", 900, 0), 150)]), ENDS_S, "USD")
    assert error.message == (
        "The daily budget of your API key has 100 tokens of 1000 tokens left, and this request may take 150 tokens. "
        "It is full again at 2026-11-29T00:00:00Z. A request with a smaller max_tokens may still fit."
    )


@pytest.mark.parametrize(
    ("nanos", "text"), [(0, "0.00"), (NANOS, "1.00"), (1_500_000, "0.0015"), (123_456_789_123, "123.456789")]
)
def test_money_is_written_with_two_to_six_decimals(nanos: int, text: str) -> None:
    assert money(nanos) == text
