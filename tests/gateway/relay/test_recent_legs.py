"""Which prefill replicas a gateway calls failing, by what became of their last legs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.registry import ReplicaRecord
from gateway.relay.pairs import recent_legs
from gateway.relay.pairs.recent_legs import RecentLegs
from gateway.relay.prefill_legs import PrefillLegs
from gateway.settings.gateway_settings import build_settings

POOL: Any = SimpleNamespace(records={"p0": ReplicaRecord("p0", "life1", "ready", 1000, 0, "http://p0")})


def noted(recent: RecentLegs, outcome: str, failure: str = "", times: int = 1, life: str = "life1") -> RecentLegs:
    leg: Any = SimpleNamespace(replica="p0", incarnation=life, pool=POOL, failure=failure)
    for _ in range(times):
        recent.note(leg, outcome)
    return recent


def test_a_replica_is_failing_if_most_of_its_last_legs_failed() -> None:
    recent = noted(noted(RecentLegs(), "computed", times=4), "refused", "no_reference", times=4)
    assert recent.failing() == {}
    noted(recent, "unstored")
    assert recent.failing() == {"p0": {"legs": 9, "failed": {"no_reference": 4, "unstored": 1}}}
    noted(recent, "computed", times=11)
    assert recent.failing() == {}


@pytest.mark.parametrize(
    ("outcome", "failure", "times"),
    [("failed", "status_500", 4), ("left", "", 9), ("refused", "switched", 9), ("refused", "status_400", 9)],
    ids=["too few", "clients left", "it has another role", "requests may be to blame"],
)
def test_what_tells_nothing_of_a_replica_does_not_count(outcome: str, failure: str, times: int) -> None:
    assert noted(RecentLegs(), outcome, failure, times=times).failing() == {}


def test_another_protocol_begins_anew_and_other_settings_do_not() -> None:
    parts: Any = dict.fromkeys(("fleet", "moves", "outgoing", "upstream", "failures", "admission", "metrics", "tasks"))
    legs = PrefillLegs(build_settings({}, {}), **parts)
    noted(legs.recent, "refused", "no_reference", times=9)
    legs.use(build_settings({"pairs": {"min_tokens": 7}}, {}))
    assert legs.recent.failing()
    legs.use(build_settings({"pairs": {"protocol": "store"}}, {}))
    assert legs.recent.failing() == {}


def test_another_life_and_an_hour_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = noted(RecentLegs(), "left", "timeout", times=9)
    assert recent.failing()
    assert noted(recent, "left", "timeout", times=9, life="life0").failing() == {}
    noted(recent, "left", "timeout", times=9, life="life0")
    assert noted(recent, "left", "timeout", times=5).failing() == {"p0": {"legs": 5, "failed": {"timeout": 5}}}
    now_s = recent_legs.time.monotonic()
    monkeypatch.setattr(recent_legs.time, "monotonic", lambda: now_s + 3601)
    assert recent.failing() == {}
