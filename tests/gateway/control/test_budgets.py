"""GET /v1/budgets and the metric of budgets. (tests/chaos/test_budgets.py shows them at four gateways.)"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from coordinator.spending import AccountBudget, Spent
from coordinator.store import Store
from gateway.control import budgets as control
from gateway.control.budgets import BudgetView
from gateway.request.keyring import Caller, Keyring
from gateway.settings.budget_settings import BudgetSettings
from gateway.settings.gateway_settings import GatewaySettings

ADMIN = Caller("t0", True, is_admin=True)
BUDGETS = BudgetSettings(per="day", money=5.0), BudgetSettings(per="month", tokens=1000)


class Keys:
    """10 000 keys of ten tenants."""

    def __init__(self, budgets: tuple[BudgetSettings, ...] = BUDGETS) -> None:
        names = (f"k{number}" for number in range(10_000))
        self._all = [Caller(f"t{name[-1]}", False, name, id=name, account=name, budgets=budgets) for name in names]

    def callers(self) -> list[Caller]:
        return self._all


class NoPools:
    def pool_names(self) -> list[str]:
        return []


@pytest.fixture
def asked_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many budgets each call reads what is spent. Of key k<number>, this is <number>."""
    at_once = list[int]()

    async def read_spent(_pools: Any, budgets: Sequence[AccountBudget]) -> list[Spent]:
        at_once.append(len(budgets))
        return [Spent("1", int(budget.account.removeprefix("key:k")), 0) for budget in budgets]

    monkeypatch.setattr(control, "read_spent", read_spent)
    return at_once


def view(**billing: Any) -> BudgetView:
    return BudgetView(
        GatewaySettings.model_validate({"billing": billing}), cast("Store", NoPools()), cast("Keyring", Keys())
    )


async def turns_of(answer: asyncio.Task[Any]) -> int:
    """How many turns of the event loop it takes."""
    turns = 0
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_requests_run_while_the_budgets_of_10_000_keys_are_read(asked_at_once: list[int]) -> None:
    listed = asyncio.get_running_loop().create_task(view().listed(ADMIN))
    assert await turns_of(listed) >= 40
    assert len(listed.result()["budgets"]) == sum(asked_at_once) == 20_000
    assert max(asked_at_once) <= 500
    used = asyncio.get_running_loop().create_task(view().used(3))
    assert await turns_of(used) >= 40
    assert [(budget.account, part) for budget, part in used.result()] == [
        ("key:k9999", 9.999),
        ("key:k9998", 9.998),
        ("key:k9997", 9.997),
    ]


async def test_what_others_have_is_neither_shown_to_a_key_nor_read_for_it(asked_at_once: list[int]) -> None:
    shown = (await view().listed(Caller("t7", False, "k7")))["budgets"]
    assert {one["tenant"] for one in shown} == {"t7"}
    assert len(shown) == sum(asked_at_once) == 2000


async def test_a_budget_opens_again_at_midnight_of_the_billing_zone_which_is_named(asked_at_once: list[int]) -> None:
    told = await view(time_zone="Asia/Tokyo").listed(Caller("t7", False, "k7"))
    assert told["time_zone"] == "Asia/Tokyo"
    assert {one["opens_again"][10:] for one in told["budgets"]} == {"T00:00:00+09:00"}
    assert asked_at_once


def test_models_without_price_are_named_if_a_key_has_a_budget_in_money() -> None:
    """Keys that were made while gateways run are among these; the configuration has none of them."""
    told = view(prices=[{"model": "chat", "output_per_mtok": 1}])
    assert told.models_without_price(["sim", "chat"]) == ["sim"]
    assert told.models_without_price(["chat"]) == []
    in_tokens = BudgetView(GatewaySettings(), cast("Store", NoPools()), cast("Keyring", Keys(BUDGETS[1:])))
    assert in_tokens.models_without_price(["sim"]) == []
