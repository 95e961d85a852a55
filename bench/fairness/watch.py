"""Looks at Redis while a run goes on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bench.embedded import connect
from coordinator.keys import PoolKeys

_LOOK_S = 0.01


@dataclass
class MostActive:
    """The most requests that Redis ever showed for one replica."""

    keys: PoolKeys
    most: int = 0

    async def watch(self, redis_url: str) -> None:
        """Look every 10 ms, until it is cancelled."""
        wire = await connect(redis_url)
        try:
            while True:
                active = await wire.send("HVALS", self.keys.active)
                self.most = max([self.most, *map(int, active)])
                await asyncio.sleep(_LOOK_S)
        finally:
            await wire.close("the run is over")
