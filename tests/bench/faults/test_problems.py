"""bench.faults: how long something was wrong."""

from __future__ import annotations

import pytest

from bench.faults.problems import STEADY_S, Wrong, placed_wrong, right_after_s
from bench.faults.verdicts import End, Seen


def placed(state: str, *sent_s: float) -> list[Seen]:
    return [Seen(each, End.COMPLETE, each + 1, state=state) for each in sent_s]


def test_the_time_ends_with_what_was_wrong_last_before_all_was_right_for_a_while() -> None:
    wrong = [Wrong(103.5, "later"), Wrong(101.0, "sooner"), Wrong(99.0, "before")]
    assert right_after_s(wrong, 100.0, 103.5 + STEADY_S) == 3.5
    assert right_after_s([], 100.0, 110.0) == 0.0
    noise = Wrong(103.5 + STEADY_S, "the machine was busy")
    assert right_after_s([*wrong, noise], 100.0, 120.0) == 3.5
    assert right_after_s([*wrong, Wrong(103.4 + STEADY_S, "not yet")], 100.0, 120.0) == pytest.approx(3.4 + STEADY_S)


def test_what_was_never_right_for_a_while_is_not_right_again() -> None:
    assert right_after_s([Wrong(101.0, "first"), Wrong(105.9, "still")], 100.0, 110.0) is None


def test_a_second_in_which_more_than_one_in_ten_is_placed_otherwise_is_wrong() -> None:
    exact = placed("exact", *(7 + number / 100 for number in range(18)))
    assert placed_wrong(exact + placed("fallback", 7.3)) == []
    assert placed_wrong(exact + placed("fallback", 7.3, 7.4)) == []
    (wrong,) = placed_wrong(exact + placed("fallback", 7.3, 7.9, 7.4))
    assert (wrong.at_s, wrong.what) == (7.9, "3 of 21 requests placed as fallback")
    assert placed_wrong(exact + placed("fallback", 7.3, 8.9, 9.4)) == [], "in different seconds"


def test_what_had_no_decision_says_nothing_of_decisions() -> None:
    assert placed_wrong(placed("", 7.1, 7.2, 7.3)) == []
