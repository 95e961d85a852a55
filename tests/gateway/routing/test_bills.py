"""What a request can cost, and which budgets it is charged to."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from coordinator.pool.redis_clock import RedisClock
from gateway.endpoints import endpoint_of
from gateway.replicas.offers import Offer
from gateway.replicas.served import ServedModel
from gateway.request.job import Job
from gateway.request.keyring import Caller
from gateway.request.route import Route
from gateway.routing.bills import Bills
from gateway.routing.tenants import Tenants
from gateway.settings.budget_settings import BudgetSettings
from gateway.settings.gateway_settings import GatewaySettings

MONTH = {"per": "month", "money": 1.5}
SETTINGS = GatewaySettings.model_validate(
    {
        "billing": {"time_zone": "Europe/Berlin", "prices": [{"model": "chat", "output_per_mtok": 4.0}]},
        "tenants": [{"name": "team", "budgets": [MONTH, {"per": "day", "tokens": 9}]}],
        "security": {
            "share_cache": True,
            "api_keys": [
                {"name": "bot", "tenant": "team", "sha256": "0" * 64, "budgets": [{"per": "week", "tokens": 7}]}
            ],
        },
    }
)
BEFORE_MIDNIGHT_MS = 1_796_079_599_000
"""In Berlin, on the last day of November 2026: a Monday."""


def job(caller: Caller, **changes: Any) -> Job:
    """A chat whose prompt has 100 tokens."""
    path, offer = "/v1/chat/completions", Offer("chat", {}, False, (), ())
    route = Route("alias", (), offer, ServedModel("m", "m", None, {}))
    asked = Job("1", "POST", path, endpoint_of(path), path, caller, "", {}, route, prompt_tokens=100)
    return asked._replace(**changes)


def clock_at(ms: int) -> RedisClock:
    clock = RedisClock()
    clock.heard(ms, time.monotonic(), 0.0)
    return clock


def bills() -> Bills:
    return Bills(SETTINGS, Tenants(SETTINGS))


def test_a_request_is_charged_to_its_tenants_and_its_keys_budgets_at_the_price_of_its_model() -> None:
    bill = bills().of(job(Caller("team", False, id="bot", account="bot")), clock_at(BEFORE_MIDNIGHT_MS), 0)
    assert bill is not None
    assert [budget.name for budget in bill.budgets] == [
        "2026-11/money/team",
        "2026-11-30/tokens/team",
        "2026-W49/tokens/key:bot",
    ]
    assert [budget.limit for budget in bill.budgets] == [1_500_000_000, 9, 7]
    assert (bill.price.output_per_mtok, bill.output_tokens) == (4 * 10**9, 200)
    made = Caller(
        "other", False, id="k-2", is_recorded=True, budgets=(BudgetSettings(**cast("Any", MONTH)),), account="k-1"
    )
    bill = bills().of(job(made), clock_at(BEFORE_MIDNIGHT_MS), 0)
    assert bill is not None
    assert [budget.name for budget in bill.budgets] == ["2026-11/money/key:k-1"]
    assert bills().of(job(Caller("other", False)), clock_at(BEFORE_MIDNIGHT_MS), 0) is None


def test_it_counts_in_the_windows_in_which_it_was_placed_first_whatever_the_clock_says_later() -> None:
    asked, known = job(Caller("team", False)), bills()
    windows = []
    for at_ms in (BEFORE_MIDNIGHT_MS, BEFORE_MIDNIGHT_MS + 2000, BEFORE_MIDNIGHT_MS - 40 * 86_400_000):
        bill = known.of(asked, clock_at(at_ms), 0)
        assert bill is not None
        windows.append([budget.window for budget in bill.budgets])
    assert windows == [["2026-11", "2026-11-30"]] * 3
    bill = known.of(job(Caller("team", False)), clock_at(BEFORE_MIDNIGHT_MS + 2000), 0)
    assert bill is not None
    assert [budget.window for budget in bill.budgets] == ["2026-12", "2026-12-01"]


@pytest.mark.parametrize(
    ("changes", "most_tokens", "expected"),
    [
        ({"max_output_tokens": 50}, 0, 50),
        ({"max_output_tokens": 5000}, 4096, 3996),
        ({"choices": 8}, 0, 1600),
        ({"endpoint": endpoint_of("/v1/embeddings")}, 0, 0),
    ],
)
def test_an_answer_costs_at_most_its_limit_or_as_much_as_99_of_100_for_each_choice(
    changes: dict[str, Any], most_tokens: int, expected: int
) -> None:
    bill = bills().of(job(Caller("team", False), **changes), clock_at(BEFORE_MIDNIGHT_MS), most_tokens)
    assert bill is not None
    assert bill.output_tokens == expected


def test_the_smallest_budget_is_no_division_by_zero() -> None:
    tiny = BudgetSettings(per="day", money=1e-10)
    bill = bills().of(job(Caller("team", False, budgets=(tiny,), is_recorded=True)), clock_at(BEFORE_MIDNIGHT_MS), 0)
    assert bill is not None
    assert bill.budgets[-1].limit == 1
