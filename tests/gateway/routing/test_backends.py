"""Which pool gets a request whose model is served by several."""

from __future__ import annotations

from collections import Counter

from gateway.routing.backends import PoolRoom, choose_pool


def chosen(rooms: dict[str, PoolRoom], prompts: int = 3000) -> Counter[str | None]:
    return Counter(choose_pool(rooms, b"%d" % n) for n in range(prompts))


def test_pools_share_by_their_ready_replicas_and_one_without_any_gets_nothing() -> None:
    shares = chosen({"old": PoolRoom(3), "new": PoolRoom(1), "dead": PoolRoom(0)})
    assert shares.keys() == {"old", "new"}
    assert 0.70 < shares["old"] / shares.total() < 0.80
    assert choose_pool({"dead": PoolRoom(0)}, b"") is None


def test_a_replica_that_comes_moves_only_conversations_to_its_own_pool() -> None:
    before, after = {"old": PoolRoom(3), "new": PoolRoom(1)}, {"old": PoolRoom(3), "new": PoolRoom(2)}
    moved = Counter(
        (was, now)
        for n in range(3000)
        if (was := choose_pool(before, b"%d" % n)) != (now := choose_pool(after, b"%d" % n))
    )
    assert moved.keys() == {("old", "new")}


def test_a_pool_that_is_much_busier_or_where_requests_wait_gets_nothing() -> None:
    assert chosen({"busy": PoolRoom(2, in_flight=40), "idle": PoolRoom(1)}).keys() == {"idle"}
    assert chosen({"full": PoolRoom(9, has_waiting=True), "free": PoolRoom(1)}).keys() == {"free"}
    assert chosen({"full": PoolRoom(2, 2, slots=1), "free": PoolRoom(1, slots=1)}).keys() == {"free"}
    assert chosen({"a": PoolRoom(2, 6), "b": PoolRoom(2, 2)}).keys() == {"a", "b"}, "a little busier is no reason"
