"""Prices, budgets of accounts, and what a request can cost: see lua/lib/spending.lua. No I/O.

Money is counted in nanos, billionths of the currency, as whole numbers: sums of any length stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

NANOS = 10**9
"""Of one unit of the currency."""
_MTOK = 10**6
_FASTEST_TOKENS_PER_S = 500
"""No engine generates a sequence faster."""

Per = Literal["day", "week", "month"]
Unit = Literal["money", "tokens"]


class AccountBudget(NamedTuple):
    """What one account may spend in one window of time."""

    account: str
    """As in keys and records: see accounts.py."""
    per: Per
    unit: Unit
    limit: int
    """Nanos or tokens."""
    soft: float
    """The part of it from which on clients are warned."""
    window: str
    """`2026-11-28`, `2026-W48` or `2026-11`."""
    ends_s: int
    """When the next window begins (Unix time)."""
    name: str
    """As in keys: `<window>/<unit>/<account>`."""


class Price(NamedTuple):
    """The price of a model, in nanos."""

    uncached_per_mtok: int
    cached_per_mtok: int
    output_per_mtok: int
    per_image: int = 0

    def cost_nanos(self, uncached_tokens: int, cached_tokens: int, output_tokens: int, images: int = 0) -> int:
        """What a request costs, rounded up once."""
        tokens = (
            uncached_tokens * self.uncached_per_mtok
            + cached_tokens * self.cached_per_mtok
            + output_tokens * self.output_per_mtok
        )
        return -(-tokens // _MTOK) + images * self.per_image

    def saved_nanos(self, cached_tokens: int) -> int:
        """How much less the cached tokens cost than uncached ones, rounded down."""
        return cached_tokens * (self.uncached_per_mtok - self.cached_per_mtok) // _MTOK


FREE = Price(0, 0, 0)
"""The price of a model without one."""


class Spent(NamedTuple):
    """What is spent of a budget over all gateways."""

    life: str
    """Of the hash in the store, which may be lost; "-" if there is none yet."""
    settled: int
    held: int
    """The most that requests in flight can cost."""


class Most(NamedTuple):
    """The most that a request can take of a budget, in its unit."""

    amount: int
    of_prompt: int
    """The part that is not for its answer."""
    per_s: int
    """The most of its answer, per second."""


@dataclass(frozen=True)  # without slots: cached_property keeps its values in __dict__
class Bill:
    """What a request can cost, and the budgets of its accounts."""

    budgets: tuple[AccountBudget, ...]
    price: Price
    prompt_tokens: int
    output_tokens: int
    """The most that its answer can take, all choices together."""
    images: int = 0
    choices: int = 1
    currency: str = ""

    @cached_property
    def text(self) -> str:
        """As `place` takes it."""
        uncached, cached, output, per_image = self.price
        text = f"{self.images * per_image} {self.output_tokens} {uncached} {cached} {output} {self._fastest}"
        return text + "".join(f" / {each.name} {each.limit}" for each in self.budgets)

    @property
    def _fastest(self) -> int:
        return self.choices * _FASTEST_TOKENS_PER_S

    def most(self, budget: AccountBudget, uncached_tokens: int) -> Most:
        """What it takes of a budget at most, on a replica that lacks so many tokens of its prompt: as spending.weigh in
        lua/lib/spending.lua."""
        if budget.unit == "tokens":
            return Most(max(1, uncached_tokens + self.output_tokens), uncached_tokens, self._fastest)
        cached_tokens = max(0, self.prompt_tokens - uncached_tokens)
        price, prompt = self.price, (uncached_tokens, cached_tokens)
        amount = price.cost_nanos(*prompt, self.output_tokens, self.images)
        return Most(
            max(amount, min(1, price.uncached_per_mtok + price.output_per_mtok)),
            price.cost_nanos(*prompt, 0, self.images),
            price.cost_nanos(0, 0, self._fastest),
        )

    def beside(self, spent: Sequence[Spent], uncached_tokens: int) -> list[tuple[AccountBudget, Spent, int]]:
        """Each budget, what is spent of it, and the most that the request takes of it on such a replica."""
        most = (self.most(budget, uncached_tokens).amount for budget in self.budgets)
        return list(zip(self.budgets, spent, most, strict=True))

    def lease(self, placed_ms: int, uncached_tokens: int) -> str:
        """What it holds, as `spend` takes it."""
        held = (" ".join(map(str, (each.name, *self.most(each, uncached_tokens)))) for each in self.budgets)
        return " / ".join((str(placed_ms), *held))
