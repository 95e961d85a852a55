from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.gateway.simulator.conftest import RunningReplica

_BODY: dict[str, Any] = {
    "model": "sim",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 6,
}


async def fail(replica: RunningReplica, mode: str, **fault: Any) -> None:
    status, _ = await replica.post("/sim/fail", {"mode": mode, **fault})
    assert status == 200


async def test_an_error_strikes_as_often_as_told(replica: RunningReplica) -> None:
    await fail(replica, "error", status=503, count=2)
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as raised:
            await replica.openai.chat.completions.create(**_BODY)
        assert raised.value.status_code == 503
    await replica.chat("works again")
    assert (await replica.state())["requests"] == 3


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


async def test_a_mistyped_fault_is_refused_with_the_modes_that_there_are(replica: RunningReplica) -> None:
    status, answer = await replica.post("/sim/fail", {"mode": "stal"})
    assert (status, answer["error"]["param"]) == (400, "mode")
    for mode in ("error", "drop_events", "stall", "slower", "none"):
        assert f"'{mode}'" in answer["error"]["message"]
    status, answer = await replica.post("/sim/fail", {"mode": "slow", "second": 3})
    assert (status, answer["error"]["param"]) == (400, "second")
    assert (await replica.state())["failing"] == []
