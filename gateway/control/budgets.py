"""Shows what tenants and API keys have spent of their budgets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from coordinator.accounts import account_of_key, account_of_tenant
from coordinator.errors import StoreError
from coordinator.pool.account_spending import read_spent
from coordinator.spending import AccountBudget, Spent
from coordinator.store import Store
from gateway.billing.prices import NANOS
from gateway.billing.windows import Windows
from gateway.control.operations import store_away
from gateway.request.keyring import Caller, Keyring
from gateway.routing.bills import budget_of
from gateway.routing.tenants import NOBODY
from gateway.settings.billing_settings import time_zone
from gateway.settings.gateway_settings import GatewaySettings


class _Line(NamedTuple):
    tenant: str
    key: str
    """Its name; empty for the tenant's own budget."""
    key_id: str
    budget: AccountBudget


class BudgetView:
    """Of all tenants and keys. Anybody may ask for their own tenant."""

    def __init__(self, settings: GatewaySettings, store: Store, keyring: Keyring) -> None:
        self._store, self._keyring = store, keyring
        self.use(settings)

    def use(self, settings: GatewaySettings) -> None:
        """These are the budgets from now on."""
        self._currency = settings.billing.currency
        self._windows = Windows(time_zone(settings.billing.time_zone))
        self._tenants = {tenant.name: tenant.budgets for tenant in settings.tenants if tenant.budgets}

    async def listed(self, caller: Caller) -> dict[str, Any]:
        """The budgets that a caller may see, and what is spent of each now. Raises ApiError."""
        tenant = caller.tenant or NOBODY
        try:
            found = await self._spent(lambda line: caller.is_admin or line.tenant == tenant)
        except StoreError as error:
            raise store_away(error) from None
        return {"currency": self._currency, "budgets": [_shown(line, spent) for line, spent in found]}

    async def used(self, most: int) -> list[tuple[AccountBudget, float]]:
        """How much of each budget is spent, as a part of it: those of which most is. Raises StoreError."""
        found = await self._spent(lambda _: True)
        parts = [(line.budget, spent.settled / line.budget.limit) for line, spent in found]
        return sorted(parts, key=lambda each: -each[1])[:most]

    async def _spent(self, is_asked: Callable[[_Line], bool]) -> list[tuple[_Line, Spent]]:
        lines = [line for line in self._lines() if is_asked(line)]
        pools = [self._store.pool(name) for name in self._store.pool_names()]
        return list(zip(lines, await read_spent(pools, [line.budget for line in lines]), strict=True))

    def _lines(self) -> list[_Line]:
        now_s, lines = time.time(), dict[str, _Line]()
        for tenant, budgets in self._tenants.items():
            for each in budgets:
                budget = budget_of(account_of_tenant(tenant), each, self._windows, now_s)
                lines[budget.name] = _Line(tenant, "", "", budget)
        for caller in self._keyring.callers():
            for each in caller.budgets:
                budget = budget_of(account_of_key(caller.account), each, self._windows, now_s)
                lines[budget.name] = _Line(caller.tenant or NOBODY, caller.key, caller.id, budget)
        return sorted(lines.values(), key=lambda line: (line.tenant, line.key, line.budget.ends_s))


def _shown(line: _Line, spent: Spent) -> dict[str, Any]:
    budget = line.budget
    left = max(0, budget.limit - spent.settled - spent.held)
    amounts: list[float] = [budget.limit, spent.settled, spent.held, left]
    if budget.unit == "money":
        amounts = [amount / NANOS for amount in amounts]
    limit, settled, held, left_of_it = amounts
    return {
        "tenant": line.tenant,
        "key": line.key or None,
        "key_id": line.key_id or None,
        "per": budget.per,
        "unit": budget.unit,
        "window": budget.window,
        "budget": limit,
        "soft": budget.soft,
        "spent": settled,
        "reserved": held,
        "left": left_of_it,
        "opens_again_s": budget.ends_s,
    }
