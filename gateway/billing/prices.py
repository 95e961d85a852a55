"""The prices of models, as they are configured. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from coordinator.spending import NANOS, Price
from gateway.settings.billing_settings import PriceSettings


class TokenCounts(NamedTuple):
    """What an answer took. Only tokens that the engine told as cached are: a prediction proves nothing."""

    uncached: int
    cached: int
    output: int


def prices_of(settings: Iterable[PriceSettings]) -> dict[str, Price]:
    """By model. Cached tokens cost as much as uncached ones if nothing is said of them."""
    return {each.model: _price_of(each) for each in settings}


def _price_of(told: PriceSettings) -> Price:
    uncached, cached = told.uncached_input_per_mtok, told.cached_input_per_mtok
    cached = uncached if cached is None else cached
    return Price(*(round(money * NANOS) for money in (uncached, cached, told.output_per_mtok, told.per_image)))
