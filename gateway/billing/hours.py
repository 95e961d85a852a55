"""The hours of the ledger. Pure."""

from __future__ import annotations

from datetime import datetime, tzinfo

from coordinator.usage import Hour

_WITHOUT_OFFSET = len("2026-11-28T14")


def order_of(name: str) -> tuple[str, int]:
    """Sorts names of hours, and their beginnings (a day, a month): in autumn `T02+0200` is before `T02+0100`."""
    return name[:_WITHOUT_OFFSET], -int(name[_WITHOUT_OFFSET:] or 0)


class Hours:
    """Those of one time zone. Most requests come in the minute of the one before, and cost nothing."""

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._minute, self._hour = -1, Hour("", 0)

    def at(self, time_s: float) -> Hour:
        """The hour of a moment (Unix time)."""
        minute = int(time_s // 60)
        if minute != self._minute:
            self._minute = minute
            local = datetime.fromtimestamp(time_s, self._zone).replace(minute=0, second=0, microsecond=0)
            self._hour = Hour(local.strftime("%Y-%m-%dT%H%z"), int(local.timestamp()))
        return self._hour
