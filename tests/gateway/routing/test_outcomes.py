"""The successes that a gateway reports to the store, and the replicas that a gateway suspects on its own."""

from __future__ import annotations

from gateway.routing.outcomes import ReplicaOutcomes


def test_what_ended_well_is_told_once_beside_the_next_failure() -> None:
    outcomes = ReplicaOutcomes()
    for second in range(5):
        outcomes.succeeded(1000.0 + second)
    assert outcomes.failed(1005.0) == 5
    assert outcomes.failed(1005.0) == 0
    outcomes.succeeded(1006.0)
    assert outcomes.failed(1007.0) == 1


def test_what_ended_well_long_ago_is_not_told() -> None:
    """Otherwise an hour of successes would outweigh every failure of the next ten seconds."""
    outcomes = ReplicaOutcomes()
    for second in range(3600):
        outcomes.succeeded(1000.0 + second)
    assert outcomes.failed(4599.0) in (10, 11)
    assert outcomes.failed(9999.0) == 0


def test_a_replica_is_suspected_by_the_rule_of_the_shared_breakers() -> None:
    outcomes = ReplicaOutcomes()
    for _ in range(4):
        outcomes.succeeded(1000.0)
    for _ in range(3):
        outcomes.failed(1001.0)
    assert not outcomes.is_suspect(1001.0), "three of seven"
    outcomes.failed(1001.0)
    assert outcomes.is_suspect(1001.0)
    assert not outcomes.is_suspect(1006.0)
    outcomes.failed(1020.0)
    assert not outcomes.is_suspect(1020.0), "one, the others are too long ago"


def test_errors_in_a_row_outweigh_what_ended_well_before() -> None:
    outcomes = ReplicaOutcomes()
    for n in range(100):
        outcomes.succeeded(1000.0 + n / 100)
    for n in range(3):
        assert not outcomes.errs_in_a_row(1001.0), n
        outcomes.erred(1001.0, 1001.0)
        outcomes.failed(1001.0)
    assert outcomes.errs_in_a_row(1001.0)
    assert outcomes.is_suspect(1001.0)
    outcomes.succeeded(1001.1, is_proof=False)
    assert outcomes.errs_in_a_row(1001.1), "its server answers what its engine has no part in"
    outcomes.succeeded(1001.1)
    assert not outcomes.errs_in_a_row(1001.1)


def test_failures_of_one_moment_are_not_in_a_row_if_the_replica_has_answered_since_they_were_sent() -> None:
    outcomes = ReplicaOutcomes()
    outcomes.succeeded(1001.0)
    for _ in range(10):
        outcomes.erred(1000.9, 1002.0)
    assert not outcomes.errs_in_a_row(1002.0)


def test_errors_long_ago_are_not_in_a_row_with_a_new_one() -> None:
    outcomes = ReplicaOutcomes()
    for now_s in (1000.0, 1001.0, 1012.0):
        outcomes.erred(now_s, now_s)
        assert not outcomes.are_over(now_s)
    assert not outcomes.errs_in_a_row(1012.0)


def test_answers_that_break_off_in_a_row_outweigh_them_too() -> None:
    """Each has begun well."""
    outcomes = ReplicaOutcomes()
    for n in range(100):
        outcomes.succeeded(1000.0 + n / 100)
        outcomes.ended_well(1000.0 + n / 100)
    for _ in range(3):
        outcomes.succeeded(1001.0)
        outcomes.broke_off(1001.0, 1001.0)
        outcomes.failed(1001.0)
    assert outcomes.is_suspect(1001.0)
    outcomes.succeeded(1001.1)
    assert outcomes.errs_in_a_row(1001.1), "it has only begun"
    outcomes.ended_well(1001.1)
    assert not outcomes.errs_in_a_row(1001.1)


def test_a_suspicion_ends_with_an_answer() -> None:
    outcomes = ReplicaOutcomes()
    for _ in range(3):
        outcomes.failed(1000.0)
    outcomes.succeeded(1000.1)
    assert not outcomes.is_suspect(1000.1)


def test_of_a_replica_that_is_gone_nothing_recent_is_left() -> None:
    outcomes = ReplicaOutcomes()
    outcomes.succeeded(1000.0)
    outcomes.failed(1000.0)
    assert not outcomes.are_over(1009.9)
    assert outcomes.are_over(1011.0)
