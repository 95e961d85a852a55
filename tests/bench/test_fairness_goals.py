"""bench.fairness: its figures and verdicts, without a cluster."""

from __future__ import annotations

import pytest

from bench.fairness import priorities
from bench.fairness.capacity import Need, fair_rates, slots_used
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


@pytest.mark.parametrize(
    ("goals", "met"),
    [
        (priorities.goals(200, 260, 5), [True, True]),
        (priorities.goals(200, 261, 0), [False, False]),
        (priorities.goals(0, 0, 5), [False, True]),  # nothing was answered
        (spread(2, {1: 0.99, 8: 0.985}).goals, [True]),
        (spread(2, {1: 0.999, 8: 0.985}).goals, [False]),
    ],
)
def test_verdicts(goals: dict[str, bool], met: list[bool]) -> None:
    assert list(goals.values()) == met
