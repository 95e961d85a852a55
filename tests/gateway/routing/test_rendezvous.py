"""The order of replicas, on which all gateways agree without communication."""

from __future__ import annotations

from collections import Counter

from coordinator.subset import Subset
from gateway.routing.rendezvous import CONTENDERS, first_usable, rendezvous_order

REPLICAS = ["r0", "r1", "r2", "r3"]
MANY = [f"r{n}" for n in range(1000)]


def affinities(count: int) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(count)]


def order_of(replicas: list[str], affinity: bytes, *, without: str = "") -> list[str]:
    return rendezvous_order(Subset.of(replicas), affinity, lambda replica: replica != without)


def test_the_order_does_not_depend_on_how_the_replicas_are_listed() -> None:
    for affinity in affinities(50):
        assert order_of(REPLICAS, affinity) == order_of(REPLICAS[::-1], affinity)
        assert order_of(MANY, affinity) == order_of(MANY[::-1], affinity)


def test_in_a_large_fleet_a_replica_that_leaves_or_dies_moves_hardly_anything_else() -> None:
    fewer = [replica for replica in MANY if replica != "r2"]
    firsts = [
        (order_of(MANY, one), order_of(fewer, one), order_of(MANY, one, without="r2")) for one in affinities(2000)
    ]
    moved = [before[0] for before, after, _ in firsts if before[0] != after[0]]
    assert "r2" in moved
    assert len([name for name in moved if name != "r2"]) < 2000 / CONTENDERS / 10
    assert sum(dead[0] != after[0] for _, after, dead in firsts) < 2000 / CONTENDERS / 10


def test_prompts_spread_evenly() -> None:
    first = Counter(order_of(REPLICAS, affinity)[0] for affinity in affinities(4000))
    assert all(850 < count < 1150 for count in first.values())
    first = Counter(order_of(MANY[:100], affinity)[0] for affinity in affinities(10_000))
    assert len(first) == 100
    assert all(50 < count < 170 for count in first.values())


def test_at_most_so_many_replicas_are_put_in_order_and_all_when_none_is_usable() -> None:
    assert len(set(order_of(MANY, b"x"))) == len(order_of(MANY, b"x")) == CONTENDERS
    assert rendezvous_order(Subset.of(MANY), b"x", lambda _: False) == order_of(MANY, b"x")
    assert rendezvous_order(Subset.of(MANY), b"x", lambda replica: replica == "r7") == ["r7"]


def test_what_one_gateway_cannot_use_moves_nothing_else() -> None:
    dead = {f"r{number}" for number in range(0, 1000, 3)}
    for affinity in affinities(500):
        first = order_of(MANY, affinity)[0]
        without = rendezvous_order(Subset.of(MANY), affinity, lambda replica: replica not in dead)
        assert first in dead or without[0] == first


def test_what_was_tried_is_never_chosen_and_what_is_avoided_comes_last() -> None:
    assert first_usable(["a", "b", "c"], avoided=["a"], tried=[]) == "b"
    assert first_usable(["a", "b", "c"], avoided=["a"], tried=["b", "c"]) == "a"
    assert first_usable(["a", "b"], avoided=[], tried=["a", "b"]) is None
