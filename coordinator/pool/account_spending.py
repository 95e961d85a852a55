"""What accounts have spent of their budgets, for people, and the end of budgets that are long over: see
lua/lib/spending.lua.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from coordinator.errors import StoreRefused
from coordinator.pool.pool import Pool
from coordinator.registry import readable, time_ms
from coordinator.spending import AccountBudget, Spent

KEPT_S = 8 * 86_400
"""How long what was spent is kept when its window is over. A clock that steps ahead by less loses no window."""
_EACH_S = 10.0
_AT_ONCE = 500
"""So many fields are looked at each time, by chance: with the budgets of 10 000 keys there are some 100 000, and to
list them takes 40 ms of Redis' time."""
_FIELD = re.compile(r"(?:settled|held|base) (\d{4}-(?:W\d\d|\d\d(?:-\d\d)?))/")


async def read_spent(pools: Sequence[Pool], budgets: Sequence[AccountBudget]) -> list[Spent]:
    """What is spent of each; in a Redis Cluster, where pools count by themselves, in the pool with the most. Raises
    StoreError."""
    hashes = {pool.keys.spending: pool for pool in pools}
    if not hashes or not budgets:
        return [Spent("-", 0, 0)] * len(budgets)
    fields = [f"{kind} {budget.name}" for budget in budgets for kind in ("settled", "held")]
    found = await asyncio.gather(*(pool.read("HMGET", key, *fields) for key, pool in hashes.items()))
    return [
        max(
            (Spent("-", _number(told[2 * at]), _number(told[2 * at + 1])) for told in found),
            key=lambda spent: spent.settled + spent.held,
        )
        for at in range(len(budgets))
    ]


def _number(text: bytes | None) -> int:
    """0 if it is none, or no number that scripts write."""
    return int(text) if text is not None and text.isdigit() and len(text) < 19 else 0


class OldBudgets:
    """Removes what was spent in windows that are long over, some of it each time. Used by the gateway that does the
    pool's maintenance."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._next_s = 0.0

    async def remove(self) -> None:
        """Looks, if it is time. Raises StoreError."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _EACH_S
        key, read = self._pool.keys.spending, self._pool.read
        try:
            fields = map(readable, await read("HRANDFIELD", key, _AT_ONCE))
        except StoreRefused:  # it is no hash: the next placement replaces it
            return
        if old := old_fields(fields, time_ms(await read("TIME")) / 1000):
            await read("HDEL", key, *old)


def old_fields(fields: Iterable[str], now_s: float) -> list[str]:
    """Those of windows that have been over for KEPT_S. Pure."""
    day = datetime.fromtimestamp(now_s - KEPT_S, UTC) - timedelta(days=1)  # in whatever time zone
    present = {len(window): window for window in (f"{day:%Y-%m-%d}", f"{day:%G-W%V}", f"{day:%Y-%m}")}
    windows = ((field, found[1]) for field in fields if (found := _FIELD.match(field)) is not None)
    return [field for field, window in windows if window < present[len(window)]]
