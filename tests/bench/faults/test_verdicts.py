"""bench.faults: the verdict on a request, given what its client saw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.faults.verdicts import End, Seen, Strike, Verdict, verdict

LATE_AFTER_S = 5.0
ANSWERED = Seen(sent_s=10.0, end=End.COMPLETE, ended_s=11.0, gateway=0, replica="r0", state="exact", head_s=10.2)
GATEWAY = Strike(at_s=10.5, until_s=22.0, gateways=frozenset({0}))
REPLICA = Strike(at_s=10.5, until_s=22.0, replicas=frozenset({"r0"}))


def said(seen: Seen, *strikes: Strike) -> Verdict:
    return verdict(seen, strikes, LATE_AFTER_S)


def test_a_complete_answer_is_late_after_five_seconds_and_not_before() -> None:
    assert said(replace(ANSWERED, late_s=5.0)) is Verdict.ANSWERED
    assert said(replace(ANSWERED, late_s=5.1)) is Verdict.LATE


def test_an_answer_is_excused_where_its_gateway_was_struck_and_no_other_gateways() -> None:
    late = replace(ANSWERED, late_s=11.0, ended_s=22.5)
    assert said(late, GATEWAY) is Verdict.LATE_EXCUSED
    assert said(replace(late, gateway=1), GATEWAY) is Verdict.LATE
    assert said(replace(late, sent_s=22.1), GATEWAY) is Verdict.LATE, "the fault was over"


def test_an_answer_is_excused_where_its_replica_had_begun_with_it() -> None:
    late = replace(ANSWERED, late_s=11.0, ended_s=22.5)
    assert said(replace(late, sent_s=9.9), REPLICA) is Verdict.LATE_EXCUSED
    assert said(replace(late, sent_s=10.1, head_s=10.4), REPLICA) is Verdict.LATE_EXCUSED, "its client had a byte"
    assert said(replace(late, sent_s=10.4, head_s=22.1), REPLICA) is Verdict.LATE, "it was sent a moment before"
    assert said(replace(late, sent_s=12.0, head_s=22.1), REPLICA) is Verdict.LATE, (
        "it was sent to a replica that was struck already"
    )


def test_a_stream_that_flowed_is_lost_with_its_replica_or_gateway_and_with_no_other() -> None:
    broken = replace(ANSWERED, end=End.ERROR_EVENT, detail="stream_broken")
    assert said(broken, REPLICA) is Verdict.LOST
    assert said(replace(broken, streams=True), REPLICA) is Verdict.SAVABLE
    assert said(replace(broken, replica="r1"), REPLICA) is Verdict.SAVABLE
    assert said(replace(broken, head_s=10.6), REPLICA) is Verdict.SAVABLE, "it had no byte when the fault struck"
    assert said(broken) is Verdict.SAVABLE, "nothing was struck"
    assert said(replace(broken, end=End.BROKEN), GATEWAY) is Verdict.LOST
    assert said(replace(broken, end=End.BROKEN, gateway=1), GATEWAY) is Verdict.SAVABLE


@pytest.mark.parametrize("end", [End.STATUS, End.BROKEN, End.UNANSWERED])
def test_without_a_byte_a_request_could_have_been_saved_from_its_replica(end: End) -> None:
    failed = replace(ANSWERED, end=end, head_s=None, replica="", ended_s=12.0)
    assert said(failed, REPLICA) is Verdict.SAVABLE


def test_without_a_byte_a_request_is_lost_with_the_connection_to_its_gateway_alone() -> None:
    failed = replace(ANSWERED, end=End.BROKEN, head_s=None, replica="")
    assert said(failed, GATEWAY) is Verdict.LOST
    assert said(replace(failed, end=End.STATUS), GATEWAY) is Verdict.SAVABLE, "the gateway answered"
    assert said(replace(failed, end=End.REFUSED, gateway=None), GATEWAY) is Verdict.SAVABLE
    assert said(replace(failed, gateway=1), GATEWAY) is Verdict.SAVABLE
