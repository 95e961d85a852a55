"""Streams that go on at another replica, whose answers the test writes byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import orjson
import pytest

from coordinator.pool.prefills import Prefills
from tests.gateway.relay.conftest import Pair
from tests.gateway.scripted import CHAT, ScriptedReplica, chunk, gateway_before, head, whole

COMPLETIONS = "/v1/completions"
EVENTS = head("content-type: text/event-stream", "transfer-encoding: chunked")
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + orjson.dumps({"id": "c", "object": "o", "created": 1, "model": "m", **fields}) + b"\n\n"


def token(number: int, reason: str | None = None, **more: Any) -> bytes:
    """An event of a chat with one token."""
    choice = {"index": 0, "delta": {"content": f"w{number} "}, "logprobs": None, "finish_reason": reason}
    return event(choices=[choice | {"token_ids": [number]}], **more)


def more(number: int, reason: str | None = None) -> bytes:
    """An event of a completion with one token."""
    choice = {"index": 0, "text": f"w{number} ", "logprobs": None, "finish_reason": reason, "token_ids": [number]}
    return event(choices=[choice])


OPENING = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], prompt_token_ids=[1, 2, 3])
USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13})
BEGINNING = OPENING + b"".join(map(token, range(10)))
"""Ten tokens of a chat."""
BROKEN = EVENTS + chunk(BEGINNING)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """A gateway in front of two replicas that say that they are vLLM."""
    replicas = ScriptedReplica(), ScriptedReplica()
    async with AsyncExitStack() as stack:
        for replica in replicas:
            replica.cards = [{"id": "m", "object": "model", "owned_by": "vllm"}]
            await stack.enter_async_context(replica.running())
        listed = [{"id": f"r{index}", "url": replica.url} for index, replica in enumerate(replicas)]
        gateway, url = await stack.enter_async_context(gateway_before(replicas[0], replicas=listed))
        yield Pair(await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30)), replicas, gateway)


async def answered(pair: Pair, *answers: bytes, path: str = CHAT, **fields: Any) -> str:
    """What a client gets if the replicas give these answers, one to each request."""
    left = list(answers)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0))

    for replica in pair.replicas:
        replica.answer = answer
    prompt = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hello"}]}
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 40}
    text = (await pair.http.post(path, json={"model": "m", **prompt, **options, **fields})).text
    assert left == []
    return text


def words(text: str) -> list[str]:
    """The text that a client has read."""
    said = ""
    for each in filter(None, text.split("\n\n")):
        if each.startswith("data: {"):
            for choice in orjson.loads(each[6:]).get("choices", ()):
                said += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return said.split()


def first(count: int) -> list[str]:
    return [f"w{number}" for number in range(count)]


async def metric(pair: Pair, name: str) -> float:
    lines = (await pair.http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def test_an_event_that_a_clean_end_cut_off_is_not_taken_for_one_that_the_client_has(pair: Pair) -> None:
    cut = EVENTS + chunk(b"".join(map(more, range(10, 20))) + more(20).rstrip(b"\n")) + END
    text = await answered(pair, BROKEN, cut, EVENTS + chunk(more(20) + more(21, "stop") + DONE) + END)
    assert b'"prompt":[1,2,3,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19]' in b"".join(
        replica.body for replica in pair.replicas
    )
    assert words(text) == first(22)


@pytest.mark.parametrize("done", [b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n", b"data: [DONE]\n", b"data: [DONE]"])
async def test_a_rest_may_end_in_each_way_of_the_standard(pair: Pair, done: bytes) -> None:
    text = await answered(pair, BROKEN, EVENTS + chunk(more(10, "stop").replace(b"\n", b"\r\n") + done) + END)
    assert words(text) == first(11)
    assert text.endswith(": x-kvgate-resumed: 1; exact\n\ndata: [DONE]\n\n")


async def test_a_rest_that_is_refused_in_its_stream_does_not_look_complete(pair: Pair) -> None:
    refusal = b'data: {"error":{"code":400,"message":"no"}}\n\n'
    text = await answered(pair, BROKEN, EVENTS + chunk(more(10) + refusal + DONE) + END)
    assert words(text) == first(11)
    assert '"stream_broken"' in text
    assert "[DONE]" not in text


async def test_a_stream_whose_connection_breaks_behind_its_end_is_complete(pair: Pair) -> None:
    text = await answered(pair, BROKEN + chunk(token(10, "stop") + USAGE + DONE))
    assert words(text) == first(11)
    assert (text.count("[DONE]"), text.count('"usage"')) == (1, 1)
    assert await metric(pair, "kvgate_stream_resumptions_total") == 0
    assert await metric(pair, 'kvgate_tokens_total{kind="output"') == 10, "as its engine has told"


@pytest.mark.parametrize("status", [500, 503])
async def test_a_rest_that_nobody_gives_leaves_a_broken_stream_that_is_paid_for(
    pair: Pair, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prefills, "tokens_per_s", lambda *_: 1e-9)  # the rest's own prompt is not computed yet
    refusal = whole(b'{"error":{"message":"no","code":"a_replicas_code"}}', status=status)
    text = await answered(pair, BROKEN, refusal, *([refusal] if status == 503 else []))
    assert orjson.loads(text.split("data: ")[-1])["error"]["code"] == "stream_broken"
    assert await metric(pair, "kvgate_broken_streams_total") == 1
    assert "(reset); it is incomplete, and did not go on (no other replica could: replica_unreachable)" in text
    assert await metric(pair, 'kvgate_stream_resumptions_total{outcome="none",reason="replica_unreachable"') == 1
    assert await metric(pair, "kvgate_stream_resumptions_total") == 1, "it did not go on"
    [(_, taken)] = [each for rows in pair.gateway.ledger._sums.values() for each in rows.items()]
    assert (taken.requests, taken.errors, taken.output_tokens) == (1, 1, 10)
    assert taken.uncached_tokens > 0


async def test_a_completion_without_a_limit_goes_on_without_one(pair: Pair) -> None:
    beginning = b"".join(map(more, range(10))).replace(b'"token_ids"', b'"others"')
    rest = EVENTS + chunk(more(10, "stop") + DONE) + END
    assert words(await answered(pair, EVENTS + chunk(beginning), rest, path=COMPLETIONS, max_tokens=None)) == first(11)
    asked = [orjson.loads(replica.body) for replica in pair.replicas]
    assert [each["max_tokens"] for each in asked] == [None, None]


@pytest.mark.parametrize(("least", "left"), [(12, 2), ("12", 2), ("12.0", 2), (5, 0), (True, 0)])
async def test_the_least_length_is_read_as_its_engine_reads_it(pair: Pair, least: Any, left: int) -> None:
    rest = EVENTS + chunk(more(10, "stop") + DONE) + END
    assert words(await answered(pair, BROKEN, rest, min_tokens=least)) == first(11)
    asked = [orjson.loads(replica.body) for replica in pair.replicas]
    assert [each["min_tokens"] for each in asked if "messages" not in each] == [left]


@pytest.mark.parametrize(
    ("beginning", "fields", "may"),
    [
        (BEGINNING, {}, True),
        (BEGINNING, {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, True),
        (BEGINNING.replace(b'"content":"w3 "', b'"tool_calls":[{"index":0}]'), {}, False),
        (BEGINNING.replace(b'"content":"w3 "', b'"reasoning":"w3 "'), {}, False),
        (OPENING, {}, False),
    ],
    ids=["text", "text with tools", "a call of a tool", "reasoning", "nothing yet"],
)
async def test_only_a_stream_that_could_go_on_leaves_a_replica_that_is_silent(
    pair: Pair, beginning: bytes, fields: dict[str, Any], may: bool
) -> None:
    may_end = asyncio.Event()
    pair.say(EVENTS + chunk(beginning + (b"" if beginning != OPENING else token(0)[:-2])), may_end, END)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "stream": True}
    async with pair.http.stream("POST", CHAT, json=body | fields) as answer:
        pieces = answer.aiter_raw()
        await anext(pieces)
        [of_replica] = pair.gateway.moves.waiting.values()
        [waiting] = of_replica
        assert waiting.can_go_on is not None
        assert [waiting.can_go_on() for _ in range(2)] == [may, may]
        may_end.set()


@pytest.mark.parametrize("answer", [whole(b'{"error":{"message":"no"}}', status=400), whole(b'{"choices":[]}')])
async def test_a_rest_that_a_replica_refuses_is_not_asked_for_again(pair: Pair, answer: bytes) -> None:
    text = await answered(pair, BROKEN, answer)
    assert "(not resumable: refused)" in text
    assert await metric(pair, 'kvgate_stream_resumptions_total{outcome="none",reason="refused"') == 1
    assert await metric(pair, "kvgate_stream_resumptions_total") == 1, "it did not go on"


async def test_if_no_other_replica_gives_the_rest_the_one_that_broke_is_asked(pair: Pair) -> None:
    refusal = whole(b'{"error":{"message":"no"}}', status=503)
    assert words(await answered(pair, BROKEN, refusal, EVENTS + chunk(more(10, "stop") + DONE) + END)) == first(11)


def named(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


AGENT = {
    "model": "m",
    "max_tokens": 40,
    "stream": True,
    "messages": [{"role": "user", "content": "Hello"}],
    "tools": [{"name": "f", "input_schema": {}}],
}
MESSAGE = (
    named("message_start", message={"id": "c", "usage": {"input_tokens": 3, "output_tokens": 0}})
    + named("content_block_start", content_block={"type": "text", "text": ""}, index=0)
    + b"".join(
        named("content_block_delta", delta={"type": "text_delta", "text": f"w{number} "}, index=0)
        for number in range(10)
    )
)
"""Ten tokens of a message."""
CUT = whole(orjson.dumps({"tokens": [*range(10)]}))
"""What /tokenize answers."""
GOES_ON = event(choices=[{"index": 0, "delta": {"role": "assistant"}}], prompt_token_ids=[1, 2, 3, *range(10)])


def calls(*parts: dict[str, Any], reason: str | None = None) -> bytes:
    """An event of a chat with parts of calls of a tool."""
    return event(choices=[{"index": 0, "delta": {"tool_calls": [*parts]}, "finish_reason": reason}])


CALL = calls({"index": 0, "id": "call_1", "type": "function", "function": {"name": "f"}})
ARGUMENTS = calls({"index": 0, "function": {"arguments": '{"x": 1}'}})


async def answered_message(pair: Pair, *answers: bytes, **fields: Any) -> httpx.Response:
    """What a client of /v1/messages gets if the replicas give these answers, one to each request."""
    left = list(answers)

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0))

    for replica in pair.replicas:
        replica.answer = answer
    response = await pair.http.post("/v1/messages", json=AGENT | fields)
    assert left == []
    return response


async def test_a_message_whose_rest_calls_a_tool_ends_with_that_call(pair: Pair) -> None:
    usage = event(choices=[], usage={"prompt_tokens": 13, "completion_tokens": 9, "total_tokens": 22})
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]) + usage + DONE
    rest = EVENTS + chunk(GOES_ON + token(10) + CALL + ARGUMENTS + end) + END
    text = (await answered_message(pair, EVENTS + chunk(MESSAGE), CUT, rest)).text
    events = [orjson.loads(each.partition("data: ")[2]) for each in text.split("\n\n") if each.startswith("event")]
    block = {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}
    argument = {"type": "input_json_delta", "partial_json": '{"x": 1}'}
    assert events[-7:] == [
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "w10 "}, "index": 0},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "content_block": block, "index": 1},
        {"type": "content_block_delta", "delta": argument, "index": 1},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"input_tokens": 3, "output_tokens": 19},
        },
        {"type": "message_stop"},
    ]
    asked = [orjson.loads(replica.body) for replica in pair.replicas if b'"continue_final_message"' in replica.body]
    function = {"name": "f", "parameters": {"type": "object"}}
    assert [each["tools"] for each in asked] == [[{"type": "function", "function": function}]]
    assert await metric(pair, 'kvgate_stream_resumptions_total{outcome="text"') == 1


async def test_a_stream_that_breaks_within_a_call_of_a_tool_does_not_go_on_once_more(pair: Pair) -> None:
    rest = EVENTS + chunk(GOES_ON + b"".join(map(token, range(10, 20))) + CALL + ARGUMENTS)
    text = (await answered_message(pair, EVENTS + chunk(MESSAGE), CUT, rest)).text
    assert "(not resumable: tool_calls)" in text


async def test_a_rest_that_nobody_understands_does_not_look_complete(pair: Pair) -> None:
    """The first part of a call has an id."""
    rest = EVENTS + chunk(GOES_ON + token(10) + ARGUMENTS + DONE) + END
    text = (await answered_message(pair, EVENTS + chunk(MESSAGE), CUT, rest)).text
    assert "w10" in text
    assert "(not resumable: events)" in text
    assert "message_stop" not in text


@pytest.mark.parametrize("takes", [True, False])
async def test_reminders_of_the_system_stay_in_their_place_if_the_template_takes_them_there(
    pair: Pair, takes: bool
) -> None:
    """vLLM 0.33 moves them to the first message if it does not: then a prompt with them in their place is refused."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "system", "content": "Be brief."}]
    rest = EVENTS + chunk(GOES_ON + token(10, "stop") + USAGE + DONE) + END
    refusal = whole(b'{"error":{"message":"System message must be at the beginning."}}', status=400)
    prompts = [whole(b'{"tokens":[1,2,3]}')] if takes else [refusal, refusal]
    text = (await answered_message(pair, EVENTS + chunk(MESSAGE), CUT, *prompts, rest, messages=messages)).text
    assert "x-kvgate-resumed: 1; text" in text
    [asked] = [orjson.loads(each.body) for each in pair.replicas if b'"continue_final_message"' in each.body]
    assert asked["messages"][:-1] == (messages if takes else messages[::-1])


async def test_a_rest_that_calls_a_tool_waits_for_its_replica(pair: Pair) -> None:
    """It could not go on elsewhere once more."""
    may_end, left = asyncio.Event(), [EVENTS + chunk(MESSAGE), CUT]

    async def answer(writer: asyncio.StreamWriter) -> None:
        if left:
            writer.write(left.pop(0))
            return
        writer.write(EVENTS + chunk(GOES_ON + b"".join(map(token, range(10, 20))) + CALL))
        await writer.drain()
        await may_end.wait()

    for replica in pair.replicas:
        replica.answer = answer
    async with pair.http.stream("POST", "/v1/messages", json=AGENT) as response:
        pieces, text = response.aiter_text(), ""
        while "tool_use" not in text:
            text += await anext(pieces)
        [of_replica] = pair.gateway.moves.waiting.values()
        [waiting] = of_replica
        assert waiting.can_go_on is not None
        assert not waiting.can_go_on()
        may_end.set()
