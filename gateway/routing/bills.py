"""What a request can cost, and the budgets that it is charged to. Pure, except for the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

from coordinator.accounts import account_of_key, account_of_tenant
from coordinator.pool.redis_clock import RedisClock
from coordinator.spending import FREE, NANOS, AccountBudget, Bill
from gateway.billing.prices import prices_of
from gateway.billing.windows import Windows
from gateway.request.job import Job
from gateway.request.keyring import Caller
from gateway.routing.tenants import NOBODY, Tenants
from gateway.settings.billing_settings import time_zone
from gateway.settings.budget_settings import BudgetSettings
from gateway.settings.gateway_settings import GatewaySettings


class Bills:
    """Those of all callers."""

    def __init__(self, settings: GatewaySettings, tenants: Tenants) -> None:
        self._learned = tenants
        self.use(settings)

    def use(self, settings: GatewaySettings) -> None:
        """Other budgets and prices hold for requests that are placed from now on."""
        self._prices = prices_of(settings.billing.prices)
        self._currency = settings.billing.currency
        self._windows = Windows(time_zone(settings.billing.time_zone))
        self._tenants = {tenant.name: tenant.budgets for tenant in settings.tenants if tenant.budgets}
        self._keys = {key.name: key.budgets for key in settings.security.api_keys if key.budgets}

    def of(self, job: Job, clock: RedisClock, most_tokens: int) -> Bill | None:
        """The bill of a request; None if nobody who pays for it has a budget. The engine computes no more than
        `most_tokens` for it, its prompt included; 0: not known. A request counts in the windows of the moment in which
        it is placed first, also if it is placed again."""
        accounts, route = self._accounts(job.caller), job.route
        if not accounts:
            return None
        if not route.billed_at_s:
            route.billed(clock.time_ms(time.monotonic()) / 1000 or time.time())
        budgets = [self._budget(account, each, route.billed_at_s) for account, budgets in accounts for each in budgets]
        output_tokens = job.max_output_tokens
        if output_tokens is None:
            output_tokens = job.choices * self._learned.long_answer_tokens(job.caller.tenant)
        if most_tokens:
            output_tokens = min(output_tokens, max(0, most_tokens - job.prompt_tokens))
        return Bill(
            tuple(budgets),
            self._prices.get(route.counts_as or "", FREE),
            job.prompt_tokens,
            output_tokens if job.endpoint.output_limits else 0,
            job.images,
            job.choices,
            self._currency,
        )

    def _accounts(self, caller: Caller) -> list[tuple[str, Sequence[BudgetSettings]]]:
        accounts: list[tuple[str, Sequence[BudgetSettings]]] = []
        tenant = caller.tenant or NOBODY
        if budgets := self._tenants.get(tenant):
            accounts.append((account_of_tenant(tenant), budgets))
        # Those of a configured key may have changed since the caller was identified.
        of_key = caller.budgets if caller.is_recorded else self._keys.get(caller.id)
        if of_key:
            accounts.append((account_of_key(caller.account), of_key))
        return accounts

    def _budget(self, account: str, told: BudgetSettings, at_s: float) -> AccountBudget:
        return budget_of(account, told, self._windows, at_s)


def budget_of(account: str, told: BudgetSettings, windows: Windows, at_s: float) -> AccountBudget:
    """A budget in the window of a moment."""
    window = windows.at(at_s, told.per)
    limit = max(1, round(told.amount * NANOS)) if told.unit == "money" else int(told.amount)
    name = f"{window.name}/{told.unit}/{account}"
    return AccountBudget(account, told.per, told.unit, limit, told.soft, *window, name)
