"""After the first byte nothing can be taken back: a stream that breaks says so, and is never cut short in silence."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.chaos.stage import Stage
from tests.cluster.clients import ask, chat, held_stream, last_event
from tests.polling import eventually

AFTER_THE_FIRST_BYTE: list[dict[str, Any]] = [
    {"mode": "cut", "after_tokens": 3},
    {"mode": "truncate", "after_tokens": 3},
    {"mode": "crash", "after_tokens": 3},
]


@pytest.mark.parametrize("fault", AFTER_THE_FIRST_BYTE, ids=lambda fault: str(fault["mode"]))
async def test_a_stream_that_breaks_ends_with_an_error_event(stage: Stage, fault: dict[str, Any]) -> None:
    text, owner = await stage.warm_prompt()
    broken = await stage.metric(stage.urls[0], "kvgate_broken_streams_total")
    await stage.fail(owner, **fault)
    answer = await ask(stage.http, stage.urls[0], text, max_tokens=8, stream=True)
    assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, owner.id)
    *events, last = [event for event in answer.text.split("\n\n") if event]
    assert len(events) == 4, "the role and three tokens"
    assert '"error"' not in "".join(events)
    error = last_event(last)["error"]
    assert (error["code"], error["type"]) == ("stream_broken", "server_error")
    assert "[DONE]" not in answer.text
    assert await stage.metric(stage.urls[0], "kvgate_broken_streams_total") == broken + 1


@pytest.mark.parametrize("fault", AFTER_THE_FIRST_BYTE, ids=lambda fault: str(fault["mode"]))
async def test_the_openai_sdk_raises_on_a_stream_that_breaks(stage: Stage, fault: dict[str, Any]) -> None:
    text, owner = await stage.warm_prompt()
    await stage.fail(owner, **fault)
    async with openai.AsyncOpenAI(base_url=f"{stage.urls[0]}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**chat(text, max_tokens=8), stream=True)
        with pytest.raises(openai.APIError, match="incomplete"):
            await read(stream)


async def read(stream: openai.AsyncStream[Any]) -> list[Any]:
    return [event async for event in stream]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
async def test_streams_of_every_api_end_with_an_error_event_when_they_break(stage: Stage, path: str) -> None:
    text = stage.new_prompt()
    prompt: dict[str, Any] = {
        "/v1/completions": {"prompt": text, "max_tokens": 8},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 8},
        "/v1/responses": {"input": text, "max_output_tokens": 8},
    }[path]
    await stage.fail_everywhere("truncate", after_tokens=3)
    answer = await stage.http.post(stage.urls[0] + path, json={"model": "sim", "stream": True, **prompt})
    assert answer.status_code == 200
    assert last_event(answer.text)["error"]["code"] == "stream_broken"


async def test_an_error_that_the_replica_reports_itself_reaches_the_client_as_it_was(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    await stage.fail(owner, "error", after_tokens=3)
    answer = await ask(stage.http, stage.urls[0], text, max_tokens=8, stream=True)
    assert "Simulated failure with status 500" in answer.text
    assert answer.text.count('"error"') == 1


async def test_killing_a_replica_breaks_its_streams_and_no_other(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    other_text, other = await stage.warm_prompt()
    while other is owner:
        other_text, other = await stage.warm_prompt()
    async with (
        held_stream(stage.http, stage.urls[0], text) as doomed,
        held_stream(stage.http, stage.urls[1], other_text, max_tokens=60) as safe,
    ):
        owner.kill()
        assert last_event(await doomed.rest())["error"]["code"] == "stream_broken"
        assert (await safe.rest()).endswith("data: [DONE]\n\n")
    await eventually(stage.all_load_is_given_back)
