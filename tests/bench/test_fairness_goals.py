"""bench.fairness: its figures and verdicts, without a cluster."""

from __future__ import annotations

import pytest

from bench.fairness import cost, priorities
from bench.fairness.budget import Taken, allowed_tokens, least_left_tokens, overdraft_tokens, used_tokens
from bench.fairness.capacity import Need, fair_rates, greedy_rates, need, slots_used
from bench.fairness.limits import concurrency_goals
from bench.fairness.load import Sent
from bench.fairness.shares import jain, spread
from bench.fairness.tenants import Tenant, config
from gateway.settings.gateway_settings import GatewaySettings

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


def test_the_greedy_tenant_asks_for_what_is_left_of_the_load() -> None:
    fair, rates = fair_rates(TENANTS, NEEDS, 24), greedy_rates(TENANTS, NEEDS, 24, "many", 3, 1.3)
    assert slots_used(rates, NEEDS) == pytest.approx(72)
    assert rates["few"] == pytest.approx(1.3 * fair["few"])
    assert rates["many"] > fair["many"]
    with pytest.raises(ValueError, match="less than its share"):
        greedy_rates(TENANTS, NEEDS, 24, "many", 1, 1.3)


def test_a_request_holds_a_slot_for_all_of_its_steps_but_not_while_it_waits() -> None:
    waited = Sent("few", sent_s=0, first_byte_s=5.0, ended_s=5.9, uncached_tokens=80, output_tokens=10, decision="")
    assert need([waited]) == Need(pytest.approx(1.0), 100)


def test_what_may_be_used_is_the_limit_the_burst_and_what_running_requests_took_beyond_their_estimates() -> None:
    taken = [
        Taken(0, 10, used_tokens=500, estimated_tokens=400),
        Taken(1, 3, used_tokens=200, estimated_tokens=900),
        Taken(2, 12, used_tokens=300, estimated_tokens=300),
    ]
    assert [used_tokens(taken, at_s) for at_s in (0, 3, 10, 12)] == [0, 200, 700, 1000]
    assert overdraft_tokens(taken, 1.5) == 200 + 100  # the last one, and the first one's error
    assert overdraft_tokens(taken, 12) == 300 + 100  # the second one took less than estimated
    assert allowed_tokens(taken, 600, 30) == 600 * 1.5 + 400
    assert overdraft_tokens([], 1) == 0
    assert overdraft_tokens([Taken(0, 10, 500, None), taken[1]], 5) == 200  # nobody saw its estimate


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


def test_what_is_lost_is_told_with_its_error() -> None:
    assert cost.share_of([(0.98, 1), (0.98, 1)]) == (0.98, 0.0)
    share, error = cost.share_of([(9, 10), (10, 9), (1, 1)])
    assert share == 1
    assert 0.05 < error < 0.07
    assert cost.share_of([(0.5, 1)]) == (0.5, 0.0)


def test_gateways_accept_the_configuration() -> None:
    capped = Tenant("capped", 10, 10, priority="batch", limits={"concurrency": 8})
    settings = GatewaySettings.model_validate({"replicas": []} | config([capped, *TENANTS], {"max_wait_s": 0}, 8))
    assert settings.policy.max_active_requests == 8
    assert [tenant.limits.concurrency for tenant in settings.tenants] == [8, None, None, None]
