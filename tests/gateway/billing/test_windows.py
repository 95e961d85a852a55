"""Days, weeks and months begin at midnight of a time zone."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from coordinator.spending import Per
from gateway.billing.windows import Windows, window_at

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("moment", "per", "name", "ends"),
    [
        ("2026-11-28T23:59:59", "day", "2026-11-28", "2026-11-29T00:00:00"),
        ("2026-11-29T00:00:00", "day", "2026-11-29", "2026-11-30T00:00:00"),
        ("2026-11-29T23:59:59", "week", "2026-W48", "2026-11-30T00:00:00"),
        ("2026-11-30T00:00:00", "week", "2026-W49", "2026-12-07T00:00:00"),
        ("2027-01-01T00:00:00", "week", "2026-W53", "2027-01-04T00:00:00"),
        ("2026-12-31T23:59:59", "month", "2026-12", "2027-01-01T00:00:00"),
        ("2028-02-29T12:00:00", "month", "2028-02", "2028-03-01T00:00:00"),
        ("2026-10-25T02:30:00", "day", "2026-10-25", "2026-10-26T00:00:00"),
        ("2026-03-29T01:00:00", "day", "2026-03-29", "2026-03-30T00:00:00"),
    ],
)
@pytest.mark.parametrize("zone", [UTC, BERLIN])
def test_a_window_is_named_by_its_beginning_and_ends_when_the_next_one_begins(
    moment: str, per: Per, name: str, ends: str, zone: ZoneInfo
) -> None:
    at = datetime.fromisoformat(moment).replace(tzinfo=zone)
    ends_s = datetime.fromisoformat(ends).replace(tzinfo=zone).timestamp()
    assert window_at(at, per) == (name, ends_s)
    assert window_at(datetime.fromtimestamp(ends_s, zone), per).name != name


def test_it_is_found_again_after_each_minute() -> None:
    windows, midnight_s = Windows(UTC), int(datetime(2026, 11, 29, tzinfo=UTC).timestamp())
    assert [windows.at(midnight_s + at_s, "day").name for at_s in (-60, -1, 0, 59, -1)] == [
        *("2026-11-28", "2026-11-28", "2026-11-29", "2026-11-29", "2026-11-28"),
    ]
