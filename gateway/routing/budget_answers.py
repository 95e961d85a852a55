"""How a client learns of the budgets of its tenant and API key: headers, and the refusal. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from coordinator.accounts import is_account_of_key
from coordinator.errors import OverBudget
from coordinator.spending import NANOS, AccountBudget, Bill, Spent
from gateway.errors import ApiError

_SOON_S = 2
"""After this time it is worth to ask again, if only requests in flight are in the way."""
_MONTHLY = {"day": "daily", "week": "weekly", "month": "monthly"}


def budget_headers(bill: Bill, spent: tuple[Spent, ...], uncached_tokens: int) -> dict[str, str]:
    """What is left of the budget that has the smallest part left, with this request; and a warning, if it has less left
    than it should."""
    parts = []
    for budget, each in zip(bill.budgets, spent, strict=True):
        used = each.settled + each.held + bill.most(budget, uncached_tokens).amount
        parts.append((used / budget.limit, budget, max(0, budget.limit - used)))
    part, budget, left = max(parts, key=lambda each: each[0])
    headers = _header(budget, left, bill.currency)
    if part >= budget.soft:
        headers["x-kvgate-budget-warning"] = f"{part:.0%} of the {_words(budget)} is used or reserved"
    return headers


def _header(budget: AccountBudget, left: int, currency: str) -> dict[str, str]:
    rest, limit = (_amount(budget, amount, currency) for amount in (left, budget.limit))
    of = f"per={budget.per}; account={_account(budget)}; resets={_time(budget.ends_s)}"
    return {"x-kvgate-budget": f"left={rest}; of={limit}; {of}"}


def budget_refused(error: OverBudget, now_s: float, currency: str) -> ApiError:
    """The answer to a request that may cost more than is left."""
    budget, spent, most, is_settled = error.blocking()
    left_amount = max(0, budget.limit - spent.settled)
    left, told = _amount(budget, left_amount, currency), _header(budget, left_amount, currency)
    facts = _facts(budget, spent, most, currency)
    may_cost = f"this request may take {_amount(budget, most, currency)}"
    if is_settled:
        retry_s = max(1, math.ceil(budget.ends_s - now_s))
        message = (
            f"The {_words(budget)} has {left} of {_amount(budget, budget.limit, currency)} left, and {may_cost}. "
            f"It is full again at {_time(budget.ends_s)}."
        )
        if spent.settled < budget.limit:
            message += " A request with a smaller max_tokens may still fit."
        told |= {"retry-after": str(retry_s), "x-should-retry": "false"}
        return ApiError(429, "budget_exceeded", message, headers=told, over_budget=facts)
    if error.is_local:
        message = f"Redis is away, and this gateway's part of the {_words(budget)} is used up. Retry in {_SOON_S} s."
    else:
        message = (
            f"The {_words(budget)} has {left} left, but requests in flight may take it, and {may_cost}. Retry in "
            f"{_SOON_S} s."
        )
    told |= {"retry-after": str(_SOON_S)}
    return ApiError(429, "budget_reserved", message, headers=told, over_budget=facts)


def _facts(budget: AccountBudget, spent: Spent, most: int, currency: str) -> dict[str, Any]:
    """What the record of a refused request tells of its budget."""
    is_money = budget.unit == "money"
    amounts = {"budget": budget.limit, "spent": spent.settled, "reserved": spent.held, "may_take": most}
    return {
        "account": _account(budget),
        "per": budget.per,
        "window": budget.window,
        "unit": currency if is_money else "tokens",
        **{name: amount / NANOS if is_money else amount for name, amount in amounts.items()},
        "resets": _time(budget.ends_s),
    }


def _words(budget: AccountBudget) -> str:
    whose = "API key" if is_account_of_key(budget.account) else "tenant"
    return f"{_MONTHLY[budget.per]} budget of your {whose}"


def _account(budget: AccountBudget) -> str:
    return "key" if is_account_of_key(budget.account) else "tenant"


def _amount(budget: AccountBudget, amount: int, currency: str) -> str:
    if budget.unit == "tokens":
        return f"{amount} tokens"
    return f"{money(amount)} {currency}"


def money(nanos: int) -> str:
    """An amount in the currency: rounded to six decimals, at least two."""
    text = f"{nanos / NANOS:.6f}".rstrip("0")
    units, _, rest = text.partition(".")
    return f"{units}.{rest.ljust(2, '0')}"


def _time(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
