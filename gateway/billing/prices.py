"""What a request costs. Pure.

Money is counted in nanos, billionths of the currency, as whole numbers: sums of any length stay exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gateway.settings.billing_settings import PriceSettings

NANOS = 10**9
"""Of one unit of the currency."""
_MTOK = 10**6


class TokenCounts(NamedTuple):
    """What an answer took. Only tokens that the engine told as cached are: a prediction proves nothing."""

    uncached: int
    cached: int
    output: int


class Price(NamedTuple):
    """The price of a model, in nanos."""

    uncached_per_mtok: int
    cached_per_mtok: int
    output_per_mtok: int
    per_image: int

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


FREE = Price(0, 0, 0, 0)
"""The price of a model without one."""


def prices_of(settings: Iterable[PriceSettings]) -> dict[str, Price]:
    """By model. Cached tokens cost as much as uncached ones if nothing is said of them."""
    return {each.model: _price_of(each) for each in settings}


def _price_of(told: PriceSettings) -> Price:
    uncached, cached = told.uncached_input_per_mtok, told.cached_input_per_mtok
    cached = uncached if cached is None else cached
    return Price(*(round(money * NANOS) for money in (uncached, cached, told.output_per_mtok, told.per_image)))
