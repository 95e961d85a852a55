"""Shares: alone a client may take all; while others want some, there is always some left."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.request.shares import WANTED_S, Shares


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def taken_all(shares: Shares, holder: str) -> int:
    """How many one holder gets, one at a time, until it is refused."""
    count = 0
    while shares.try_take(holder, 1):
        count += 1
    return count


def test_a_client_alone_may_take_all() -> None:
    shares = Shares(1024, Clock())
    assert taken_all(shares, "a") == 1024
    shares.give_back("a", 1)
    assert shares.try_take("a", 1)


def test_beside_others_a_greedy_client_leaves_room_for_the_next() -> None:
    shares = Shares(1024, Clock())
    assert shares.try_take("other", 1)
    assert taken_all(shares, "greedy") < 1024 * 0.9
    assert all(shares.try_take(f"new {number}", 1) for number in range(100))


def test_what_a_client_that_took_all_gives_back_is_for_those_that_it_kept_out() -> None:
    clock = Clock()
    shares = Shares(64, clock)
    assert taken_all(shares, "greedy") == 64
    assert not shares.try_take("other", 1)
    shares.give_back("greedy", 1)
    assert not shares.try_take("greedy", 1)
    assert shares.try_take("other", 1)


def test_a_client_that_asked_long_ago_bounds_nobody() -> None:
    clock = Clock()
    shares = Shares(64, clock)
    taken_all(shares, "greedy")
    assert not shares.try_take("other", 1)
    clock.now_s += WANTED_S + 1
    shares.give_back("greedy", 1)
    assert shares.try_take("greedy", 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 5)), max_size=60), st.integers(1, 12))
def test_what_is_taken_is_never_more_than_there_is_and_all_of_it_comes_back(
    steps: list[tuple[str, int]], limit: int
) -> None:
    shares = Shares(limit, Clock())
    held = dict.fromkeys("abc", 0)
    for holder, count in steps:
        if count > 0 and shares.try_take(holder, count):
            held[holder] += count
        elif count < 0 and held[holder] >= -count:
            shares.give_back(holder, -count)
            held[holder] += count
        assert shares.taken == sum(held.values()) <= limit
