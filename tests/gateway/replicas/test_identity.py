"""Whether a replica's record describes this gateway's engine. The tests pass the time to the decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.registry import ReplicaRecord
from gateway.replicas.identity import Identity, IdentityFacts

PATIENCE_S = 6.0
HERE, THERE = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
OURS, OTHER, LATER = "100", "200", "300"


def record(started: str, url: str) -> ReplicaRecord:
    return ReplicaRecord("r0", started, "ready", 0, 0, url)


def seen(known: ReplicaRecord | None, **facts: Any) -> IdentityFacts:
    """The facts of a gateway whose replica is alive. Another gateway is the pool's worker."""
    return replace(IdentityFacts(OURS, HERE, is_alive=True, record=known, has_other_worker=True), **facts)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (seen(None), "ours"),
        (seen(record(OURS, HERE)), "ours"),
        # Another URL of the same host: another name or a forwarded port.
        (seen(record(OURS, "http://localhost:8000"), is_followed=True), "ours"),
        # The engine has restarted, but its agent has not noticed yet.
        (seen(record(OTHER, HERE), is_followed=True), "replace"),
        # The engine has moved: only the old record is left, or the worker found the old engine dead.
        (seen(record(OTHER, THERE), has_other_worker=False), "replace"),
        (seen(replace(record(OTHER, THERE), state="dead")), "replace"),
        # Another engine: an agent follows it, or another gateway finds it alive.
        (seen(record(OTHER, THERE), is_followed=True, has_other_worker=False), "taken"),
        (seen(record(OTHER, THERE)), "taken"),
        # The engine restarted, and another gateway noticed first.
        (seen(record(OTHER, THERE), is_alive=False), "ours"),
        # Engines that do not report their start time.
        (seen(record("life-1", THERE), is_followed=True), "ours"),
        (seen(record(OTHER, THERE), started="", is_followed=True), "ours"),
    ],
)
def test_one_look_at_a_record(facts: IdentityFacts, verdict: str) -> None:
    assert Identity().judge(facts, 0.0, PATIENCE_S) == verdict


def test_an_engine_that_was_registered_over_and_is_back_is_left_alone() -> None:
    identity = Identity()
    for now_s in (0.0, 2.0):
        assert identity.judge(seen(record(OURS, HERE)), now_s, PATIENCE_S) == "ours"
    assert identity.judge(seen(record(OTHER, HERE)), 3.0, PATIENCE_S) == "replace"
    assert identity.judge(seen(record(OURS, HERE)), 4.0, PATIENCE_S) == "ours"
    for now_s in (5.0, 60.0, 3600.0):
        assert identity.judge(seen(record(OTHER, HERE)), now_s, PATIENCE_S) == "taken"
    assert identity.judge(seen(record(LATER, HERE)), 3601.0, PATIENCE_S) == "taken"  # the other engine has restarted


def test_of_two_clusters_that_undo_each_other_one_gives_way_and_then_nothing_changes_hands() -> None:
    """Two hosts use one address. Neither cluster can distinguish the other's engine from its own before a restart."""
    sides, known, changes = {OURS: Identity(), OTHER: Identity()}, record(OURS, HERE), 0
    for now_s in range(20):
        for started in (OTHER, OURS):
            if sides[started].judge(seen(known, started=started), float(now_s), PATIENCE_S) == "replace":
                known = record(started, HERE)
                changes += 1
    assert changes == 2
    assert known == record(OURS, HERE)
    assert [identity.is_taken for identity in sides.values()] == [False, True]


def test_the_id_is_taken_back_when_no_gateway_of_the_other_engines_is_left() -> None:
    identity = Identity()
    theirs = seen(record(OTHER, THERE), is_followed=True)
    assert identity.judge(theirs, 0.0, PATIENCE_S) == "taken"
    gone = replace(theirs, is_followed=False, has_other_worker=False)
    assert identity.judge(replace(theirs, is_followed=False), 1.0, PATIENCE_S) == "taken"  # only its agent has gone
    assert identity.judge(gone, 2.0, PATIENCE_S) == "taken"
    assert identity.judge(replace(gone, has_other_worker=True), 7.0, PATIENCE_S) == "taken"  # another worker
    assert identity.judge(gone, 8.0, PATIENCE_S) == "taken"
    assert identity.judge(gone, 14.0, PATIENCE_S) == "replace"
    assert identity.judge(seen(record(OURS, HERE)), 15.0, PATIENCE_S) == "ours"


def test_a_finding_names_both_addresses_and_only_what_lasts_is_one() -> None:
    identity = Identity()
    theirs = seen(record(OTHER, THERE), is_followed=True)
    identity.judge(theirs, 0.0, PATIENCE_S)
    assert identity.conflict(5.9, PATIENCE_S) == ""
    found = identity.conflict(6.0, PATIENCE_S)
    assert all(part in found for part in (HERE, THERE, "redis.namespace"))
    identity.judge(seen(record(OURS, HERE)), 7.0, PATIENCE_S)
    assert identity.conflict(7.0, PATIENCE_S) == ""
