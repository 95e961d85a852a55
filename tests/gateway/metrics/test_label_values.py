"""Clients cannot make as many series as they like."""

from __future__ import annotations

from gateway.metrics.label_values import MOST_PAIRS, OTHERS, LabelValues


def test_the_first_hundred_names_keep_theirs_and_all_others_share_one() -> None:
    values = LabelValues()
    assert [values.of(f"m{n}")[0] for n in range(150)] == [*(f"m{n}" for n in range(100)), *[OTHERS] * 50]
    assert values.of("m0") == ("m0",)


def test_models_of_tenants_do_not_multiply() -> None:
    pairs = LabelValues(MOST_PAIRS)
    found = {pairs.of(f"m{model}", f"t{tenant}") for model in range(50) for tenant in range(50)}
    assert len(found) == 201
    assert (OTHERS, OTHERS) in found
    assert pairs.of("m0", "t0") == ("m0", "t0")
