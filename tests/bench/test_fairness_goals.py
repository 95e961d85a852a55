"""bench.fairness: its figures and verdicts, without a cluster."""

from __future__ import annotations

import pytest

from bench.fairness import cost, priorities
from bench.fairness.budget import Taken, allowed_tokens, least_left_tokens, used_tokens
from bench.fairness.capacity import Need, fair_rates, slots_used
from bench.fairness.limits import concurrency_goals
from bench.fairness.shares import jain, spread
from bench.fairness.tenants import Tenant

TENANTS = (Tenant("many", 10, 10), Tenant("few", 10, 10), Tenant("double", 10, 10, weight=2))
NEEDS = {"many": Need(1.0, 100.0), "few": Need(2.0, 400.0), "double": Need(1.0, 100.0)}


def test_jains_index_is_one_if_all_got_the_same_and_one_in_n_if_one_got_everything() -> None:
    assert jain([5, 5, 5]) == 1
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain([0, 0]) == 0


def test_fair_rates_use_all_slots_and_charge_by_weight() -> None:
    rates = fair_rates(TENANTS, NEEDS, 24)
    assert slots_used(rates, NEEDS) == pytest.approx(24)
    charged = {name: rate * NEEDS[name].charge_tokens for name, rate in rates.items()}
    assert charged["many"] == pytest.approx(charged["few"]) == pytest.approx(charged["double"] / 2)


def test_a_limit_is_broken_if_more_was_used_at_any_moment() -> None:
    kept = [Taken(number, number + 0.5, 100, 100) for number in range(10)]
    assert least_left_tokens(kept, 900) >= 0
    assert least_left_tokens(kept, 300) < 0
    late = [*kept, Taken(600, 601, 100, 100)]
    assert allowed_tokens(late, 300, 601) > used_tokens(late, 601)
    assert least_left_tokens(late, 300) < 0


@pytest.mark.parametrize(
    ("goals", "met"),
    [
        (priorities.goals(200, 260, 5), [True, True]),
        (priorities.goals(200, 261, 0), [False, False]),
        (priorities.goals(0, 0, 5), [False, True]),  # nothing was answered
        (concurrency_goals(8, 8), [True, True]),
        (concurrency_goals(8, 9), [False, True]),
        (concurrency_goals(7, 8), [True, False]),
        (cost.goals(0.98, 0.98), [True, True]),
        (cost.goals(0.97, 0.97), [False, False]),
        (spread(2, {1: 0.99, 8: 0.985}).goals, [True]),
        (spread(2, {1: 0.999, 8: 0.985}).goals, [False]),
    ],
)
def test_verdicts(goals: dict[str, bool], met: list[bool]) -> None:
    assert list(goals.values()) == met
