"""A broken stream that cannot go on elsewhere ends with an error, and is never cut short silently. (Those that can are
in test_resumed_streams.py.)"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.chaos.stage import Stage
from tests.cluster.clients import CHAT, ask, chat, last_event
from tests.cluster.gateways import another_gateway
from tests.polling import eventually

AFTER_THE_FIRST_BYTE: list[dict[str, Any]] = [
    {"mode": "cut", "after_tokens": 3},
    {"mode": "truncate", "after_tokens": 3},
    {"mode": "crash", "after_tokens": 3},
]
UNKNOWN = {"some_new_field": 1}
PROMPTS = (CHAT, "/v1/completions", "/v1/messages", "/v1/responses")


def streamed(stage: Stage, path: str, max_tokens: int = 8) -> dict[str, Any]:
    """A streaming request in the API of its path, whose answer cannot go on elsewhere."""
    text = stage.new_prompt()
    prompt: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "logprobs": True},
        "/v1/completions": {"prompt": text, "max_tokens": max_tokens, "logprobs": 0},
        "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **UNKNOWN},
        "/v1/responses": {"input": text, "max_output_tokens": max_tokens, **UNKNOWN},
    }[path]
    return {"model": "sim", "stream": True, **prompt}


@pytest.mark.parametrize("fault", AFTER_THE_FIRST_BYTE, ids=lambda fault: str(fault["mode"]))
async def test_a_stream_that_breaks_ends_with_an_error_event(stage: Stage, fault: dict[str, Any]) -> None:
    text, owner = await stage.warm_prompt()
    broken = await stage.metric(stage.urls[0], "kvgate_broken_streams_total")
    await stage.fail(owner, **fault)
    answer = await ask(stage.http, stage.urls[0], text, max_tokens=8, stream=True, logprobs=True)
    assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, owner.id)
    *events, last = [event for event in answer.text.split("\n\n") if event]
    assert len(events) == 4, "the role and three tokens"
    assert '"error"' not in "".join(events)
    error = last_event(last)["error"]
    assert (error["code"], error["type"]) == ("stream_broken", "server_error")
    assert "[DONE]" not in answer.text
    assert await stage.metric(stage.urls[0], "kvgate_broken_streams_total") == broken + 1


async def test_the_openai_sdk_raises_on_a_stream_that_breaks(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    await stage.fail(owner, "cut", after_tokens=3)
    async with openai.AsyncOpenAI(base_url=f"{stage.urls[0]}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**chat(text, max_tokens=8), stream=True, logprobs=True)
        with pytest.raises(openai.APIError, match="incomplete"):
            await read(stream)


async def read(stream: openai.AsyncStream[Any]) -> list[Any]:
    return [event async for event in stream]


@pytest.mark.parametrize("path", PROMPTS)
async def test_streams_of_every_api_end_with_their_own_error_event_when_they_break(stage: Stage, path: str) -> None:
    await stage.fail_everywhere("truncate", after_tokens=3)
    answer = await stage.http.post(stage.urls[0] + path, json=streamed(stage, path))
    assert answer.status_code == 200
    ends_with_an_error(path, answer, "stream_broken", "server_error", "api_error")


@pytest.mark.parametrize("path", PROMPTS)
async def test_streams_of_every_api_say_so_when_their_time_is_over(stage: Stage, path: str, hasty: str) -> None:
    await stage.fail_everywhere("hang", after_tokens=3)
    answer = await stage.http.post(hasty + path, json=streamed(stage, path))
    ends_with_an_error(path, answer, "deadline_exceeded", "server_error", "timeout_error")


@pytest.fixture
async def hasty(stage: Stage) -> AsyncIterator[str]:
    """A gateway that allows requests one second."""
    limits = {"first_byte_s": 1, "request_s": 1}
    async with another_gateway(stage.cluster, "hasty", timeouts=limits) as gateway:
        yield gateway.url


@pytest.mark.parametrize("path", PROMPTS)
async def test_streams_of_every_api_end_with_their_own_error_event_when_their_replica_falls_silent(
    stage: Stage, path: str, impatient: str
) -> None:
    await stage.fail_everywhere("hang", after_tokens=3)
    answer = await stage.http.post(impatient + path, json=streamed(stage, path))
    ends_with_an_error(path, answer, "stream_broken", "server_error", "api_error")
    await eventually(lambda: none_runs(stage))


@pytest.fixture
async def impatient(stage: Stage) -> AsyncIterator[str]:
    """A gateway that allows a replica half a second of silence."""
    async with another_gateway(stage.cluster, "impatient", timeouts={"idle_s": 0.5}) as gateway:
        yield gateway.url


async def none_runs(stage: Stage) -> bool:
    """Whether no replica computes a request any more."""
    return not any([(await stage.replica_state(replica))["running"] for replica in stage.cluster.replicas])


async def test_streams_of_every_api_say_so_when_their_gateway_stops(stage: Stage) -> None:
    async with another_gateway(stage.cluster, "leaving", timeouts={"grace_s": 0.6}) as leaving:
        asked = [
            asyncio.ensure_future(stage.http.post(leaving.url + path, json=streamed(stage, path, max_tokens=4000)))
            for path in PROMPTS
        ]
        await eventually(lambda: stage.active_is(len(asked)))
        await eventually(lambda: first_tokens_of(stage, leaving.url, len(asked)))
        leaving.signal(signal.SIGTERM)
        for path, answer in zip(PROMPTS, await asyncio.gather(*asked), strict=True):
            ends_with_an_error(path, answer, "shutting_down", "server_error", "overloaded_error")


async def first_tokens_of(stage: Stage, url: str, count: int) -> bool:
    seen = [await stage.replica_state(replica) for replica in stage.cluster.replicas]
    return sum(state["running"] for state in seen) >= count


def ends_with_an_error(path: str, answer: httpx.Response, code: str, kind: str, anthropic_kind: str) -> None:
    """The stream's last event is an error in the shape of its API, and no event before it is one."""
    *events, last = [event.splitlines() for event in answer.text.split("\n\n") if event]
    assert len(events) > 2
    assert all(event[0] != "event: error" for event in events)
    document = last_event(answer.text)
    if path == "/v1/messages":
        assert last[0] == "event: error"
        assert (document["type"], document["error"]["type"]) == ("error", anthropic_kind)
        assert document["request_id"] == answer.headers["request-id"]
    else:
        assert set(document["error"]) == {"message", "type", "param", "code"}
        assert document["error"]["type"] == kind
    if path == "/v1/responses":
        assert last[0] == "event: error"
        numbers = [json.loads(event[-1].removeprefix("data: "))["sequence_number"] for event in [*events, last]]
        assert numbers == list(range(len(numbers)))
        assert (document["type"], document["code"], document["param"]) == ("error", code, None)
        assert document["message"] == document["error"]["message"]
    assert document["error"]["code"] == code


@pytest.mark.parametrize("fault", AFTER_THE_FIRST_BYTE, ids=lambda fault: str(fault["mode"]))
async def test_the_openai_sdk_raises_on_a_response_that_breaks(stage: Stage, fault: dict[str, Any]) -> None:
    await stage.fail_everywhere(**fault)
    async with openai.AsyncOpenAI(base_url=f"{stage.urls[0]}/v1", api_key="none", max_retries=0) as client:
        prompt = stage.new_prompt()
        stream = await client.responses.create(model="sim", input=prompt, stream=True, extra_body=UNKNOWN)
        with pytest.raises(openai.APIError, match="incomplete"):
            await read(stream)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages"])
async def test_a_stream_that_its_engine_aborts_ends_with_an_error_event(stage: Stage, path: str) -> None:
    """vLLM ends the stream as if it were complete. (Of a response it says nothing at all.)"""
    url = stage.urls[0] + path
    async with stage.http.stream("POST", url, json=streamed(stage, path, max_tokens=4000)) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        await asyncio.gather(*(abort_requests(stage, replica.url) for replica in stage.cluster.replicas))
        text += "".join([piece async for piece in pieces])
    assert last_event(text)["error"]["code"] == "stream_broken"
    assert (text.count("stream_broken"), "[DONE]" in text, "message_stop" in text) == (1, False, False)
    await eventually(stage.all_load_is_given_back)
    assert await stage.ledger.breakers() == {}


async def abort_requests(stage: Stage, url: str) -> None:
    (await stage.http.post(f"{url}/abort_requests", json={})).raise_for_status()
