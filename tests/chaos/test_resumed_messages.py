"""Streams of /v1/messages and /v1/responses that break in the middle, and go on at another replica."""

from __future__ import annotations

import signal
from typing import Any

import openai
import orjson
import pytest

from tests.chaos.stage import Stage
from tests.gateway.simulator.pictures import image_part
from tests.polling import eventually

PATHS = MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
IMAGE = image_part(7)
TOKENS = 24
COMMENT = ": x-kvgate-resumed: 1; text"
TOOL = {"name": "f", "input_schema": {"properties": {"x": {"type": "string"}}}}


def asked(text: str, path: str, tokens: int = TOKENS) -> dict[str, Any]:
    """A streaming request. Decoding is greedy, as the simulator's always is."""
    if path == RESPONSES:
        said: dict[str, Any] = {"max_output_tokens": tokens, "input": text, "instructions": "Be brief."}
    else:
        said = {"max_tokens": tokens, "messages": [{"role": "user", "content": text}], "system": "Be brief."}
    return {"model": "sim", "stream": True, "temperature": 0, **said}


def told(answer: str) -> list[Any]:
    """The events of a stream, without what differs between two streams: their ids, when they were made, and what the
    cache had of the prompt. All events of one stream have the same ids."""
    events: list[Any] = []
    ids: dict[str, set[str]] = {}
    for event in filter(None, answer.split("\n\n")):
        name, _, data = event.partition("\ndata: ")
        if data:
            document = orjson.loads(data)
            assert name == f"event: {document['type']}"
            event = without_ids(document, ids)
        events.append(event)
    assert all(len(found) == 1 for found in ids.values()), ids
    return events


def without_ids(value: Any, ids: dict[str, set[str]]) -> Any:
    if isinstance(value, list):
        return [without_ids(each, ids) for each in value]
    if not isinstance(value, dict):
        return value
    left = {name: without_ids(each, ids) for name, each in value.items() if name not in ("id", "item_id", "created_at")}
    for name in ("id", "item_id"):
        if name in value:
            ids.setdefault(value[name][:4], set()).add(value[name])
    left.pop("input_tokens_details", None)
    if "input_tokens" in left:
        left["input_tokens"] += left.pop("cache_read_input_tokens", 0)
    return left


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["cut", "truncate", "crash", "error"])
async def test_a_stream_that_breaks_goes_on_without_a_seam(stage: Stage, path: str, mode: str) -> None:
    body = asked(stage.new_prompt(), path)
    first = await stage.http.post(stage.urls[0] + path, json=body)
    whole, owner = told(first.text), stage.replica(first.headers["x-kvgate-replica"])
    await stage.fail(owner, mode, after_tokens=9)
    answer = await stage.http.post(stage.urls[1] + path, json=body)
    assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, owner.id)
    events = told(answer.text)
    assert events.count(COMMENT) == 1, answer.text
    events.remove(COMMENT)
    assert events == whole
    await eventually(stage.all_load_is_given_back)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_replica_that_dies_or_freezes_breaks_no_stream(stage: Stage, path: str, how: signal.Signals) -> None:
    body = asked(stage.new_prompt(), path, 60)
    first = await stage.http.post(stage.urls[0] + path, json=body)
    owner, before = stage.replica(first.headers["x-kvgate-replica"]), await broken(stage)
    async with stage.http.stream("POST", stage.urls[1] + path, json=body) as answer:
        pieces, text = answer.aiter_text(), ""
        while text.count("delta") < 20:
            text += await anext(pieces)
        assert answer.headers["x-kvgate-replica"] == owner.id
        owner.signal(how)
        text += "".join([piece async for piece in pieces])
    events = told(text)
    events.remove(COMMENT)
    assert events == told(first.text)
    assert await broken(stage) == before
    await eventually(stage.all_load_is_given_back)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_may_break_again(stage: Stage, path: str) -> None:
    body = asked(stage.new_prompt(), path)
    whole = told((await stage.http.post(stage.urls[0] + path, json=body)).text)
    await stage.fail_everywhere("cut", after_tokens=9, count=-1)
    events = told((await stage.http.post(stage.urls[1] + path, json=body)).text)
    events.remove(COMMENT.replace("1;", "2;"))
    assert events == whole


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_does_not_go_on_ends_with_one_error_in_its_order(stage: Stage, path: str) -> None:
    await stage.fail_everywhere("cut", after_tokens=2, count=-1)
    *events, last = told((await stage.http.post(stage.urls[0] + path, json=asked(stage.new_prompt(), path))).text)
    assert "did not go on (not resumable: short_runs)" in last["error"]["message"]
    numbers = [event["sequence_number"] for event in (*events, last) if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))
    assert (path == RESPONSES) == bool(numbers)


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}, "thinking"),
        (RESPONSES, {"tools": [{"type": "custom", "name": "f"}]}, "tools"),
        (RESPONSES, {"store": True}, "store"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text"),
    ],
)
async def test_a_stream_that_cannot_go_on_says_why(stage: Stage, path: str, fields: dict[str, Any], why: str) -> None:
    await stage.fail_everywhere("cut", after_tokens=9, count=-1)
    answer = await stage.http.post(stage.urls[0] + path, json=asked(stage.new_prompt(), path) | fields)
    assert f"(not resumable: {why})" in told(answer.text)[-1]["error"]["message"]


def asked_by_an_agent(text: str, path: str) -> dict[str, Any]:
    """A request as agents send it: with tools, and after two calls of them."""
    body = asked(text, path)
    if path == RESPONSES:
        calls = [{"type": "function_call", "call_id": each, "name": "f", "arguments": '{"x": "ü"}'} for each in "ab"]
        results = [{"type": "function_call_output", "call_id": each, "output": "done"} for each in "ab"]
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I call."}]}
        body["tools"] = [{"type": "function", "name": "f", "parameters": TOOL["input_schema"]}]
        return body | {"input": [{"role": "user", "content": text}, said, *calls, *results]}
    calls = [{"type": "tool_use", "id": each, "name": "f", "input": {"x": "ü"}} for each in "ab"]
    results = [{"type": "tool_result", "tool_use_id": each, "content": "done"} for each in "ab"]
    body["messages"] += [
        {"role": "assistant", "content": [{"type": "text", "text": "I call."}, *calls]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    return body | {"tools": [TOOL], "system": [{"type": "text", "text": "Be brief."}]}


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_of_an_agent_goes_on_without_a_seam(stage: Stage, path: str) -> None:
    body = asked_by_an_agent(stage.new_prompt(), path)
    first = await stage.http.post(stage.urls[0] + path, json=body)
    await stage.fail(stage.replica(first.headers["x-kvgate-replica"]), "cut", after_tokens=9)
    events = told((await stage.http.post(stage.urls[1] + path, json=body)).text)
    events.remove(COMMENT)
    assert events == told(first.text)


async def test_an_image_in_a_message_is_in_the_prompt_of_the_rest(stage: Stage) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE["image_url"]["url"].partition(",")[2]}
    body = asked(stage.new_prompt(), MESSAGES)
    body["messages"][0]["content"] = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    first = await stage.http.post(stage.urls[0] + MESSAGES, json=body)
    await stage.fail(stage.replica(first.headers["x-kvgate-replica"]), "cut", after_tokens=9)
    events = told((await stage.http.post(stage.urls[1] + MESSAGES, json=body)).text)
    events.remove(COMMENT)
    assert events == told(first.text)


async def test_the_openai_sdk_reads_a_response_that_went_on(stage: Stage) -> None:
    body = asked(stage.new_prompt(), RESPONSES)
    first = await stage.http.post(stage.urls[0] + RESPONSES, json=body)
    await stage.fail(stage.replica(first.headers["x-kvgate-replica"]), "crash", after_tokens=9)
    async with openai.AsyncOpenAI(base_url=f"{stage.urls[1]}/v1", api_key="none", max_retries=0) as client:
        events = [event async for event in await client.responses.create(**body)]
    deltas = (event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert ("".join(deltas), last.usage.output_tokens) == (last.output_text, TOKENS)
    assert last.output[0].id == events[2].item.id


async def broken(stage: Stage) -> float:
    return await stage.metric_of_all("kvgate_broken_streams_total")
