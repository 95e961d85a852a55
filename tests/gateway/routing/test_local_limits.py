"""A tenant's limits of a minute, as one gateway keeps its share of them."""

from __future__ import annotations

import pytest

from coordinator.errors import OverLimit
from coordinator.placement import TenantLimits, Used
from gateway.routing.local_limits import LocalBuckets, local_concurrency

NOW_MS = 1_000_000.0


def test_each_gateway_gives_its_share_of_requests_and_gets_it_back_evenly() -> None:
    buckets, limits = LocalBuckets(), TenantLimits(requests_per_min=6)
    for _ in range(3):
        buckets.let_in("team", limits, 2, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in("team", limits, 2, NOW_MS)
    assert (refused.value.limit, refused.value.wait_s, refused.value.left) == ("requests", 20.0, (0, 60_000, -1, 0))
    buckets.let_in("other", limits, 2, NOW_MS)
    buckets.let_in("team", limits, 2, NOW_MS + 20_000)


def test_a_share_is_as_full_as_the_store_said_last_and_never_less_than_this_gateway_knows() -> None:
    buckets, limits = LocalBuckets(), TenantLimits(concurrency=3, requests_per_min=6, tokens_per_min=100)
    buckets.told("team", (2, 40_000, 0, 0, 3), 1, NOW_MS)
    buckets.let_in("team", limits, 2, NOW_MS)
    buckets.told("team", (6, 0, 0, 0, 3), 1, NOW_MS)  # it does not know of the one above yet
    with pytest.raises(OverLimit):
        buckets.let_in("team", limits, 2, NOW_MS)
    assert [buckets.elsewhere("team", NOW_MS + ms) for ms in (0, 10_000)] == [2, 0]
    buckets.told("other", (6, 0, 0, 900_000), 0, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in("other", limits, 2, NOW_MS)
    assert (refused.value.limit, refused.value.wait_s) == ("tokens", 840.001)


def test_a_share_is_at_least_one_request() -> None:
    assert [local_concurrency(limit, 4) for limit in (0, 1, 4, 9)] == [0, 1, 1, 2]
    buckets, limits = LocalBuckets(), TenantLimits(requests_per_min=1)
    buckets.let_in("team", limits, 50, NOW_MS)
    with pytest.raises(OverLimit):
        buckets.let_in("team", limits, 50, NOW_MS)


def test_the_last_request_may_overdraw_and_tokens_are_corrected_at_the_end() -> None:
    buckets, limits = LocalBuckets(), TenantLimits(tokens_per_min=2000)
    for reservation in ("one", "two"):
        buckets.let_in("team", limits, 2, NOW_MS)
        buckets.reserve(reservation, "team", 700, limits, 2, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in("team", limits, 2, NOW_MS)
    assert (refused.value.limit, refused.value.wait_s) == ("tokens", 24.001)
    buckets.finish("one", Used(0, 100), NOW_MS)
    buckets.finish("one", Used(0, 100), NOW_MS)
    buckets.let_in("team", limits, 2, NOW_MS)
    buckets.finish("two", None, NOW_MS)
    buckets.reserve("three", "team", 200, limits, 2, NOW_MS)
    with pytest.raises(OverLimit):
        buckets.let_in("team", limits, 2, NOW_MS)


def test_a_huge_estimate_gives_back_no_more_than_it_took() -> None:
    buckets, limits = LocalBuckets(), TenantLimits(tokens_per_min=1000)
    buckets.reserve("used", "team", 1000, limits, 1, NOW_MS)
    buckets.reserve("huge", "team", 10_000_000, limits, 1, NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in("team", limits, 1, NOW_MS)
    assert refused.value.wait_s > 600_000
    buckets.finish("huge", Used(0, 0), NOW_MS)
    with pytest.raises(OverLimit) as refused:
        buckets.let_in("team", limits, 1, NOW_MS)
    assert refused.value.wait_s < 1
