"""The clients' request rate limits the retries at any time."""

from __future__ import annotations

from gateway.relay.retry_budget import WINDOW_S, RetryBudget
from gateway.routing.sliding_count import SlidingCount

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


def test_within_no_ten_seconds_more_than_the_least_number_are_granted() -> None:
    budget = RetryBudget()
    times = [START_S + n * 0.05 for n in range(2000) if budget.take(START_S + n * 0.05)]
    assert len(times) > 50
    for now_s in times:
        assert sum(now_s - WINDOW_S < each <= now_s for each in times) <= 10


def test_a_count_covers_its_window_and_little_more() -> None:
    count = SlidingCount(10.0)
    count.add(START_S)
    count.add(START_S + 4.0, by=3)
    assert count.total(START_S + 9.99) == 4
    assert count.total(START_S + 11.0) == 3
    assert count.total(START_S + 15.0) == 0
    count.add(START_S + 9000.0)
    assert count.total(START_S + 9000.0) == 1
