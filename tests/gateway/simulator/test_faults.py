from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.gateway.simulator.conftest import RunningReplica, until_broken

_BODY: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 6,
}


async def fail(replica: RunningReplica, mode: str, **fault: Any) -> None:
    status, _ = await replica.post("/sim/fail", {"mode": mode, **fault})
    assert status == 200


async def streamed(replica: RunningReplica) -> list[str]:
    """The data of all events in a stream that ends cleanly, including `[DONE]`."""
    async with replica.http.post("/v1/chat/completions", json={**_BODY, "stream": True}) as response:
        lines = (await response.text()).splitlines()
    return [line[6:] for line in lines if line.startswith("data: ")]


async def test_an_error_strikes_as_often_as_told(replica: RunningReplica) -> None:
    await fail(replica, "error", status=503, count=2)
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as raised:
            await replica.openai.chat.completions.create(**_BODY)
        assert raised.value.status_code == 503
    await replica.chat("works again")
    assert (await replica.state())["requests"] == 3


async def test_a_cut_stream_breaks_after_so_many_tokens(replica: RunningReplica) -> None:
    await fail(replica, "cut", after_tokens=2)
    async with replica.http.post("/v1/chat/completions", json={**_BODY, "stream": True}) as response:
        received = await until_broken(response)
    assert received.count(b'"delta":{"content":"') == 2
    assert b"[DONE]" not in received
    state = await replica.until(lambda state: state["blocks_used"] == 0)
    assert state["running"] == 0


async def test_an_error_after_tokens_is_an_event_inside_the_stream(replica: RunningReplica) -> None:
    await fail(replica, "error", after_tokens=1)
    *_, error, done = await streamed(replica)
    assert '"code":500' in error
    assert done == "[DONE]"


async def test_a_slow_request_has_its_headers_at_once_and_reaches_the_engine_later(
    replica: RunningReplica,
) -> None:
    await fail(replica, "slow", seconds=60)
    async with replica.http.post("/v1/chat/completions", json={**_BODY, "stream": True}) as response:
        assert response.status == 200
        assert (await replica.state())["prompt_tokens"] == 0
    await fail(replica, "slow", seconds=0.01)
    assert (await streamed(replica))[-1] == "[DONE]"


async def test_a_stalled_engine_says_that_it_is_healthy_and_moves_no_counter_until_it_goes_on(
    replica: RunningReplica,
) -> None:
    await fail(replica, "stall")
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(replica.chat("waits"))
        stalled = await replica.until(lambda state: state["waiting"] == 1)
        async with replica.http.get("/health") as response:
            assert response.status == 200
        counters = ("running", "prompt_tokens", "cached_tokens", "blocks_stored")
        assert [(await replica.state())[name] for name in counters] == [stalled[name] for name in counters] == [0] * 4
        assert not answer.done()
        await fail(replica, "none")
    assert (await answer)["usage"]["completion_tokens"] > 0
