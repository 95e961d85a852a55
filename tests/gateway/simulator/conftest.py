"""A simulated replica on a free port, used over real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from gateway.simulator.server import serving
from gateway.simulator.settings import SimSettings
from tests.gateway.simulator.subscription import Subscription, subscribed


@dataclass
class RunningReplica:
    settings: SimSettings
    port: int
    http: aiohttp.ClientSession
    openai: openai.AsyncOpenAI

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.http.post(path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> Any:
        async with self.http.get(path) as response:
            return await response.json()

    async def chat(self, content: Any, **body: Any) -> dict[str, Any]:
        """The answer to a chat request with one user message. The request must succeed."""
        messages = [{"role": "user", "content": content}]
        status, answer = await self.post("/v1/chat/completions", {"model": "sim", "messages": messages, **body})
        assert status == 200, answer
        return answer

    async def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON of each event in a stream."""
        async with self.http.post(path, json={**body, "stream": True}) as response:
            lines = (await response.text()).split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]

    async def cached_tokens(self, content: Any, **body: Any) -> int:
        answer = await self.chat(content, **body)
        return cached_tokens_of(answer)

    async def state(self) -> dict[str, Any]:
        state: dict[str, Any] = await self.get("/sim/state")
        return state

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Waits for a /sim/state that meets the condition."""
        for _ in range(1000):
            if condition(state := await self.state()):
                return state
            await asyncio.sleep(0.005)
        raise AssertionError(f"did not come to pass: {state}")


def cached_tokens_of(answer: dict[str, Any]) -> int:
    """The number of cached tokens in an answer's usage, which leaves out a zero."""
    details = answer["usage"]["prompt_tokens_details"]
    return 0 if details is None else int(details["cached_tokens"])


async def until_broken(response: aiohttp.ClientResponse) -> bytes:
    """The bytes received of a body that never ends properly."""
    received = bytearray()
    try:
        async for chunk in response.content.iter_any():
            received += chunk
    except aiohttp.ClientError:
        return bytes(received)
    raise AssertionError("the body ended as it should")


StartReplica = Callable[..., Awaitable[RunningReplica]]


@pytest.fixture
async def start_replica() -> AsyncIterator[StartReplica]:
    """Starts replicas from the fields of SimSettings. They run at full speed unless the fields say otherwise."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> RunningReplica:
            sim = SimSettings(**{"speed": 0, **settings})
            port = await stack.enter_async_context(serving(sim))
            url = f"http://127.0.0.1:{port}"
            http = await stack.enter_async_context(aiohttp.ClientSession(url))
            sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            return RunningReplica(sim, port, http, await stack.enter_async_context(sdk))

        yield start


Publishing = tuple[RunningReplica, Subscription]
StartPublishing = Callable[..., Awaitable[Publishing]]


@pytest.fixture
async def start_publishing(start_replica: StartReplica) -> AsyncIterator[StartPublishing]:
    """Starts replicas from the fields of SimSettings. Each has an empty cache and a subscription that is in effect."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> Publishing:
            replica = await start_replica(**settings)
            source = (await replica.get("/kv_event_sources"))["0"]
            subscription = stack.enter_context(subscribed(source["endpoint"], source["replay_endpoint"]))
            await join(replica, subscription)
            return replica, subscription

        yield start


async def join(replica: RunningReplica, subscription: Subscription) -> None:
    """Causes events until one arrives, because ZeroMQ does not report when a subscription takes effect. Then it empties
    the cache."""
    for attempt in itertools.count():
        prompt = [10**6 + attempt] * replica.settings.block_size
        assert (await replica.post("/v1/completions", {"model": "sim", "prompt": prompt, "max_tokens": 1}))[0] == 200
        if await subscription.poll():
            break
    while await subscription.poll():
        await subscription.live()
    assert (await replica.post("/sim/fail", {"mode": "amnesia"}))[0] == 200


@pytest.fixture
async def replica(start_replica: StartReplica) -> RunningReplica:
    return await start_replica()
