"""What a tenant, or an API key, may spend in a day, a week or a month."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gateway.settings.base import Section


class BudgetSettings(Section):
    per: Literal["day", "week", "month"]
    money: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    tokens: Annotated[int, Field(ge=1, le=10**15)] | None = None
    soft: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.8
    """The part of it from which on clients are warned."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.money is None) == (self.tokens is None):
            raise ValueError("give money or tokens: for both, write two budgets")
        return self

    @property
    def unit(self) -> Literal["money", "tokens"]:
        return "tokens" if self.money is None else "money"

    @property
    def amount(self) -> float:
        """In the currency, or in tokens."""
        return self.tokens or 0 if self.money is None else self.money


def _are_distinct(budgets: list[BudgetSettings]) -> list[BudgetSettings]:
    for number, one in enumerate(budgets):
        if any((one.per, one.unit) == (other.per, other.unit) for other in budgets[:number]):
            raise ValueError(f"two budgets of {one.unit} per {one.per}: leave one out")
    return budgets


Budgets = Annotated[list[BudgetSettings], AfterValidator(_are_distinct)]
