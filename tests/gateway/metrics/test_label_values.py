"""Clients cannot make as many series as they like."""

from __future__ import annotations

from gateway.metrics.label_values import OTHERS, LabelValues


def test_the_first_hundred_names_keep_theirs_and_all_others_share_one() -> None:
    values = LabelValues()
    assert [values.of(f"m{n}") for n in range(150)] == [*(f"m{n}" for n in range(100)), *[OTHERS] * 50]
    assert values.of("m0") == "m0"
