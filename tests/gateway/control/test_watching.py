"""Who begins to watch while the store is away."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from coordinator.errors import StoreDown
from coordinator.store import Store
from gateway.control import decisions
from gateway.control.decisions import Decisions, told


class AwayStore:
    """A store that does not answer."""

    asked = 0

    async def ask(self, *_command: Any) -> Any:
        self.asked += 1
        raise StoreDown("the store is not connected")


async def test_is_told_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "LOOK_S", 0.05)
    monkeypatch.setattr(decisions, "FLUSH_S", 0.01)
    store = AwayStore()
    watched = Decisions(cast("Store", store), "gw0", "", [], lambda _is_watched: None)
    running = asyncio.get_running_loop().create_task(watched.run())
    pieces = [piece async for piece in told(watched, {}, lambda: store.asked >= 4)]
    running.cancel()
    assert b"".join(pieces).count(b"event: trouble") == 1
