"""A gateway in front of two scripted replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import pytest

from gateway.app import Gateway
from gateway.request.admission import Admission
from gateway.settings.limit_settings import LimitSettings
from tests.gateway.scripted import ScriptedReplica, gateway_before


@dataclass
class Pair:
    """A gateway in front of two replicas that behave the same."""

    http: httpx.AsyncClient
    replicas: tuple[ScriptedReplica, ScriptedReplica]
    gateway: Gateway

    def say(self, *pieces: bytes | asyncio.Event) -> None:
        for replica in self.replicas:
            replica.says(*pieces)

    @property
    def asked(self) -> int:
        return sum(replica.asked for replica in self.replicas)


@pytest.fixture
def admission() -> Admission:
    return Admission(LimitSettings())


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    replicas = ScriptedReplica(), ScriptedReplica()
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica.running())
        listed = [{"id": f"r{index}", "url": replica.url} for index, replica in enumerate(replicas)]
        limits = {"first_byte_s": 1}
        before = gateway_before(replicas[0], replicas=listed, timeouts=limits)
        gateway, url = await stack.enter_async_context(before)
        assert sorted(gateway.fleet.served["m"][0].replicas) == ["r0", "r1"]
        yield Pair(await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30)), replicas, gateway)
