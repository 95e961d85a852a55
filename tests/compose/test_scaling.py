"""Gateways start and stop under a continuous load."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.cluster.clients import Load, held_stream, prose, running_load
from tests.compose.cluster import ComposeCluster
from tests.polling import eventually

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

# At 20 ms a token, the longest answers of the load take over a second.
MAX_TOKENS = (1, 60)
# 8 s: longer than an idle gateway takes to stop.
HELD_TOKENS = 400


async def test_gateways_come_and_go_under_load_and_not_one_request_fails(
    cluster: ComposeCluster, http: httpx.AsyncClient
) -> None:
    async with running_load(Load(http, [cluster.url], max_tokens=MAX_TOKENS), clients=8) as load:
        await cluster.up(gateways=4)

        async def all_serve() -> bool:
            served = await cluster.chats_answered()
            return len(served) == 4 and all(served.values())

        await eventually(all_serve, 30)
        at_four = load.answered
        async with AsyncExitStack() as streams:
            held = [
                await streams.enter_async_context(
                    held_stream(http, cluster.url, prose(f"held {number}", 20), max_tokens=HELD_TOKENS)
                )
                for number in range(8)
            ]
            stopping = asyncio.ensure_future(cluster.up(gateways=1))
            texts = await asyncio.gather(*(stream.rest() for stream in held))
            await stopping
        assert len(await cluster.containers("gateway")) == 1
        at_one = load.answered
        await eventually(lambda: load.answered > at_one + 50, 30)
    assert load.failures == []
    assert load.broken == 0
    assert all(text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in texts)
    assert at_one > at_four > 0
