"""What several of these tests stand on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.gateway.scripted import Relayed, ScriptedReplica, gateway_before


@pytest.fixture
async def relayed(request: pytest.FixtureRequest) -> AsyncIterator[Relayed]:
    """A gateway in front of a scripted replica; a test's parameter are sections of its configuration."""
    replica = ScriptedReplica()
    async with (
        replica.running(),
        gateway_before(replica, **getattr(request, "param", {})) as (gateway, url),
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield Relayed(http, gateway, replica)
