"""A stream that breaks goes on at another replica: its client gets the events that it would have got anyway."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import Any

import openai
import orjson
import pytest

from bench.cluster import SimReplica
from gateway.ops.cli.explain import reasons
from tests.chaos.stage import Stage
from tests.cluster.clients import CHAT, held_stream, last_event, records_of
from tests.gateway.simulator.pictures import image_part
from tests.polling import eventually

COMPLETIONS = "/v1/completions"
TOKENS = 24
BREAKS = ("cut", "truncate", "crash", "error")
COMMENT = ": x-kvgate-resumed: 1; exact"


def asked(text: str, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    """A streaming request. Decoding is greedy, as the simulator's always is."""
    prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    return {"model": "sim", "max_tokens": TOKENS, **prompt, **options, **fields}


def told(answer: str) -> list[Any]:
    """The events of a stream without what differs between two streams: their ids, and when they were made. All tokens
    of the prompt may have been cached or not."""
    events: list[Any] = []
    for event in filter(None, answer.split("\n\n")):
        data = event.removeprefix("data: ")
        if not data.startswith("{"):
            events.append(data)
            continue
        document = orjson.loads(data)
        events.append({name: value for name, value in document.items() if name not in ("id", "created")})
        if document.get("usage"):
            document["usage"].pop("prompt_tokens_details", None)
    return events


async def unbroken(stage: Stage, path: str, body: dict[str, Any]) -> tuple[list[Any], SimReplica]:
    """The events of a stream, and the replica that has its prompt now."""
    answer = await stage.http.post(stage.urls[0] + path, json=body)
    return told(answer.text), stage.replica(answer.headers["x-kvgate-replica"])


async def broken(stage: Stage, path: str, body: dict[str, Any], owner: SimReplica, gateway: int = 0) -> list[Any]:
    """The events of a stream that its owner breaks, without the comment that says so."""
    answer = await stage.http.post(stage.urls[gateway] + path, json=body)
    assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, owner.id)
    events = told(answer.text)
    assert events.count(COMMENT) == 1, answer.text
    events.remove(COMMENT)
    ids = {orjson.loads(data)["id"] for each in answer.text.split("\n\n") if (data := each[6:]).startswith("{")}
    assert len(ids) == 1
    return events


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("mode", BREAKS)
async def test_a_stream_that_breaks_goes_on_without_a_seam(stage: Stage, path: str, mode: str) -> None:
    body = asked(stage.new_prompt(), path)
    whole, owner = await unbroken(stage, path, body)
    await stage.fail(owner, mode, after_tokens=9)
    before = await stage.metric(stage.urls[0], "kvgate_streams_total", resumable="yes")
    assert await broken(stage, path, body, owner) == whole
    assert await stage.metric(stage.urls[0], "kvgate_streams_total", resumable="yes") == before + 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_replica_that_dies_or_freezes_breaks_no_stream(stage: Stage, how: signal.Signals) -> None:
    body = asked(stage.new_prompt(), max_tokens=60)
    whole, owner = await unbroken(stage, CHAT, body)
    before = await stage.metric(stage.urls[1], "kvgate_broken_streams_total")
    options = {"temperature": 0, "stream_options": body["stream_options"]}
    async with held_stream(stage.http, stage.urls[1], body["messages"][0]["content"], 60, **options) as begun:
        assert begun.replica == owner.id
        owner.signal(how)
        events = told(await begun.rest())
    events.remove(COMMENT)
    assert events == whole
    assert await stage.metric(stage.urls[1], "kvgate_broken_streams_total") == before
    await eventually(stage.all_load_is_given_back)


TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
IMAGE = image_part(7)


@pytest.mark.parametrize("what", ["tools", "image"])
async def test_chats_with_tools_or_images_go_on(stage: Stage, what: str) -> None:
    text = stage.new_prompt()
    body = asked(text, **(TOOLS if what == "tools" else {}))
    if what == "image":
        body["messages"] = [{"role": "user", "content": [IMAGE, {"type": "text", "text": text}]}]
    whole, owner = await unbroken(stage, CHAT, body)
    await stage.fail(owner, "cut", after_tokens=9)
    events = told((await stage.http.post(stage.urls[0] + CHAT, json=body)).text)
    events.remove(COMMENT)  # the engine cut the text into the same tokens
    assert events == whole


def content(events: list[Any]) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_a_stream_may_break_again(stage: Stage) -> None:
    body = asked(stage.new_prompt())
    whole, _ = await unbroken(stage, CHAT, body)
    await stage.fail_everywhere("cut", after_tokens=9)
    events = told((await stage.http.post(stage.urls[0] + CHAT, json=body)).text)
    events.remove(COMMENT.replace("1;", "2;"))
    assert events == whole


async def test_a_prompt_that_seems_to_break_each_engine_is_not_sent_to_a_third_one(stage: Stage) -> None:
    await stage.fail_everywhere("cut", after_tokens=2)
    answer = await stage.http.post(stage.urls[0] + CHAT, json=asked(stage.new_prompt()))
    assert "did not go on (not resumable: short_runs)" in last_event(answer.text)["error"]["message"]
    states = [await stage.replica_state(replica) for replica in stage.cluster.replicas]
    assert sum("cut" in state["failing"] for state in states) == 1, "one replica was not asked"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2, "temperature": 1}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"some_new_field": 1}, "some_new_field"),
    ],
)
async def test_a_stream_that_cannot_go_on_says_why(stage: Stage, fields: dict[str, Any], why: str) -> None:
    await stage.fail_everywhere("cut", after_tokens=9)
    answer = await stage.http.post(stage.urls[0] + CHAT, json=asked(stage.new_prompt(), **fields))
    error = last_event(answer.text)["error"]
    assert error["code"] == "stream_broken"
    assert f"(not resumable: {why})" in error["message"]
    (record,) = await records_of(stage.http, stage.urls[1], answer.headers["x-request-id"])
    [left] = record["resumed"]
    why_not = f"not resumable: {why}"
    assert left == {"replica": record["replica"], "why": "reset", "how": "none", "why_not": why_not}
    told = f"began at {left['replica']}, which broke it off (reset); it did not go on ({why_not})"
    assert told in list(reasons(record))
    label = why if why != "some_new_field" else "field"
    assert await stage.metric(stage.urls[0], "kvgate_stream_resumptions_total", outcome="none", reason=label) >= 1
    assert await stage.metric(stage.urls[0], "kvgate_streams_total", resumable=label) >= 1


async def test_a_client_that_leaves_while_its_stream_moves_leaves_no_load(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    others = [replica for replica in stage.cluster.replicas if replica is not owner]
    await asyncio.gather(*(stage.fail(replica, "hang") for replica in others))

    async def is_asked() -> bool:
        return any([not (await stage.replica_state(replica))["failing"] for replica in others])

    async def not_gone_on() -> float:
        return await stage.metric(stage.urls[0], "kvgate_stream_resumptions_total", outcome="none", reason="ended")

    before = await not_gone_on()
    async with held_stream(stage.http, stage.urls[0], text, 60) as begun:
        owner.kill()
        await eventually(is_asked)
        await begun.hang_up()
    await eventually(stage.all_load_is_given_back)
    assert await not_gone_on() == before + 1


async def test_the_openai_sdk_reads_a_stream_that_went_on(stage: Stage) -> None:
    body = asked(stage.new_prompt())
    whole, owner = await unbroken(stage, CHAT, body)
    await stage.fail(owner, "crash", after_tokens=9)
    async with openai.AsyncOpenAI(base_url=f"{stage.urls[0]}/v1", api_key="none", max_retries=0) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**body)]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [TOKENS]
    assert len(chunks) == len(whole) - 1


async def test_a_replica_that_is_drained_with_move_is_empty_in_seconds(stage: Stage) -> None:
    body = asked(stage.new_prompt(), max_tokens=120)
    whole, owner = await unbroken(stage, CHAT, body)
    text, options = body["messages"][0]["content"], {"temperature": 0, "stream_options": body["stream_options"]}
    async with AsyncExitStack() as stack:
        begun = [
            await stack.enter_async_context(held_stream(stage.http, url, text, 120, **options)) for url in stage.urls
        ]
        stays = await stack.enter_async_context(
            held_stream(stage.http, stage.urls[0], text, 120, temperature=0, logprobs=True)
        )
        assert {stream.replica for stream in (*begun, stays)} == {owner.id}
        drained = await stage.http.post(f"{stage.urls[0]}/v1/replicas/{owner.id}/drain?move=true", json={})
        assert drained.json()["state"] == "draining"
        answers = [await stream.rest() for stream in begun]
        assert "[DONE]" in await stays.rest()
    for answer in answers:
        events = told(answer)
        events.remove(COMMENT)
        assert events == whole
    assert await stage.metric_of_all("kvgate_stream_resumptions_total", outcome="exact", reason="drained") >= len(begun)
    (await stage.http.post(f"{stage.urls[1]}/v1/replicas/{owner.id}/undrain", json={})).raise_for_status()
    await eventually(stage.all_load_is_given_back)


async def test_afterwards_anybody_can_see_that_a_stream_went_on(stage: Stage) -> None:
    body = asked(stage.new_prompt())
    _, owner = await unbroken(stage, CHAT, body)
    await stage.fail(owner, "cut", after_tokens=9)
    answer = await stage.http.post(stage.urls[0] + CHAT, json=body)
    (record,) = await records_of(stage.http, stage.urls[1], answer.headers["x-request-id"])
    assert record["resumed"] == [{"replica": owner.id, "why": "reset", "how": "exact"}]
    assert (record["replica"] != owner.id, record["output_tokens"]) == (True, TOKENS)
    told_words = f"began at {owner.id}, which broke it off (reset); went on at {record['replica']} (exact)"
    assert told_words in list(reasons(record))


async def test_a_stream_that_no_other_replica_takes_is_told_not_to_have_gone_on(stage: Stage) -> None:
    text, owner = await stage.warm_prompt()
    others = [replica for replica in stage.cluster.replicas if replica is not owner]
    await asyncio.gather(*(stage.fail(replica, "error", count=-1, status=503) for replica in others))
    gone_on = await stage.metric_of_all("kvgate_stream_resumptions_total", outcome="exact")
    async with held_stream(stage.http, stage.urls[0], text, 60, temperature=0) as begun:
        owner.kill()
        error = last_event(await begun.rest())["error"]
    assert "did not go on (no other replica could: replica_unreachable)" in error["message"]
    assert await stage.metric_of_all("kvgate_stream_resumptions_total", outcome="exact") == gone_on
    (record,) = await records_of(stage.http, stage.urls[1], begun.request_id)
    [left] = record["resumed"]
    assert (left["replica"], left["why"], left["how"]) == (owner.id, "reset", "none")
    told_words = f"began at {owner.id}, which broke it off (reset); it did not go on (no other replica could: "
    assert any(line.startswith(told_words) for line in reasons(record))
