"""The clients' request rate limits the retries at any time."""

from __future__ import annotations

from gateway.relay.retry_budget import WINDOW_S, RetryBudget

START_S = 5000.0


def granted(budget: RetryBudget, asked: int, now_s: float) -> int:
    return sum(budget.take(now_s) for _ in range(asked))


def test_beyond_that_they_are_a_tenth_of_the_requests() -> None:
    budget = RetryBudget()
    for n in range(1000):
        budget.note_request(START_S + n / 200)
    assert granted(budget, 500, START_S + 5) == 100
    assert granted(budget, 500, START_S + 9) == 0
    assert granted(budget, 500, START_S + 3 * WINDOW_S) == 10, "the requests are too long ago"


def test_a_retry_that_may_exceed_it_counts_too() -> None:
    budget = RetryBudget()
    assert granted(budget, 9, START_S) == 9
    assert budget.take(START_S, may_exceed=True), "the tenth"
    assert granted(budget, 1, START_S) == 0
    assert budget.take(START_S, may_exceed=True), "beyond the budget"
