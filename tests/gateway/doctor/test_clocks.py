"""The doctor names a Redis whose clock went back, for an hour, whichever evidence shows it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.doctor.examine import examine
from tests.gateway.doctor.cluster import NOW_MS, with_snapshots


@pytest.mark.parametrize(
    ("snapshots", "said"),
    [
        ({"went_back": (NOW_MS - 120_000, 5000)}, "its clock went back by 5 s, 2 min ago"),
        ({"went_back": (NOW_MS + 120_000, 5000)}, "its clock went back by 5 s, at a time in the future"),
        ({"tick_ms": NOW_MS + 61_000}, "the last heartbeat in pool m lies 57 s in its future"),
    ],
)
def test_a_clock_that_went_back_is_named(snapshots: dict[str, Any], said: str) -> None:
    assert [(found.code, found.what) for found in examine(with_snapshots(**snapshots)).findings] == [
        ("redis-clock-stepped", said)
    ]


def test_one_that_went_back_long_ago_or_by_nothing_to_speak_of_is_not() -> None:
    assert not examine(with_snapshots(went_back=(NOW_MS - 7_200_000, 5000), tick_ms=NOW_MS + 1000)).findings
