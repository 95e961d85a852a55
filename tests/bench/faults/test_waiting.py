"""bench.faults: what is judged of the queue."""

from __future__ import annotations

from bench.faults.queue import Look, over_cap, waited
from bench.faults.verdicts import End, Seen


def look(at_s: float, **active: int) -> Look:
    return Look(at_s, active, waiting=0)


def placed(state: str, sent_s: float, ended_s: float, waited_s: float = 0.0) -> Seen:
    return Seen(sent_s, End.COMPLETE, ended_s, replica="r0", state=state, waited_s=waited_s)


def test_a_replica_is_over_its_cap_with_more_requests_than_were_placed_without_the_store() -> None:
    looks = [look(1.0, r0=4, r1=4), look(2.0, r0=5, r1=3), look(3.0, r0=5, r1=5), look(9.0, r0=5)]
    assert over_cap(looks, [], cap=4) == [2.0, 3.0, 9.0]
    assert over_cap(looks, [placed("exact", 0.0, 10.0)], cap=4) == [2.0, 3.0, 9.0]
    assert over_cap(looks, [placed("fallback", 0.0, 4.0)], cap=4) == [3.0, 9.0], "one explains one"
    assert over_cap(looks, [placed("fallback", 0.0, 4.0), placed("fallback", 2.5, 8.8)], cap=4) == []


def test_requests_that_waited_are_counted_among_those_that_could() -> None:
    seen = [placed("exact", 0, 1, 0.5), placed("exact", 0, 1), placed("fallback", 0, 1), placed("fallback", 0, 3, 1.0)]
    assert waited(seen) == (2, 3)
    assert waited([]) == (0, 0)
