"""When each chunk is checked: at once, in the middle of its life, and more and more often towards its end."""

from __future__ import annotations

import itertools

import pytest

from coordinator.watch import chunk_schedule
from coordinator.watch.chunk_schedule import ChunkSchedule

DAY_S = 86_400.0


def looks(life_s: float) -> list[float]:
    """The fractions of its life at which an unread chunk is checked."""
    found, known, now_s = [], ChunkSchedule(), 0.0
    known.add("chunk", 0.0)
    while now_s < life_s:
        if known.take(now_s, 1):
            found.append(now_s / life_s)
            known.checked("chunk", life_s - now_s, 1, life_s, now_s)
        now_s += 1.0
    return found


def test_a_chunk_is_looked_at_a_dozen_times_in_a_life_of_a_day() -> None:
    found = looks(DAY_S)
    assert found[:4] == [0.0, 0.5, 0.75, 0.875]
    assert len(found) < 20


def test_none_ends_unseen_for_longer_than_lately_reaches() -> None:
    """Reads in the last quarter of a life count. Checks are at most a quarter apart, so no such read is missed."""
    for life_s in (8.0, 60.0, 3600.0, DAY_S):
        found = [*looks(life_s)[1:], 1.0]
        assert found[0] <= 0.5
        assert max(later - earlier for earlier, later in itertools.pairwise(found)) <= 0.25


def test_a_chunk_that_was_given_a_longer_life_than_usual_waits_for_its_second_half() -> None:
    known = ChunkSchedule()
    known.add("chunk", 0.0)
    known.checked("chunk", 1000.0, 1, 100.0, 0.0)
    assert known.take(949.0, 1) == []
    assert known.take(950.0, 1) == ["chunk"]


def test_what_is_written_again_is_looked_at_at_once_and_what_is_gone_never() -> None:
    known = ChunkSchedule()
    for key in ("again", "gone"):
        known.add(key, 0.0)
    known.checked("again", 100.0, 5, 100.0, 0.0)
    known.checked("gone", 100.0, 7, 100.0, 0.0)
    known.add("again", 10.0)
    known.forget("gone")
    known.checked("gone", 100.0, 7, 100.0, 0.0)
    assert known.take(100.0, 10) == ["again"]
    assert (len(known), known.bytes) == (1, 5)


def test_it_remembers_no_more_than_it_has_room_for_however_often_chunks_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_schedule, "MOST_CHUNKS", 10)
    known = ChunkSchedule()
    for number in range(5000):
        known.forget(str(number - 10))
        assert known.add(str(number), 0.0)
        known.checked(str(number), DAY_S, 3, DAY_S, 0.0)
    assert not known.add("one too many", 0.0)
    known.checked("one too many", DAY_S, 3, DAY_S, 0.0)
    assert (len(known), known.bytes) == (10, 30)
    assert len(known._heap) < 2000
