"""An engine that is told to abort ends its requests as vLLM 0.33 does: with a status of 200, and what there is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.simulator.conftest import RunningReplica, StartReplica

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4000}
ORDERS = [("/abort_requests", {}), ("/pause", None), ("/sleep?level=0", None)]


@pytest.fixture
async def slow(start_replica: StartReplica) -> RunningReplica:
    return await start_replica(speed=1)


async def aborted(
    replica: RunningReplica, path: str, body: dict[str, Any], order: tuple[str, Any] = ORDERS[0]
) -> dict[str, Any]:
    """The answer to a request that is aborted when it has some tokens."""
    asked = asyncio.ensure_future(replica.post(path, body))
    await replica.until(lambda state: state["running"] and state["recent"][-1]["completion_tokens"])
    (await replica.http.post(order[0], json=order[1])).raise_for_status()
    status, answer = await asked
    assert status == 200
    return answer


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order[0])
async def test_a_chat_ends_with_what_was_generated_and_the_reason(slow: RunningReplica, order: tuple[str, Any]) -> None:
    answer = await aborted(slow, "/v1/chat/completions", CHAT, order)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
    assert 0 < answer["usage"]["completion_tokens"] < 4000
    state = await slow.state()
    assert (state["running"], state["aborted"], state["blocks_used"]) == (0, 1, 0)


async def test_a_message_has_no_stop_reason_and_a_response_says_that_it_is_completed(slow: RunningReplica) -> None:
    message = await aborted(slow, "/v1/messages", CHAT)
    assert (message["stop_reason"], message["stop_sequence"]) == (None, None)
    response = await aborted(slow, "/v1/responses", {"model": "sim", "input": "Hello", "max_output_tokens": 4000})
    assert (response["status"], len(response["output"])) == ("completed", 1)


async def test_streams_end_as_if_they_were_complete(slow: RunningReplica) -> None:
    await slow.post("/sim/fail", {"mode": "stall"})

    async def stream(path: str, body: dict[str, Any]) -> str:
        async with slow.http.post(path, json={**body, "stream": True}) as answer:
            return await answer.text()

    asked = [
        asyncio.ensure_future(stream("/v1/chat/completions", {**CHAT, "n": 2})),
        asyncio.ensure_future(stream("/v1/messages", CHAT)),
        asyncio.ensure_future(stream("/v1/responses", {"model": "sim", "input": "Hello"})),
    ]
    await slow.until(lambda state: state["waiting"] + state["running"] == 4)
    assert (await slow.post("/abort_requests", {}))[1] == {"status": "aborted", "aborted": 4}
    chat, message, response = await asyncio.gather(*asked)
    assert (chat.count('"finish_reason":"abort"'), chat.endswith("data: [DONE]\n\n")) == (2, True)
    assert '"delta":{"stop_reason":null' in message
    assert "event: message_stop" in message
    assert [line for line in response.splitlines() if line.startswith("event: ")] == [
        "event: response.created",
        "event: response.in_progress",
        "event: response.completed",
    ]
