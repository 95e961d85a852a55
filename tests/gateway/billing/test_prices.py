"""What requests cost."""

from __future__ import annotations

from coordinator.spending import FREE, NANOS
from gateway.billing.prices import prices_of
from gateway.settings.billing_settings import PriceSettings


def test_a_request_costs_the_sum_of_its_parts_exactly() -> None:
    chat = PriceSettings(
        model="chat",
        uncached_input_per_mtok=1.0,
        cached_input_per_mtok=0.1,
        output_per_mtok=4.0,
        per_image=0.002,
    )
    price = prices_of([chat])["chat"]
    assert price.cost_nanos(1_000_000, 0, 0) == NANOS
    assert price.cost_nanos(700, 300, 50, 2) == 700_000 + 30_000 + 200_000 + 4_000_000
    assert price.saved_nanos(300) == 270_000


def test_a_cost_is_rounded_up_once_not_for_each_part() -> None:
    price = prices_of(
        [
            PriceSettings(
                model="tiny", uncached_input_per_mtok=0.0004, cached_input_per_mtok=0.0004, output_per_mtok=0.0004
            )
        ]
    )["tiny"]
    assert price.cost_nanos(1, 1, 0) == 1  # 0.8 nanos
    assert price.cost_nanos(1, 1, 1) == 2  # 1.2 nanos, not three times 1


def test_cached_tokens_cost_as_uncached_ones_if_nothing_is_said_of_them() -> None:
    price = prices_of([PriceSettings(model="chat", uncached_input_per_mtok=2.0)])["chat"]
    assert price.cost_nanos(0, 1000, 0) == price.cost_nanos(1000, 0, 0) > 0
    assert price.saved_nanos(1000) == 0
    assert FREE.cost_nanos(10**9, 10**9, 10**9, 1000) == 0
