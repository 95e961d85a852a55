from __future__ import annotations

from typing import Any

import orjson

from tests.gateway.simulator.conftest import RunningReplica
from tests.gateway.simulator.pictures import data_url

_BODY: dict[str, Any] = {
    "model": "sim",
    "max_tokens": 3,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "hello there " * 20}],
}


async def stream_events(replica: RunningReplica, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with replica.http.post("/v1/messages", json={**body, "stream": True}) as response:
        assert response.status == 200
        lines = (await response.text()).split("\n")
    return [orjson.loads(line[6:]) for line in lines if line.startswith("data: ")]


async def test_tools_images_and_tool_results_are_understood(replica: RunningReplica) -> None:
    media_type, data = data_url(1).removeprefix("data:").split(";base64,")
    body = {
        **_BODY,
        "max_tokens": 64,
        "tools": [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {}}}}],
        "tool_choice": {"type": "any"},
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}},
                    {"type": "text", "text": "and this?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "a cat"}]},
        ],
    }
    status, message = await replica.post("/v1/messages", body)
    assert status == 200
    assert message["stop_reason"] == "tool_use"
    (block,) = message["content"]
    assert (block["type"], block["name"], list(block["input"])) == ("tool_use", "look", ["at"])
    events = await stream_events(replica, body)
    streamed = "".join(event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta")
    assert orjson.loads(streamed) == block["input"]
