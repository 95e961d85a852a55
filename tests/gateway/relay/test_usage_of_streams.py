"""A client that says nothing of usage gets what it would get from the replica itself. The first such stream of a
replica shows what that is; later ones are asked for their usage, and it is taken out."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.scripted import Relayed, chunk, head, whole
from tests.polling import eventually

EVENTS = head("content-type: text/event-stream", "transfer-encoding: chunked")
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n'
DONE = b"data: [DONE]\n\n"
ASKED = b'"stream_options":{"include_usage":true}'


async def test_a_replica_that_always_tells_usage_tells_it_to_each_client(relayed: Relayed) -> None:
    relayed.replica.says(EVENTS, chunk(TOKEN + USAGE + DONE) + b"0\r\n\r\n")
    for _ in range(3):
        assert (await relayed.stream()).content == TOKEN + USAGE + DONE
        assert b"stream_options" not in relayed.replica.body
    declined = await relayed.ask(stream=True, stream_options={"include_usage": False})
    assert declined.content == TOKEN + DONE


async def test_usage_that_only_the_gateway_asked_for_is_not_shown(relayed: Relayed) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        usage = USAGE if ASKED in relayed.replica.body else b""
        writer.write(EVENTS + chunk(TOKEN + usage + DONE) + b"0\r\n\r\n")

    relayed.replica.answer = answer
    asked = []
    for _ in range(3):
        assert (await relayed.stream()).content == TOKEN + DONE
        asked.append(relayed.replica.body.endswith(b"," + ASKED + b"}"))
    assert asked == [False, True, True]
    assert 'kvgate_tokens_total{kind="output",model="m",tenant=""} 2.0' in (await relayed.http.get("/metrics")).text


async def test_a_first_stream_that_breaks_shows_nothing_and_the_next_one_does(relayed: Relayed) -> None:
    relayed.replica.says(EVENTS, chunk(TOKEN.replace(b'"stop"', b"null")))
    assert b"stream_broken" in (await relayed.stream()).content
    relayed.replica.says(EVENTS, chunk(TOKEN + USAGE + DONE) + b"0\r\n\r\n")
    for _ in range(2):
        assert (await relayed.stream()).content == TOKEN + USAGE + DONE


@pytest.mark.parametrize(
    "teaches_nothing",
    [
        TOKEN.replace(b"}\n\n", b',"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'),
        b'data: {"error":{"code":400,"message":"no"}}\n\n',
    ],
    ids=["an engine that streams in one event", "a request that is refused in its stream"],
)
async def test_an_unusual_first_stream_shows_nothing(relayed: Relayed, teaches_nothing: bytes) -> None:
    relayed.replica.says(EVENTS, chunk(teaches_nothing + DONE) + b"0\r\n\r\n")
    assert (await relayed.stream()).status_code in (200, 400)
    relayed.replica.says(EVENTS, chunk(TOKEN + DONE) + b"0\r\n\r\n")
    asked = []
    for _ in range(2):
        await relayed.stream()
        asked.append(ASKED in relayed.replica.body)
    assert asked == [False, True]


async def test_a_json_answer_to_a_stream_shows_nothing(relayed: Relayed) -> None:
    body = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}'
    relayed.replica.says(whole(body))
    await relayed.stream()
    relayed.replica.says(EVENTS, chunk(TOKEN + USAGE + DONE) + b"0\r\n\r\n")
    assert (await relayed.stream()).content == TOKEN + USAGE + DONE


async def test_only_one_stream_at_a_time_is_sent_to_learn(relayed: Relayed) -> None:
    may_end = asyncio.Event()
    relayed.replica.says(EVENTS, chunk(TOKEN), may_end, chunk(DONE) + b"0\r\n\r\n")
    async with asyncio.TaskGroup() as group:
        answers = []
        for asked in (1, 2):
            answers.append(group.create_task(relayed.stream()))
            await eventually(lambda asked=asked: relayed.replica.asked == asked)
        assert ASKED in relayed.replica.body
        may_end.set()
    assert {each.result().content for each in answers} == {TOKEN + DONE}
