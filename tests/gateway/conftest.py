"""Fixtures that several of these tests use."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.gateway.scripted import Relayed, ScriptedReplica, gateway_before


@pytest.fixture
async def relayed(request: pytest.FixtureRequest) -> AsyncIterator[Relayed]:
    """A gateway in front of a scripted replica. A test's parameter has sections of the gateway's configuration."""
    replica = ScriptedReplica()
    async with (
        replica.running(),
        gateway_before(replica, **getattr(request, "param", {})) as (gateway, url),
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield Relayed(http, gateway, replica)
