"""The order of replicas, on which all gateways agree without communication."""

from __future__ import annotations

from collections import Counter

from gateway.routing.rendezvous import first_usable, rendezvous_order

REPLICAS = ["r0", "r1", "r2", "r3"]


def affinities(count: int) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(count)]


def test_the_order_does_not_depend_on_how_the_replicas_are_listed() -> None:
    for affinity in affinities(50):
        assert rendezvous_order(REPLICAS, affinity) == rendezvous_order(reversed(REPLICAS), affinity)


def test_a_replica_that_leaves_moves_only_what_it_had() -> None:
    for affinity in affinities(200):
        order = rendezvous_order(REPLICAS, affinity)
        without = rendezvous_order([r for r in REPLICAS if r != "r2"], affinity)
        assert without == [replica for replica in order if replica != "r2"]


def test_prompts_spread_evenly() -> None:
    first = Counter(rendezvous_order(REPLICAS, affinity)[0] for affinity in affinities(4000))
    assert all(850 < count < 1150 for count in first.values())


def test_what_was_tried_is_never_chosen_and_what_is_avoided_comes_last() -> None:
    assert first_usable(["a", "b", "c"], avoided=["a"], tried=[]) == "b"
    assert first_usable(["a", "b", "c"], avoided=["a"], tried=["b", "c"]) == "a"
    assert first_usable(["a", "b"], avoided=[], tried=["a", "b"]) is None
