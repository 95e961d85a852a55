"""Shows what tenants and API keys have spent of their budgets. Those of 10 000 keys are worked on in pieces, and
requests run in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import datetime, tzinfo
from heapq import nlargest
from itertools import chain
from typing import Any, NamedTuple

from coordinator.accounts import account_of_key, account_of_tenant
from coordinator.errors import StoreError
from coordinator.pool.account_spending import read_spent
from coordinator.spending import NANOS, AccountBudget, Spent
from coordinator.store import Store
from gateway.billing.windows import Windows
from gateway.control.operations import store_away
from gateway.request.keyring import Caller, Keyring
from gateway.routing.bills import budget_of
from gateway.routing.tenants import NOBODY
from gateway.settings.billing_settings import time_zone
from gateway.settings.budget_settings import BudgetSettings
from gateway.settings.gateway_settings import GatewaySettings

_PIECE = 500


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
        self.currency = settings.billing.currency
        self._zone, self._zone_name = time_zone(settings.billing.time_zone), settings.billing.time_zone
        self._windows = Windows(self._zone)
        self._priced = {price.model for price in settings.billing.prices}
        self._aliases = {alias for model in settings.models for alias in model.aliases}
        self._tenants = {tenant.name: tenant.budgets for tenant in settings.tenants if tenant.budgets}

    async def listed(self, caller: Caller) -> dict[str, Any]:
        """The budgets that a caller may see, and what is spent of each now. Raises ApiError."""
        tenant, found = caller.tenant or NOBODY, list[tuple[_Line, dict[str, Any]]]()
        try:
            async for line, spent in self._spent(lambda each: caller.is_admin or each == tenant):
                found.append((line, _shown(line, spent, self._zone)))
        except StoreError as error:
            raise store_away(error) from None
        found.sort(key=lambda each: (each[0].tenant, each[0].key, each[0].budget.ends_s))
        shown = [shown for _, shown in found]
        return {"currency": self.currency, "time_zone": self._zone_name, "budgets": shown}

    async def used(self, most: int) -> list[tuple[AccountBudget, float]]:
        """How much of each budget is spent, as a part of it: those of which most is. Raises StoreError."""
        parts = [(line.budget, spent.settled / line.budget.limit) async for line, spent in self._spent(lambda _: True)]
        return nlargest(most, parts, key=lambda each: each[1])

    def models_without_price(self, served: Iterable[str]) -> list[str]:
        """The models whose requests spend nothing of budgets in money. Empty if there is no such budget."""
        free = sorted(set(served) - self._priced - self._aliases)
        return free if free and any(budget.unit == "money" for budget in self._configured()) else []

    def _configured(self) -> Iterator[BudgetSettings]:
        yield from chain.from_iterable(self._tenants.values())
        yield from chain.from_iterable(caller.budgets for caller in self._keyring.callers())

    async def _spent(self, is_asked: Callable[[str], bool]) -> AsyncIterator[tuple[_Line, Spent]]:
        """Of the tenants that are asked."""
        pools, now_s = [self._store.pool(name) for name in self._store.pool_names()], time.time()
        budgets = list(self._budgets(is_asked))
        for start in range(0, len(budgets), _PIECE):
            lines = [self._line(*each, now_s) for each in budgets[start : start + _PIECE]]
            for found in zip(lines, await read_spent(pools, [line.budget for line in lines]), strict=True):
                yield found
            await asyncio.sleep(0)

    def _budgets(self, is_asked: Callable[[str], bool]) -> Iterator[tuple[str, Caller | None, BudgetSettings]]:
        """A tenant's own, and those of its keys: each once, though the keys of a rotation share them."""
        for tenant, budgets in self._tenants.items():
            if is_asked(tenant):
                yield from ((tenant, None, each) for each in budgets)
        callers = {caller.account: caller for caller in self._keyring.callers() if caller.budgets}
        for caller in callers.values():
            if is_asked(caller.tenant or NOBODY):
                yield from ((caller.tenant or NOBODY, caller, each) for each in caller.budgets)

    def _line(self, tenant: str, caller: Caller | None, told: BudgetSettings, now_s: float) -> _Line:
        account = account_of_tenant(tenant) if caller is None else account_of_key(caller.account)
        budget = budget_of(account, told, self._windows, now_s)
        return _Line(tenant, caller.key if caller else "", caller.id if caller else "", budget)


def _shown(line: _Line, spent: Spent, zone: tzinfo) -> dict[str, Any]:
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
        "opens_again": datetime.fromtimestamp(budget.ends_s, zone).isoformat(),
    }
