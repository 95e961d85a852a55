"""An engine's publisher, and readers of its events."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coordinator.agent.feed import Feed
from tests.coordinator.agent.publisher import Publisher
from tests.coordinator.agent.reader import LONG_S, Read, Reader


@pytest.fixture
async def engine() -> AsyncIterator[Publisher]:
    publisher = Publisher()
    yield publisher
    await publisher.close()


@pytest.fixture
async def read() -> AsyncIterator[Read]:
    """Reads an engine with a patient feed: unless options say otherwise, it does not become idle and its replay does
    not time out within a test."""
    readers: list[Reader] = []

    def start(engine: Publisher, *, replays: bool = True, **options: float) -> Reader:
        endpoint = engine.replay_endpoint if replays else None
        options = {"idle_s": LONG_S, "replay_timeout_s": LONG_S, **options}
        feed = Feed(engine.events_endpoint, endpoint, **options)  # type: ignore[arg-type]
        readers.append(Reader(feed))
        return readers[-1]

    yield start
    for reader in readers:
        await reader.close()
