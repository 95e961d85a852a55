"""The checks on Redis that the watch and the doctor share."""

from __future__ import annotations

from coordinator.finding import FindingKind
from coordinator.redis import checks
from coordinator.redis.checks import CONDITIONS


def test_each_condition_of_the_watch_is_that_of_a_finding() -> None:
    kinds = [value for value in vars(checks).values() if isinstance(value, FindingKind)]
    assert {condition for kind in kinds for condition in kind.conditions} == set(CONDITIONS)
