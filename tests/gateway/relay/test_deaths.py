"""Which deaths are those of single replicas, and which mean that the network, or who checks, has failed."""

from __future__ import annotations

import pytest

from gateway.relay.deaths import WINDOW_S, Deaths


def states(count: int, *dead: int) -> dict[str, str]:
    return {f"r{index}": "dead" if index in dead else "ready" for index in range(count)}


def observed(count: int, *moments: tuple[float, tuple[int, ...]]) -> Deaths:
    """All were ready at first; then, at those times, these were dead."""
    deaths = Deaths()
    deaths.observe(states(count), 0)
    for at_s, dead in moments:
        deaths.observe(states(count, *dead), at_s)
    return deaths


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_one_of_any_number_dies_alone(count: int) -> None:
    deaths = observed(count, (5, (0,)))
    assert deaths.died_alone("r0")
    assert not any(deaths.died_alone(f"r{index}") for index in range(1, count))


def test_up_to_a_third_of_a_pool_dies_alone_and_more_does_not() -> None:
    third = observed(9, (1, (0,)), (2, (0, 1)), (3, (0, 1, 2)))
    assert all(third.died_alone(name) for name in ("r0", "r1", "r2"))
    more = observed(9, (1, (0,)), (2, (0, 1)), (3, (0, 1, 2)), (4, (0, 1, 2, 3)))
    assert not any(more.died_alone(name) for name in ("r0", "r1", "r2", "r3"))


def test_deaths_that_lie_further_apart_are_not_counted_together() -> None:
    deaths = observed(3, (1, (0,)), (1 + WINDOW_S, (0, 1)))
    assert deaths.died_alone("r0")
    assert deaths.died_alone("r1")


def test_who_died_with_others_does_not_die_alone_later_by_lying_there() -> None:
    deaths = observed(3, (1, (0, 1)), (1 + 2 * WINDOW_S, (0, 1)))
    assert not deaths.died_alone("r0")
    deaths.observe(states(3, 1), 100)
    deaths.observe(states(3, 0, 1), 101)
    assert deaths.died_alone("r0")
    assert not deaths.died_alone("r1")


def test_a_replica_that_hangs_is_dead_and_one_that_was_never_ready_has_not_died() -> None:
    deaths = Deaths()
    deaths.observe({"r0": "dead", "r1": "ready"}, 0)
    deaths.observe({"r0": "dead", "r1": "hung"}, 1)
    assert not deaths.died_alone("r0")
    assert deaths.died_alone("r1")


def test_a_replica_that_was_forgotten_is_not_dead_any_more() -> None:
    deaths = observed(3, (1, (0,)))
    deaths.observe({"r1": "ready", "r2": "ready"}, 2)
    assert not deaths.died_alone("r0")
