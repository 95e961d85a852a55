"""Usage in three dialects, and when a shortfall means an eviction."""

from __future__ import annotations

import pytest

from gateway.audit import Usage, is_eviction, known_cached_tokens, read_usage


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, None)),
        ({"prompt_tokens": 9}, Usage(9, None)),
        ({"prompt_tokens": 9, "completion_tokens": 1}, Usage(9, None, omits_zero=True)),
        ({"prompt_tokens": 9, "completion_tokens": 0}, Usage(9, None)),  # an embedding
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}, Usage(9, 0)),
        ({"input_tokens": 9, "cache_read_input_tokens": 3}, Usage(9, 3)),
        ({"prompt_tokens": "9"}, None),
        (None, None),
    ],
)
def test_usage_is_read_in_every_apis_form(usage: object, expected: Usage | None) -> None:
    assert read_usage(usage) == expected


@pytest.mark.parametrize(
    ("usage", "replica_reports", "cached"),
    [
        (Usage(9, None, omits_zero=True), True, 0),
        (Usage(9, None, omits_zero=True), False, None),
        (Usage(9, None), True, None),  # /v1/messages, or an embedding
        (Usage(9, 4, omits_zero=True), True, 4),
        (Usage(9, 0), False, 0),
    ],
)
def test_a_replica_that_reports_cached_tokens_means_none_by_leaving_them_out(
    usage: Usage, replica_reports: bool, cached: int | None
) -> None:
    assert known_cached_tokens(usage, replica_reports) == cached


@pytest.mark.parametrize(
    ("predicted", "cached", "evicted"),
    [(1000, 0, True), (1000, 499, True), (1000, 500, False), (60, 0, False), (0, 0, False), (100, 200, False)],
)
def test_only_a_large_shortfall_counts_as_an_eviction(predicted: int, cached: int, evicted: bool) -> None:
    assert is_eviction(predicted, cached) is evicted
