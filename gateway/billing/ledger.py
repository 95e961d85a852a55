"""What this gateway process adds to the ledger of usage (coordinator/usage.py).

A request is counted in memory when it is over. Once a second, what was counted since goes to the store as one numbered
call, which is repeated until the store has it. Only then follows the next one, so an outage makes one larger call.

The store names the last call that it has. If that is an earlier one, it has lost some (a failover): they are sent again
as far as they are kept here. If it has none, it was emptied: what this process has counted is sent again, as far back
as it remembers. So nothing is counted twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import structlog

from coordinator.errors import StoreError
from coordinator.spending import FREE
from coordinator.usage import MOST_ROWS, Consumed, Hour, Row, Rows, UsageStore
from gateway.billing.hours import Hours
from gateway.billing.prices import TokenCounts, prices_of
from gateway.settings.billing_settings import BillingSettings, time_zone

_log = structlog.get_logger("kvgate.usage")

FLUSH_S = 1.0
_LAST_S = 2.0
"""How long the end of a gateway waits for its last call."""
_MOST_HOURS = 26
"""Those that are remembered: the last ones in which anything was counted."""
_MOST_CALLS = 120
"""Those that are kept after the store had them, for a failover."""
_PIECE = 500
"""So many rows are sent in one call: Redis works on them for some ms."""
_OTHERS = "others"
_Counts = dict[Hour, dict[Row, Consumed]]
_DAY_S = 86_400


class _Call(NamedTuple):
    number: int
    is_again: bool
    """Whether it tells once more what calls before it have told."""
    rows: Rows


class Ledger:
    """Of one gateway process. Run `run` as a task."""

    def __init__(self, settings: BillingSettings, store: UsageStore) -> None:
        self._store = store
        self._sums: _Counts = {}
        """All that is remembered."""
        self._new: _Counts = {}
        """What is in no call yet."""
        self._calls: deque[_Call] = deque()
        self._number = 0
        """Of the last call that was made."""
        self._told = 0
        """Of the last one that the store has; 0: none."""
        self._again = 0
        """Of the first one that was made when the store was emptied."""
        self._turn = asyncio.Lock()
        self.use(settings)

    def __repr__(self) -> str:
        return f"<Ledger {self._told} of {self._number} calls told>"

    def use(self, settings: BillingSettings) -> None:
        """These prices hold for requests that end from now on."""
        self._prices = prices_of(settings.prices)
        self._hours = Hours(time_zone(settings.time_zone))
        self._kept_s = settings.usage_days * _DAY_S

    def count(self, time_s: float, row: Row, tokens: TokenCounts | None, images: int, *, is_error: bool) -> int:
        """A request is over, which came at this time. Without `tokens` it took nothing. Returns what it costs, in
        nanos."""
        consumed = Consumed(1, int(is_error))
        if tokens is not None:
            price = self._prices.get(row.model, FREE)
            cost_nanos = price.cost_nanos(*tokens, images)
            consumed = Consumed(1, int(is_error), *tokens, images, cost_nanos, price.saved_nanos(tokens.cached))
        hour = self._hours.at(time_s)
        _add(self._sums, hour, row, consumed)
        _add(self._new, hour, row, consumed)
        return consumed.cost_nanos

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            with suppress(StoreError):
                await self.flush()

    async def close(self) -> None:
        """Send what is left, when no more requests come."""
        try:
            async with asyncio.timeout(_LAST_S):
                await self.flush()  # it may have begun with an earlier call
                await self.flush()
        except (StoreError, TimeoutError) as error:
            rows = [row for call in self._calls if call.number > self._told for row in call.rows.values()]
            lost = sum(consumed.requests for row in (*rows, *self._new.values()) for consumed in row.values())
            if lost:
                _log.warning("usage lost", requests=lost, reason=str(error) or "no answer in time")

    async def flush(self) -> None:
        """Send what was counted. Raises StoreError; then the next call of this method goes on with it. Without any news
        it still finds out whether the store has lost something."""
        async with self._turn:
            call = self._next()
            if call is None and self._new:
                self._call(self._taken())
                call = self._next()
            if call is None and self._number:
                call = _Call(self._told, False, {})
            while call is not None:
                self._told = await self._store.add(self._told, call.number, call.rows, self._kept_s)
                if self._told == 0:
                    self._tell_again()
                elif self._told > self._number:
                    _log.warning("somebody else has changed the numbers of calls in the ledger of usage")
                    self._number = self._told
                call = self._next()
            while len(self._calls) > _MOST_CALLS:
                self._calls.popleft()

    def _next(self) -> _Call | None:
        """The first call that the store lacks."""
        for call in self._calls:
            # A store with nothing needs what is told again. One that has old data, after a failover, needs the calls
            # that followed.
            is_other = self._told < self._again and call.is_again != (self._told == 0)
            if call.number > self._told and not is_other:
                return call
        return None

    def _call(self, counts: _Counts, *, is_again: bool = False) -> None:
        """Make calls of these counts, each of some rows."""
        for rows in _pieces(counts):
            self._number += 1
            self._calls.append(_Call(self._number, is_again, rows))

    def _taken(self) -> _Counts:
        taken, self._new = self._new, {}
        return taken

    def _tell_again(self) -> None:
        """The store has nothing of this process any more: it was emptied."""
        _log.warning("the ledger of usage was emptied; what is remembered is told again", hours=len(self._sums))
        self._calls = deque(call for call in self._calls if not call.is_again)
        self._call(self._taken())
        self._again = self._number + 1
        self._call(self._sums, is_again=True)


def _add(counts: _Counts, hour: Hour, row: Row, consumed: Consumed) -> None:
    rows = counts.get(hour)
    if rows is None:
        rows = counts[hour] = {}
        if len(counts) > _MOST_HOURS:
            del counts[next(iter(counts))]
    known = rows.get(row)
    if known is None:
        if len(rows) >= MOST_ROWS:
            row = row._replace(key=_OTHERS)
        known = rows.setdefault(row, Consumed())
    known.add(consumed)


def _pieces(counts: _Counts) -> Iterator[Rows]:
    """Copies of all rows, which do not change any more."""
    for hour, rows in counts.items():
        found = list(rows.items())
        for start in range(0, len(found), _PIECE):
            yield {hour: {row: consumed.copy() for row, consumed in found[start : start + _PIECE]}}
