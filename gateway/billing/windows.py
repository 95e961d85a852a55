"""The days, weeks and months of budgets. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from typing import NamedTuple

from coordinator.spending import Per


class Window(NamedTuple):
    name: str
    """`2026-11-28`, `2026-W48` (ISO 8601: it begins on a Monday) or `2026-11`."""
    ends_s: int
    """When the next one begins (Unix time)."""


class Windows:
    """Those of one time zone."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._known: dict[Per, tuple[int, Window]] = {}
        """With the minute in which they were found: most requests come in the minute of the one before."""

    def at(self, time_s: float, per: Per) -> Window:
        """The window of a moment (Unix time)."""
        minute = int(time_s // 60)
        known = self._known.get(per)
        if known is None or known[0] != minute:
            known = self._known[per] = minute, window_at(datetime.fromtimestamp(time_s, self._zone), per)
        return known[1]


def window_at(moment: datetime, per: Per) -> Window:
    """The window in which a moment of a time zone is."""
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    if per == "day":
        name, ends = day.strftime("%Y-%m-%d"), day + timedelta(days=1)
    elif per == "week":
        year, week, weekday = day.isocalendar()
        name, ends = f"{year}-W{week:02d}", day + timedelta(days=8 - weekday)
    else:
        name, ends = day.strftime("%Y-%m"), (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    return Window(name, int(ends.timestamp()))
