"""The messages while a cluster starts, and when it does not start."""

from __future__ import annotations

from gateway.ops.followed import FollowedReplica
from gateway.ops.local.waiting import WaitReport, why_not_ready

SLOW = {"gw0": "no answer on http://127.0.0.1:7001", "the shared port": "no answer on http://127.0.0.1:8080"}


def told(*problems: tuple[float, dict[str, str]]) -> list[str]:
    """The messages so far. Each argument has the seconds waited and the problems at that time."""
    said: list[str] = []
    waiting = WaitReport(["gw0", "gw1"], said.append)
    for waited_s, those in problems:
        waiting.tell(those, waited_s)
    return said


def test_at_first_it_is_only_said_what_is_starting_and_once() -> None:
    assert told((3.0, SLOW), (8.0, SLOW), (14.9, SLOW)) == ["starting gw0, gw1 …"]


def test_reasons_are_given_after_15_s_and_again_when_they_change() -> None:
    reason = {"gw0": "has not reached Redis yet"}
    assert told((3.0, SLOW), (15.0, reason), (20.0, reason), (25.0, {"gw1": "no answer"})) == [
        "starting gw0, gw1 …",
        "waiting for gw0: has not reached Redis yet",
        "waiting for gw1: no answer",
    ]


def test_servers_that_should_have_been_there_are_named_with_how_to_look() -> None:
    fronted = [FollowedReplica(id="r0", url="http://h:1"), FollowedReplica(id="r1", url="http://h:2")]
    text, is_their_fault = why_not_ready({"gw0": "replica r1: refused"}, fronted)
    assert (
        text == "gw0: replica r1: refused; check that these servers are up and answer with 200: curl http://h:2/health"
    )
    assert is_their_fault
