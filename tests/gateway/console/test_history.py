"""The history of a pool stays while Redis is full, and what somebody else wrote in its place goes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from coordinator.errors import StoreRefused
from coordinator.keys import PoolKeys
from coordinator.pool.pool import Pool
from coordinator.store import Store
from gateway.console.history import History
from gateway.metrics.first_tokens import FirstTokens

KEYS = PoolKeys("m")


class Refusing:
    """A pool whose Redis refuses the first write."""

    name, keys = "m", KEYS

    def __init__(self, reason: str) -> None:
        self.refusal: StoreRefused | None = StoreRefused(reason)
        self.sent: list[tuple[Any, ...]] = []

    async def read(self, *command: Any) -> Any:
        self.sent.append(command)
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal


def history(pool: Refusing) -> History:
    first_tokens = FirstTokens()
    first_tokens.note("m", 0.25)
    return History(cast("Store", None), first_tokens, 1000.0)


async def test_it_is_kept_while_redis_is_full() -> None:
    pool = Refusing("OOM command not allowed when used memory > 'maxmemory'.")
    with pytest.raises(StoreRefused, match="OOM"):
        await history(pool)._add_first_tokens(cast("Pool", pool))
    assert "UNLINK" not in {command[0] for command in pool.sent}


async def test_what_somebody_else_wrote_there_is_removed() -> None:
    pool = Refusing("WRONGTYPE Operation against a key holding the wrong kind of value")
    await history(pool)._add_first_tokens(cast("Pool", pool))
    assert ("UNLINK", KEYS.first_tokens) in pool.sent
