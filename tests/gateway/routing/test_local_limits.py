"""A tenant's limits of a minute, as one gateway keeps its share of them."""

from __future__ import annotations

import pytest

from coordinator.accounts import AccountLimits, Left, Limits
from coordinator.errors import OverLimit
from coordinator.placement import Used
from gateway.routing.local_limits import LocalBuckets, local_concurrency
from tests.account_limits import limits_of

NOW_MS = 1_000_000.0


def test_each_gateway_gives_its_share_of_requests_and_gets_it_back_evenly() -> None:
    buckets, limits = LocalBuckets(), limits_of("team", requests_per_min=6)
    for _ in range(3):
        buckets.let_in(limits, 2, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in(limits, 2, NOW_MS)
    assert (refused.value.limit, refused.value.wait_s, refused.value.left) == (
        "requests",
        20.0,
        (Left(0, 60_000, -1, 0),),
    )
    buckets.let_in(limits_of("other", requests_per_min=6), 2, NOW_MS)
    buckets.let_in(limits, 2, NOW_MS + 20_000)


def test_a_share_is_as_full_as_the_store_said_last_and_never_less_than_this_gateway_knows() -> None:
    buckets, limits = LocalBuckets(), limits_of("team", concurrency=3, requests_per_min=6, tokens_per_min=100)
    buckets.told("team", Left(2, 40_000, 0, 0, 3), 1, NOW_MS)
    buckets.let_in(limits, 2, NOW_MS)
    buckets.told("team", Left(6, 0, 0, 0, 3), 1, NOW_MS)  # it does not know of the one above yet
    with pytest.raises(OverLimit):
        buckets.let_in(limits, 2, NOW_MS)
    assert [buckets.elsewhere("team", NOW_MS + ms) for ms in (0, 10_000)] == [2, 0]
    buckets.told("other", Left(6, 0, 0, 900_000), 0, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in(limits_of("other", tokens_per_min=100), 2, NOW_MS)
    assert (refused.value.limit, refused.value.wait_s) == ("tokens", 840.001)


def test_a_share_is_at_least_one_request() -> None:
    assert [local_concurrency(limit, 4) for limit in (0, 1, 4, 9)] == [0, 1, 1, 2]
    buckets, limits = LocalBuckets(), limits_of("team", requests_per_min=1)
    buckets.let_in(limits, 50, NOW_MS)
    with pytest.raises(OverLimit):
        buckets.let_in(limits, 50, NOW_MS)


def test_the_last_request_may_overdraw_and_tokens_are_corrected_at_the_end() -> None:
    buckets, limits = LocalBuckets(), limits_of("team", tokens_per_min=2000)
    for reservation in ("one", "two"):
        buckets.let_in(limits, 2, NOW_MS)
        buckets.reserve(reservation, 700, limits, 2, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in(limits, 2, NOW_MS)
    assert (refused.value.limit, refused.value.wait_s) == ("tokens", 24.001)
    buckets.finish("one", Used(0, 100), NOW_MS)
    buckets.finish("one", Used(0, 100), NOW_MS)
    buckets.let_in(limits, 2, NOW_MS)
    buckets.finish("two", None, NOW_MS)
    buckets.reserve("three", 200, limits, 2, NOW_MS)
    with pytest.raises(OverLimit):
        buckets.let_in(limits, 2, NOW_MS)


def test_a_huge_estimate_gives_back_no_more_than_it_took() -> None:
    buckets, limits = LocalBuckets(), limits_of("team", tokens_per_min=1000)
    buckets.reserve("used", 1000, limits, 1, NOW_MS)
    buckets.reserve("huge", 10_000_000, limits, 1, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in(limits, 1, NOW_MS)
    assert refused.value.wait_s > 600_000
    buckets.finish("huge", Used(0, 0), NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in(limits, 1, NOW_MS)
    assert refused.value.wait_s < 1


def test_every_account_must_let_a_request_in_and_a_refusal_costs_none_of_them_anything() -> None:
    tenant, key = AccountLimits("team", requests_per_min=20), AccountLimits("key:k", requests_per_min=4)
    buckets, both = LocalBuckets(), Limits((tenant, key))
    for _ in range(2):
        buckets.let_in(both, 2, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in(both, 2, NOW_MS)
    assert (refused.value.at, refused.value.wait_s) == (1, 30.0)
    assert [left.requests for left in refused.value.left] == [8, 0]
    for _ in range(8):
        buckets.let_in(Limits((tenant,)), 2, NOW_MS)
    with pytest.raises(OverLimit):
        buckets.let_in(Limits((tenant,)), 2, NOW_MS)


def test_tokens_are_reserved_and_corrected_for_every_account() -> None:
    tenant, key = AccountLimits("team", tokens_per_min=2000), AccountLimits("key:k", tokens_per_min=1000)
    buckets, both = LocalBuckets(), Limits((tenant, key))
    buckets.reserve("one", 1000, both, 1, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in(both, 1, NOW_MS)
    assert [left.tokens for left in refused.value.left] == [1000, 0]
    buckets.finish("one", Used(0, 100), NOW_MS)
    buckets.let_in(both, 1, NOW_MS)
    buckets.reserve("two", 2000, both, 1, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in(both, 1, NOW_MS)
    assert (refused.value.at, [left.tokens for left in refused.value.left]) == (1, [0, 0])
