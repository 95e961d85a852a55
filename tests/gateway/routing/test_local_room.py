"""The share of a replica's room that one gateway may use while the store is away."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.accounts import AccountLimits, Budget
from coordinator.placement import Reservation
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.live_load import LiveLoad
from gateway.routing.local_room import Loads, LocalRoom, choose


@given(st.integers(1, 500), st.integers(1, 60), st.floats(0.01, 1))
def test_the_shares_of_all_gateways_are_no_more_than_the_room_or_one_request_each(
    cap: int, gateways: int, room_share: float
) -> None:
    room = LocalRoom.of(PolicyKnobs(max_active_requests=cap), gateways, room_share)
    assert room.requests >= 1
    assert room.requests * gateways <= max(cap * room_share, gateways)
    assert room.backlog_tokens * gateways == pytest.approx(10 * 8000 * room_share)


def test_without_settings_there_is_no_bound() -> None:
    room = LocalRoom.of(PolicyKnobs(max_active_requests=0, max_wait_s=0), 3, 1)
    assert not room.is_bounded
    assert room.admits(10**6, 10**9)


@pytest.mark.parametrize(
    ("requests", "tokens", "admits"),
    [(0, 0, True), (1, 999, True), (2, 0, False), (0, 1000, False)],
)
def test_a_request_has_room_beside_fewer_requests_and_tokens_than_the_share(
    requests: int, tokens: int, admits: bool
) -> None:
    room = LocalRoom.of(PolicyKnobs(max_active_requests=4, max_wait_s=2, prefill_tokens_per_s=1000), 2, 1)
    assert room == LocalRoom(2, 1000)
    assert room.admits(requests, tokens) is admits


def among(*names: str) -> Callable[[str], bool]:
    return lambda replica: replica in names


def test_the_first_usable_replica_with_room_gets_a_request() -> None:
    order = ["r0", "r1", "r2"]
    assert choose(order, among("r1", "r2"), among("r0", "r2")) == "r2"
    assert choose(order, among("r1", "r2"), among("r0")) is None
    assert choose(order, among(), among()) == "r0", "as a last resort"


def test_load_is_what_is_live_and_what_is_kept_for_others() -> None:
    live = LiveLoad()
    one = Reservation("a", "r0", "1", 100, "-", Budget((AccountLimits("team"),), 300, 0))
    live.add(one)
    assert (live.requests, live.backlog_tokens, live.of_account) == ({"r0": 1}, {"r0": 100}, {"team": 1})
    loads, room = Loads(live), LocalRoom(2, 0)
    assert loads.have_room("r0", room)
    loads.keep("r0", 50)
    assert not loads.have_room("r0", room)
    assert not loads.have_room("r0", LocalRoom(0, 150))
    assert loads.have_room("r0", LocalRoom(0, 151))
    live.end_backlog(one)
    one.backlog_tokens = 0
    live.remove(one)
    assert (live.requests, live.backlog_tokens, live.of_account) == ({}, {}, {})
