"""What counts as late: judged by what first bytes usually take in the pool."""

from __future__ import annotations

from gateway.relay.lateness import Lateness, predicted_s, tokens_until


def observed(lateness: Lateness, ratios: dict[str, float], times: int = 16) -> None:
    for number in range(times):
        for replica, ratio in ratios.items():
            lateness.observe(replica, ratio * (1 + number / 100), was_late=False)


def test_a_first_byte_is_due_when_what_is_ahead_of_it_and_its_own_prompt_are_computed() -> None:
    assert round(predicted_s(3000, 1000, 1000) - predicted_s(0, 0, 1000), 6) == 4
    assert abs(tokens_until(predicted_s(3000, 1000, 1000), 1000) - 4000) <= 1
    assert tokens_until(0, 1000) == 0


def test_nobody_knows_what_is_usual_until_enough_has_come() -> None:
    lateness = Lateness()
    observed(lateness, {"r0": 1.0, "r1": 1.0}, 7)
    assert lateness.usual == 0
    observed(lateness, {"r0": 1.0, "r1": 1.0}, 16)
    assert 1 < lateness.usual < 1.2


def test_one_slow_replica_does_not_make_late_what_is_usual() -> None:
    lateness = Lateness()
    observed(lateness, {"r0": 1.0, "r1": 5.0, "r2": 1.0})
    assert lateness.usual < 1.2
    observed(lateness, {"r0": 5.0, "r1": 5.0, "r2": 5.0}, 48)
    assert lateness.usual > 5, "if all are slow, that is usual"


def test_redis_is_told_of_replicas_that_are_late_or_were_lately() -> None:
    lateness = Lateness()
    observed(lateness, {"r0": 1.0, "r1": 1.0})
    lateness.take_told()
    lateness.observe("r0", 1.0, was_late=False)
    assert not lateness.is_late("r1"), "one may be"
    lateness.observe("r1", 3.0, was_late=True)
    lateness.placed_tokens += 7
    assert lateness.take_told() == (7, {"r1": (1, 1)})
    lateness.lately = {"r0": True}
    lateness.observe("r0", 1.0, was_late=False)
    assert lateness.take_told() == (0, {"r0": (0, 1)})
    assert lateness.slow() == ["r0"]
    assert [lateness.is_late(replica) for replica in ("r0", "r1", "r2")] == [True, True, False]
