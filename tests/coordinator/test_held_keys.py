"""What is due on a replica's keys follows from a few figures: a quiet pool costs a look, and a change costs a pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.maintenance.held_keys import (
    CLAIM_TTL_MS,
    MAX_KEYS,
    SWEEP_EVERY_MS,
    UNCONFIRMED_MS,
    WHOLE_PASS_MS,
    HeldKeys,
    Look,
    Pass,
    due,
)
from coordinator.pool.pool import Pool
from coordinator.registry import AgentRecord, PoolState, ReplicaRecord

NOW_MS = 10**12
BORN_MS = NOW_MS - 10 * CLAIM_TTL_MS
POOL = Pool("m", "gw0", 1.0)
RECORD = ReplicaRecord("r0", "life1", "ready", 1000, BORN_MS, "http://r0", floor=5)
LOOK = Look(count=100, oldest_ms=NOW_MS - 5000, newest_ms=NOW_MS - 1000, owned_tokens=900)


def state(now_ms: int = NOW_MS, *, has_agent: bool = True, relearns: bool = False) -> PoolState:
    until_ms = now_ms + 1000
    agents = {"r0": AgentRecord("agent0", "life1", until_ms, "session", relearns, 0, 1)} if has_agent else {}
    return PoolState(True, (), {"r0": RECORD}, {}, "gw0", now_ms, agents)


def task(look: Look = LOOK, last: Pass | None = None, record: ReplicaRecord = RECORD, **at: Any) -> HeldKeys:
    return due(POOL, record, look, state(**at), last)[0]


def passed(now_ms: int = NOW_MS, **at: Any) -> Pass:
    """The pass that begins at this time, if nothing is known of an earlier one."""
    made = due(POOL, RECORD, LOOK, state(now_ms, **at), None)[1]
    assert made is not None
    return made


def test_a_new_worker_checks_all_keys_of_a_replica_with_an_agent_without_haste() -> None:
    first = task()
    assert (first.left, first.down_to_ms, first.is_urgent) == (100, 0, False)
    assert first.claims_before_ms == NOW_MS - UNCONFIRMED_MS


def test_nothing_is_due_while_nothing_has_changed() -> None:
    assert not task(last=passed(NOW_MS - SWEEP_EVERY_MS)).is_due


def test_each_minute_the_keys_used_since_the_last_pass_are_due() -> None:
    last = passed(NOW_MS - SWEEP_EVERY_MS - 1)
    again = task(last=last)
    assert (again.left, again.down_to_ms) == (100, last.claims_before_ms)
    unused = replace(LOOK, newest_ms=float(last.claims_before_ms - 1))
    assert not task(unused, last).is_due


@pytest.mark.parametrize("record", [replace(RECORD, floor=6), replace(RECORD, incarnation="life2")])
def test_all_keys_are_due_at_once_when_the_floor_or_the_incarnation_is_another(record: ReplicaRecord) -> None:
    pool_state = state()
    agents = {"r0": replace(pool_state.agents["r0"], incarnation=record.incarnation)}
    moved, _ = due(POOL, record, LOOK, replace(pool_state, replicas={"r0": record}, agents=agents), passed())
    assert (moved.left, moved.down_to_ms, moved.is_urgent) == (100, 0, True)


def test_when_the_agent_knows_everything_what_it_may_not_have_confirmed_is_due_at_once() -> None:
    last = passed(NOW_MS - 1000, relearns=True)
    known = task(last=last)
    assert (known.left, known.down_to_ms, known.is_urgent) == (100, last.claims_before_ms, True)
    assert not task(last=passed(), relearns=True).is_due, "the other way round, nothing new is known"


def test_each_hour_and_after_the_clock_went_back_all_keys_are_due() -> None:
    for last in (passed(NOW_MS - WHOLE_PASS_MS - 1), passed(NOW_MS + CLAIM_TTL_MS)):
        again = task(last=last)
        assert (again.left, again.down_to_ms, again.is_urgent) == (100, 0, False)


def test_of_a_replica_without_an_agent_keys_are_trimmed_that_are_old_or_have_no_room() -> None:
    assert not task(has_agent=False).is_due
    old = replace(LOOK, oldest_ms=float(NOW_MS - CLAIM_TTL_MS - 1))
    full = replace(LOOK, owned_tokens=1001)
    for look in (old, full):
        trimmed = task(look, has_agent=False)
        assert (trimmed.trims, trimmed.to_capacity, trimmed.is_urgent, trimmed.left) == (True, True, True, 0)
        assert not task(look, passed()).is_due, "its agent tells what it holds"
    unknown = replace(RECORD, capacity_tokens=0)
    assert not task(replace(full, count=MAX_KEYS), record=unknown, has_agent=False).is_due
    assert task(replace(full, count=MAX_KEYS + 1), record=unknown, has_agent=False).trims


def test_keys_of_an_earlier_incarnation_are_trimmed_whether_there_is_an_agent_or_not() -> None:
    earlier = replace(LOOK, oldest_ms=float(BORN_MS - 1))
    assert task(earlier, passed()).trims
    assert task(earlier, has_agent=False).trims
